"""The commands `shardline logs` and `shardline explain`, for runs here and on the platform."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardline.pipelines.cli.foreground import foreground
from shardline.pipelines.cli.options import environment_flags, json_option, show_json
from shardline.trainer.errors import EXIT_CANCELLED, EXIT_FAILED, SettingsError

if TYPE_CHECKING:
    from datetime import datetime

    from shardline.components.conclude.outcome import Outcome
    from shardline.pipelines.vertex.environment import Environment

_RUNS_DIR = click.option(
    "--runs-dir",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="Where run directories are.",
)


@click.command()
@click.argument("run")
@click.option("--task", default="", help="Only this task.")
@click.option("--replica", default="", help="Only this replica of a custom job: chief-0, worker-1.")
@click.option("--follow", "-f", is_flag=True, help="Wait for more until the run has ended.")
@click.option(
    "--since", default="", metavar="TIME", help="On the platform: 30m, 2h, 1d, or a time (ISO 8601)."
)
@_RUNS_DIR
@environment_flags
def logs(
    run: str,
    task: str,
    replica: str,
    follow: bool,
    since: str,
    runs_dir: Path,
    settings: Path | None,
    **flags: str,
) -> None:
    """Show what the tasks of RUN have printed.

    RUN is a run directory, the name of one under RUNS_DIR, or the id of a run on the platform.
    """
    place = _find(run, runs_dir, settings, flags)
    with foreground(sys.stderr):
        if isinstance(place, Path):
            from shardline.pipelines.local.log_files import read_log as read_files

            if since:
                raise SettingsError("--since is for runs on the platform: lines of a local run have no time")
            lines = read_files(place, task, replica, follow=follow)
        else:
            from shardline.pipelines.vertex.logs import read_log

            lines = read_log(place, run, task, replica, since=_time(since), follow=follow)
        for line in lines:
            click.echo(line)


@click.command()
@click.argument("run")
@_RUNS_DIR
@json_option
@environment_flags
def explain(run: str, runs_dir: Path, as_json: bool, settings: Path | None, **flags: str) -> None:
    """Explain why RUN failed: step, replica, exit code, last lines, likely cause, next step.

    RUN is a run directory, the name of one under RUNS_DIR, or the id of a run on the platform. Ends with 1
    when it failed, with 4 when it was cancelled.
    """
    from shardline.components.conclude import outcome, run_directory

    place = _find(run, runs_dir, settings, flags)
    with foreground(sys.stderr):
        if isinstance(place, Path):
            found = run_directory.read_outcome(place)
        else:
            from shardline.pipelines.vertex import explain as platform

            found = platform.read_outcome(place, run)
    if as_json:
        show_json(found.as_json())
    else:
        click.echo("\n".join(_page(found)))
    codes = {outcome.FAILED: EXIT_FAILED, outcome.CANCELLED: EXIT_CANCELLED}
    sys.exit(codes.get(found.state, 0))


def _page(found: Outcome) -> Iterator[str]:
    from shardline.components.conclude.explanation import explain as judge

    yield found.headline()
    rows = list(found.links.items())
    if found.failure is not None:
        explanation = judge(found.failure)
        rows = [*explanation.rows(), *rows]
        rows += [
            ("" if number else "last lines", f"| {line}") for number, line in enumerate(explanation.lines)
        ]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        yield f"  {name.ljust(width)}  {value}"


def _find(run: str, runs_dir: Path, settings: Path | None, flags: dict[str, str]) -> Path | Environment:
    """Returns the directory of a run on this machine, or where on the platform it is."""
    from shardline.components.conclude.run_directory import is_run_directory
    from shardline.pipelines.vertex.environment import load_environment

    for path in (Path(run), runs_dir / run):
        if is_run_directory(path):
            return path
    try:
        return load_environment(settings, flags, os.environ)
    except SettingsError as error:
        raise SettingsError(f"{run} is no run directory; for a run on the platform {error}") from None


def _time(text: str) -> datetime | None:
    """Returns the time that --since names.

    Raises:
        SettingsError: When it is neither a duration nor a time.
    """
    import datetime
    import re

    if not text:
        return None
    if found := re.fullmatch(r"(\d+)([smhd])", text):
        unit = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}[found[2]]
        return datetime.datetime.now(datetime.UTC) - datetime.timedelta(**{unit: int(found[1])})
    try:
        return datetime.datetime.fromisoformat(text).astimezone()
    except ValueError:
        raise SettingsError(f"--since takes 30m, 2h, 1d or 2026-01-31T12:00:00Z, got {text!r}") from None
