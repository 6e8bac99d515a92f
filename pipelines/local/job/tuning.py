"""A tuning job on this machine: each trial a custom job with the trial's parameters in its arguments.

Optuna replaces the platform's own service, and the trials run one after the other.
"""

from __future__ import annotations

import datetime
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import optuna

from shardline.components.custom_job import PoolSpec, list_at, mapping_at
from shardline.pipelines.local import process
from shardline.pipelines.local.job.custom_job import CustomJob, ShowLine, parse_payload
from shardline.pipelines.local.job.supervisor import run_job
from shardline.trainer.base import files, progress
from shardline.trainer.base.errors import PipelineError, RunError
from shardline.trainer.base.progress import MEASUREMENTS_VARIABLE, Event, read_measurements, report

_TOPIC = "tune"
#: Rules of early stopping; Optuna's median rule is used for all of them.
_STOPPING = ("median_automated_stopping_spec", "decay_curve_stopping_spec", "convex_automated_stopping_spec")
_REVERSE_LOG = "UNIT_REVERSE_LOG_SCALE"

#: Step, value and time.
Measurement = tuple[int, float, float]
Values = dict[str, float | int | str]


class _StoppedEarlyError(RunError):
    """Ends a trial that has been stopped early."""


@dataclass
class Trial:
    """A trial, numbered from "1", and its outcome; `failure` says why it has failed, "" when it has not.

    `directory` is that of its logs, `measurements` are the values of the metric that its chief has reported.
    """

    id: str
    parameters: Mapping[str, Any]
    directory: Path
    start: datetime.datetime = field(default_factory=lambda: datetime.datetime.now(datetime.UTC))
    end: datetime.datetime | None = None
    measurements: Sequence[Measurement] = ()
    failure: str = ""

    @property
    def topic(self) -> str:
        """Topic of its events."""
        return f"trial {self.id}"

    @property
    def metrics(self) -> Path:
        """The file with what its chief reports."""
        return self.directory / "output.metrics"


def _run_trial(
    trial: Trial, job: CustomJob, show_line: ShowLine, network: str, is_behind: Callable[[], bool]
) -> str:
    """Runs a trial; returns why it has failed, "" if not."""

    def show(event: Event) -> None:
        if event.kind != "fact":  # facts of a run are those of its last training
            outer(replace(event, topic=trial.topic))
        if is_behind():
            raise _StoppedEarlyError("stopped early")

    trial.directory.mkdir(parents=True, exist_ok=True)
    with progress.sink(show) as outer:
        try:
            run_job(job, trial.directory, topic=trial.topic, show_line=show_line, network=network)
        except RunError as error:
            return "" if isinstance(error, _StoppedEarlyError) else " ".join(str(error).split())
    return ""


def _with_parameters(job: CustomJob, trial: Trial) -> CustomJob:
    flags = tuple(f"--{name}={value}" for name, value in trial.parameters.items())

    def pool_of(pool: PoolSpec) -> PoolSpec:
        container = {
            **pool.container,
            "args": [*list_at(pool.container, "args"), *flags],
            "env": [*pool.env, {"name": MEASUREMENTS_VARIABLE, "value": str(trial.metrics)}],
        }
        return PoolSpec({**pool.spec, "container_spec": container}) if pool.replicas else pool

    return replace(
        job,
        worker_pools=tuple(map(pool_of, job.worker_pools)),
        base_output_directory=f"{job.base_output_directory.rstrip('/')}/{trial.id}",
        trial=trial.id,
    )


