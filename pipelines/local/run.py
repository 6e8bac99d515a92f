"""Run of a compiled pipeline on this machine: its directory, process and output, and continuation."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import platform
import re
import shlex
import shutil
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, TextIO

import yaml

from shardline.components import text as summary
from shardline.components.runs import Run, RunDirectory, RunState, TaskLog
from shardline.pipelines.local import execute, process
from shardline.pipelines.local.job import parse_injection
from shardline.pipelines.local.localize import (
    check_runnable,
    has_custom_jobs,
    localize,
    localize_value,
    preloaded_modules,
)
from shardline.pipelines.local.terminal import Heartbeat, Terminal, foreground
from shardline.pipelines.parameters import check_parameters
from shardline.pipelines.spec import RETRAIN, defaults, parse_pipeline, read_pipeline
from shardline.trainer.base import crash, files, progress
from shardline.trainer.base.errors import EXIT_BAD_INPUT, PipelineError, RunError
from shardline.trainer.base.plugins import installed_version
from shardline.trainer.base.progress import Event

_PACKAGES = ("shardline", "tensorflow", "keras", "kfp", "google-cloud-pipeline-components")
#: Rows at the end of a run: the verdict first, checksums last; "" is a command, "*" all other rows.
_ORDER = (
    *("failed", "cancelled", "succeeded", "verdict", "best trial", "quality", "next", "", "*"),
    *("run directory", "log", "to continue", "duration", "records", "replicas", "strategy", "dataset"),
    *("version", "pipeline"),
)


@contextlib.contextmanager
def new_run(runs: Path, content: bytes, now: datetime.datetime, **facts: Any) -> Iterator[Run]:
    """Creates the directory of a run in `runs`, named by the time, with an exact copy of the pipeline.

    Its run.json has the state of the run at any time; the directory is locked while the context lasts. The
    facts are further fields of the run. Raises SettingsError when the directory cannot be written, RunError
    when its disk is full.
    """
    with contextlib.ExitStack() as held:
        with crash.output_errors(f"write the run directory {runs}", "choose another with --runs-dir"):
            here = RunDirectory(_make_directory(runs, now))
            try:
                locked = held.enter_context(here.lock())
                files.write_bytes(here.pipeline, content)
                here.log.touch()
            except OSError:
                shutil.rmtree(here.path, ignore_errors=True)
                raise
        run = Run(
            name=here.path.name,
            state="running",
            created=summary.timestamp(now),
            resource=str(here.path),
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
        run.write(here.path)
        _link_latest(here.path)
        yield run


def _link_latest(directory: Path) -> None:
    """Makes RUNS_DIR/latest a link to a run directory, atomically; none where links are not supported."""
    link = directory.parent / RunDirectory.LATEST
    temporary = directory / f".{RunDirectory.LATEST}"
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


@dataclass
class Execution:
    """The execution of one run: its process, and what its tasks have reported.

    Attributes:
        run: The run as it began.
        stream: Where its end is shown.
        facts: The last fact of each name that tasks have reported, in order of arrival.
        errors: The errors that tasks have reported.
        tail: The last lines that tasks have printed.
        exit_code: Exit status of the executing process once it has ended.
    """

    run: Run
    stream: TextIO
    facts: dict[str, Event] = field(default_factory=dict)
    errors: list[Event] = field(default_factory=list)
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=12))
    exit_code: int = 0
    _began: float = field(default_factory=time.monotonic)
    _log: TaskLog = field(default_factory=TaskLog)
    _heartbeat: Heartbeat = field(default_factory=Heartbeat)

    def watch(self, localized: dict[str, Any], parameters: dict[str, Any], terminal: Terminal) -> None:
        """Runs the executing process to its end, and stops every process that it has started."""
        directory, here = self.run.directory, RunDirectory(self.run.directory)
        pipeline, values = directory / "localized.yaml", directory / "parameters.json"
        files.write_text(pipeline, yaml.safe_dump(localized, sort_keys=False, allow_unicode=True))
        files.write_json(values, parameters)
        arguments = [str(path) for path in (pipeline, values, directory / "outputs")]
        variables = {here.VARIABLE: str(directory), crash.DIRECTORY_VARIABLE: f"{directory}/crashes"}
        with process.scratch_directory() as temporary, here.log.open("w", encoding="utf-8") as log:
            command = [sys.executable, "-m", execute.__name__, *arguments, str(temporary)]
            command += preloaded_modules(localized)
            child = process.GuardedProcess(
                process.Launch(command, process.child_environment(variables)),
                lambda line: self._handle_line(line, log, terminal),
                grace=int(process.GRACE_S) + 2,  # it stops its own descendants first
            )
            self.exit_code = child.run_to_end(self._heartbeat.report_if_due)

    def raise_failure(self) -> None:
        """Raises ProcessFailedError if the run has failed: with the failed task's error if it has one."""
        if self.exit_code == 0:
            return
        own = [event for event in self.errors if event.topic != execute.TOPIC]
        if own:
            raise process.ProcessFailedError(own[-1].text, own[-1].exit_code)
        for line in self.tail:
            progress.report(execute.TOPIC, f"| {line}")
        texts = [event.text for event in self.errors]
        text = texts[-1] if texts else f"the executing process {process.describe_exit(self.exit_code)}"
        raise process.ProcessFailedError(f"{text} (log: {RunDirectory(self.run.directory).log})")

    def end(self, state: RunState, error: str | None = None) -> Run:
        """Shows and records the end of the run, and returns it."""
        here, duration_s = RunDirectory(self.run.directory), round(time.monotonic() - self._began, 3)
        run = here.read(replace(self.run, state=state, duration_s=duration_s, error=error))
        facts, reported = self.facts, self.facts.get("blessed")
        # Outputs of tasks override what a task has reported.
        if run.blessed is None:
            facts.pop("blessed", None)
        elif reported is None or reported.value is not run.blessed:
            facts["blessed"] = Event("fact", "blessed", "yes" if run.blessed else "no", value=run.blessed)
        is_user_error = any(event.exit_code == EXIT_BAD_INPUT for event in self.errors)
        texts = {name: event.text for name, event in facts.items()}
        summary.print_rows(outcome_rows(run, texts, can_continue=not is_user_error), self.stream)
        run = here.explain(replace(run, facts={name: event.value for name, event in facts.items()}))
        run.write(here.path)
        return run

    def _handle_line(self, line: str, log: TextIO, terminal: Terminal) -> None:
        event = progress.parse(line)
        line = execute.COLOUR.sub("", line)
        # Indented like all output of tasks: other lines of the log are kfp.local's own.
        logged = line if event is None else f"{TaskLog.INDENT}{' '.join(progress.render(event).split())}"
        print(logged, file=log, flush=True)
        if event is None:
            printed = self._log.read(line)
            if self._heartbeat.task != self._log.task:
                self._heartbeat.task = self._log.task
                terminal.end_work()
            if printed is not None and line.startswith(TaskLog.INDENT):
                self.tail.append(printed)
                if replica := self._log.replica:
                    self._heartbeat.reset()
                    terminal.line(replica, printed.removeprefix(f"{replica} | "))
        elif event.kind == "error":
            self.errors.append(event)
        else:
            if event.kind == "fact":
                self.facts[event.topic] = event
            else:
                self._heartbeat.reset()
            progress.emit(event)


