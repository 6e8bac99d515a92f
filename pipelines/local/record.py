"""Directory of a new run on this machine, starts of a job's replicas, and continuation of a failed run."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import os
import platform
import re
import shlex
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from shardline.components.runs.directory import read_local_record
from shardline.components.runs.record import (
    JOB_FILE,
    LATEST,
    LOG,
    PIPELINE_FILE,
    RUNNING,
    SUCCEEDED,
    JobRecord,
    ReplicaRecord,
    ReplicaStart,
    RunRecord,
    State,
    directory_lock,
)
from shardline.components.text import Rows, duration, table, timestamp
from shardline.pipelines.local.process import processes
from shardline.pipelines.spec import RETRAIN
from shardline.trainer.base import crash, files, progress
from shardline.trainer.base.errors import EXIT_BAD_INPUT, PipelineError, RunError
from shardline.trainer.base.plugins import installed_version
from shardline.trainer.base.progress import Scalar

_PACKAGES = ("shardline", "tensorflow", "keras", "kfp", "google-cloud-pipeline-components")
#: Rows at the end of a run: the verdict first, checksums last; "" is a command, "*" all other rows.
_ORDER = (
    *("failed", "cancelled", "succeeded", "verdict", "best trial", "quality", "next", "", "*"),
    *("run directory", "log", "to continue", "duration", "records", "replicas", "strategy", "dataset"),
    *("version", "pipeline"),
)


class RunDirectory:
    """The directory of one run and its run.json, which has the state of the run at any time.

    `record` is the content of run.json at the start: pipeline, parameters and versions.
    """

    def __init__(
        self, runs: Path, content: bytes, now: datetime.datetime, *, pipeline: str, **facts: Any
    ) -> None:
        """Creates the directory in `runs`, named by the time, with an exact copy of the pipeline.

        Raises SettingsError when the directory cannot be written, RunError when its disk is full.
        """
        self._started = time.monotonic()
        self._lock = contextlib.ExitStack()
        with crash.output_errors(f"write the run directory {runs}", "choose another with --runs-dir"):
            self.directory = _make_directory(runs, now)
            try:
                locked = self._lock.enter_context(directory_lock(self.directory))
                files.write_bytes(self.directory / PIPELINE_FILE, content)
                (self.directory / LOG).touch()
            except OSError:
                self._lock.close()
                shutil.rmtree(self.directory, ignore_errors=True)
                raise
        self.record = RunRecord(
            name=self.directory.name,
            pipeline=pipeline,
            state=RUNNING,
            created=timestamp(now),
            sha256=hashlib.sha256(content).hexdigest(),
            versions={
                "python": platform.python_version(),
                **{name: installed_version(name) for name in _PACKAGES},
            },
            platform=platform.platform(),
            cpus=os.cpu_count(),
            locked=locked,
            host=socket.gethostname(),
            pid=os.getpid(),
            **facts,
        )
        self.record.write(self.directory)
        _link_latest(self.directory)

    @property
    def duration(self) -> float:
        """Seconds since the run was created."""
        return time.monotonic() - self._started

    def end(self, state: State, facts: Mapping[str, Scalar], error: str | None) -> None:
        """Records the end of the run: succeeded, failed or cancelled; OSError where the disk is full."""
        seconds = round(self.duration, 3)
        ended = dataclasses.replace(self.record, state=state, duration_s=seconds, facts=facts, error=error)
        with self._lock:  # released without a record, it shows a failed run
            read_local_record(self.directory, record=ended).write(self.directory)

    def short_path(self, value: str) -> str:
        """Links an output from the top of the run directory; returns the link, or the value unchanged.

        TensorBoard logs have no link: TensorBoard reads the run directory, and would show them twice.
        """
        target = Path(value)
        if not target.is_relative_to(self.directory / "outputs") or not target.exists():
            return value
        if target.name == "logs":
            return str(self.directory)
        link = self.directory / target.name
        with contextlib.suppress(OSError):  # there is one, or the disk has no links
            link.symlink_to(target.relative_to(self.directory))
        return str(link) if link.exists() and link.samefile(target) else value

    def outcome(
        self, texts: Mapping[str, str], state: State, blessed: bool | None, *, can_continue: bool
    ) -> Rows:
        """Returns the table at the end of the run, of the facts that its tasks have reported.

        `can_continue` says whether a failed run can be continued with its parameters.
        """
        facts = {name: self.short_path(text) for name, text in texts.items()}
        words, runs, command = facts.pop("blessed", ""), self.directory.parent, ""
        published = "published as the champion" if "champion" in facts else "blessed, but not published"
        verdict = f"{published if blessed else 'not published'}: {words}" if words else ""
        if state == SUCCEEDED and "champion" in facts and "state" not in facts:
            command = shlex.join(["shardline", "check", self.record.yaml])
        elif state != SUCCEEDED and can_continue and self.record.pipeline == RETRAIN:
            elsewhere = "" if runs == Path("runs").absolute() else f" --runs-dir {runs}"
            facts["to continue"] = f"shardline run --resume {self.directory.name}{elsewhere}"
        store, _, version = facts.pop("champion", "").partition("/versions/")
        page, took = facts.pop("report", facts.get("trials")), duration(self.duration)
        end = "duration" if words and state == SUCCEEDED else state
        rows = {
            end: took if end == "duration" else f"in {took}",
            "verdict": "; ".join(filter(None, (facts.pop("state", ""), verdict))),
            "next": "; ".join(filter(None, (f"open {page}" if page else "", facts.pop("next", "")))),
            "": command,
            "model store" if version else "champion": store,
            "version": version,
            "run directory": str(self.directory),
            "log": str(self.directory / LOG),
            "pipeline": f"sha256:{self.record.sha256}",
        }
        facts |= {name: text for name, text in rows.items() if text}
        # run.json has the whole checksums.
        shown = [(name, re.sub(r"^(sha256:.{12}).*", r"\1", text)) for name, text in facts.items()]
        return sorted(shown, key=lambda row: _ORDER.index(row[0] if row[0] in _ORDER else "*"))


def _link_latest(directory: Path) -> None:
    """Makes RUNS_DIR/latest a link to a run directory, atomically; none where links are not supported."""
    link = directory.parent / LATEST
    temporary = directory / f".{LATEST}"
    with contextlib.suppress(OSError):
        temporary.symlink_to(directory.name)
        try:
            temporary.replace(link)
        finally:
            temporary.unlink(missing_ok=True)


def _make_directory(runs: Path, now: datetime.datetime) -> Path:
    """Creates the directory of a new run in `runs`, named by the time; raises OSError."""
    name = now.strftime("%Y-%m-%dT%H-%M-%SZ")
    runs.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        directory = runs.absolute() / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            directory.mkdir()
            return directory
    raise AssertionError("numbers never end")


class History:
    """The starts and ends of every replica of a job, in seconds since the start of the job."""

    def __init__(self, display_name: str, names: Sequence[str]) -> None:
        self._display_name = display_name
        self._created = timestamp(datetime.datetime.now(datetime.UTC).replace(microsecond=0))
        self._began = time.monotonic()
        self._starts: dict[str, list[ReplicaStart]] = {name: [] for name in names}

    def add(self, name: str, started: float, code: int, peak_memory: int, *, stopped: bool) -> None:
        """Adds a replica that has ended: exit status, peak memory in bytes, whether the job stopped it."""
        start = ReplicaStart(
            start_s=round(started - self._began, 3),
            end_s=self._now(),
            exit=processes.signal_name(code) or code,
            stopped=stopped,
            peak_memory_bytes=peak_memory,
        )
        self._starts[name].append(start)

    def _show(self, topic: str) -> None:
        """Shows a line per replica: first start, last end and exit, largest memory."""
        rows = [
            (
                name,
                f"{starts[0].start_s:.1f} s",
                f"{starts[-1].end_s:.1f} s",
                "stopped" if starts[-1].stopped and starts[-1].exit != 0 else str(starts[-1].exit),
                str(len(starts) - 1),
                f"{max(start.peak_memory_bytes for start in starts) / 2**20:,.0f} MiB",
            )
            for name, starts in self._starts.items()
            if starts
        ]
        titles = ("replica", "start", "end", "exit", "restarts", "peak memory")
        for line in table(titles, rows, align="lrrlr").splitlines():
            progress.report(topic, line)

    @contextlib.contextmanager
    def recorded(self, directory: Path, topic: str) -> Iterator[None]:
        """Writes job.json when the job in this context has ended, and shows the table of replicas."""
        state, message, is_user_error = "stopped", None, False
        try:
            yield
            state = "succeeded"
        except RunError as error:
            state, message, is_user_error = "failed", str(error), error.exit_code == EXIT_BAD_INPUT
            raise
        except processes.Stopped as error:
            message = f"stopped by {error.signal_name}"
            raise
        finally:
            record = JobRecord(
                display_name=self._display_name,
                state=state,
                error=message,
                created=self._created,
                duration_s=self._now(),
                replicas=tuple(
                    ReplicaRecord(name, max(0, len(starts) - 1), tuple(starts))
                    for name, starts in self._starts.items()
                ),
            )
            files.write_json(directory / JOB_FILE, dataclasses.asdict(record))
            if not is_user_error:
                self._show(topic)

    def _now(self) -> float:
        return round(time.monotonic() - self._began, 3)


@dataclasses.dataclass(frozen=True)
class FailedRun:
    """A run that can be continued by another."""

    directory: Path
    record: RunRecord

    @classmethod
    def find(cls, directory: Path) -> FailedRun:
        """Reads the record of a run.

        Raises SettingsError when it is no run directory, or damaged, and PipelineError when the run is still
        running, has succeeded, or its pipeline cannot continue one.
        """
        record = RunRecord.read(directory)
        if record.state == RUNNING:
            raise PipelineError(
                f"the run {record.name} is still running; 'shardline logs {directory} -f' follows it"
            )
        if record.state == SUCCEEDED:
            raise PipelineError(f"the run {record.name} has succeeded: there is nothing to continue")
        if record.pipeline != RETRAIN:
            raise PipelineError(
                f"{record.name} is a run of the pipeline {record.pipeline!r}; only runs of {RETRAIN!r} can "
                "be continued, whose parameter continue_run names the checkpoints: start another run"
            )
        return cls(directory, record)

    def with_checkpoints(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Returns parameters to continue training from the newest checkpoints of the run; reports them.

        A checkpoint_dir is kept, where training continues by itself, and so is a continue_run that differs
        from the run's own. Without checkpoints, training begins where the run's began.
        """
        before, start = self.record.parameters, parameters.get("continue_run", "")
        if directory := parameters.get("train_options", {}).get("checkpoint_dir", ""):
            start = ""  # the two exclude each other
        elif start in ("", before.get("continue_run", "")):
            last = before.get("train_options", {}).get("checkpoint_dir", "")
            start = str(self._checkpoints() or last or start)
        directory = directory or start
        outcome = "it has no checkpoints: training starts from the beginning"
        if directory:
            outcome = f"training continues from {directory}"
        progress.report("run", f"continues {self.record.name}; {outcome}")
        return {**parameters, "continue_run": start}

    def _checkpoints(self) -> Path | None:
        checkpoints = [
            (index.stat().st_mtime, directory)
            for pattern in ("outputs/*/*/checkpoints", "outputs/*/*/*/checkpoints", "gcs/**/checkpoints")
            for directory in self.directory.resolve().glob(pattern)
            for index in directory.glob("*.index")
        ]
        return max(checkpoints)[1] if checkpoints else None
