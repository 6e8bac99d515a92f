"""The fake refuses what the documentation says the API refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from google.cloud.aiplatform_v1.types import CustomJob

from tests.contract.fake.rules import faults
from tests.contract.fake.services import ApiError, FakeServices


def pool(**values: Any) -> dict[str, Any]:
    machine = {"machine_type": "n1-standard-4"}
    return {"machine_spec": machine, "replica_count": 1, "container_spec": {"image_uri": "i:1"}, **values}


def job(*pools: dict[str, Any], labels: dict[str, str] | None = None, name: str = "a", **spec: Any) -> Any:
    content = {"worker_pool_specs": pools or [pool()], **spec}
    return CustomJob.pb(CustomJob(display_name=name, job_spec=content, labels=labels or {}))


def flex(*pools: dict[str, Any], **scheduling: Any) -> Any:
    return job(*pools, scheduling={"strategy": "FLEX_START", **scheduling})


NETWORK = "projects/1/global/networks/n"
PSC = {"network_attachment": "projects/p/regions/r/networkAttachments/n"}
BOARD = "projects/p/locations/l/tensorboards/1"
MOUNT = {"server": "10.0.0.2", "path": "/a", "mount_point": "a"}
BIG = {"machine_type": "n1-standard-8"}

REFUSED: list[tuple[Any, str]] = [
    (job(name=""), "display_name"),
    (job(name="a" * 129), "display_name"),
    (job(labels={"A": "a"}), "labels"),
    (job(labels={"a": "A"}), "labels"),
    (job(*[pool()] * 5), "worker_pool_specs: must be 1 to 4, got 5"),
    (job(pool(replica_count=0), pool()), "[0].replica_count: must be 1 for the primary replica, got 0"),
    (job(pool(replica_count=2)), "[0].replica_count: must be 1 for the primary replica, got 2"),
    (job(pool(), pool(replica_count=0)), "[1].replica_count: must be positive"),
    (
        job({"machine_spec": BIG, "replica_count": 1}),
        "[0]: container_spec or python_package_spec is required",
    ),
    (job(pool(machine_spec={})), "machine_type: is required"),
    (job(pool(machine_spec={**BIG, "accelerator_type": "NVIDIA_L4"})), "NVIDIA_L4 does not go with 0"),
    (job(pool(machine_spec={**BIG, "accelerator_count": 1})), "does not go with 1 accelerators"),
    (
        job(pool(machine_spec={**BIG, "reservation_affinity": {"reservation_affinity_type": 3}})),
        "SPECIFIC_RESERVATION needs key and values",
    ),
    (job(pool(disk_spec={"boot_disk_type": "ssd", "boot_disk_size_gb": 100})), "boot_disk_type"),
    (job(pool(disk_spec={"boot_disk_type": "pd-ssd", "boot_disk_size_gb": 50})), "boot_disk_size_gb"),
    (job(pool(container_spec={"image_uri": "i", "env": [{"name": f"V{i}"} for i in range(101)]})), "env"),
    (job(pool(container_spec={"image_uri": "i", "env": [{"name": "A"}, {"name": "A"}]})), "each once"),
    (job(pool(nfs_mounts=[MOUNT])), "nfs_mounts: needs a network"),
    (job(scheduling={"timeout": "0s"}), "timeout: must be positive"),
    (
        job(scheduling={"strategy": "SPOT", "max_wait_duration": "5s"}),
        "max_wait_duration: only with FLEX_START",
    ),
    (flex(timeout="604801s"), "at most 7 days"),
    (flex(pool(), pool(machine_spec=BIG)), "all machines are the same"),
    (job(network="default"), "job_spec.network"),
    (job(network=NETWORK, psc_interface_config=PSC), "excludes psc_interface_config"),
    (job(tensorboard=BOARD), "tensorboard: needs service_account"),
    (job(tensorboard="1", service_account="s"), "job_spec.tensorboard"),
    (job(persistent_resource_id="p"), "persistent_resource_id: needs service_account"),
    (job(base_output_directory={"output_uri_prefix": "/gcs/b"}), "must be gs://"),
]


@pytest.mark.parametrize(("wrong", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_one_fault_is_named_and_nothing_else(wrong: Any, words: str) -> None:
    (found,) = faults(wrong)
    assert words in found


ACCEPTED: dict[str, Callable[[], Any]] = {
    "one": job,
    "an empty slot": lambda: job(pool(), {}, {"replica_count": 0}, pool(replica_count=2)),
    "queued": lambda: flex(pool(), pool(), timeout="604800s", max_wait_duration="60s"),
    "connected": lambda: job(
        pool(nfs_mounts=[MOUNT]), network=NETWORK, tensorboard=BOARD, service_account="s"
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_job_that_is_right(name: str) -> None:
    assert list(faults(ACCEPTED[name]())) == []


def test_calls_that_the_fake_does_not_know() -> None:
    with pytest.raises(ApiError, match="does not know DeleteCustomJob"):
        FakeServices().call("DeleteCustomJob", None)