def run_pipeline(
    path: Path,
    parameters: Mapping[str, Any],
    *,
    runs_dir: Path,
    require_blessing: bool = False,
    injections: Sequence[str] = (),
    network: str = "auto",
    stream: TextIO | None = None,
) -> Run:
    """Runs a compiled pipeline on this machine and shows its progress, by default on standard output.

    The options are those of `shardline run`. The run directory receives pipeline.yaml (an exact copy of the
    input), localized.yaml, run.json (settings and versions, state, results), run.log (output of all tasks),
    replicas/ (one log per replica and job.json), outputs/ (the artifacts) and gcs/ (/gcs/ of custom jobs).
    When this function returns or raises, no process of the run is left. Returns the run, which has succeeded.

    Raises:
        PipelineError: When the file is not a pipeline that can run here, a parameter is wrong, or there is
            no custom job to inject a failure into.
        SettingsError: When an injection is malformed, or the run directory cannot be written.
        ProcessFailedError: When a task failed; exit_code says whether by a user error.
        RunError: When a blessing is required and there is none.
        Stopped: When a signal (SIGINT, SIGTERM, SIGHUP) stopped this process.
    """
    stream = stream or sys.stdout
    content = read_pipeline(path)
    spec = parse_pipeline(content, path)
    checked = check_parameters(spec, parameters)
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    for text in injections:
        parse_injection(text)
    if injections and not has_custom_jobs(spec):
        raise PipelineError("--inject needs a custom job, and no task of the pipeline is one")
    check_runnable(spec)
    options = [f"--network={network}", *(f"--inject={text}" for text in injections)]
    localized = localize(spec, created=summary.timestamp(now), job_options=options)
    values = localize_value(checked, created=summary.timestamp(now))
    name, complete = spec["pipelineInfo"]["name"], defaults(spec) | checked
    facts = {"yaml": str(path.absolute()), "parameters": complete}
    with new_run(runs_dir, content, now, pipeline=name, **facts) as run:
        _make_champion_directory(runs_dir, complete)
        execution = Execution(run, stream)
        try:
            with process.stop_on_signals(), foreground(stream, facts=False) as terminal:
                progress.report("run", f"{name} in {run.resource.removeprefix(f'{Path.cwd()}/')}")
                execution.watch(localized, values, terminal)
                execution.raise_failure()
        except process.Stopped as error:
            execution.end("cancelled", f"stopped by {error.signal_name}")
            raise
        except Exception as failure:
            if isinstance(failure, OSError):
                failure.filename = failure.filename or str(RunDirectory(run.directory).log)
            reason = crash.as_error(failure)
            with contextlib.suppress(OSError):  # of the same full disk
                execution.end("failed", str(reason))
            raise reason from None
        ended = execution.end("succeeded")
    if require_blessing and not ended.blessed:
        verdict = execution.facts.get("blessed")
        why = f"not blessed: {verdict.text}" if verdict else "the pipeline validated no model"
        raise RunError(f"a blessing is required; {why}")
    return ended


