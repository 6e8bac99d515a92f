"""What the fake runs for a pipeline job: the product's own local runner, in a process of its own."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from google.cloud.aiplatform_v1.types import Artifact, CustomJob, JobState, PipelineJob, PipelineTaskDetail
from google.rpc import code_pb2, status_pb2

from shardline.trainer.base.errors import EXIT_BAD_INPUT
from tests.contract.fake.api import PROJECT
from tests.contract.fake.pipeline_jobs import PipelineOutcome, as_json
from tests.contract.fake.replicas import without_clients
from tests.contract.fake.services import FakeServices
from tests.helpers.payloads import whole

_BEGIN = re.compile(r"([\d:.]+) - INFO - Executing task '(.+)'")
_END = re.compile(r"([\d:.]+) - \w+ - Task '(.+)' finished with status (\w+)")
#: What kfp.local itself says between the lines of a task.
_FRAME = re.compile(r"[\d:.]+ - [A-Z]+ - |-{20,}$")
#: Seconds between two looks at a run.
_PAUSE_S = 0.2
_POOLS = ("chief", "worker", "ps", "evaluator")


@dataclass
class LocalTask:
    """One task as the log of a local run has it.

    Attributes:
        name: Its name.
        start: When it began.
        lines: What it has printed.
        end: When it ended; None where it has not.
        succeeded: How it ended.
    """

    name: str
    start: datetime.datetime
    lines: list[str] = field(default_factory=list)
    end: datetime.datetime | None = None
    succeeded: bool = False

    @property
    def state(self) -> PipelineTaskDetail.State:
        """As the platform has it."""
        states = PipelineTaskDetail.State
        if self.end is None:
            return states.RUNNING
        return states.SUCCEEDED if self.succeeded else states.FAILED


class LocalRuns:
    """Runs pipeline jobs on this machine: `fake_vertex(directory, run_pipeline=LocalRuns(directory))`.

    The job's task details are filled in from the run, and each of its tasks leaves a custom job and the lines
    of its log in the fake.

    Attributes:
        services: The fake; set by it.
        directories: Run directories by the job's name.
    """

    def __init__(self, directory: Path, environment: Mapping[str, str] | None = None) -> None:
        """Takes where runs keep their files, and variables for them beside those of this process."""
        self.services: FakeServices | None = None
        self.directories: dict[str, Path] = {}
        self._directory = directory
        self._environment = environment or {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __call__(self, job: PipelineJob) -> PipelineOutcome:
        """Runs a job to its end."""
        directory = self._directory / job.name.rpartition("/")[2]
        directory.mkdir(parents=True)
        content = as_json(job)
        pipeline = directory / "pipeline.yaml"
        pipeline.write_text(yaml.safe_dump(whole(content["pipeline_spec"]), sort_keys=False))
        given = whole(content["runtime_config"].get("parameter_values", {}))
        output = directory / "output"
        with output.open("w") as file:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-c", "from shardline.pipelines.cli.main import main; main()"),
                    *("run", str(pipeline), "--runs-dir", str(directory / "runs")),
                    *(part for name, value in given.items() for part in ("-p", f"{name}={_text(value)}")),
                ],
                env={**without_clients(os.environ), **self._environment},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self._running[job.name] = process
        while process.poll() is None:
            for log in (directory / "runs").glob("*/run.log"):
                job.job_detail.task_details = list(map(_detail, tasks_of(log.parent), itertools.count(1)))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_PAUSE_S)
        return self._outcome(job, directory, process.returncode, output.read_text())

    def cancel(self, job: PipelineJob) -> None:
        """Stops a job that is running."""
        if job.name in self._running:
            self._running[job.name].terminate()

    def _outcome(self, job: PipelineJob, directory: Path, code: int, output: str) -> PipelineOutcome:
        runs = list((directory / "runs").glob("*"))
        if not runs:
            return PipelineOutcome(code_pb2.INVALID_ARGUMENT, output[-1000:])
        self.directories[job.name] = runs[0]
        tasks = list(tasks_of(runs[0]))
        details = list(map(_detail, tasks, itertools.count(1)))
        for task, detail in zip(tasks, details, strict=True):
            self._complete(detail, task, runs[0], EXIT_BAD_INPUT if code == EXIT_BAD_INPUT else 1)
        if code == 0:
            return PipelineOutcome(tasks=details)
        failed = ", ".join(task.name for task in tasks if not task.succeeded)
        words = f"The DAG failed because some tasks failed. The failed tasks are: [{failed}]."
        return PipelineOutcome(code_pb2.FAILED_PRECONDITION, words, details)

    def _complete(self, detail: PipelineTaskDetail, task: LocalTask, run: Path, status: int) -> None:
        """Says of a task that has ended which job it was, why it failed, and what it has put out."""
        custom_job = self._custom_job(task, run, status)
        detail.executor_detail.container_detail.main_job = custom_job.name
        if not task.succeeded:
            words = f"Job (project_id = {PROJECT}) is failed due to the above error."
            detail.error = status_pb2.Status(code=custom_job.error.code, message=words)
        for path in (run / "outputs").glob(f"*/{task.name}/executor_output.json"):
            _fill_outputs(detail, json.loads(path.read_text()))

    def _custom_job(self, task: LocalTask, run: Path, status: int) -> CustomJob:
        """Returns the custom job as which a task ran, and leaves it and its log in the fake."""
        job = CustomJob(display_name=task.name, create_time=task.start, end_time=task.end)
        job.state = JobState.JOB_STATE_SUCCEEDED if task.succeeded else JobState.JOB_STATE_FAILED
        replicas = dict(_replicas(run / "replicas" / task.name)) or {"workerpool0-0": task.lines}
        if not task.succeeded:
            words = f"The replica {_failed_replica(run, task)} exited with a non-zero status of {status}."
            job.error = status_pb2.Status(code=code_pb2.INVALID_ARGUMENT, message=words)
        if self.services is not None:
            self.services.keep_custom_job(job)
            job_id = job.name.rpartition("/")[2]
            for replica, lines in replicas.items():
                for line in lines:
                    resource = {"job_id": job_id, "task_name": replica}
                    self.services.logs.add(line, ("ml_job", resource), log=replica)
        return job


def tasks_of(run: Path) -> Iterator[LocalTask]:
    """Yields the tasks of a local run, in the order in which they began."""
    tasks: list[LocalTask] = []
    for line in (run / "run.log").read_text().splitlines():
        if begin := _BEGIN.fullmatch(line):
            tasks.append(LocalTask(begin[2], _time(begin[1])))
        elif end := _END.fullmatch(line):
            ended = next(task for task in reversed(tasks) if task.name == end[2])
            ended.end, ended.succeeded = _time(end[1]), end[3] == "SUCCESS"
        elif tasks and tasks[-1].end is None and line.strip() and not _FRAME.match(line):
            tasks[-1].lines.append(line.removeprefix("    "))
    yield from tasks


def _time(text: str) -> datetime.datetime:
    """Returns the last moment at which a clock on this machine showed a time of the day."""
    time = datetime.time.fromisoformat(text)
    latest = datetime.datetime.now().astimezone()
    found = datetime.datetime.combine(latest.date(), time).astimezone()
    return found if found <= latest else found - datetime.timedelta(days=1)


def _detail(task: LocalTask, number: int) -> PipelineTaskDetail:
    return PipelineTaskDetail(
        task_id=number,
        task_name=task.name,
        create_time=task.start,
        start_time=task.start,
        end_time=task.end,
        state=task.state,
    )


def _replicas(directory: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields the lines of each replica of a custom job, by the platform's names of replicas."""
    for path in sorted(directory.glob("*.log")):
        yield _platform_name(path.stem), path.read_text().splitlines()


def _failed_replica(run: Path, task: LocalTask) -> str:
    """Returns the replica that ended by itself, and badly."""
    path = run / "replicas" / task.name / "job.json"
    replicas = json.loads(path.read_text())["replicas"] if path.exists() else []
    for replica in replicas:
        last = replica["starts"][-1]
        if last["exit"] != 0 and not last["stopped"]:
            return _platform_name(replica["name"])
    return "workerpool0-0"


def _platform_name(replica: str) -> str:
    role, _, index = replica.rpartition("-")
    return f"workerpool{_POOLS.index(role)}-{index}"


def _fill_outputs(detail: PipelineTaskDetail, output: dict[str, Any]) -> None:
    """Puts the outputs of a task where the platform keeps them."""
    values = output.get("parameterValues", {})
    detail.execution.metadata = {f"output:{name}": value for name, value in values.items()}
    for name, artifacts in output.get("artifacts", {}).items():
        found = [
            Artifact(uri=item.get("uri", ""), metadata=item.get("metadata", {}))
            for item in artifacts["artifacts"]
        ]
        detail.outputs[name] = PipelineTaskDetail.ArtifactList(artifacts=found)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
