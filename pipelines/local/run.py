"""Run of a compiled pipeline on this machine: its own run directory, its process, and its output."""

from __future__ import annotations

import contextlib
import datetime
import os
import select
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import yaml

from shardline.components import text as summary
from shardline.components.runs.causes import KfpLines, split_replica
from shardline.components.runs.directory import TASK_INDENT, blessing, running_task
from shardline.components.runs.record import CANCELLED, FAILED, LOG, RUN_VARIABLE, SUCCEEDED, State
from shardline.pipelines.local import execute, record
from shardline.pipelines.local.job.injections import parse_injection
from shardline.pipelines.local.job.replica import LineBuffer
from shardline.pipelines.local.localize import check_runnable, has_custom_jobs, localize, localize_value
from shardline.pipelines.local.process import processes
from shardline.pipelines.local.process.processes import PLATFORM_VARIABLES, with_safe_path
from shardline.pipelines.local.terminal import Heartbeat, Terminal, foreground
from shardline.pipelines.parameters import check_parameters
from shardline.pipelines.spec import defaults, parse_pipeline, read_pipeline
from shardline.trainer.base import crash, files, progress
from shardline.trainer.base.errors import EXIT_BAD_INPUT, PipelineError, RunError
from shardline.trainer.base.progress import Event, Scalar