def outcome_rows(run: Run, texts: Mapping[str, str], *, can_continue: bool) -> summary.Rows:
    """Returns the table at the end of a run, of the facts that its tasks have reported.

    `can_continue` says whether a failed run can be continued with its parameters.
    """
    here, took = RunDirectory(run.directory), summary.duration(run.seconds)
    facts = {name: _short_path(here.path, text) for name, text in texts.items()}
    words, runs, command = facts.pop("blessed", ""), here.path.parent, ""
    published = "published as the champion" if "champion" in facts else "blessed, but not published"
    verdict = f"{published if run.blessed else 'not published'}: {words}" if words else ""
    if run.state == "succeeded" and "champion" in facts and "state" not in facts:
        command = shlex.join(["shardline", "check", run.yaml])
    elif run.state != "succeeded" and can_continue and run.pipeline == RETRAIN:
        elsewhere = "" if runs == Path("runs").absolute() else f" --runs-dir {runs}"
        facts["to continue"] = f"shardline run --resume {run.name}{elsewhere}"
    store, _, version = facts.pop("champion", "").partition("/versions/")
    page = facts.pop("report", facts.get("trials"))
    end = "duration" if words and run.state == "succeeded" else run.state
    rows = {
        end: took if end == "duration" else f"in {took}",
        "verdict": "; ".join(filter(None, (facts.pop("state", ""), verdict))),
        "next": "; ".join(filter(None, (f"open {page}" if page else "", facts.pop("next", "")))),
        "": command,
        "model store" if version else "champion": store,
        "version": version,
        "run directory": run.resource,
        "log": str(here.log),
        "pipeline": f"sha256:{run.sha256}",
    }
    facts |= {name: text for name, text in rows.items() if text}
    # run.json has the whole checksums.
    shown = [(name, re.sub(r"^(sha256:.{12}).*", r"\1", text)) for name, text in facts.items()]
    return sorted(shown, key=lambda row: _ORDER.index(row[0] if row[0] in _ORDER else "*"))


