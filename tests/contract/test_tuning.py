"""The tuning job: the real launcher and client at the fake, and trials that really train."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.cloud.aiplatform_v1.types import CustomJob, HyperparameterTuningJob, Scheduling, Trial
from google.rpc import code_pb2
from kfp import compiler, dsl

from shardline.components.tune.best_trial import read_job, trials_of
from shardline.components.tune.component import best_trial, plan_study, tuning_job
from shardline.pipelines.local.localize import localize
from shardline.pipelines.settings import load
from shardline.pipelines.tune import job_arguments
from shardline.trainer.errors import PlatformError
from shardline.trainer.measurements import read_measurements
from tests.contract.fake.replicas import run_replicas
from tests.contract.fake.services import PROJECT, PROJECT_NUMBER, Outcome
from tests.contract.fake.vertex import LOCATION, FakeVertex, fake_vertex
from tests.helpers import programs
from tests.helpers.datasets import write_table

LAUNCHER = "google_cloud_pipeline_components.container.v1.hyperparameter_tuning_job.launcher"
STUDY: dict[str, Any] = {
    "metric": "val_accuracy",
    "max_trial_count": 2,
    "stopping": "median",
    "parameter": [
        {"name": "learning_rate", "type": "double", "min": 0.0, "max": 0.1},
        {"name": "units", "type": "discrete", "values": [8, 16]},
    ],
}
NOTE = 'say "hi" \\ {{ x }} \'\n\ttab, näïve ☃'


def launch(vertex: FakeVertex, text: str, resources: Path) -> subprocess.CompletedProcess[str]:
    where = ("--project", PROJECT, "--location", LOCATION, "--gcp_resources", str(resources))
    return programs.run(
        [sys.executable, "-m", LAUNCHER, "--type", "HyperparameterTuningJob", "--payload", text, *where],
        env=vertex.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def payload(**changes: str) -> str:
    """The payload that the backend makes of our component, with a study of 0 to 1."""
    fields: dict[str, Any] = {
        "study_spec": json.dumps(
            {
                "metrics": [{"metric_id": "val_loss", "goal": "MINIMIZE"}],
                "parameters": [
                    {"parameter_id": "x", "double_value_spec": {"min_value": 0.0, "max_value": 1.0}},
                    {"parameter_id": "n", "discrete_value_spec": {"values": [0, 8]}},
                ],
                "convex_automated_stopping_spec": {"min_measurement_count": 5},
            }
        ),
        "worker_pool_specs": json.dumps(
            [
                {
                    "machine_spec": {"machine_type": "n1-standard-4"},
                    "replica_count": 1,
                    "container_spec": {"image_uri": "image:1", "args": [NOTE]},
                },
                {"replica_count": "0"},
                {"replica_count": "0"},
                {
                    "machine_spec": {"machine_type": "n1-standard-4"},
                    "replica_count": 1,
                    "container_spec": {"image_uri": "image:1"},
                },
            ]
        ),
        "max_trial_count": 3,
        "parallel_trial_count": 2,
        "max_failed_trial_count": 0,
        "base_output_directory": "gs://staging/trials",
        "labels": '{"component": "tune", "seed": "7"}',
    }
    fixed = {
        **job_arguments(load(Path("settings/local.toml"))),
        "service_account": "sa@acme-vision.iam.gserviceaccount.com",
        "network": "projects/123456/global/networks/net",
        "encryption_spec_key_name": "",
        "persistent_resource_id": "",
        **changes,
    }
    job = tuning_job(fixed)
    args = job.component_spec.implementation.container.args
    template = "".join(str(part) for part in args[list(args).index("--payload") + 1].items)

    def paste(match: re.Match[str]) -> str:
        value = fields[match.group(1)]
        return value if isinstance(value, str) else json.dumps(value)

    return re.sub(r"\{\{\$\.inputs\.parameters\['(\w+)'\]\}\}", paste, template)


def test_our_tuning_job_arrives_as_it_was_meant(vertex_environ: FakeVertex, tmp_path: Path) -> None:
    vertex, resources = vertex_environ, tmp_path / "gcp_resources"
    done = launch(vertex, payload(), resources)

    assert done.returncode == 0, done.stderr
    (job,) = vertex.services.tuning_jobs.values()
    assert (job.max_trial_count, job.parallel_trial_count) == (3, 2)
    assert job.labels == {"component": "tune", "seed": "7"}
    assert job.study_spec.convex_automated_stopping_spec.min_measurement_count == 5
    assert list(job.study_spec.parameters[1].discrete_value_spec.values) == [0, 8]
    spec = job.trial_job_spec
    # What GCPC's own component leaves out, and without which a cluster does not survive a lost worker.
    assert spec.scheduling.restart_job_on_worker_restart is True
    assert spec.scheduling.timeout.days == 7
    assert spec.scheduling.strategy == Scheduling.Strategy.STANDARD
    assert [pool.replica_count for pool in spec.worker_pool_specs] == [1, 0, 0, 1]
    assert spec.worker_pool_specs[0].container_spec.args == [NOTE]
    assert spec.service_account == "sa@acme-vision.iam.gserviceaccount.com"
    assert spec.base_output_directory.output_uri_prefix == "gs://staging/trials"

    # The step after it finds the job by the launcher's output alone, with the client as it is.
    read = read_job(resources.read_text())
    assert read["name"] == f"projects/{PROJECT_NUMBER}/locations/{LOCATION}/hyperparameterTuningJobs/1"
    trials = trials_of(read)
    assert [trial.value for trial in trials] == [1, 2, 3]
    assert trials[0].parameters == {"x": pytest.approx(1 / 6), "n": 0}
    assert trials[2].parameters == {"x": pytest.approx(5 / 6), "n": 8}


def test_a_duration_that_only_one_strategy_takes_would_be_refused(vertex: FakeVertex, tmp_path: Path) -> None:
    """Why it is left out: this launcher, other than that of custom jobs, sends it."""
    done = launch(vertex, payload(max_wait_duration="86400s"), tmp_path / "gcp_resources")

    assert done.returncode != 0
    assert "max_wait_duration: only with FLEX_START" in done.stderr
    flexible = payload(max_wait_duration="86400s", strategy="FLEX_START")
    assert launch(vertex, flexible, tmp_path / "gcp_resources").returncode == 0


def test_a_job_that_cannot_be_read_is_named(vertex_environ: FakeVertex) -> None:
    name = f"projects/{PROJECT}/locations/{LOCATION}/hyperparameterTuningJobs/9"
    uri = f"https://{LOCATION}-aiplatform.googleapis.com/v1/{name}"
    resources = json.dumps({"resources": [{"resourceType": "HyperparameterTuningJob", "resourceUri": uri}]})
    with pytest.raises(PlatformError, match=f"cannot read the tuning job {name}: not found"):
        read_job(resources)
    vertex_environ.services.fail("GetHyperparameterTuningJob", code_pb2.PERMISSION_DENIED)
    with pytest.raises(PlatformError, match=r"aiplatform\.hyperparameterTuningJobs\.get"):
        read_job(resources)


def run_trials(job: HyperparameterTuningJob, directory: Path) -> Outcome:
    """Runs trials as the platform does: flags behind the arguments, each with a directory of its own."""
    base = job.trial_job_spec.base_output_directory.output_uri_prefix
    for number, (rate, units) in enumerate([(0.05, 16.0), (0.05, -1.0)], 1):
        metrics = directory / str(number) / "output.metrics"
        copy = HyperparameterTuningJob(job)
        spec = copy.trial_job_spec
        spec.base_output_directory.output_uri_prefix = f"{base}/{number}"
        for pool in spec.worker_pool_specs:
            pool.container_spec.args = [
                *pool.container_spec.args,
                *(f"--learning_rate={rate}", f"--units={units}"),
            ]
            pool.container_spec.env = [
                {"name": "CLOUD_ML_TRIAL_ID", "value": str(number)},
                {"name": "CLOUD_ML_HP_METRIC_FILE", "value": str(metrics)},
            ]
        run_replicas(CustomJob(display_name="trial", job_spec=spec), directory / f"{number}-run")
        measured = read_measurements(metrics, "val_accuracy")
        messages = [
            {"step_count": step, "metrics": [{"metric_id": "val_accuracy", "value": value}]}
            for step, value, _ in measured
        ]
        parameters = [
            Trial.Parameter(parameter_id=name, value=value)
            for name, value in {"learning_rate": rate, "units": units}.items()
        ]
        state = Trial.State.SUCCEEDED if measured else Trial.State.INFEASIBLE
        trial = Trial(id=str(number), state=state, parameters=parameters, measurements=messages)
        if messages:
            trial.final_measurement = messages[-1]
        job.trials.append(trial)
    return Outcome()


def collect(result: str, trial: str, training: dict) -> None:  # type: ignore[type-arg]
    """Writes what the step before it has put out."""
    import json
    from pathlib import Path

    found = {"trial": trial, "training": training}
    Path(result).write_text(json.dumps(found))


def compile_steps(dataset: Path, path: Path) -> dict[str, Any]:
    """The tuning part of the pipeline: plan, tuning job, best trial."""
    settings = load(Path("settings/local.toml"))

    def component(function: Any) -> Any:
        return dsl.component(base_image=settings.image, install_kfp_package=False)(function)

    training = {
        "model": "mlp",
        "hparams": {"units": 8},
        "epochs": 9,
        "per_replica_batch_size": 8,
        "seed": 3,
        "train_options": {"deterministic": True},
    }

    @dsl.pipeline(name="steps")  # type: ignore[untyped-decorator]
    def steps(result: str) -> None:
        data = dsl.importer(artifact_uri=str(dataset), artifact_class=dsl.Dataset)
        planned = component(plan_study)(
            study=json.dumps(STUDY),
            max_trial_count=0,
            trial_epochs=2,
            worker_pool_specs=settings.train.cluster.specs({"image_uri": settings.image}),
            job_labels={},
            dataset=data.output,
            training=training,
        )
        fields = {name: planned.outputs[name] for name in planned.outputs if name != "trials"}
        fields["base_output_directory"] = "gs://staging/trials"  # there the artifact would have such a URI
        tuned = tuning_job(job_arguments(settings))(**fields)
        best = component(best_trial)(gcp_resources=tuned.outputs["gcp_resources"], training=training)
        component(collect)(
            result=result,
            trial=best.outputs["trial"],
            training=best.outputs["training"],
        )

    compiler.Compiler().compile(steps, str(path))
    spec: dict[str, Any] = yaml.safe_load(path.read_text())
    return spec


# The payload is compared above, and a study that trains here is in tests/e2e/test_tune.py.
@pytest.mark.matrix
@pytest.mark.e2e
@pytest.mark.multiworker
@pytest.mark.timeout(300)
def test_trials_train_through_the_api_and_the_best_comes_back(tmp_path: Path) -> None:
    write_table(tmp_path / "data")
    result = tmp_path / "result.json"
    given = {"result": str(result)}
    text = yaml.safe_dump(localize(compile_steps(tmp_path / "data", tmp_path / "steps.yaml"), given))
    assert text.count("shardline.pipelines.local.stand_ins") == 1
    text = text.replace("shardline.pipelines.local.stand_ins", "tests.contract.fake.launch")
    (tmp_path / "local.yaml").write_text(text)
    (tmp_path / "given.json").write_text(json.dumps(given))
    (tmp_path / "scratch").mkdir()
    paths = [str(tmp_path / name) for name in ("local.yaml", "given.json", "outputs", "scratch")]

    with fake_vertex(tmp_path, run_tuning=lambda job: run_trials(job, tmp_path / "trials")) as vertex:
        done = subprocess.run(
            [sys.executable, "-m", "shardline.pipelines.local.execute", *paths, str(os.getpid())],
            env={**vertex.environment, "PYTHONPATH": os.getcwd()},
            capture_output=True,
            text=True,
        )

    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(result.read_text())
    assert seen == {
        "trial": "1",
        "training": {
            "model": "mlp",
            "hparams": {"units": 16},
            "epochs": 9,
            "per_replica_batch_size": 8,
            "learning_rate": 0.05,
            "seed": 3,
            "train_options": {"deterministic": True},
        },
    }
    (job,) = vertex.services.tuning_jobs.values()
    assert job.study_spec.median_automated_stopping_spec.use_elapsed_duration is True
    assert [pool.replica_count for pool in job.trial_job_spec.worker_pool_specs] == [1, 1]
    # Two epochs on two replicas: the chief alone has reported, after each.
    trained, failed = job.trials
    assert [measurement.step_count for measurement in trained.measurements] == [6, 12]
    assert failed.state == Trial.State.INFEASIBLE
    # The trial's model went to its own directory, /gcs/ of the platform.
    model = tmp_path / "trials" / "1-run" / "gcs" / "staging" / "trials" / "1" / "model"
    assert (model / "model.keras").is_file()
    assert json.loads((model / "metrics.json").read_text())["epochs"] == 2
