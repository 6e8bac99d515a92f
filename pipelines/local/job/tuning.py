"""A tuning job here or on Slurm: each trial a custom job with the trial's parameters in its arguments.

Optuna replaces the platform's own service. On this machine the trials run one after the other. On Slurm,
parallel_trial_count of them are a wave: chosen together, submitted as one array, and reported together.
"""

from __future__ import annotations

import datetime
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import optuna

from shardline.components.runs.logs import own_error
from shardline.components.runs.slurm_job import SlurmJob, end_message, read_job, run_slurm
from shardline.components.vertex.payload import PoolSpec, list_at
from shardline.pipelines.engines.custom_job import CustomJob, ShowLine, parse_payload
from shardline.pipelines.engines.slurm import engine
from shardline.pipelines.engines.slurm.replica import write_job
from shardline.pipelines.engines.slurm.script import POOLS_FILE
from shardline.pipelines.engines.slurm.settings import SlurmSettings
from shardline.pipelines.local.job.supervisor import run_job
from shardline.trainer.base import progress
from shardline.trainer.base.errors import RunError
from shardline.trainer.base.progress import Event, report
from shardline.trainer.loop.measurements import FILE_VARIABLE, read_measurements

_TOPIC = "tune"
#: Seconds between two questions to Slurm.
_PAUSE_S = 2.0
#: The job as the API would show it, next to the task's outputs.
JOB_FILE = "tuning_job.json"
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


def _run_here(trial: Trial, job: CustomJob, show_line: ShowLine, is_behind: Callable[[int], bool]) -> str:
    """Runs a wave of one trial on this machine; returns why it has failed, "" if not."""

    def show(event: Event) -> None:
        if event.kind != "fact":  # facts of a run are those of its last training
            outer(replace(event, topic=trial.topic))
        if is_behind(0):
            raise _StoppedEarlyError("stopped early")

    trial.directory.mkdir(parents=True, exist_ok=True)
    with progress.sink(show) as outer:
        try:
            run_job(job, trial.directory, topic=trial.topic, show_line=show_line)
        except RunError as error:
            return "" if isinstance(error, _StoppedEarlyError) else " ".join(str(error).split())
    return ""


def _run_on_slurm(
    wave: Sequence[Trial],
    jobs: Sequence[CustomJob],
    settings: SlurmSettings,
    is_behind: Callable[[int], bool],
) -> Iterator[tuple[int, str]]:
    """Runs a wave on Slurm as one array, an element each; yields a number and why it has failed at each end.

    That is "" where a trial has succeeded, or was stopped. `is_behind` is asked of each trial that runs.
    """
    directory = wave[0].directory.with_name(f"trials-from-{wave[0].id}")
    running = {}
    for number, (trial, job) in enumerate(zip(wave, jobs, strict=True)):
        place = directory / str(number)
        place.mkdir(parents=True, exist_ok=True)
        write_job(job, place / POOLS_FILE)
        # Its logs are where those of a trial on this machine are.
        trial.directory.unlink(missing_ok=True)
        trial.directory.symlink_to(f"{directory.name}/{number}")
        running[number] = engine.Logs(place, partial(_show_chief, trial.topic))
    stopped = set()
    batch, limits = engine.pools_job(jobs[0], directory, len(jobs)), engine.limited(jobs[0], settings)
    with engine.submitted(batch, limits, _TOPIC) as job_id:
        while running:
            array = read_job(job_id, directory)
            for number, logs in list(running.items()):
                state = array.elements.get(number, array.state)
                element = replace(array, id=f"{job_id}_{number}", state=state)
                logs.read(at_end=element.has_ended)
                if element.has_ended:
                    del running[number]
                    is_failure = element.state != "succeeded" and number not in stopped
                    yield number, _why(wave[number].directory, element) if is_failure else ""
                elif element.state == "running" and number not in stopped and is_behind(number):
                    stopped.add(number)
                    run_slurm(["scancel", element.id])
            time.sleep(_PAUSE_S if running else 0)


def _show_chief(topic: str, replica: str, line: str) -> None:
    if replica.endswith("chief-0"):  # after the number
        report(topic, line)


def _why(directory: Path, job: SlurmJob) -> str:
    """Returns why a job of an array has failed: the error in a replica's log, or what Slurm says."""
    logs = (path.read_text(encoding="utf-8", errors="replace") for path in sorted(directory.glob("*.log")))
    errors = (own_error(log.splitlines()) for log in logs)
    return next(filter(None, errors), "") or end_message(job)