def _short_path(directory: Path, value: str) -> str:
    """Links an output from the top of the run directory; returns the link, or the value unchanged.

    TensorBoard logs have no link: TensorBoard reads the run directory, and would show them twice.
    """
    target = Path(value)
    if not target.is_relative_to(directory / "outputs") or not target.exists():
        return value
    if target.name == "logs":
        return str(directory)
    link = directory / target.name
    with contextlib.suppress(OSError):  # there is one, or the disk has no links
        link.symlink_to(target.relative_to(directory))
    return str(link) if link.exists() and link.samefile(target) else value


def _make_champion_directory(runs_dir: Path, parameters: Mapping[str, Any]) -> None:
    """Creates the model store inside `runs_dir`; any other must exist already."""
    path = Path(str(parameters.get("champion_uri", "")))
    if path.is_relative_to(runs_dir.absolute() / "champions"):
        with contextlib.suppress(OSError):  # the first task reports it
            path.mkdir(parents=True, exist_ok=True)


def failed_run(here: RunDirectory) -> Run:
    """Reads the record of a run that another can continue.

    Raises SettingsError when it is no run directory, or damaged, and PipelineError when the run is still
    running, has succeeded, or its pipeline cannot continue one.
    """
    run = here.record()
    if run.state == "running":
        raise PipelineError(
            f"the run {run.name} is still running; 'shardline logs {here.path} -f' follows it"
        )
    if run.state == "succeeded":
        raise PipelineError(f"the run {run.name} has succeeded: there is nothing to continue")
    if run.pipeline != RETRAIN:
        raise PipelineError(
            f"{run.name} is a run of the pipeline {run.pipeline!r}; only runs of {RETRAIN!r} can "
            "be continued, whose parameter continue_run names the checkpoints: start another run"
        )
    return run


def with_checkpoints(failed: Run, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns parameters to continue training from the newest checkpoints of a run; reports them.

    A checkpoint_dir is kept, where training continues by itself, and so is a continue_run that differs
    from the run's own. Without checkpoints, training begins where the run's began.
    """
    before, start = failed.parameters, parameters.get("continue_run", "")
    if directory := parameters.get("train_options", {}).get("checkpoint_dir", ""):
        start = ""  # the two exclude each other
    elif start in ("", before.get("continue_run", "")):
        last = before.get("train_options", {}).get("checkpoint_dir", "")
        start = str(_checkpoints(failed.directory.resolve()) or last or start)
    directory = directory or start
    outcome = "it has no checkpoints: training starts from the beginning"
    if directory:
        outcome = f"training continues from {directory}"
    progress.report("run", f"continues {failed.name}; {outcome}")
    return {**parameters, "continue_run": start}


def _checkpoints(run: Path) -> Path | None:
    checkpoints = [
        (index.stat().st_mtime, directory)
        for pattern in ("outputs/*/*/checkpoints", "outputs/*/*/*/checkpoints", "gcs/**/checkpoints")
        for directory in run.glob(pattern)
        for index in directory.glob("*.index")
    ]
    return max(checkpoints)[1] if checkpoints else None
