"""Devices of a replica: reported in its first line, and compared with those of its worker pool."""

import pytest

from shardline.trainer.base import progress
from shardline.trainer.base.errors import RunError, SettingsError
from shardline.trainer.cluster import ClusterConfig
from shardline.trainer.distribute import strategy


@pytest.fixture
def seen(monkeypatch):
    """Returns what makes TensorFlow see GPUs of these models,."""

    def set_models(*models):
        kinds = {"GPU": list(models)}
        monkeypatch.setattr(strategy.tf.config, "list_physical_devices", kinds.__getitem__)
        monkeypatch.setattr(
            strategy.tf.config.experimental, "get_device_details", lambda gpu: {"device_name": gpu}
        )

    return set_models


@pytest.mark.parametrize(
    ("models", "words"),
    [
        (["Tesla T4"], "1 GPU, Tesla T4"),
        (["Tesla T4"] * 2, "2 GPUs, Tesla T4"),
        (["Tesla T4", "NVIDIA L4"], "1 GPU, Tesla T4, 1 GPU, NVIDIA L4"),
    ],
)
def test_names_the_gpus(seen, models, words):
    seen(*models)
    assert strategy.describe_devices() == words


@pytest.mark.parametrize(("cores", "words"), [({0}, "CPU, 1 core"), ({0, 3}, "CPU, 2 cores")])
def test_names_the_available_cores(seen, monkeypatch, cores, words):
    seen()
    monkeypatch.setattr(strategy.os, "sched_getaffinity", lambda pid: cores)
    assert strategy.describe_devices() == words


@pytest.mark.parametrize(
    "accelerators", ["", "1 NVIDIA_TESLA_T4", "2 reduction servers", "1 NVIDIA_L4, 2 reduction servers"]
)
def test_the_requested_accelerators_are_there(seen, accelerators):
    seen("Tesla T4")
    strategy.check_devices({"SHARDLINE_ACCELERATORS": accelerators})


@pytest.mark.parametrize(
    ("cuda", "path", "error", "words"),
    [
        (None, "/x:/usr/local/nvidia/lib64", SettingsError, "sees no GPU: the image has no CUDA"),
        ("9", "/x", SettingsError, "LD_LIBRARY_PATH, '/x', must hold /usr/local/nvidia/lib64"),
        ("9", "/x:/usr/local/nvidia/lib64", RunError, "another machine may have them all"),
    ],
)
def test_a_missing_gpu_is_a_mistake_only_where_no_machine_would_have_it(
    seen, monkeypatch, cuda, path, error, words
):
    """What another machine may have is tried again: a RunError, of which no attempt is remembered."""
    seen()
    monkeypatch.setattr(strategy, "installed_version", lambda package: cuda)
    with pytest.raises(error, match=f"should have 1 NVIDIA_TESLA_T4, but TensorFlow .*{words}"):
        strategy.check_devices({"SHARDLINE_ACCELERATORS": "1 NVIDIA_TESLA_T4", "LD_LIBRARY_PATH": path})


def test_fewer_gpus_than_requested_are_refused(seen):
    seen("Tesla T4")
    with pytest.raises(RunError, match="should have 2 NVIDIA_TESLA_T4, but TensorFlow sees 1 GPU"):
        strategy.check_devices({"SHARDLINE_ACCELERATORS": "2 NVIDIA_TESLA_T4"})


@pytest.mark.parametrize(
    ("origin", "own", "warned"),
    [
        ("Slurm job 12, 2 tasks on n1", "2", True),
        ("Slurm job 12, 2 tasks on n1", "8", False),  # whole nodes
        ("Slurm job 12, 2 tasks on n1", "", False),
        ("TF_CONFIG", "2", False),  # such as `launch` in a job of Slurm, in a network of its own
    ],
)
def test_a_node_that_others_may_share_is_warned_of(seen, monkeypatch, origin, own, warned):
    seen()
    monkeypatch.setattr(strategy.os, "cpu_count", lambda: 8)
    lines = []
    with progress.sink(lambda event: lines.append(event.text)):
        cluster = ClusterConfig("chief", 0, ("a:1", "a:2"), origin=origin)
        strategy.announce_devices(cluster, {"SLURM_CPUS_ON_NODE": own})

    assert any("--exclusive" in line for line in lines) is warned