class Search:
    """Chooses the parameters of each trial, and decides when to stop one early.

    The same study, seed and results give the same choices. `spec` is a StudySpec in snake_case, as the
    launcher sends it: without empty values and zeros.
    """

    def __init__(self, spec: Mapping[str, Any], seed: int) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._specs = {item["parameter_id"]: item for item in spec["parameters"]}
        self._space = {name: _distribution(item) for name, item in self._specs.items()}
        algorithm = spec.get("algorithm", "")
        named = {"RANDOM_SEARCH": "random search", "GRID_SEARCH": "grid search"}
        self.name = f"Optuna {optuna.__version__}, {named.get(algorithm, 'TPE')}"
        self._grid: Iterator[tuple[Any, ...]] | None = None
        if algorithm == "GRID_SEARCH":
            spaces: list[Any] = list(self._space.values())
            self._grid = itertools.product(
                *(getattr(item, "choices", None) or range(item.low, item.high + 1) for item in spaces)
            )
        is_random = self._grid or algorithm == "RANDOM_SEARCH"
        sampler = optuna.samplers.RandomSampler(seed) if is_random else optuna.samplers.TPESampler(seed=seed)
        stops = any(rule in spec for rule in _STOPPING)
        self._study = optuna.create_study(
            direction="minimize" if spec["metrics"][0].get("goal") == "MINIMIZE" else "maximize",
            sampler=sampler,
            pruner=optuna.pruners.MedianPruner(n_startup_trials=1) if stops else optuna.pruners.NopPruner(),
        )

    def ask(self) -> Values | None:
        """Returns the parameters of the next trial; None when the search is exhausted."""
        if self._grid is not None:  # Optuna's own grid needs its own loop
            if (point := next(self._grid, None)) is None:
                return None
            self._study.enqueue_trial(dict(zip(self._space, point, strict=True)))
        self._asked = self._study.ask(self._space)
        return self._parameters(self._asked)

    def _parameters(self, trial: optuna.Trial) -> Values:
        chosen = dict(trial.params)
        for name, spec in self._specs.items():
            if spec.get("scale_type") == _REVERSE_LOG and "discrete_value_spec" not in spec:
                distribution: Any = self._space[name]
                chosen[name] = distribution.low + distribution.high - chosen[name]
        return chosen

    def should_stop(self, values: Sequence[float]) -> bool:
        """Whether the trial asked for last, with these values so far, should be stopped.

        Values are compared by epoch: steps differ between trials with different batch sizes.
        """
        known = self._study.trials[self._asked.number].intermediate_values
        for index, value in enumerate(values):
            if index not in known:
                self._asked.report(value, index)
        return bool(values) and self._asked.should_prune()

    def tell(self, value: float | None) -> None:
        """Ends the trial asked for last with its measurement; None for one that has failed."""
        state = optuna.trial.TrialState.FAIL if value is None else optuna.trial.TrialState.COMPLETE
        self._study.tell(self._asked, value, state=state)


def _distribution(spec: Mapping[str, Any]) -> optuna.distributions.BaseDistribution:
    # A reverse log scale is sampled as a log scale, and mirrored afterwards.
    log = spec.get("scale_type") in ("UNIT_LOG_SCALE", _REVERSE_LOG)
    if item := spec.get("discrete_value_spec") or spec.get("categorical_value_spec"):
        return optuna.distributions.CategoricalDistribution(item["values"])
    item = spec.get("double_value_spec") or mapping_at(spec, "integer_value_spec")
    if not item:
        raise PipelineError(f"the parameter {spec.get('parameter_id')} of study_spec has no values but 0")
    low, high = item.get("min_value", 0), item.get("max_value", 0)
    if "double_value_spec" in spec:
        return optuna.distributions.FloatDistribution(low, high, log=log)
    return optuna.distributions.IntDistribution(int(low), int(high), log=log)


def run_tuning_job(
    payload: Mapping[str, Any],
    executor_input: str,
    logs: Path,
    record: Path,
    *,
    show_line: ShowLine,
    network: str,
) -> None:
    """Runs the tuning job in `payload`; each trial has its own directory in `logs`.

    The file `record` gets the job as the API would show it. Raises PipelineError when the study lacks
    something, and RunError when more trials have failed than max_failed_trial_count allows.
    """
    from google.cloud.aiplatform_v1.types import HyperparameterTuningJob
    from google.protobuf.json_format import MessageToDict, ParseDict

    with process.stop_on_signals():
        trials = _run_trials(payload, executor_input, logs, show_line, network)
    content = {name: value for name, value in payload.items() if name != "trial_job_spec"}
    content["trials"] = [_trial_json(payload["study_spec"], trial) for trial in trials]
    content["state"] = "JOB_STATE_SUCCEEDED"
    record.parent.mkdir(parents=True, exist_ok=True)
    # The API's own messages check the format.
    job = ParseDict(content, HyperparameterTuningJob.pb(HyperparameterTuningJob()))
    files.write_json(record, MessageToDict(job))


