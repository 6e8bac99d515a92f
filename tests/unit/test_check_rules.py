"""Rules of the check: each finds its broken example, and not the repaired one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from shardline.components.code import pack
from shardline.pipelines.check import Pipeline, Schedule, Target, check_pipeline, check_run
from shardline.pipelines.spec import load_pipeline
from shardline.trainer.base.errors import ShardlineError
from tests.helpers.checks import check_spec, codes, component, gpu_pool, job, pipeline, pool, task

T4 = gpu_pool("n1-standard-8", "NVIDIA_TESLA_T4", 1)
REDUCER = pool(
    "n1-highcpu-16",
    container={"image_uri": "us-docker.pkg.dev/vertex-ai-restricted/training/reductionserver:latest"},
)
NO_RESTART = {"restart_job_on_worker_restart": False}
TENSORBOARD = "projects/p/locations/europe-west4/tensorboards/1"
CRYPTO_KEY = "projects/p/locations/{}/keyRings/r/cryptoKeys/k"
OUTPUT = "gs://bucket/job"
KEY = "AIza" + 35 * "x"
UNPACK = "from shardline.trainer.base.code import unpack\nunpack('{}')\n"
RETRAIN = load_pipeline(Path(__file__).parents[2] / "compiled" / "retrain.yaml")
#: The same with an image that the platform can pull.
SENT = json.loads(
    json.dumps(RETRAIN).replace("shardline:0.1.0", "europe-docker.pkg.dev/vision/r/shardline:1")
)
GIVEN = {"champion_uri": "gs://b/champions"}


def trainer(*args: str, **container: Any) -> dict[str, Any]:
    return pool(container={"args": list(args), **container})


def function(parameter: str) -> dict[str, Any]:
    source = f"def train(dataset, {parameter}):\n    pass\n"
    return pool(
        container={"command": ["sh", "-c", "run", source], "args": ["--function_to_execute", "train"]}
    )


def env(**values: str) -> dict[str, Any]:
    return pool(container={"env": [{"name": name, "value": value} for name, value in values.items()]})


def image(name: str) -> dict[str, Any]:
    return pipeline(component(image=name))


def reading(value: Any, *, cached: bool = True, name: str = "source", **more: Any) -> dict[str, Any]:
    """A task that is given what to read."""
    inputs = {name: "STRING", **dict.fromkeys(more, "STRING")}
    only = task(parameters={name: value, **more}, cachingOptions={"enableCache": cached})
    return pipeline(component(inputs=inputs), tasks=only)


def saying(text: str, **inputs: Any) -> dict[str, Any]:
    return pipeline(
        component(inputs=dict.fromkeys(inputs, "STRING"), args=[text]), tasks=task(parameters=inputs)
    )


def declaring(default: str) -> dict[str, Any]:
    return pipeline(parameters={"p": {"parameterType": "STRING", "defaultValue": default}})


ROWS = [
    ("SL101", job(pool(replica_count=2)), job(pool(), pool(replica_count=1))),
    # The evaluator would become a parameter server.
    ("SL103", job(pool(), pool(), {}, pool()), job(pool(), pool(), pool(), pool())),
    ("SL103", job(pool(), {"replica_count": 0}, pool()), job(pool(), {"replica_count": "0"}, pool())),
    ("SL301", job(pool(), pool(replica_count=1.5)), job(pool(), pool(replica_count=2.0))),
    ("SL106", job(pool(), pool(replica_count=0)), job(pool(), {})),
    ("SL107", job(pool(), {"replica_count": "0"}, pool()), job(pool(), pool(), pool())),
    ("SL109", job(T4, REDUCER), job(T4, T4, REDUCER)),
    ("SL110", job(pool(), pool(), REDUCER), job(T4, T4, REDUCER)),
    ("SL110", job(T4, {"replica_count": "0"}, REDUCER), job(T4, T4, REDUCER)),
    ("SL110", job(T4, T4, T4 | {"container_spec": REDUCER["container_spec"]}), job(T4, T4, REDUCER)),
    ("SL114", job(gpu_pool("n1-standard-8", "NVIDIA_TESLA_T4", 0)), job(T4)),
    ("SL114", job(pool(machine={"accelerator_count": 1})), job(pool())),
    (
        "SL114",
        job(pool(disk_spec={"boot_disk_size_gb": 50})),
        job(pool(disk_spec={"boot_disk_size_gb": "100"})),
    ),
    ("SL201", job(timeout="0s"), job(timeout="1s", max_wait_duration="0s")),
    ("SL301", job(strategy="spot"), job(strategy="SPOT")),
    ("SL301", job(timeout="1h"), job(timeout="3600s")),
    ("SL202", job(T4, pool(), strategy="FLEX_START"), job(T4, T4, strategy="FLEX_START")),
    (
        "SL202",
        job(labels={"team": "Vision"}),
        job(labels={"équipe": "視覚-1", "run": "{{$.pipeline_job_name}}"}),
    ),
    ("SL202", job(tensorboard=TENSORBOARD), job(tensorboard=TENSORBOARD, service_account="a@b.c")),
    ("SL201", job(strategy="FLEX_START", timeout="604801s"), job(strategy="FLEX_START", timeout="604800s")),
    ("SL207", job(strategy="SPOT"), job(strategy="SPOT", base_output_directory=OUTPUT)),
    ("SL209", job(pool(), pool(), **NO_RESTART), job(pool(), pool())),
    # Parameter-server training goes on without a worker.
    ("SL209", job(pool(), pool(), REDUCER, **NO_RESTART), job(pool(), pool(), pool(), **NO_RESTART)),
    ("SL214", job(tensorboard=TENSORBOARD), job(tensorboard=TENSORBOARD, base_output_directory=OUTPUT)),
    (
        "SL217",
        job(tensorboard=TENSORBOARD, encryption_spec_key_name=CRYPTO_KEY.format("us-east1")),
        job(tensorboard=TENSORBOARD, encryption_spec_key_name=CRYPTO_KEY.format("europe-west4")),
    ),
    ("SL301", job("{{$.inputs.parameters['pools']}}", extra_inputs={"labels": "no json"}), job(labels={})),
    ("SL301", job(display_name='the "best" one'), job(display_name="the best one")),
    ("SL305", job(function("strategy: str")), job(function("distribution: str"))),
    ("SL310", saying("x" * 131_072), saying("x" * 131_071)),
    ("SL310", job(pool(container={"args": 2 * ["x" * 70_000]})), job(trainer("x" * 70_000))),
    ("SL322", job(env(TF_CONFIG="{}")), job(env(TF_CPP_MIN_LOG_LEVEL="2"))),
    ("SL322", job(pool(container={"env": 2 * [{"name": "A", "value": "1"}]})), job(env(A="1"))),
    ("SL403", image("step:latest"), image("us-docker.pkg.dev/vertex-ai/prediction/sklearn-cpu.1-5:latest")),
    ("SL403", image("registry:5000/step:1"), image(f"registry:5000/step:1@sha256:{64 * 'a'}")),
    (
        "SL411",
        image("europe-west4-docker.pkg.dev/p/r/Image:1"),
        image("europe-west4-docker.pkg.dev/p/r/image:1"),
    ),
    ("SL411", image("step:1@sha256:12"), image(f"gcr.io/acme.com:p/step:1@sha256:{64 * 'a'}")),
    ("SL407", pipeline(component(command=["sh", "-c", "python3 -m pip install 'kfp==2.17.0'"])), pipeline()),
    ("SL412", image("eu-docker.pkg.dev/my-project/r/i:1"), image("eu-docker.pkg.dev/vision/my-projects/i:1")),
    ("SL513", reading("gs://bucket/data"), reading("gs://bucket/data", cached=False)),
    # A time of the run is part of the key.
    (
        "SL513",
        reading("SELECT a\nFROM t"),
        reading("SELECT a FROM t", at="{{$.pipeline_job_create_time_utc}}"),
    ),
    ("SL513", reading("images:gs://bucket/data"), reading("gs://bucket/model", name="output_uri")),
    ("SL521", saying("{{$.pipeline_job_nmae}}"), saying("{{$.pipeline_job_name}}")),
    ("SL521", saying("{{$.inputs.parameters['b']}}", a="s"), saying("{{$.inputs.parameters['a']}}", a="s")),
    ("SL811", declaring(KEY), declaring("AIza")),
    ("SL811", reading("-----BEGIN RSA PRIVATE KEY-----"), reading("PRIVATE KEY")),
    (
        "SL811",
        pipeline(component(env=[{"name": "API_KEY", "value": "s3cr3t"}])),
        pipeline(component(env=[{"name": "API_KEY_FILE", "value": "/secret"}])),
    ),
    ("SL811", saying(f"key = '{KEY}'"), saying("key = load()")),
    ("SL811", job(env(TOKEN="ghp_" + 36 * "a")), job(env(TOKEN="{{$.inputs.parameters['token']}}"))),
]


@pytest.mark.parametrize(("code", "broken", "repaired"), ROWS, ids=[row[0] for row in ROWS])
def test_a_rule_finds_what_is_broken_and_not_what_is_right(
    code: str, broken: dict[str, Any], repaired: dict[str, Any]
) -> None:
    assert code in codes(broken)
    assert code not in codes(repaired)


def options(**given: Any) -> dict[str, Any]:
    return {"train_options": given}


RUN_ROWS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("SL601", {"epoch": 1}, {"epochs": 1}),
    ("SL601", {"epochs": "three"}, {"epochs": "3"}),
    ("SL606", {"epochs": 0}, {"epochs": 1}),
    ("SL606", {"model": "mnist_cnnn"}, {"model": "own.package:cnn"}),
    ("SL607", {"source": "images:photos"}, {"source": "images:gs://b/photos/{date}"}),
    ("SL607", {"source": "images:/"}, {"source": "images:/mnt/nowhere"}),  # which the image may hold
    ("SL607", {"data_options": {"schema": "s.json"}}, {"data_options": {"schema": "gs://b/s.json"}}),
    ("SL607", options(initial_model="runs/x"), options(initial_model="/gcs/b/x")),
    ("SL607", {"model": "keras:VGG16", "hparams": {"weights": "w.h5"}}, {"hparams": {"weights": "imagenet"}}),
    ("SL607", {"source": "images:s3://b/x"}, {"source": "images:gs://b/x"}),
    ("SL610", {"champion_uri": "runs/champions/x"}, {"champion_uri": ""}),
    ("SL610", {"history_uri": "https://b/x"}, {"history_uri": "gs://b/x"}),
    ("SL610", options(checkpoint_dir="/tmp"), options(checkpoint_dir="gs://b/jobs/{{$.pipeline_job_name}}")),
    ("SL412", {"source": "images:gs://my-bucket/photos"}, {"source": "images:gs://my-bucket-2/photos"}),
]


@pytest.mark.parametrize(("code", "broken", "repaired"), RUN_ROWS, ids=[row[0] for row in RUN_ROWS])
def test_what_a_run_is_given(code: str, broken: dict[str, Any], repaired: dict[str, Any]) -> None:
    assert code in codes(RETRAIN, parameters=GIVEN | broken)
    assert code not in codes(RETRAIN, parameters=GIVEN | repaired)
    # On this machine they are places like others.
    assert not {"SL607", "SL610"} & codes(RETRAIN, parameters=GIVEN | broken, target=Target.LOCAL)


@pytest.mark.parametrize(
    ("copied", "source", "is_found"),
    [
        ("other leafnets", "leafnet.source:Leaves", True),
        ("leafnet/ leafnet", "leafnet.source:Leaves", False),
        (". .", "leafnet.source:Leaves", False),
        ("other .", "distribution.source:Leaves", False),
        ("--chown=user ./leafnet/ ./leafnet", "leafnet.source:Leaves", False),
        ("other \\\n  leafnet /app/", "leafnet.source:Leaves", False),
        ('["leafnet", "x"]', "leafnet.source:Leaves", False),
        ("* .", "leafnet.source:Leaves", False),
        ("other .\nadd leafnet leafnet", "leafnet.source:Leaves", False),
    ],
)
def test_a_package_that_the_image_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: str, source: str, is_found: bool
) -> None:
    code, given = "SL612", GIVEN | {"source": source}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "leafnet").mkdir()
    (tmp_path / "leafnet" / "source.py").write_text("class Leaves: ...\n")
    (tmp_path / "Dockerfile").write_text(f"FROM python\nCOPY {copied}\n")

    assert (code in codes(RETRAIN, parameters=given)) == is_found
    held = Pipeline({**RETRAIN, "more": UNPACK.format(pack(["leafnet"]))}, given)
    assert code not in {finding.code for finding in check_pipeline(held)}


def test_code_that_is_not_that_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("leafnet.py").write_text("a = 1")
    code, spec = "SL614", saying(UNPACK.format(pack(["leafnet"])))
    assert code not in codes(spec)
    Path("leafnet.py").write_text("a = 2")
    assert code in codes(spec)
    Path("leafnet.py").unlink()
    assert code not in codes(spec)


def test_a_run_passes_what_has_no_default() -> None:
    code, spec = "SL601", pipeline(parameters={"p": "NUMBER_INTEGER"})

    assert code in codes(spec, parameters={})
    assert code not in codes(spec)  # nothing is known of the run yet


def test_components_in_a_pipeline_of_ones_own_have_valid_settings() -> None:
    code, own = "SL613", RETRAIN | {"pipelineInfo": {"name": "own"}}

    assert code in codes(own, parameters={"epochs": 0})
    assert code not in codes(own, parameters={"epochs": 1}) | codes(RETRAIN, parameters={"epochs": 0})


def test_ones_own_image_names_its_registry() -> None:
    code, elsewhere = "SL411", json.loads(json.dumps(RETRAIN).replace("shardline:0.1.0", "leafnet:0.1.0"))

    assert code in codes(RETRAIN, target=Target.PLATFORM)
    assert code in codes(elsewhere, target=Target.PLATFORM)
    assert code not in codes(SENT, target=Target.PLATFORM) | codes(RETRAIN, target=Target.LOCAL)
    assert code not in codes(image("python:3.11"), target=Target.PLATFORM)


def test_a_run_without_a_place_for_its_champion_is_said_and_then_refused() -> None:
    code, nowhere, said = "SL611", {}, {"champion_uri": ""}  # type: tuple[str, dict[str, str], dict[str, str]]

    assert code in codes(RETRAIN, parameters=nowhere)
    assert code not in codes(RETRAIN, parameters=said) | codes(RETRAIN)
    with pytest.raises(ShardlineError, match="champion_uri is not set"):
        check_run(SENT, nowhere)
    assert check_run(SENT, said)[0] == said


def test_a_tensorboard_and_a_network_are_in_the_region_of_the_run() -> None:
    attachment = "projects/p/regions/europe-west4/networkAttachments/a"
    for used in ({"tensorboard": TENSORBOARD}, {"psc_interface_config": {"network_attachment": attachment}}):
        for region, found in (("us-east1", True), ("europe-west4", False)):
            findings = check_pipeline(Pipeline(job(**used), location=region))
            assert ("SL217" in {finding.code for finding in findings}) == found


def test_an_endpoint_and_a_key_are_in_the_region_of_the_run() -> None:
    uri = "https://us-east1-aiplatform.googleapis.com/v1/projects/p/locations/us-east1/endpoints/1"
    spec = pipeline()
    spec["deploymentSpec"]["executors"]["exec-step"] = {"importer": {"artifactUri": {"constant": uri}}}
    key = {"encryption_spec_key_name": CRYPTO_KEY.format("us-east1")}
    for parts in ({"spec": spec}, {"spec": pipeline(), "environment": key}):
        for region, found in (("us-east1", False), ("europe-west4", True)):
            findings = check_pipeline(Pipeline(location=region, **parts))
            assert ("SL217" in {finding.code for finding in findings}) == found


def schedule(cron: str = "TZ=Europe/Vienna 0 6 * * 1", **fields: Any) -> Schedule:
    return Schedule(**{"cron": cron, "display_name": "nightly", "pipeline": "p.yaml", **fields})


SCHEDULE_ROWS = [
    ("SL901", schedule("TZ=UTC 0 6 * *"), schedule("TZ=UTC 0 6 * * *")),
    ("SL902", schedule("0 6 * * *"), schedule("CRON_TZ=UTC 0 6 * * *")),
    ("SL902", schedule("TZ=../etc/passwd 0 6 * * *"), schedule("TZ=America/New_York 0 6 * * *")),
    ("SL909", schedule("TZ=UTC */15 * * * *"), schedule("TZ=UTC 0 * * * *")),
]


@pytest.mark.parametrize(("code", "broken", "repaired"), SCHEDULE_ROWS, ids=[row[0] for row in SCHEDULE_ROWS])
def test_schedules(code: str, broken: Schedule, repaired: Schedule) -> None:
    assert code in codes(pipeline(), schedule=broken)
    assert code not in codes(pipeline(), schedule=repaired)


def test_a_job_of_many_different_pools_is_right() -> None:
    found = job(
        T4,
        {**T4, "replica_count": 7},
        REDUCER,
        pool("n1-highmem-8"),
        strategy="SPOT",
        timeout="86400s",
        tensorboard=TENSORBOARD,
        service_account="{{$.pipeline_service_account}}",
        network="{{$.pipeline_network}}",
        base_output_directory=OUTPUT,
    )

    assert codes(found, schedule=schedule()) == set()


def test_a_finding_never_shows_the_secret() -> None:
    found = check_spec(declaring(KEY)) + check_spec(reading(KEY))

    assert {finding.code for finding in found} == {"SL811"}
    assert KEY not in str(found)


def test_a_given_parameter_is_followed_down_to_the_job() -> None:
    """The pipeline's parameter reaches the worker pool, which is checked with its value."""
    pools = [{**pool(), "replica_count": "{{$.inputs.parameters['pipelinechannel--count']}}"}]
    spec = job(*pools)
    spec["root"]["inputDefinitions"] = {"parameters": {"count": {"parameterType": "NUMBER_INTEGER"}}}
    only = spec["root"]["dag"]["tasks"]["custom-training-job"]
    only["inputs"]["parameters"]["pipelinechannel--count"] = {"componentInputParameter": "count"}

    assert codes(spec) == set()
    assert codes(spec, parameters={"count": 1}) == set()
    assert codes(spec, parameters={"count": 2}) == {"SL101"}


def test_a_run_here_is_refused_a_directory_of_something_else_for_its_champion(tmp_path: Path) -> None:
    given = {"source": "digits", "champion_uri": str(tmp_path)}
    check_run(SENT, given, here=True)
    (tmp_path / "export.json").touch()

    with pytest.raises(ShardlineError, match=r"holds no champions .* but export\.json; give"):
        check_run(SENT, given, here=True)
