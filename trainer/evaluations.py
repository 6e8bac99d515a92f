"""What chief and evaluator tell each other: files beside the checkpoints, the only thing that both can see.

`evaluations/{steps}.json` is the result of a checkpoint. `evaluations/chief` changes for as long as the
chief lives, and `evaluations/last.json` names the checkpoint after which there will be no other. Clocks of
two machines are never compared.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from shardline.trainer import files
from shardline.trainer.resume.state import Position

# Seconds between two signs of life.
_BEAT_S = 5.0


class Evaluations:
    """The directory of results."""

    def __init__(self, checkpoints: Path):
        """Names the directory, which need not exist.

        Args:
            checkpoints: The checkpoints' directory.
        """
        self._directory = checkpoints / "evaluations"
        self._beat = self._directory / "chief"
        self._last = self._directory / "last.json"

    def steps(self) -> list[int]:
        """Returns the steps whose checkpoints have been evaluated, in order."""
        return sorted(int(path.stem) for path in self._directory.glob("*.json") if path.stem.isdecimal())

    def write(self, position: Position, metrics: Mapping[str, float]) -> None:
        """Writes the result of a checkpoint; a metric that is not finite becomes null."""
        self._directory.mkdir(parents=True, exist_ok=True)
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        content = {"steps": position.steps, "epoch": position.epoch, "metrics": finite}
        files.write_json(self._path(position.steps), content)

    def read(self, steps: int) -> dict[str, float] | None:
        """Returns the finite metrics of a checkpoint, or None where it has not been evaluated."""
        try:
            metrics = json.loads(self._path(steps).read_text(encoding="utf-8"))["metrics"]
        except (OSError, ValueError, KeyError):
            return None
        return {name: value for name, value in metrics.items() if value is not None}

    @contextlib.contextmanager
    def chief_alive(self, first_step: int) -> Iterator[None]:
        """Shows that the chief lives while the context lasts.

        Args:
            first_step: Step at which training begins; what an earlier attempt has left after it is removed.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        self._last.unlink(missing_ok=True)
        for steps in self.steps():
            if steps > first_step:
                self._path(steps).unlink()
        over = threading.Event()
        thread = threading.Thread(target=self._show_life, args=(over,), name="alive", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def life(self) -> str:
        """Returns what changes for as long as the chief lives."""
        with contextlib.suppress(OSError):
            return self._beat.read_text(encoding="utf-8")
        return ""

    def finish(self, steps: int) -> None:
        """Says, as the chief, that the checkpoint at `steps` is the last."""
        self._directory.mkdir(parents=True, exist_ok=True)
        files.write_json(self._last, {"steps": steps})

    @property
    def finished(self) -> bool:
        """Whether there will be no further checkpoint; of an earlier run, as long as no chief lives."""
        return self._last.exists()

    def _path(self, steps: int) -> Path:
        return self._directory / f"{steps}.json"

    def _show_life(self, over: threading.Event) -> None:
        while True:
            # A full disk must not end the run here; a checkpoint will say so.
            with contextlib.suppress(OSError):
                files.write_text(self._beat, f"{time.time_ns()}\n")
            if over.wait(_BEAT_S):
                return