@dataclass
class Execution:
    """The execution of one run: its process, and what its tasks have reported.

    Attributes:
        facts: The last fact of each name that tasks have reported, in order of arrival.
        errors: The errors that tasks have reported.
        tail: The last lines that tasks have printed.
        exit_code: Exit status of the executing process once it has ended.
    """

    directory: Path
    facts: dict[str, Event] = field(default_factory=dict)
    errors: list[Event] = field(default_factory=list)
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=12))
    exit_code: int = 0
    _kfp_lines: KfpLines = field(default_factory=KfpLines)
    _heartbeat: Heartbeat = field(default_factory=Heartbeat)

    @property
    def log(self) -> Path:
        """The file with the output of all tasks."""
        return self.directory / LOG

    def watch(self, localized: dict[str, Any], parameters: dict[str, Any], terminal: Terminal) -> None:
        """Runs the executing process to its end, and stops every process that it has started."""
        pipeline, values = self.directory / "localized.yaml", self.directory / "parameters.json"
        files.write_text(pipeline, yaml.safe_dump(localized, sort_keys=False, allow_unicode=True))
        files.write_json(values, parameters)
        arguments = [str(path) for path in (pipeline, values, self.directory / "outputs")]
        inherited = {key: value for key, value in os.environ.items() if key not in PLATFORM_VARIABLES}
        with (
            processes.scratch_directory() as temporary,
            self.log.open("w", encoding="utf-8") as log,
            processes.adopted_orphans(),
        ):
            child = subprocess.Popen(
                [sys.executable, "-m", execute.__name__, *arguments, str(temporary), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={
                    **with_safe_path(inherited),
                    "PYTHONUNBUFFERED": "1",
                    progress.EVENTS_VARIABLE: progress.secret(),
                    RUN_VARIABLE: str(self.directory),
                    crash.DIRECTORY_VARIABLE: str(self.directory / "crashes"),
                },
                start_new_session=True,
            )
            try:
                for line in _output(child):
                    if line is None:
                        self._heartbeat.report_if_due()
                    else:
                        self._handle_line(line, log, terminal)
            finally:
                with processes.ignore_stop_signals():
                    self.exit_code = _end(child)
                    processes.stop_descendants(with_variable=(RUN_VARIABLE, str(self.directory)))

    def raise_failure(self) -> None:
        """Raises ProcessFailedError if the run has failed: with the failed task's error if it has one."""
        if self.exit_code == 0:
            return
        own = [event for event in self.errors if event.topic != execute.TOPIC]
        if own:
            raise processes.ProcessFailedError(own[-1].text, own[-1].exit_code)
        for line in self.tail:
            progress.report(execute.TOPIC, f"| {line}")
        texts = [event.text for event in self.errors]
        text = texts[-1] if texts else f"the executing process {processes.describe_exit(self.exit_code)}"
        raise processes.ProcessFailedError(f"{text} (log: {self.log})")

    def _handle_line(self, line: str, log: TextIO, terminal: Terminal) -> None:
        event = progress.parse(line)
        line = execute.COLOUR.sub("", line)
        # Indented like all output of tasks: other lines of the log are kfp.local's own.
        logged = line if event is None else f"{TASK_INDENT}{' '.join(progress.render(event).split())}"
        print(logged, file=log, flush=True)
        if event is None:
            if (task := running_task(line)) is not None:
                self._heartbeat.task = task
                terminal.end_work()
            if line.startswith(TASK_INDENT) and line.strip():
                printed = line.removeprefix(TASK_INDENT)
                replica, text = split_replica(printed)
                if not self._kfp_lines.has(text, replica):
                    self.tail.append(printed)
                    if replica:
                        self._heartbeat.reset()
                        terminal.line(replica, text)
        elif event.kind == "error":
            self.errors.append(event)
        else:
            if event.kind == "fact":
                self.facts[event.topic] = event
            else:
                self._heartbeat.reset()
            progress.emit(event)


def _output(child: subprocess.Popen[bytes]) -> Iterator[str | None]:
    """Yields the child's lines until it has ended, and None at least once a second."""
    assert child.stdout is not None
    output = child.stdout.fileno()
    os.set_blocking(output, False)
    buffer = LineBuffer()
    with open(os.pidfd_open(child.pid), "rb", 0) as pidfd:
        watched, ready = [output, pidfd.fileno()], []
        while pidfd.fileno() not in ready:
            ready = select.select(watched, [], [], 1.0)[0]
            yield None
            with contextlib.suppress(BlockingIOError):
                while data := os.read(output, 1 << 16):
                    yield from buffer.feed(data)
                watched = [pidfd.fileno()]  # end of file
    yield from buffer.flush()


def _end(child: subprocess.Popen[bytes]) -> int:
    """Ends the executing process, which ends all processes that it has started; returns its exit status."""
    child.terminate()
    try:
        code = child.wait(processes.GRACE_S + 2)
    except subprocess.TimeoutExpired:
        child.kill()
        code = child.wait()
    if child.stdout is not None:
        child.stdout.close()
    return code


@dataclass(frozen=True)
class LocalRun:
    """Result of a run that succeeded: facts in the order in which tasks report them.

    `blessed` says whether the run's model was blessed; None without a verdict.
    """

    directory: Path
    facts: Mapping[str, Scalar]
    blessed: bool | None


def run_pipeline(
    path: Path,
    parameters: Mapping[str, Any],
    *,
    runs_dir: Path,
    require_blessing: bool = False,
    injections: Sequence[str] = (),
    network: str = "auto",
    stream: TextIO | None = None,
) -> LocalRun:
    """Runs a compiled pipeline on this machine and shows its progress, by default on standard output.

    The options are those of `shardline run`. The run directory receives pipeline.yaml (an exact copy of the
    input), localized.yaml, run.json (settings and versions, state, results), run.log (output of all tasks),
    replicas/ (one log per replica and job.json), outputs/ (the artifacts) and gcs/ (/gcs/ of custom jobs).
    When this function returns or raises, no process of the run is left.

    Raises:
        PipelineError: When the file is not a pipeline that can run here, a parameter is wrong, or there is
            no custom job to inject a failure into.
        SettingsError: When an injection is malformed, or the run directory cannot be written.
        ProcessFailedError: When a task failed; exit_code says whether by a user error.
        RunError: When a blessing is required and there is none.
        processes.Stopped: When a signal (SIGINT, SIGTERM, SIGHUP) stopped this process.
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
    run_directory = record.RunDirectory(
        runs_dir, content, now, pipeline=name, yaml=str(path.absolute()), parameters=complete
    )
    _make_champion_directory(runs_dir, complete)
    run = Execution(run_directory.directory)
    try:
        with processes.stop_on_signals(), foreground(stream, facts=False) as terminal:
            where = str(run_directory.directory).removeprefix(f"{Path.cwd()}/")
            progress.report("run", f"{name} in {where}")
            run.watch(localized, values, terminal)
            run.raise_failure()
    except processes.Stopped as error:
        _end_run(run_directory, run, CANCELLED, stream, f"stopped by {error.signal_name}")
        raise
    except Exception as failure:
        if isinstance(failure, OSError):
            failure.filename = failure.filename or str(run.log)
        reason = crash.as_error(failure)
        with contextlib.suppress(OSError):  # of the same full disk
            _end_run(run_directory, run, FAILED, stream, str(reason))
        raise reason from None
    blessed = _end_run(run_directory, run, SUCCEEDED, stream)
    if require_blessing and not blessed:
        verdict = run.facts.get("blessed")
        why = f"not blessed: {verdict.text}" if verdict else "the pipeline validated no model"
        raise RunError(f"a blessing is required; {why}")
    facts = {name: event.value for name, event in run.facts.items()}
    return LocalRun(run_directory.directory, facts, blessed)


def _end_run(
    run_directory: record.RunDirectory,
    run: Execution,
    state: State,
    stream: TextIO,
    explanation: str | None = None,
) -> bool | None:
    """Records and shows the end of a run; returns whether its model was blessed, None without a verdict."""
    blessed, reported = blessing(run_directory.directory), run.facts.get("blessed")
    # Outputs of tasks override what a task has reported.
    if blessed is None:
        run.facts.pop("blessed", None)
    elif reported is None or reported.value is not blessed:
        run.facts["blessed"] = Event("fact", "blessed", "yes" if blessed else "no", value=blessed)
    is_user_error = any(event.exit_code == EXIT_BAD_INPUT for event in run.errors)
    texts = {name: event.text for name, event in run.facts.items()}
    rows = run_directory.outcome(texts, state, blessed, can_continue=not is_user_error)
    summary.print_rows(rows, stream)
    run_directory.end(state, {name: event.value for name, event in run.facts.items()}, explanation)
    return blessed


def _make_champion_directory(runs_dir: Path, parameters: Mapping[str, Any]) -> None:
    """Creates the model store inside `runs_dir`; any other must exist already."""
    path = Path(str(parameters.get("champion_uri", "")))
    if path.is_relative_to(runs_dir.absolute() / "champions"):
        with contextlib.suppress(OSError):  # the first task reports it
            path.mkdir(parents=True, exist_ok=True)
