"""Continuation of a failed run on this machine: its pipeline, its parameters and its checkpoints."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardline.components.run_record import RUNNING, SUCCEEDED, RunRecord
from shardline.pipelines.spec import RETRAIN, read_pipeline
from shardline.trainer import progress
from shardline.trainer.errors import PipelineError

#: Where the checkpoints of a training can lie in a run directory.
_PLACES = ("outputs/*/*/checkpoints", "outputs/*/*/*/checkpoints", "gcs/**/checkpoints")


@dataclass(frozen=True)
class FailedRun:
    """A run that can be continued by another.

    Attributes:
        directory: Its run directory.
        record: Its record.
    """

    directory: Path
    record: RunRecord

    @classmethod
    def find(cls, directory: Path, *, abandoned: bool = False) -> FailedRun:
        """Reads the record of a run; of one whose end nothing here tells, `abandoned` says that it has ended.

        Raises:
            SettingsError: When it is no run directory, or damaged.
            PipelineError: When the run is going on, has succeeded, or is of a pipeline of which another run
                would not find the checkpoints.
        """
        record = RunRecord.read(directory)
        if record.state == RUNNING and not (abandoned and not record.tells_its_end):
            hint = "" if record.tells_its_end else "; where its process is gone, --abandoned continues it"
            raise PipelineError(
                f"the run {record.name} is still running; 'shardline logs {directory} -f' follows it{hint}"
            )
        if record.state == SUCCEEDED:
            raise PipelineError(f"the run {record.name} has succeeded: there is nothing to continue")
        if record.pipeline != RETRAIN:
            raise PipelineError(
                f"{record.name} is a run of the pipeline {record.pipeline!r}; only runs of {RETRAIN!r} can "
                "be continued, whose parameter continue_run names the checkpoints: start another run"
            )
        return cls(directory, record)

    def pipeline(self, given: Path | None, *, changed: bool) -> Path:
        """Returns the file to run: the one given, or that of the run.

        Raises PipelineError when it is gone, or is not what ran and may not be `changed`.
        """
        path, copy = given or Path(self.record.yaml), self.directory / "pipeline.yaml"
        if not path.is_file():
            raise PipelineError(
                f"there is no {path}; 'shardline run {copy} --resume {self.directory}' runs what ran"
            )
        if changed or hashlib.sha256(read_pipeline(path)).hexdigest() == self.record.sha256:
            return path
        raise PipelineError(
            f"{path} is not what ran in {self.record.name}; --changed takes it as it is now, "
            f"'shardline run {copy} --resume {self.directory}' runs what ran"
        )

    def with_checkpoints(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Returns parameters by which training goes on from the newest checkpoints of the run, and says so.

        A checkpoint_dir stays, in which training goes on by itself, and so does a continue_run that was not
        the run's own. Where the run has no checkpoints, training begins where the run's has begun.
        """
        before, start = self.record.parameters, parameters.get("continue_run", "")
        if place := parameters.get("train_options", {}).get("checkpoint_dir", ""):
            start = ""  # the two exclude each other
        elif start in ("", before.get("continue_run", "")):
            last = before.get("train_options", {}).get("checkpoint_dir", "")
            start = str(self._checkpoints() or last or start)
        place = place or start
        words = f"training goes on from {place}" if place else "it has no checkpoints: training begins anew"
        progress.say("run", f"continues {self.record.name}; {words}")
        return {**parameters, "continue_run": start}

    def _checkpoints(self) -> Path | None:
        """Returns the directory of the newest checkpoint."""
        found = [
            (index.stat().st_mtime, place)
            for pattern in _PLACES
            for place in self.directory.resolve().glob(pattern)
            for index in place.glob("*.index")
        ]
        return max(found)[1] if found else None
