"""The last step of a run that trained: its result is remembered."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from shardline.components.changes import last_run
from shardline.components.changes.last_run import Run, State
from shardline.components.export_validate import layout
from shardline.components.register.champion import champion_directory, current, read_part
from shardline.trainer.progress import say


def remember(
    exported: Path, state: str, reason: str, history_uri: str, champion_uri: str, job_name: str
) -> None:
    """Writes how a run came out into the history.

    Args:
        exported: Output directory of the validation.
        state: What the first step found; "" where nothing is remembered.
        reason: Why the run trained.
        history_uri: Directory or gs:// that remembers; "" remembers nothing.
        champion_uri: Where a blessed model was published; "" published nothing.
        job_name: Name of the run.

    Raises:
        ModelError: When `exported` is no complete validation.
        RunError: When writing fails.
    """
    if not history_uri:
        return
    blessing = read_part(exported, layout.BLESSING_FILE)
    evaluation = read_part(exported, layout.EVALUATION_FILE)
    blessed = blessing["blessed"] is True
    published = current(champion_directory(champion_uri)) if blessed and champion_uri else None
    run = Run(
        run=job_name,
        outcome="trained",
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
        reason=reason,
        blessed=blessed,
        verdict=str(blessing["reason"]),
        metrics=evaluation["metrics"],
        champion=published.version if published else "",
        state=State.of_text(state),
    )
    last_run.write_run(champion_directory(history_uri), run)
    say("changes", f"remembered in {history_uri}: the next run trains if data, settings or code change")
