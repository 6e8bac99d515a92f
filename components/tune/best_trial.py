"""Trials of a finished tuning job: read, compared, and shown in a table."""

from __future__ import annotations

import contextlib
import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from shardline.components import text
from shardline.components.html import render_page
from shardline.components.tune.study import read_value
from shardline.components.vertex import Platform, call_api
from shardline.trainer.base import files
from shardline.trainer.base.errors import PlatformError, RunError
from shardline.trainer.base.progress import fact, report

#: In the output directory: the job with its trials in the API's JSON, and a table of the trials.
TRIALS_FILE, REPORT_FILE = "trials.json", "trials.html"


class Best(NamedTuple):
    """Id of the best trial, its metric and its parameters."""

    trial: str
    value: float
    parameters: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """A trial of a tuning job, numbered from "1"; `state` is one of the API, as in SUCCEEDED.

    `value` is the study's metric, measured at training step `step`; None where it was not, or is not finite.
    `seconds` is the duration, None where it is unknown; `reason` says why the trial is infeasible.
    """

    id: str
    state: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    value: float | None = None
    step: int = 0
    seconds: float | None = None
    reason: str = ""


def select_best_trial(gcp_resources: str, output: Path, artifact: Path) -> Best:
    """Returns the best trial, reports all of them, and writes trials.json and trials.html into `output`.

    Raises PlatformError when the job cannot be read, RunError when no trial was measured.
    """
    job = read_job(gcp_resources)
    output.mkdir(parents=True, exist_ok=True)
    try:
        files.write_json(output / TRIALS_FILE, job)
        trials, metric = read_trials(job), job["studySpec"]["metrics"][0]
        best = find_best_trial(trials, metric)
        page = _report_page(job, trials, best)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise PlatformError(f"the tuning job {job.get('name', '')} cannot be read: {error!r}") from None
    for path in (artifact, output / REPORT_FILE):  # for the platform's console, and for people
        files.write_text(path, page)
    for line in trial_table(trials, metric["metricId"], best):
        report("tune", line)
    reached = f"{metric['metricId']} {best.value:.4f}"
    fact("best trial", best.id, f"{best.id}: {reached}  {_describe_parameters(best)}")
    fact("trials", str(output / REPORT_FILE))
    return Best(best.id, float(best.value or 0), dict(best.parameters))


def read_job(gcp_resources: str) -> dict[str, Any]:
    """Returns the tuning job that a launcher's output names, in the API's JSON.

    Raises PlatformError when it names no job, or the job cannot be read.
    """
    try:
        uri = files.parse_json(gcp_resources, "gcp_resources", PlatformError)["resources"][0]["resourceUri"]
        parts = urlsplit(uri)
    except (PlatformError, LookupError, TypeError, ValueError, AttributeError):
        raise PlatformError(f"the output of the tuning task names no job: {gcp_resources!r}") from None
    if parts.scheme == "file":  # of a local run
        return files.read_json(Path(unquote(parts.path)), PlatformError)
    from google.protobuf.json_format import MessageToDict

    name = parts.path.removeprefix("/v1/")
    jobs = Platform.of_resource(name).jobs
    job = call_api(f"read the tuning job {name}", jobs.get_hyperparameter_tuning_job, {"name": name})
    return dict(MessageToDict(type(job).pb(job)))


def read_trials(job: Mapping[str, Any]) -> list[TrialResult]:
    """Returns the trials of a job in the API's JSON, in the order of their numbers."""
    types = {
        spec["parameterId"]: key.removesuffix("ValueSpec")
        for spec in job["studySpec"]["parameters"]
        for key in spec
        if key.endswith("ValueSpec")
    }
    metric = job["studySpec"]["metrics"][0]["metricId"]
    trials = [_trial(item, types, metric) for item in job.get("trials", [])]
    return sorted(trials, key=lambda trial: int(trial.id))


