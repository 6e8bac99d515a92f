"""Worker pools: what the settings say, and what the API receives after the launcher's transformation."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf import json_format
from kfp import compiler, dsl

from shardline.components.custom_job import REDUCTION_SERVER_IMAGE, Cluster, CustomJobSettings, WorkerPool
from shardline.components.train.component import custom_job
from shardline.pipelines.check import Pipeline, check_pipeline
from shardline.trainer.base.errors import SettingsError
from tests.helpers.payloads import payload, received

CPU = WorkerPool(machine_type="n1-standard-8")
GPU = WorkerPool(machine_type="n1-standard-8", accelerator_type="NVIDIA_TESLA_T4", accelerator_count=2)
THREE = replace(CPU, replica_count=3)
AWKWARD = 'say "hi" \\ {{ x }} \'\n\ttab, näïve ☃ 日本語 $HOME'
PLATFORM = {
    "{{$.pipeline_service_account}}": "sa@my-project.iam.gserviceaccount.com",
    "{{$.pipeline_network}}": "projects/12345/global/networks/net",
    "{{$.pipeline_encryption_key_name}}": "projects/p/locations/l/keyRings/r/cryptoKeys/k",
    "{{$.pipeline_job_name}}": "retrain-20260101",
}


@dsl.component(base_image="image:1", install_kfp_package=False)
def learn(note: str, model: dsl.Output[dsl.Model]) -> int:
    print(note)
    return 1


def compiled(settings: CustomJobSettings, tmp_path: Path) -> dict[str, Any]:
    train = custom_job(learn, settings, labels={"pipeline": "toy"})

    @dsl.pipeline(name="toy")
    def pipeline(note: str = "") -> None:
        train(note=note)

    compiler.Compiler().compile(pipeline, str(tmp_path / "toy.yaml"))
    return yaml.safe_load((tmp_path / "toy.yaml").read_text())


def sent(settings: CustomJobSettings, tmp_path: Path, **inputs: Any) -> dict[str, Any]:
    """Returns the CustomJob that the API receives, as JSON with the platform's names."""
    executor_input = {"inputs": {"parameterValues": inputs}}
    job = received(payload(compiled(settings, tmp_path), executor_input, PLATFORM))
    return json_format.MessageToDict(job, preserving_proto_field_name=True)


