"""Stand-in for GCPC's launcher of tuning jobs: `python -m shardline.pipelines.local.tuning`.

`localize` puts it into the pipeline in the launcher's place, with the launcher's own arguments. The trials
run one after the other, whatever parallel_trial_count says.

One trial of a tuning job on this machine: a custom job with the trial's parameters in its arguments.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardline.components.run_record import REPLICAS, RUN_VARIABLE
from shardline.components.vertex.payload import PoolSpec, list_at, read_payload
from shardline.pipelines.local import processes
from shardline.pipelines.local.custom_job import EXECUTOR_VARIABLE, GCS_DIRECTORY
from shardline.pipelines.local.job import CustomJob, parse_payload
from shardline.pipelines.local.output import ShowLine
from shardline.pipelines.local.supervisor import run_job
from shardline.trainer import files, progress
from shardline.trainer.errors import PipelineError, RunError
from shardline.trainer.measurements import FILE_VARIABLE, read_measurements
from shardline.trainer.progress import Event, errors_end_the_process, say

#: Beside a trial's log files, what its chief reports.
METRIC_FILE = "output.metrics"

Measurement = tuple[int, float, float]


class _HopelessError(RunError):
    """Ends a trial that has been stopped early."""


@dataclass
class Trial:
    """A trial and how it went.

    Attributes:
        id: Number, as text, from "1".
        parameters: Values by name.
        start: When it started.
        end: When it ended.
        measurements: Step, value and time of each report.
        stopped: Whether it was stopped early.
        fault: Why it has failed; "" when it has not.
    """

    id: str
    parameters: Mapping[str, Any]
    start: datetime.datetime = field(default_factory=lambda: datetime.datetime.now(datetime.UTC))
    end: datetime.datetime | None = None
    measurements: Sequence[Measurement] = ()
    stopped: bool = False
    fault: str = ""


def run_trial(
    trial: Trial,
    job: CustomJob,
    metric: str,
    log_directory: Path,
    *,
    is_hopeless: Callable[[Sequence[float]], bool],
    show_line: ShowLine,
    gcs_root: Path,
) -> None:
    """Runs a trial and fills in how it went. Only a signal that stops this process is raised.

    Args:
        trial: What is tried.
        job: What every trial runs.
        metric: The metric's name.
        log_directory: Gets the log files and what the chief reports.
        is_hopeless: Whether a trial that has measured these values should be stopped.
        show_line: As for `run_job`.
        gcs_root: As for `run_job`.
    """
    topic = f"trial {trial.id}"
    log_directory.mkdir(parents=True, exist_ok=True)
    reports = log_directory / METRIC_FILE

    def show(event: Event) -> None:
        if event.kind != "fact":  # the results of a run are those of its last training
            outer(replace(event, topic=topic))
        measured = read_measurements(reports, metric)
        if len(measured) > len(trial.measurements):
            trial.measurements = measured
            if is_hopeless([value for _, value, _ in measured]):
                raise _HopelessError(f"{metric} {measured[-1][1]:.4f} is behind the other trials")

    with progress.sink(show) as outer:
        try:
            run_job(
                _with_parameters(job, trial, reports),
                log_directory,
                topic=topic,
                show_line=show_line,
                gcs_root=gcs_root,
            )
        except _HopelessError as error:
            trial.stopped = True
            outer(Event("line", topic, f"stopped early: {error}"))
        except RunError as error:
            trial.fault = " ".join(str(error).split())
            outer(Event("line", topic, f"failed: {trial.fault}"))
    trial.measurements = read_measurements(reports, metric)
    trial.end = datetime.datetime.now(datetime.UTC)
    if not trial.measurements and not trial.fault:
        trial.fault = f"{metric} was not reported"


def _with_parameters(job: CustomJob, trial: Trial, reports: Path) -> CustomJob:
    """Returns the job as the platform runs it for one trial."""
    flags = tuple(f"--{name}={value}" for name, value in trial.parameters.items())

    def pool_of(pool: PoolSpec) -> PoolSpec:
        container = {
            **pool.container,
            "args": [*list_at(pool.container, "args"), *flags],
            "env": [*pool.env, {"name": FILE_VARIABLE, "value": str(reports)}],
        }
        return PoolSpec({**pool.spec, "container_spec": container}) if pool.replicas else pool

    return replace(
        job,
        worker_pools=tuple(map(pool_of, job.worker_pools)),
        base_output_directory=f"{job.base_output_directory.rstrip('/')}/{trial.id}",
        trial=trial.id,
    )


_TOPIC = "tune"
#: The job as the API would show it, beside what the task puts out.
JOB_FILE = "tuning_job.json"


def main(argv: list[str] | None = None) -> None:
    """Runs the trials of the launcher's arguments and ends as the job ends."""
    executor = os.environ.get(EXECUTOR_VARIABLE)
    processes.die_with_parent(int(executor) if executor else None)
    options = _parse(argv)
    resources = Path(options.gcp_resources)
    resources.parent.mkdir(parents=True, exist_ok=True)
    with processes.adopted_orphans(), errors_end_the_process(_TOPIC):
        payload = _read(options.payload)
        try:
            trials = _run(payload, options.executor_input, resources.parent)
        finally:
            processes.stop_descendants(0)
        job = resources.parent / JOB_FILE
        files.write_json(job, job_of(payload, trials))
        resource = {"resourceType": "HyperparameterTuningJob", "resourceUri": job.absolute().as_uri()}
        files.write_json(resources, {"resources": [resource]})