def _with_parameters(job: CustomJob, trial: Trial) -> CustomJob:
    """Returns the job as the platform runs it for one trial."""
    flags = tuple(f"--{name}={value}" for name, value in trial.parameters.items())

    def pool_of(pool: PoolSpec) -> PoolSpec:
        container = {
            **pool.container,
            "args": [*list_at(pool.container, "args"), *flags],
            "env": [*pool.env, {"name": FILE_VARIABLE, "value": str(trial.metrics)}],
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
        self._algorithm = spec.get("algorithm", "")
        self._grid: Iterator[tuple[Any, ...]] | None = None
        if self._algorithm == "GRID_SEARCH":
            spaces: list[Any] = list(self._space.values())
            self._grid = itertools.product(
                *(getattr(item, "choices", None) or range(item.low, item.high + 1) for item in spaces)
            )
        is_random = self._grid or self._algorithm == "RANDOM_SEARCH"
        sampler = optuna.samplers.RandomSampler(seed) if is_random else optuna.samplers.TPESampler(seed=seed)
        stops = any(rule in spec for rule in _STOPPING)
        self._study = optuna.create_study(
            direction="minimize" if spec["metrics"][0].get("goal") == "MINIMIZE" else "maximize",
            sampler=sampler,
            pruner=optuna.pruners.MedianPruner(n_startup_trials=1) if stops else optuna.pruners.NopPruner(),
        )
        self._asked: list[optuna.Trial] = []

    @property
    def name(self) -> str:
        """Description of the search algorithm."""
        algorithm = {"RANDOM_SEARCH": "random search", "GRID_SEARCH": "grid search"}.get(
            self._algorithm, "TPE"
        )
        return f"Optuna {optuna.__version__}, {algorithm}"

    def ask(self, count: int = 1) -> list[Values]:
        """Returns the parameters of the next trials, at most `count`; none when the search is exhausted."""
        points: list[Any] = [None] * count
        if self._grid is not None:  # Optuna's own grid needs its own loop
            points = list(itertools.islice(self._grid, count))
        self._asked = []
        for point in points:
            if point is not None:
                self._study.enqueue_trial(dict(zip(self._space, point, strict=True)))
            self._asked.append(self._study.ask(self._space))
        return [self._parameters(trial) for trial in self._asked]

    def _parameters(self, trial: optuna.Trial) -> Values:
        chosen = dict(trial.params)
        for name, spec in self._specs.items():
            if spec.get("scale_type") == _REVERSE_LOG and "discrete_value_spec" not in spec:
                distribution: Any = self._space[name]
                chosen[name] = distribution.low + distribution.high - chosen[name]
        return chosen

    def should_stop(self, number: int, values: Sequence[float]) -> bool:
        """Whether a trial of those asked for last, with these values so far, should be stopped.

        Values are compared by epoch: steps differ between trials with different batch sizes.
        """
        trial = self._asked[number]
        known = self._study.trials[trial.number].intermediate_values
        for index, value in enumerate(values):
            if index not in known:
                trial.report(value, index)
        return bool(values) and trial.should_prune()

    def tell(self, *values: float | None) -> None:
        """Ends the trials asked for last with their measurements; None for one that has failed."""
        for trial, value in zip(self._asked, values, strict=True):
            state = optuna.trial.TrialState.FAIL if value is None else optuna.trial.TrialState.COMPLETE
            self._study.tell(trial, value, state=state)


def _distribution(spec: Mapping[str, Any]) -> optuna.distributions.BaseDistribution:
    # A reverse log scale is sampled as a log scale, and mirrored afterwards.
    log = spec.get("scale_type") in ("UNIT_LOG_SCALE", _REVERSE_LOG)
    if item := spec.get("discrete_value_spec") or spec.get("categorical_value_spec"):
        return optuna.distributions.CategoricalDistribution(item["values"])
    item = spec.get("double_value_spec") or spec["integer_value_spec"]
    low, high = item.get("min_value", 0), item.get("max_value", 0)
    if "double_value_spec" in spec:
        return optuna.distributions.FloatDistribution(low, high, log=log)
    return optuna.distributions.IntDistribution(int(low), int(high), log=log)


def run_trials(
    payload: Mapping[str, Any],
    executor_input: str,
    logs: Path,
    *,
    show_line: ShowLine,
    slurm: SlurmSettings | None = None,
) -> list[Trial]:
    """Runs the trials of the tuning job in `payload`; each has its own directory in `logs`.

    `slurm` has the settings of Slurm; without them the trials run on this machine. Raises RunError when more
    trials have failed than max_failed_trial_count allows.
    """
    spec, metric = payload["study_spec"], payload["study_spec"]["metrics"][0]["metric_id"]
    trial_job = {"display_name": payload["display_name"], "job_spec": payload["trial_job_spec"]}
    job = parse_payload(json.dumps(trial_job), executor_input)
    seed = int(payload.get("labels", {}).get("seed", 0))
    search = Search(spec, seed)
    max_trials = int(payload["max_trial_count"])
    max_failed = int(payload.get("max_failed_trial_count", 0))
    width = int(payload.get("parallel_trial_count", 1)) if slurm else 1
    together = f"{width} at a time" if width > 1 else "one after the other"
    report(_TOPIC, f"{search.name}, seed {seed}: up to {max_trials} trials, {together}")
    trials: list[Trial] = []
    while chosen := search.ask(min(width, max_trials - len(trials))):
        wave = [
            Trial(f"{n}", values, logs / f"trial-{n}") for n, values in enumerate(chosen, len(trials) + 1)
        ]
        trials += wave
        for trial in wave:
            values = ", ".join(f"{name} {value}" for name, value in trial.parameters.items())
            report(_TOPIC, f"trial {trial.id} of {max_trials}: {values}")
        _run_wave(wave, job, metric, search, show_line, slurm)
        search.tell(*(None if trial.failure else final_measurement(spec, trial)[1] for trial in wave))
        failed = [trial for trial in trials if trial.failure]
        if 0 < max_failed <= len(failed):
            raise RunError(
                f"{len(failed)} trials have failed, the limit of max_failed_trial_count; "
                f"the last: {failed[-1].failure}"
            )
    return trials


def _run_wave(
    wave: Sequence[Trial],
    job: CustomJob,
    metric: str,
    search: Search,
    show_line: ShowLine,
    slurm: SlurmSettings | None,
) -> None:
    """Runs trials, and records their outcomes in them."""

    def is_behind(number: int) -> bool:
        trial = wave[number]
        measured = read_measurements(trial.metrics, metric)
        if len(measured) <= len(trial.measurements):
            return False
        trial.measurements = measured
        if behind := search.should_stop(number, [value for _, value, _ in measured]):
            report(trial.topic, f"stopped early: {metric} {measured[-1][1]:.4f} is behind the other trials")
        return behind

    jobs = [_with_parameters(job, trial) for trial in wave]
    ends: Iterable[tuple[int, str]]
    if slurm:
        ends = _run_on_slurm(wave, jobs, slurm, is_behind)
    else:
        ends = [(0, _run_here(wave[0], jobs[0], show_line, is_behind))]
    for number, failure in ends:
        trial = wave[number]
        if failure:
            report(trial.topic, f"failed: {failure}")
        trial.measurements = read_measurements(trial.metrics, metric)
        trial.end = datetime.datetime.now(datetime.UTC)
        trial.failure = failure or ("" if trial.measurements else f"{metric} was not reported")


def final_measurement(spec: Mapping[str, Any], trial: Trial) -> Measurement:
    """Returns the measurement that is the trial's result, by the study's rule; the first of equals."""
    if spec.get("measurement_selection_type") == "LAST_MEASUREMENT":
        return trial.measurements[-1]
    sign = -1 if spec["metrics"][0].get("goal") == "MINIMIZE" else 1
    return max(trial.measurements, key=lambda measurement: sign * measurement[1])


def tuning_job_json(payload: Mapping[str, Any], trials: Sequence[Trial]) -> dict[str, Any]:
    """Returns a finished job in the API's JSON, without its trial_job_spec."""
    from google.cloud.aiplatform_v1.types import HyperparameterTuningJob
    from google.protobuf.json_format import MessageToDict, ParseDict

    spec = payload["study_spec"]
    content = {name: value for name, value in payload.items() if name != "trial_job_spec"}
    content |= {"trials": [_trial_json(spec, trial) for trial in trials], "state": "JOB_STATE_SUCCEEDED"}
    # The API's own messages check the format.
    return dict(MessageToDict(ParseDict(content, HyperparameterTuningJob.pb(HyperparameterTuningJob()))))


def _trial_json(spec: Mapping[str, Any], trial: Trial) -> dict[str, Any]:
    metric = spec["metrics"][0]["metric_id"]

    def message(measurement: Measurement) -> dict[str, Any]:
        step, value, _ = measurement
        return {"step_count": step, "metrics": [{"metric_id": metric, "value": value}]}

    content: dict[str, Any] = {
        "id": trial.id,
        "state": "INFEASIBLE" if trial.failure else "SUCCEEDED",
        "parameters": [{"parameter_id": key, "value": value} for key, value in trial.parameters.items()],
        "start_time": trial.start.isoformat(),
        "measurements": [message(measurement) for measurement in trial.measurements],
    }
    if trial.end:
        content["end_time"] = trial.end.isoformat()
    if trial.failure:
        content["infeasible_reason"] = trial.failure
    else:
        content["final_measurement"] = message(final_measurement(spec, trial))
    return content