def _run_trials(
    payload: Mapping[str, Any], executor_input: str, logs: Path, show_line: ShowLine, network: str
) -> list[Trial]:
    spec = mapping_at(payload, "study_spec")
    if not (spec.get("metrics") and spec.get("parameters")):
        raise PipelineError("study_spec has no metrics or no parameters")
    metric = spec["metrics"][0]["metric_id"]
    trial_job = {"display_name": payload["display_name"], "job_spec": payload["trial_job_spec"]}
    job = parse_payload(json.dumps(trial_job), executor_input)
    seed = int(payload.get("labels", {}).get("seed", 0))
    search = Search(spec, seed)
    max_trials = int(payload["max_trial_count"])
    max_failed = int(payload.get("max_failed_trial_count", 0))
    report(_TOPIC, f"{search.name}, seed {seed}: up to {max_trials} trials, one after the other")
    trials: list[Trial] = []
    while len(trials) < max_trials and (chosen := search.ask()) is not None:
        trials.append(trial := Trial(f"{len(trials) + 1}", chosen, logs / f"trial-{len(trials) + 1}"))
        values = ", ".join(f"{name} {value}" for name, value in chosen.items())
        report(_TOPIC, f"trial {trial.id} of {max_trials}: {values}")

        def is_behind(trial: Trial = trial) -> bool:
            measured = read_measurements(trial.metrics, metric)
            if len(measured) <= len(trial.measurements):
                return False
            trial.measurements = measured
            if behind := search.should_stop([value for _, value, _ in measured]):
                value = f"{metric} {measured[-1][1]:.4f}"
                report(trial.topic, f"stopped early: {value} is behind the other trials")
            return behind

        failure = _run_trial(trial, _with_parameters(job, trial), show_line, network, is_behind)
        trial.measurements = read_measurements(trial.metrics, metric)
        trial.end = datetime.datetime.now(datetime.UTC)
        trial.failure = failure or ("" if trial.measurements else f"{metric} was not reported")
        if trial.failure:
            report(trial.topic, f"failed: {trial.failure}")
        search.tell(None if trial.failure else final_measurement(spec, trial)[1])
        failed = [trial for trial in trials if trial.failure]
        if 0 < max_failed <= len(failed):
            raise RunError(
                f"{len(failed)} trials have failed, the limit of max_failed_trial_count; "
                f"the last: {failed[-1].failure}"
            )
    return trials


def final_measurement(spec: Mapping[str, Any], trial: Trial) -> Measurement:
    """Returns the measurement that is the trial's result, by the study's rule; the first of equals."""
    if spec.get("measurement_selection_type") == "LAST_MEASUREMENT":
        return trial.measurements[-1]
    sign = -1 if spec["metrics"][0].get("goal") == "MINIMIZE" else 1
    return max(trial.measurements, key=lambda measurement: sign * measurement[1])


def _trial_json(spec: Mapping[str, Any], trial: Trial) -> dict[str, Any]:
    metric = spec["metrics"][0]["metric_id"]

    def message(measurement: Measurement) -> dict[str, Any]:
        step, value, _ = measurement
        return {"step_count": step, "metrics": [{"metric_id": metric, "value": value}]}

    return {
        "id": trial.id,
        "state": "INFEASIBLE" if trial.failure else "SUCCEEDED",
        "parameters": [{"parameter_id": key, "value": value} for key, value in trial.parameters.items()],
        "start_time": trial.start.isoformat(),
        "end_time": trial.end and trial.end.isoformat(),
        "measurements": [message(measurement) for measurement in trial.measurements],
        "infeasible_reason": trial.failure,
        "final_measurement": None if trial.failure else message(final_measurement(spec, trial)),
    }
