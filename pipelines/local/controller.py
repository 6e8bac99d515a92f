"""Run whose own process is a job of Slurm, too: `python -m shardline.pipelines.local.controller DIR`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shardline.components.runs.record import REPLICAS
from shardline.pipelines.check.job import jobs
from shardline.pipelines.check.pipeline import Pipeline
from shardline.pipelines.engines.custom_job import EXECUTOR_INPUT_MARKER, CustomJob, parse_payload
from shardline.pipelines.engines.slurm import engine
from shardline.pipelines.engines.slurm.script import BatchJob
from shardline.pipelines.engines.slurm.settings import SlurmSettings
from shardline.pipelines.local.run import run_pipeline
from shardline.trainer.base import files
from shardline.trainer.base.deserialize import load
from shardline.trainer.base.errors import SettingsError
from shardline.trainer.base.progress import exit_on_error

_PIPELINE, _FILE = "pipeline.yaml", "controller.json"


@dataclass(frozen=True, kw_only=True)
class Controller:
    """What the process runs besides its pipeline, and how: the content of controller.json."""

    parameters: Mapping[str, Any]
    slurm: SlurmSettings
    require_blessing: bool = False

    @property
    def own_settings(self) -> SlurmSettings:
        """Settings for its own job, without GPUs; a second start would begin the pipeline anew."""
        options = (*self.slurm.options, "--no-requeue")
        return replace(self.slurm, time="", nodes="", gres="", options=options, restarts=0, pools={})

    def prepare(self, directory: Path, pipeline: bytes) -> None:
        """Writes what the process reads into its run directory."""
        files.write_bytes(directory / _PIPELINE, pipeline)
        files.write_json(directory / _FILE, asdict(self))

    def job(self, pipeline: str, directory: Path, python: str) -> BatchJob:
        """Returns the job of the process, named by its pipeline."""
        command = (python, "-m", __spec__.name, str(directory))
        return engine.batch_job(CustomJob.with_roles(command, 1, display_name=pipeline), directory)

    def custom_jobs(self, spec: Mapping[str, Any], directory: Path) -> dict[str, BatchJob | None]:
        """Returns the custom jobs of a pipeline by task; None for one whose pools only the run knows."""
        found: dict[str, BatchJob | None] = {}
        for job in jobs(Pipeline(spec, self.parameters)):
            payload = json.dumps({"display_name": job.task.name, "job_spec": job.spec})
            place = directory / REPLICAS / job.task.name
            found[job.task.path] = (
                engine.pools_job(parse_payload(payload, EXECUTOR_INPUT_MARKER), place) if job.pools else None
            )
        return found


def main(directory: Path) -> None:
    """Runs the pipeline whose run directory a submission has made."""
    given = load(Controller, directory / _FILE, SettingsError)
    run_pipeline(
        directory / _PIPELINE,
        given.parameters,
        runs_dir=directory.parent,
        require_blessing=given.require_blessing,
        slurm=given.slurm,
        directory=directory,
    )


if __name__ == "__main__":
    with exit_on_error("run"):
        sys.argv[0] = "shardline"  # the program of the commands that a run proposes
        main(Path(sys.argv[1]))
