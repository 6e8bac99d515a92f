"""Worker pools: what the settings say, and what the API receives after the launcher's transformation."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf import json_format
from kfp import compiler, dsl

from shardline.components.train.component import custom_job
from shardline.components.vertex.job import CustomJobSettings
from shardline.components.vertex.pools import REDUCTION_SERVER_IMAGE, Cluster, NfsMount, WorkerPool
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
    pools = sent(CustomJobSettings(cluster=cluster), tmp_path)["job_spec"]["worker_pool_specs"]
    names = ("chief", "workers", "servers", "evaluators")
    slots = zip(pools, names, strict=False)
    found = [f"{pool['replica_count']} {name}" if pool else "-" for pool, name in slots]
    assert found == ["1 chief", *expected[1:]]


def test_an_empty_slot_is_the_empty_message(tmp_path: Path) -> None:
    """What the API's documentation calls "an empty value", byte for byte."""
    settings = CustomJobSettings(cluster=Cluster(chief=CPU, evaluator=CPU))
    job = received(payload(compiled(settings, tmp_path), {}, {}))
    assert [pool.ByteSize() for pool in job.job_spec.worker_pool_specs][1:3] == [0, 0]


def test_every_setting_of_a_pool_arrives(tmp_path: Path) -> None:
    chief = replace(
        GPU,
        boot_disk_size_gb=500,
        image_uri="other:2",
        env={"NOTE": AWKWARD, "EMPTY": ""},
        nfs_mounts=(NfsMount(server="10.0.0.2", path="/data", mount_point="data"),),
        reservation_affinity_type="SPECIFIC_RESERVATION",
        reservation_affinity_key="compute.googleapis.com/reservation-name",
        reservation_affinity_values=("projects/p/zones/z/reservations/r",),
    )
    servers = WorkerPool(machine_type="n1-highcpu-16", replica_count=2)
    told = [
        {"name": "SHARDLINE_ACCELERATORS", "value": "2 NVIDIA_TESLA_T4"},
        {"name": "SHARDLINE_REDUCTION_SERVERS", "value": "2"},
    ]
    cluster = Cluster(chief=chief, workers=GPU, reduction_server=servers)
    pools = sent(CustomJobSettings(cluster=cluster), tmp_path, note="n")["job_spec"]["worker_pool_specs"]
    container = pools[0].pop("container_spec")
    assert pools[0] == {
        "machine_spec": {
            "machine_type": "n1-standard-8",
            "accelerator_type": "NVIDIA_TESLA_T4",
            "accelerator_count": 2,
            "reservation_affinity": {
                "reservation_affinity_type": "SPECIFIC_RESERVATION",
                "key": "compute.googleapis.com/reservation-name",
                "values": ["projects/p/zones/z/reservations/r"],
            },
        },
        "replica_count": "1",
        "disk_spec": {"boot_disk_size_gb": 500},
        "nfs_mounts": [{"server": "10.0.0.2", "path": "/data", "mount_point": "data"}],
    }
    assert container["image_uri"] == "other:2"
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
        display_name="näme of it's own",
        strategy="FLEX_START",
        max_wait_duration="3600s",
        timeout="7200.5s",
        service_account="me@p.iam.gserviceaccount.com",
        psc_interface_config=psc,
        encryption_spec_key_name="",
        tensorboard="projects/p/locations/l/tensorboards/1",
        base_output_directory="gs://bucket/{{$.pipeline_job_name}}/",
        persistent_resource_id="mine",
        extra={"enable_web_access": True, "scheduling": {"disable_retries": True}},
        tags={"pipeline": "mine", "team": "ü-1"},
    )
    job = sent(settings, tmp_path)
    spec = job["job_spec"]
    del spec["worker_pool_specs"]
    assert job == {
        "display_name": "näme of it's own",
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
            "persistent_resource_id": "mine",
            "enable_web_access": True,
        },
    }


@pytest.mark.parametrize(
    ("retries", "policy"), [(3, {"maxRetryCount": 3, "backoffDuration": "5s"}), (0, None)]
)
def test_retries_are_constants_of_the_task(retries: int, policy: Any, tmp_path: Path) -> None:
    settings = CustomJobSettings(cluster=Cluster(chief=CPU), num_retries=retries, backoff_duration="5s")
    task = compiled(settings, tmp_path)["root"]["dag"]["tasks"]["learn"]
    found = task.get("retryPolicy")
    assert (found and {key: found[key] for key in policy}) == policy


def test_a_component_parameter_never_overrides_a_field_of_the_job() -> None:
    @dsl.component(base_image="i:1", install_kfp_package=False)
    def train(strategy: str) -> None:
        print(strategy)

    with pytest.raises(SettingsError, match=r"parameters that a CustomJob has too: \['strategy'\]"):
        custom_job(train, CustomJobSettings(cluster=Cluster(chief=CPU)))


def test_a_placeholder_in_a_components_source_is_refused() -> None:
    @dsl.component(base_image="i:1", install_kfp_package=False)
    def train() -> None:
        print("{{$.inputs}}")

    with pytest.raises(SettingsError, match="source of component 'train' holds"):
        custom_job(train, CustomJobSettings(cluster=Cluster(chief=CPU)))