def _trial(item: Mapping[str, Any], types: Mapping[str, str], metric: str) -> TrialResult:
    measured, seconds = item.get("finalMeasurement", {}), None
    with contextlib.suppress(KeyError, ValueError):
        start, end = (datetime.datetime.fromisoformat(item[key]) for key in ("startTime", "endTime"))
        seconds = (end - start).total_seconds()
    # JSON may leave out a metric of 0, the default of the message.
    entries = [entry for entry in measured.get("metrics", []) if entry["metricId"] == metric]
    values = [value for entry in entries if math.isfinite(value := float(entry.get("value", 0.0)))]
    return TrialResult(
        id=str(item["id"]),
        state=item.get("state", "STATE_UNSPECIFIED"),
        parameters={
            entry["parameterId"]: read_value(types[entry["parameterId"]], str(entry["value"]))
            for entry in item.get("parameters", [])
        },
        value=values[0] if values else None,
        step=int(measured.get("stepCount", 0)),
        seconds=seconds,
        reason=item.get("infeasibleReason", ""),
    )


def find_best_trial(trials: Sequence[TrialResult], metric: Mapping[str, str]) -> TrialResult:
    """Returns the best trial by the study's metric, the first of equals; RunError when none has succeeded."""
    measured = [trial for trial in trials if trial.state == "SUCCEEDED" and trial.value is not None]
    if not measured:
        reasons = "; ".join(dict.fromkeys(trial.reason for trial in trials if trial.reason))
        raise RunError(
            f"none of {len(trials)} trials has reported {metric['metricId']}: {reasons or 'see their logs'}"
        )
    sign = -1 if metric.get("goal") == "MINIMIZE" else 1
    return max(measured, key=lambda trial: sign * float(trial.value or 0))


def trial_table(trials: Sequence[TrialResult], metric: str, best: TrialResult) -> list[str]:
    """Returns the trials as lines of text, a heading first."""
    names = _parameter_names(trials)
    rows = [
        [trial.id, *(_format_value(trial.parameters.get(name)) for name in names), *_outcome(trial)]
        for trial in trials
    ]
    rows[list(trials).index(best)][-1] += "  <- best"
    head = ["trial", *names, metric, "step", "time", "state"]
    return text.table(head, rows, align="r" * (len(head) - 1) + "l").splitlines()


def _parameter_names(trials: Sequence[TrialResult]) -> list[str]:
    return list(dict.fromkeys(name for trial in trials for name in trial.parameters))


def _outcome(trial: TrialResult) -> list[str]:
    value = "-" if trial.value is None else f"{trial.value:.4f}"
    seconds = "-" if trial.seconds is None else f"{trial.seconds:.0f} s"
    state = trial.state.lower() + (f": {trial.reason}" if trial.reason else "")
    return [value, str(trial.step or "-"), seconds, state]


def _format_value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)


def _describe_parameters(trial: TrialResult) -> str:
    return ", ".join(f"{name} {_format_value(value)}" for name, value in trial.parameters.items())


def _report_page(job: Mapping[str, Any], trials: Sequence[TrialResult], best: TrialResult) -> str:
    study = job["studySpec"]
    facts = {
        "job": job.get("name") or job.get("displayName", ""),
        "metric": f"{study['metrics'][0]['metricId']}, {study['metrics'][0].get('goal', '').lower()}",
        "algorithm": study.get("algorithm", "the platform's default; in a local run Optuna's"),
        "trials at most": str(job.get("maxTrialCount", "")),
        **{f"label {name}": label for name, label in job.get("labels", {}).items()},
    }
    return render_page(
        Path(__file__).with_name("trials.html.j2"),
        name=job.get("displayName", ""),
        metric=study["metrics"][0]["metricId"],
        names=_parameter_names(trials),
        trials=[(trial, _outcome(trial)) for trial in trials],
        best=best,
        best_parameters=_describe_parameters(best),
        format_value=_format_value,
        tables=[("Study", list(facts.items()))],
    )
