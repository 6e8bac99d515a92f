"""Rules about custom jobs: each finds its broken example, and not the repaired one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.checks import codes, gpu_pool, job, pool, raw_job

T4 = gpu_pool("n1-standard-8", "NVIDIA_TESLA_T4", 1)
A100 = gpu_pool("a2-highgpu-1g", "NVIDIA_TESLA_A100", 1)
REDUCER = pool(
    "n1-highcpu-16",
    container={"image_uri": "us-docker.pkg.dev/vertex-ai-restricted/training/reductionserver:latest"},
)
TENSORBOARD = "projects/p/locations/l/tensorboards/1"
NETWORK = "projects/123/global/networks/n"
ACCOUNT = "trainer@p.iam.gserviceaccount.com"
OUTPUT = "gs://bucket/job"
MOUNT = {"server": "10.0.0.2", "path": "/data", "mount_point": "data"}
SOURCE = "def train(dataset, {}):\n    pass\n"
PSC = {"network_attachment": "projects/p/regions/r/networkAttachments/a"}


def trainer(*args: str, **container: Any) -> dict[str, Any]:
    return pool(container={"args": list(args), **container})


def function(parameter: str) -> dict[str, Any]:
    return pool(
        container={
            "command": ["sh", "-c", "run", SOURCE.format(parameter)],
            "args": ["--function_to_execute", "train"],
        }
    )


def env(**values: str) -> dict[str, Any]:
    return pool(container={"env": [{"name": name, "value": value} for name, value in values.items()]})


def scheduled(**scheduling: Any) -> dict[str, Any]:
    return raw_job(job_spec={"worker_pool_specs": [pool()], "scheduling": scheduling})


ROWS = [
    ("SL101", job(pool(replica_count=2)), job(pool(), pool(replica_count=1))),
    ("SL102", job(*5 * [pool()]), job(*4 * [pool()])),
    # The evaluator would become a parameter server.
    ("SL103", job(pool(), pool(), {}, pool()), job(pool(), pool(), pool(), pool())),
    ("SL103", job({}, pool()), job(pool(), {})),
    ("SL103", job(pool(), {"replica_count": 0}, pool()), job(pool(), {"replica_count": "0"}, pool())),
    ("SL104", job({}, {}), job(pool())),
    ("SL105", job({**pool(), "container_spec": {}}), job(pool())),
    ("SL105", job(pool(python_package_spec={"executor_image_uri": "i:1"})), job(pool())),
    ("SL106", job(pool(), pool(replica_count=1.5)), job(pool(), pool(replica_count=2.0))),
    ("SL106", job(pool(), pool(replica_count=0)), job(pool(), {})),
    (
        "SL107",
        job(trainer("--strategy=multi_worker_mirrored"), pool(), pool()),
        job(trainer("--strategy", "parameter_server"), pool(), pool()),
    ),
    (
        "SL107",
        job(pool(), pool(), pool(), extra_inputs={"distribution_strategy": "mirrored"}),
        job(pool(), pool(), REDUCER, extra_inputs={"distribution_strategy": "mirrored"}),
    ),
    (
        "SL108",
        job(trainer("--strategy", "parameter_server"), pool()),
        job(trainer("--strategy", "auto"), pool()),
    ),
    ("SL109", job(T4, REDUCER), job(T4, T4, REDUCER)),
    ("SL110", job(pool(), pool(), REDUCER), job(T4, T4, REDUCER)),
    ("SL111", job({**pool(), "machine_spec": {}}), job(pool())),
    ("SL112", job(pool("n1-standart-8")), job(pool("n1-standard-8"))),
    ("SL112", job(pool("e2-standard-2")), job(pool("e2-standard-4"))),
    ("SL113", job(gpu_pool("n1-standard-8", "nvidia-tesla-t4", 1)), job(T4)),
    ("SL114", job(pool(machine={"accelerator_count": 1})), job(T4)),
    (
        "SL114",
        job(pool(machine={"accelerator_type": "NVIDIA_TESLA_T4"})),
        job(pool(machine={"accelerator_type": "ACCELERATOR_TYPE_UNSPECIFIED"})),
    ),
    ("SL115", job(gpu_pool("n1-standard-8", "NVIDIA_L4", 1)), job(gpu_pool("g2-standard-8", "NVIDIA_L4", 1))),
    ("SL115", job(gpu_pool("e2-standard-8", "NVIDIA_TESLA_T4", 1)), job(T4)),
    (
        "SL116",
        job(gpu_pool("n1-standard-8", "NVIDIA_TESLA_T4", 3)),
        job(gpu_pool("n1-standard-8", "NVIDIA_TESLA_T4", 2)),
    ),
    # 32 vCPUs need 4 V100.
    (
        "SL116",
        job(gpu_pool("n1-standard-32", "NVIDIA_TESLA_V100", 2)),
        job(gpu_pool("n1-standard-32", "NVIDIA_TESLA_V100", 4)),
    ),
    ("SL116", job(gpu_pool("a2-highgpu-1g", "NVIDIA_TESLA_A100", 2)), job(A100)),
    ("SL117", job(pool("a2-highgpu-1g")), job(A100)),
    ("SL118", job(gpu_pool("n1-standard-8", "NVIDIA_TESLA_P100", 1)), job(T4)),
    ("SL112", job(pool("n1-standard-2")), job(pool("ct5lp-hightpu-4t", machine={"tpu_topology": "2x2"}))),
    (
        "SL121",
        job(pool(disk_spec={"boot_disk_type": "ssd"})),
        job(pool(disk_spec={"boot_disk_type": "pd-ssd"})),
    ),
    (
        "SL122",
        job(pool(disk_spec={"boot_disk_size_gb": 50})),
        job(pool(disk_spec={"boot_disk_size_gb": 100})),
    ),
    (
        "SL124",
        job(T4, T4, {**REDUCER, **T4, "container_spec": REDUCER["container_spec"]}),
        job(T4, T4, REDUCER),
    ),
    (
        "SL125",
        job(pool(), {"replica_count": "0"}, {"replica_count": "0"}, pool(replica_count=2)),
        job(*4 * [pool()]),
    ),
    ("SL130", job(pool(nfs_mounts=[MOUNT])), job(pool(nfs_mounts=[MOUNT]), network=NETWORK)),
    ("SL131", job(pool(nfs_mounts=[{"server": "10.0.0.2"}])), job(pool(nfs_mounts=[MOUNT]))),
    ("SL201", job(timeout="1h"), job(timeout="3600s")),
    ("SL201", job(max_wait_duration="60"), job(max_wait_duration="3.5s")),
    ("SL202", job(strategy="PREEMPTIBLE"), job(strategy="SPOT")),
    ("SL203", job(strategy="LOW_COST"), job(strategy="SPOT")),
    ("SL204", job(A100, pool(), strategy="FLEX_START"), job(A100, A100, strategy="FLEX_START")),
    ("SL205", job(T4, strategy="FLEX_START"), job(A100, strategy="FLEX_START")),
    ("SL205", job(strategy="FLEX_START"), job(strategy="STANDARD")),
    (
        "SL206",
        job(A100, strategy="FLEX_START", timeout="604801s"),
        job(A100, strategy="FLEX_START", timeout="604800s"),
    ),
    ("SL207", job(strategy="SPOT"), job(strategy="SPOT", base_output_directory=OUTPUT)),
    ("SL207", job(strategy="SPOT"), job(trainer("--checkpoint-dir=gs://b/c"), strategy="SPOT")),
    ("SL209", job(pool(), pool(), restart_job_on_worker_restart=False), job(pool(), pool())),
    # Parameter-server training goes on without a worker.
    (
        "SL209",
        job(pool(), pool(), REDUCER, restart_job_on_worker_restart=False),
        job(pool(), pool(), pool(), restart_job_on_worker_restart=False),
    ),
    (
        "SL210",
        scheduled(disable_retries=True, restart_job_on_worker_restart=True),
        scheduled(disable_retries=True),
    ),
    ("SL211", job(tensorboard=TENSORBOARD), job(tensorboard=TENSORBOARD, service_account=ACCOUNT)),
    (
        "SL211",
        job(tensorboard=TENSORBOARD),
        job(tensorboard=TENSORBOARD, service_account="{{$.pipeline_service_account}}"),
    ),
    ("SL212", job(network=NETWORK, psc_interface_config=PSC), job(psc_interface_config=PSC)),
    (
        "SL213",
        job(persistent_resource_id="cluster"),
        job(persistent_resource_id="cluster", service_account=ACCOUNT),
    ),
    ("SL214", job(tensorboard=TENSORBOARD), job(tensorboard=TENSORBOARD, base_output_directory=OUTPUT)),
    ("SL215", job(tensorboard="123"), job(tensorboard=TENSORBOARD)),
    ("SL216", job(network="projects/name/global/networks/n"), job(network=NETWORK)),
    (
        "SL217",
        job(encryption_spec_key_name="key"),
        job(encryption_spec_key_name="projects/p/locations/l/keyRings/r/cryptoKeys/k"),
    ),
    ("SL218", job(service_account="trainer"), job(service_account=ACCOUNT)),
    ("SL219", job(base_output_directory="/gcs/bucket/job"), job(base_output_directory=OUTPUT)),
    ("SL220", job(reserved_ip_ranges=["range"]), job(reserved_ip_ranges=["range"], network=NETWORK)),
    ("SL301", job("{{$.inputs.parameters['pools']}}", extra_inputs={"labels": "no json"}), job(labels={})),
    ("SL302", job(display_name='the "best" one'), job(display_name="the best one")),
    ("SL302", job(base_output_directory="gs://b\\c"), job(base_output_directory="gs://b/c")),
    ("SL303", job(pool(container={"args": 2 * ["x" * 70_000]})), job(trainer("x" * 70_000))),
    ("SL304", job(display_name="n" * 129), job(display_name="n" * 128)),
    ("SL304", job(display_name=""), job(display_name="n")),
    ("SL305", job(function("strategy: str")), job(function("distribution: str"))),
    ("SL311", job(trainer("x" * 131_072)), job(trainer("x" * 100_000))),
    ("SL314", job(env(**{f"V{n}": "1" for n in range(101)})), job(env(**{f"V{n}": "1" for n in range(100)}))),
    ("SL321", job(env(**{"MY-VAR": "1"})), job(env(MY_VAR="1"))),
    ("SL322", job(env(TF_CONFIG="{}")), job(env(TF_CPP_MIN_LOG_LEVEL="2"))),
    ("SL323", job(pool(container={"env": 2 * [{"name": "A", "value": "1"}]})), job(env(A="1"))),
    ("SL402", job({**pool(), "container_spec": {"command": ["run"]}}), job(pool())),
    (
        "SL404",
        job(trainer(image_uri="registry:5000/trainer")),
        job(trainer(image_uri="registry:5000/trainer:1")),
    ),
    ("SL404", job(trainer(image_uri="trainer:latest")), job(trainer(image_uri=f"trainer@sha256:{64 * 'a'}"))),
    (
        "SL410",
        job(trainer(image_uri="registry.io/trainer:1")),
        job(trainer(image_uri=f"registry.io/trainer@sha256:{64 * 'a'}")),
    ),
    ("SL408", job(pool(container={"command": ["sh", "-c", "python3 -m pip install kfp"]})), job(pool())),
    ("SL801", job(labels={"Team": "vision"}), job(labels={"team": "vision"})),
    ("SL801", job(labels={"team": "a b"}), job(labels={"team": "größe_1-a"})),
    ("SL801", job(labels={"1st": "a"}), job(labels={"first": ""})),
    ("SL801", job(labels={"team": 64 * "a"}), job(labels={"team": 63 * "a"})),
    ("SL801", job(labels={f"l{n}": "a" for n in range(65)}), job(labels={f"l{n}": "a" for n in range(64)})),
    ("SL813", job(env(TOKEN="ghp_" + 36 * "a")), job(env(TOKEN="{{$.inputs.parameters['token']}}"))),
    ("SL813", job(env(DB_PASSWORD="hunter2")), job(env(DB_PASSWORD=""))),
]


@pytest.mark.parametrize(("code", "broken", "repaired"), ROWS, ids=[row[0] for row in ROWS])
def test_a_rule_finds_what_is_broken_and_not_what_is_right(
    code: str, broken: dict[str, Any], repaired: dict[str, Any]
) -> None:
    assert code in codes(broken)
    assert code not in codes(repaired)


def test_a_job_of_many_different_pools_is_right() -> None:
    big = gpu_pool(
        "n1-standard-16",
        "NVIDIA_TESLA_V100",
        2,
        disk_spec={"boot_disk_type": "pd-ssd", "boot_disk_size_gb": 500},
    )
    found = job(
        big,
        {**big, "replica_count": 7},
        REDUCER,
        T4,
        strategy="SPOT",
        timeout="86400s",
        tensorboard=TENSORBOARD,
        service_account="{{$.pipeline_service_account}}",
        network="{{$.pipeline_network}}",
        base_output_directory=OUTPUT,
        labels={"team": "vision"},
    )

    assert codes(found) == set()