def pool(**values: Any) -> Any:
    return lambda: WorkerPool(**{"machine_type": "n1-standard-8", **values})


def cluster(**pools: WorkerPool) -> Any:
    return lambda: Cluster(**{"chief": CPU, **pools})


def job(**values: Any) -> Any:
    return lambda: CustomJobSettings(**{"cluster": Cluster.of(THREE), **values})


MOUNT = NfsMount(server="10.0.0.2", path="/d", mount_point="d")
REFUSED = [
    (pool(machine_type="n1"), "Compute Engine machine type .*got 'n1'"),
    (pool(replica_count=0), "replica_count must be at least 1, got 0"),
    (pool(accelerator_type="NVIDIA_L4"), "go together, got 'NVIDIA_L4' and 0"),
    (pool(accelerator_count=1), "go together, got '' and 1"),
    (pool(boot_disk_size_gb=10), "at least 100, got 10"),
    (pool(reservation_affinity_type="ANY"), "reservation_affinity_type is one of"),
    (
        pool(reservation_affinity_type="SPECIFIC_RESERVATION"),
        "and no other type, needs",
    ),
    (pool(reservation_affinity_values=("r",)), "and no other type, needs"),
    (pool(env={"A B": ""}), "env: 'A B' is not the name"),
    (pool(env={"TF_CONFIG": ""}), "env: TF_CONFIG is set by the platform"),
    (pool(env={f"V{i}": "" for i in range(99)}), "a container has room for 98 variables, got 99"),
    (pool(machine_type="ct5lp-hightpu-4t"), "ct5lp-hightpu-4t has TPUs, on which Shardline does not train"),
    (pool(accelerator_type="TPU_V3", accelerator_count=8), "has TPUs, on which"),
    (pool(env={"A": "{{$.inputs}}"}), r"env\.A holds '\{\{\$', which begins an unknown placeholder"),
    (pool(env={"A": "a\0b"}), r"env\.A holds a NUL"),
    (pool(env={"A": "\udc80"}), r"env\.A is not valid UTF-8"),
    (lambda: NfsMount(server="s", path="data", mount_point="m"), "path of an NFS mount starts with '/'"),
    (lambda: NfsMount(server="", path="/d", mount_point="m"), "needs server, path and mount_point"),
    (cluster(chief=THREE), "the chief is one replica, got replica_count 3"),
    (cluster(parameter_servers=CPU), "parameter_servers need workers"),
    (cluster(workers=CPU, reduction_server=CPU), "workers with GPUs; there are no such workers"),
    (cluster(workers=GPU, reduction_server=CPU, parameter_servers=CPU), "share one worker pool"),
    (job(strategy="LOW_COST"), "strategy is one of STANDARD, SPOT, FLEX_START, got 'LOW_COST'"),
    (job(timeout="0s"), "timeout must be more than 0s"),
    (job(max_wait_duration="60s"), "max_wait_duration goes with strategy FLEX_START, not STANDARD"),
    (job(strategy="FLEX_START", timeout="604801s"), "at most 604800s"),
    (job(strategy="FLEX_START", cluster=Cluster(chief=CPU, workers=GPU)), "same machine"),
    (job(num_retries=-1), "num_retries must not be negative, got -1"),
    (job(backoff_duration="1m"), "backoff_duration must be whole seconds, as in '60s', got '1m'"),
    (job(network="default"), "network must be projects/NUMBER/global/networks/NAME, got 'default'"),
    (job(network="projects/1/global/networks/n", psc_interface_config={"a": "b"}), "exclude each other"),
    (job(network="", reserved_ip_ranges=("r",)), "reserved_ip_ranges are ranges of a network"),
    (job(network="", cluster=Cluster(chief=replace(CPU, nfs_mounts=(MOUNT,)))), "nfs_mounts need a network"),
    (job(encryption_spec_key_name="key"), "encryption_spec_key_name must be projects/"),
    (
        job(tensorboard="projects/p/locations/l/tensorboards/1", service_account=""),
        "tensorboard needs service_account",
    ),
    (job(persistent_resource_id="pr", service_account=""), "persistent_resource_id needs service_account"),
    (
        job(base_output_directory="gs://b/x"),
        r"all runs would share .*gs://b/x/\{\{\$\.pipeline_job_name\}\}$",
    ),
    (job(display_name='a "b"'), "display_name holds '\"', which breaks the payload"),
    (job(display_name="a\nb"), "display_name holds .* which breaks the payload"),
    (job(display_name="{{channel:b}}"), "display_name holds '{{channel:'"),
    (
        job(service_account="{{$.pipeline_nosuch}}"),
        r"service_account holds '\{\{\$', which",
    ),
    (job(psc_interface_config={"a": [{"b": "{{$}}"}]}), r"psc_interface_config\.a\.b holds"),
    (job(tags={"Team": "a"}), "tags: a key is .* got 'Team'"),
    (job(tags={"team": "A b"}), r"tags\.team: a value is at most 63"),
    (job(tags={f"k{i}": "" for i in range(65)}), "at most 64, got 65"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_what_the_platform_would_refuse_is_refused_here(make: Any, words: str) -> None:
    with pytest.raises(SettingsError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)