SHAPES = {
    "one": (Cluster(chief=CPU), ["chief"]),
    "parameter servers": (
        Cluster(chief=CPU, workers=CPU, parameter_servers=THREE),
        ["chief", "1 workers", "3 servers"],
    ),
    "all": (
        Cluster(chief=CPU, workers=THREE, parameter_servers=CPU, evaluator=CPU),
        ["chief", "3 workers", "1 servers", "1 evaluators"],
    ),
    # The launcher would move these evaluators into the servers' or workers' slot.
    "no servers": (
        Cluster(chief=CPU, workers=THREE, evaluator=CPU),
        ["chief", "3 workers", "-", "1 evaluators"],
    ),
    "only an evaluator": (Cluster(chief=CPU, evaluator=CPU), ["chief", "-", "-", "1 evaluators"]),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_pool_reaches_the_api_in_its_slot(shape: str, tmp_path: Path) -> None:
    cluster, expected = SHAPES[shape]
    settings = CustomJobSettings(cluster=cluster)
    pools = sent(settings, tmp_path)["job_spec"]["worker_pool_specs"]
    names = ("chief", "workers", "servers", "evaluators")
    slots = zip(pools, names, strict=False)
    found = [f"{pool['replica_count']} {name}" if pool else "-" for pool, name in slots]
    assert found == ["1 chief", *expected[1:]]
    # An empty slot is what the API's documentation calls "an empty value", byte for byte.
    api = received(payload(compiled(settings, tmp_path), {}, {})).job_spec.worker_pool_specs
    assert [bool(pool.ByteSize()) for pool in api] == [name != "-" for name in expected]


def test_every_setting_of_a_pool_arrives(tmp_path: Path) -> None:
    chief = replace(GPU, boot_disk_size_gb=500, env={"NOTE": AWKWARD, "EMPTY": ""})
    servers = WorkerPool(machine_type="n1-highcpu-16", replica_count=2)
    told = [{"name": "SHARDLINE_ACCELERATORS", "value": "2 NVIDIA_TESLA_T4, 2 reduction servers"}]
    cluster = Cluster(chief=chief, workers=GPU, reduction_server=servers)
    pools = sent(CustomJobSettings(cluster=cluster), tmp_path, note="n")["job_spec"]["worker_pool_specs"]
    container = pools[0].pop("container_spec")
    gpus = {"accelerator_type": "NVIDIA_TESLA_T4", "accelerator_count": 2}
    assert pools[0] == {
        "machine_spec": {"machine_type": "n1-standard-8", **gpus},
        "replica_count": "1",
        "disk_spec": {"boot_disk_size_gb": 500},
    }
    assert container["image_uri"] == "image:1"
    assert container["env"] == [{"name": "NOTE", "value": AWKWARD}, {"name": "EMPTY"}, *told]
    assert pools[1]["container_spec"]["env"] == told
    assert pools[1]["container_spec"]["image_uri"] == "image:1"
    assert pools[1]["container_spec"]["command"] == container["command"]
    assert pools[2] == {
        "machine_spec": {"machine_type": "n1-highcpu-16"},
        "replica_count": "2",
        "disk_spec": {"boot_disk_size_gb": 100},
        "container_spec": {"image_uri": REDUCTION_SERVER_IMAGE},
    }


def test_a_parameter_reaches_every_replica_as_it_was_given(tmp_path: Path) -> None:
    settings = CustomJobSettings(cluster=Cluster(chief=CPU, workers=CPU))
    for pool in sent(settings, tmp_path, note=AWKWARD)["job_spec"]["worker_pool_specs"]:
        arguments = pool["container_spec"]["args"]
        executor_input = json.loads(arguments[arguments.index("--executor_input") + 1])
        assert executor_input["inputs"]["parameterValues"]["note"] == AWKWARD


def test_the_job_takes_over_what_the_pipeline_was_given(tmp_path: Path) -> None:
    job = sent(CustomJobSettings(cluster=Cluster.of(THREE)), tmp_path)
    spec = job["job_spec"]
    assert spec["service_account"] == "sa@my-project.iam.gserviceaccount.com"
    assert spec["network"] == "projects/12345/global/networks/net"
    assert job["encryption_spec"] == {"kms_key_name": "projects/p/locations/l/keyRings/r/cryptoKeys/k"}
    assert spec["scheduling"] == {
        "timeout": "604800s",
        "restart_job_on_worker_restart": True,
        "strategy": "STANDARD",
    }
    assert job["labels"] == {"component": "learn", "pipeline": "toy"}
    assert job["display_name"] == "learn"
    assert "persistent_resource_id" not in spec


def test_every_setting_of_the_job_arrives(tmp_path: Path) -> None:
    psc = {"network_attachment": "projects/p/regions/r/networkAttachments/n"}
    settings = CustomJobSettings(
        cluster=Cluster(chief=CPU, workers=CPU, parameter_servers=CPU),
        strategy="FLEX_START",
        timeout="7200.5s",
        service_account="me@p.iam.gserviceaccount.com",
        encryption_spec_key_name="",
        tensorboard="projects/p/locations/l/tensorboards/1",
        base_output_directory="gs://bucket/{{$.pipeline_job_name}}/",
        network="",
        extra={
            "enable_web_access": True,
            "psc_interface_config": psc,
            "scheduling": {"disable_retries": True, "max_wait_duration": "3600s"},
        },
        tags={"pipeline": "mine", "team": "ü-1"},
    )
    job = sent(settings, tmp_path)
    spec = job["job_spec"]
    del spec["worker_pool_specs"]
    assert job == {
        "display_name": "learn",
        "labels": {"component": "learn", "pipeline": "mine", "team": "ü-1"},
        "job_spec": {
            "scheduling": {
                "timeout": "7200.500s",
                "strategy": "FLEX_START",
                "max_wait_duration": "3600s",
                "disable_retries": True,
            },
            "service_account": "me@p.iam.gserviceaccount.com",
            "psc_interface_config": psc,
            "tensorboard": "projects/p/locations/l/tensorboards/1",
            "base_output_directory": {"output_uri_prefix": "gs://bucket/retrain-20260101/"},
            "enable_web_access": True,
        },
    }


@pytest.mark.parametrize(
    ("retries", "policy"), [(3, {"maxRetryCount": 3, "backoffDuration": "60s"}), (0, None)]
)
def test_retries_are_constants_of_the_task(retries: int, policy: Any, tmp_path: Path) -> None:
    settings = CustomJobSettings(cluster=Cluster(chief=CPU), num_retries=retries)
    task = compiled(settings, tmp_path)["root"]["dag"]["tasks"]["learn"]
    found = task.get("retryPolicy")
    assert (found and {key: found[key] for key in policy}) == policy


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: replace(CPU, replica_count=0), "replica_count must be at least 1, got 0"),
        (lambda: replace(CPU, machine_type="ct5lp-hightpu-4t"), "has TPUs, on which Shardline does not"),
        (lambda: replace(CPU, accelerator_type="TPU_V3"), "has TPUs, on which"),
        (
            lambda: Cluster(chief=CPU, workers=GPU, reduction_server=CPU, parameter_servers=CPU),
            "share one worker pool",
        ),
        (
            lambda: CustomJobSettings(cluster=Cluster.of(THREE), base_output_directory="gs://b/x"),
            r"all runs would share .*gs://b/x/\{\{\$\.pipeline_job_name\}\}$",
        ),
        (
            lambda: CustomJobSettings(cluster=Cluster.of(CPU), extra={"worker_pool_specs": []}),
            "extra sets worker_pool_specs, which other keys set",
        ),
        (
            lambda: CustomJobSettings(cluster=Cluster.of(CPU), extra={"scheduling": {"timeout": "1s"}}),
            "extra sets timeout",
        ),
    ],
)
def test_what_no_rule_would_see_is_refused_here(make: Any, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        make()


def test_values_that_make_a_bad_payload_are_found_in_the_payload(tmp_path: Path) -> None:
    settings = CustomJobSettings(
        cluster=Cluster(chief=THREE, workers=replace(CPU, env={"TF_CONFIG": ""})),
        strategy="FLEX_START",
        timeout="604801s",
        service_account='a "b"',
    )
    found = {finding.code for finding in check_pipeline(Pipeline(compiled(settings, tmp_path)))}
    assert "SL301" in found
    found = {
        finding.code
        for finding in check_pipeline(Pipeline(compiled(replace(settings, service_account=""), tmp_path)))
    }
    assert {"SL101", "SL201", "SL322"} <= found
