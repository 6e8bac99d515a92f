"""Worker pools that are given at run time: read into the values that settings make, or refused."""

from typing import Any

import pytest

from shardline.components.vertex.pools import (
    REDUCTION_SERVER_IMAGE,
    Cluster,
    NfsMount,
    WorkerPool,
    read_specs,
)
from shardline.trainer.errors import SettingsError

CPU: dict[str, Any] = {"machine_spec": {"machine_type": "n1-standard-8"}, "replica_count": 1}
FULL = WorkerPool(
    machine_type="n1-standard-8",
    replica_count=3,
    accelerator_type="NVIDIA_TESLA_T4",
    accelerator_count=2,
    reservation_affinity_type="SPECIFIC_RESERVATION",
    reservation_affinity_key="compute.googleapis.com/reservation-name",
    reservation_affinity_values=("r",),
    boot_disk_type="pd-standard",
    boot_disk_size_gb=200,
    image_uri="other:1",
    env={"A": "b", "C": ""},
    nfs_mounts=(NfsMount(server="10.0.0.2", path="/d", mount_point="d"),),
)


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster(chief=WorkerPool(machine_type="n1-standard-8")),
        Cluster.of(FULL),
        Cluster(chief=WorkerPool(machine_type="n1-standard-8"), evaluator=FULL),
        Cluster(
            chief=WorkerPool(machine_type="n1-standard-8"),
            workers=FULL,
            reduction_server=WorkerPool(machine_type="n1-highcpu-16", image_uri=REDUCTION_SERVER_IMAGE),
        ),
    ],
)
def test_what_is_written_is_read_again(cluster):
    specs = cluster.specs({})

    assert read_specs(specs) == cluster
    assert read_specs(as_doubles(specs)) == cluster


def as_doubles(value: Any) -> Any:
    """Numbers as they arrive in a pipeline's parameter."""
    if isinstance(value, dict):
        return {key: as_doubles(item) for key, item in value.items()}
    return [as_doubles(item) for item in value] if isinstance(value, list) else as_double(value)


def as_double(value: Any) -> Any:
    return float(value) if isinstance(value, int) else value


@pytest.mark.parametrize("empty", [{}, {"replica_count": 0}, {"replica_count": "0"}, {"replica_count": 0.0}])
def test_every_way_to_write_an_empty_pool(empty):
    assert read_specs([CPU, empty, {}, CPU]).pools[1:3] == (None, None)


def changed(table: str, **values: Any) -> list[Any]:
    return [{**CPU, table: {**CPU.get(table, {}), **values}}]


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([], "must be a list of 1 to 4 pools, got 0"),
        ([CPU] * 5, "must be a list of 1 to 4 pools, got 5"),
        ("[]", r"must be a list of 1 to 4 pools, got '\[\]'"),
        ([{}], r"worker_pool_specs\[0\] is the chief and cannot be empty"),
        (["a"], r"worker_pool_specs\[0\] must be a mapping with machine_spec, .*, got 'a'"),
        ([{**CPU, "replica_counts": 1}], r"\[0\].replica_counts; did you mean .*replica_count"),
        ([{**CPU, "replica_count": 2}], "the chief is one replica, got replica_count 2"),
        ([{**CPU, "replica_count": 1.5}], r"\[0\]: replica_count must be a whole number, got 1.5"),
        ([{**CPU, "replica_count": float("inf")}], "must be a whole number, got inf"),
        ([{**CPU, "replica_count": True}], "must be a whole number, got True"),
        ([CPU, {**CPU, "replica_count": 0}], r"\[1\].replica_count must be at least 1"),
        ([CPU, {"machine_spec": CPU["machine_spec"]}], r"\[1\].replica_count must be at least 1"),
        ([{"replica_count": 1}], r"\[0\]: machine_type is missing"),
        (changed("machine_spec", machineType="a"), r"machine_spec.machineType; did you mean .*machine_type"),
        (changed("machine_spec", machine_type=8), r"\[0\]: machine_type must be text, got 8"),
        (changed("machine_spec", accelerator_count=1), r"worker_pool_specs\[0\]: accelerator_type and"),
        (changed("machine_spec", reservation_affinity={"values": "r"}), "values must be a list of texts"),
        (changed("container_spec", command=["a"]), "container_spec.command; there are image_uri, env"),
        (changed("container_spec", env=["A"]), r"container_spec.env\[0\] must be a mapping with name, value"),
        (changed("container_spec", env=[{"name": "TF_CONFIG"}]), "TF_CONFIG is set by the platform"),
        (changed("disk_spec", boot_disk_size_gb=1), r"worker_pool_specs\[0\]: boot_disk_size_gb must be"),
        ([{**CPU, "nfs_mounts": [{"server": "a", "path": "b", "mount_point": "c"}]}], "starts with '/'"),
        ([{**CPU, "nfs_mounts": [{"server": "a"}]}], r"nfs_mounts\[0\].path is missing"),
        ([CPU, {}, CPU], "parameter_servers need workers"),
    ],
)
def test_what_makes_no_cluster_is_refused(specs, message):
    with pytest.raises(SettingsError, match=message) as error:
        read_specs(specs)
    assert "\n" not in str(error.value)
