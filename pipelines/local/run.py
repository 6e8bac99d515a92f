"""Runs a compiled pipeline on this machine, whole and watched, in a run directory of its own."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import yaml

from shardline.components import text as summary
from shardline.components.run_record import CANCELLED, FAILED, SUCCEEDED
from shardline.pipelines.local import execute, processes, record
from shardline.pipelines.local.execution import Execution
from shardline.pipelines.local.localize import has_custom_jobs, localize, localize_value
from shardline.pipelines.local.rehearsal import parse_injection
from shardline.pipelines.local.terminal import open_terminal
from shardline.pipelines.parameters import check_parameters
from shardline.pipelines.spec import defaults, has_exit_tasks, parse_pipeline, read_pipeline
from shardline.trainer import files
from shardline.trainer.errors import PipelineError, RunError
from shardline.trainer.progress import Scalar


@dataclass(frozen=True)
class RunResult:
    """How a run that finished came out.

    Attributes:
        directory: The run directory.
        facts: Results by name, in the order in which they were reported.
        blessed: Whether the run's model was blessed; None when nothing was judged.
        duration: Seconds.
    """

    directory: Path
    facts: Mapping[str, Scalar]
    blessed: bool | None
    duration: float


def run_pipeline(
    path: Path,
    parameters: Mapping[str, Any],
    *,
    runs_dir: Path,
    require_blessing: bool = False,
    injections: Sequence[str] = (),
    stream: TextIO | None = None,
) -> RunResult:
    """Runs a compiled pipeline on this machine and shows how it goes.

    The run directory gets pipeline.yaml (an exact copy of what ran), localized.yaml, run.json (settings
    and versions, state, results), run.log (all that any task printed), replicas/ (one log per replica
    and job.json), outputs/ (the artifacts) and gcs/ (what custom jobs see as /gcs/). When this function
    returns or raises, no process of the run is left.

    Args:
        path: The compiled YAML.
        parameters: Pipeline parameters by name, as text or of their declared types.
        runs_dir: Where the run directory is made.
        require_blessing: Whether a run whose model is not blessed counts as failed.
        injections: Failures to rehearse in every custom job of the pipeline (see `parse_injection`).
        stream: Where to show; standard output unless given.

    Raises:
        PipelineError: When the file is no pipeline that can run here, or a parameter is wrong, or there
            is no custom job to inject a failure into.
        SettingsError: When an injection is malformed, or the run directory cannot be written.
        ProcessFailedError: When a task failed; exit_code says whether by a mistake of the user.
        RunError: When a blessing is required and there is none.
        processes.Stopped: When a signal (SIGINT, SIGTERM, SIGHUP) stopped this process.
    """
    stream = stream or sys.stdout
    content = read_pipeline(path)
    spec = parse_pipeline(content, path)
    checked = check_parameters(spec, parameters)
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    _check_injections(injections, spec)
    localized = localize(spec, checked, created=summary.timestamp(now))
    values = localize_value(checked, created=summary.timestamp(now))
    book = record.RunDirectory(runs_dir, content, now)
    book.start(spec["pipelineInfo"]["name"], path.absolute(), defaults(spec) | checked)
    command = _write_inputs(book.directory, localized, values)
    run = Execution(book.directory, patient=has_exit_tasks(spec), injections=injections)
    state, explanation = CANCELLED, None
    try:
        with processes.stop_on_signals(), open_terminal(stream, facts=False) as terminal:
            run.watch(command, terminal)
            run.raise_failure(terminal)
        state = SUCCEEDED
    except processes.ProcessFailedError as error:
        state, explanation = FAILED, str(error)
        raise
    except processes.Stopped as error:
        explanation = f"stopped by {error.signal_name}"
        raise
    finally:
        book.end(state, run.values, explanation)
        summary.show(_rows(book, run, state), stream)
    return _judge(book, run, require_blessing)


def _check_injections(injections: Sequence[str], spec: dict[str, Any]) -> None:
    for text in injections:
        parse_injection(text)
    if injections and not has_custom_jobs(spec):
        raise PipelineError("--inject needs a custom job, and no task of the pipeline is one")


def _write_inputs(directory: Path, localized: dict[str, Any], parameters: dict[str, Any]) -> list[str]:
    """Writes what the executing process reads, and returns its command as far as it is known here."""
    pipeline, values = directory / "localized.yaml", directory / "parameters.json"
    files.write_text(pipeline, yaml.safe_dump(localized, sort_keys=False, allow_unicode=True))
    files.write_json(values, parameters)
    return [sys.executable, "-m", execute.__name__, str(pipeline), str(values), str(directory / "outputs")]


def _rows(book: record.RunDirectory, run: Execution, state: str) -> list[tuple[str, str]]:
    return [
        ("pipeline", f"sha256 {book.sha256}"),
        *((name, event.text) for name, event in run.facts.items()),
        (state, f"in {summary.duration(book.duration)}"),
        ("run directory", str(book.directory)),
        ("log", str(run.log)),
    ]


def _judge(book: record.RunDirectory, run: Execution, require_blessing: bool) -> RunResult:
    verdict = run.facts.get("blessed")
    blessed = None if verdict is None else verdict.value is True
    if require_blessing and not blessed:
        reason = "the pipeline judged no model" if verdict is None else f"not blessed: {verdict.text}"
        raise RunError(f"a blessing is required; {reason}")
    return RunResult(book.directory, run.values, blessed, book.duration)