def _read(payload: str) -> dict[str, Any]:
    """Returns the request that the launcher would send."""
    try:
        return dict(read_payload(payload))
    except ValueError as error:
        raise PipelineError(
            f"the tuning job's payload is not JSON ({error}); a double quote or backslash in display_name "
            "or another field of the job breaks it"
        ) from None


def _run(payload: Mapping[str, Any], executor_input: str, task_directory: Path) -> list[Trial]:
    from shardline.pipelines.local.search import Search

    run = Path(os.environ.get(RUN_VARIABLE, task_directory))
    spec, metric = payload["study_spec"], payload["study_spec"]["metrics"][0]["metric_id"]
    job = parse_payload(
        json.dumps({"display_name": payload["display_name"], "job_spec": payload["trial_job_spec"]}),
        executor_input,
    )
    seed = int(payload.get("labels", {}).get("seed", 0))
    search = Search(spec, seed)
    most, worst = int(payload["max_trial_count"]), int(payload.get("max_failed_trial_count", 0))
    say(_TOPIC, f"{search.name}, seed {seed}: up to {most} trials, one after the other")
    trials: list[Trial] = []
    while len(trials) < most and (chosen := search.ask()) is not None:
        trial = Trial(str(len(trials) + 1), chosen)
        trials.append(trial)
        words = ", ".join(f"{name} {value}" for name, value in chosen.items())
        say(_TOPIC, f"trial {trial.id} of {most}: {words}")
        run_trial(
            trial,
            job,
            metric,
            run / REPLICAS / task_directory.name / f"trial-{trial.id}",
            is_hopeless=search.is_hopeless,
            show_line=_print_line,
            gcs_root=run / GCS_DIRECTORY,
        )
        search.tell(None if trial.fault else final(spec, trial)[1])
        failed = [trial for trial in trials if trial.fault]
        if 0 < worst <= len(failed):
            raise RunError(
                f"{len(failed)} trials have failed, which max_failed_trial_count allows no more; "
                f"the last: {failed[-1].fault}"
            )
    return trials


def final(spec: Mapping[str, Any], trial: Trial) -> Measurement:
    """Returns the measurement that counts, by the study's rule; the first of equals."""
    if spec.get("measurement_selection_type") == "LAST_MEASUREMENT":
        return trial.measurements[-1]
    sign = -1 if spec["metrics"][0].get("goal") == "MINIMIZE" else 1
    return max(trial.measurements, key=lambda measurement: sign * measurement[1])


def job_of(payload: Mapping[str, Any], trials: Sequence[Trial]) -> dict[str, Any]:
    """Returns a job that has ended in the JSON form of the API, without what its trials ran."""
    from google.cloud.aiplatform_v1.types import HyperparameterTuningJob
    from google.protobuf.json_format import MessageToDict, ParseDict

    spec = payload["study_spec"]
    content = {name: value for name, value in payload.items() if name != "trial_job_spec"}
    content["trials"] = [_trial(spec, trial) for trial in trials]
    content["state"] = "JOB_STATE_SUCCEEDED"
    # By way of the API's own messages: what is written here has their form.
    message = ParseDict(content, HyperparameterTuningJob.pb(HyperparameterTuningJob()))
    return dict(MessageToDict(message))


def _trial(spec: Mapping[str, Any], trial: Trial) -> dict[str, Any]:
    metric = spec["metrics"][0]["metric_id"]

    def message(measurement: Measurement) -> dict[str, Any]:
        step, value, _ = measurement
        return {"step_count": step, "metrics": [{"metric_id": metric, "value": value}]}

    found: dict[str, Any] = {
        "id": trial.id,
        "state": "INFEASIBLE" if trial.fault else "SUCCEEDED",
        "parameters": [{"parameter_id": key, "value": value} for key, value in trial.parameters.items()],
        "start_time": trial.start.isoformat(),
        "measurements": [message(measurement) for measurement in trial.measurements],
    }
    if trial.end:
        found["end_time"] = trial.end.isoformat()
    if trial.fault:
        found["infeasible_reason"] = trial.fault
    else:
        found["final_measurement"] = message(final(spec, trial))
    return found


def _print_line(name: str, line: str) -> None:
    print(f"{name} | {line}", flush=True)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--executor_input", required=True)
    parser.add_argument("--payload", required=True)
    parser.add_argument("--gcp_resources", required=True)
    for ignored in ("--marker", "--type", "--project", "--location"):
        parser.add_argument(ignored)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
