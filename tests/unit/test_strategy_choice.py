"""Which strategy a run gets, and which contradictions are refused at once."""

import contextlib

import pytest
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceStrategy

from shardline.trainer.base.errors import SettingsError
from shardline.trainer.base.settings import TrainSettings
from shardline.trainer.cluster import ClusterConfig
from shardline.trainer.distribute import strategy

ALONE = ClusterConfig()
WORKERS = ClusterConfig("worker", 1, ("a:1", "b:1"), has_chief_task=False)
SERVED = ClusterConfig("chief", 0, ("a:1", "b:1"), ("p:1",))
EVALUATOR = ClusterConfig("evaluator", 0, ("a:1", "b:1"), ("p:1",))
EVALUATOR_ALONE = ClusterConfig("evaluator", 0)


def settings(**changes):
    return TrainSettings(dataset="-", model="-", **changes)


@pytest.mark.parametrize(
    ("requested", "cluster", "cpu_devices", "chosen"),
    [
        ("auto", ALONE, 0, "one_device"),
        ("auto", ALONE, 1, "one_device"),  # one logical CPU is the whole CPU
        ("auto", ALONE, 2, "mirrored"),
        ("auto", WORKERS, 0, "multi_worker_mirrored"),
        ("auto", SERVED, 0, "parameter_server"),
        ("parameter_server", SERVED, 0, "parameter_server"),
        ("multi_worker_mirrored", ALONE, 0, "multi_worker_mirrored"),  # a cluster of one
        # The evaluator works alone, whatever the others do.
        ("auto", EVALUATOR, 0, "one_device"),
        ("parameter_server", EVALUATOR, 0, "one_device"),
        ("multi_worker_mirrored", EVALUATOR_ALONE, 0, "one_device"),
        ("mirrored", EVALUATOR_ALONE, 2, "one_device"),
    ],
)
def test_chooses(requested, cluster, cpu_devices, chosen):
    assert strategy.choose_strategy(settings(strategy=requested, cpu_devices=cpu_devices), cluster) == chosen


@pytest.mark.parametrize(
    ("requested", "cluster", "cpu_devices", "message"),
    [
        ("one_device", WORKERS, 0, "'one_device' trains in one process, but TF_CONFIG has 2"),
        ("parameter_server", WORKERS, 0, "needs parameter servers, but TF_CONFIG has none"),
        ("multi_worker_mirrored", SERVED, 0, r"no parameter servers, .* chief \+ 1 worker \+ 1 parameter"),
        ("auto", WORKERS, 2, "cpu_devices 2 .* strategy multi_worker_mirrored uses one CPU device"),
    ],
)
def test_refuses_contradictions(requested, cluster, cpu_devices, message):
    with pytest.raises(SettingsError, match=message):
        strategy.choose_strategy(settings(strategy=requested, cpu_devices=cpu_devices), cluster)


@pytest.mark.parametrize(
    ("requested", "cluster", "gpus", "message"),
    [
        ("nccl", WORKERS, 0, "communication nccl is between GPUs, but worker-1 has none; use auto"),
        ("tcp", WORKERS, 2, "communication tcp is between processes of one device each, .* has 2 GPUs"),
        ("tcp", ALONE, 2, "communication tcp is between workers, but strategy mirrored has"),
        ("ring", ALONE, 2, "communication ring is between workers, but strategy mirrored has"),
        ("ring", SERVED, 0, "communication ring is between workers, but strategy parameter_server"),
        ("nccl", WORKERS, 1, ""),
        ("tcp", WORKERS, 1, ""),
        ("ring", WORKERS, 2, ""),
        ("tcp", ALONE, 1, ""),  # nothing is exchanged
        ("nccl", EVALUATOR, 0, ""),
    ],
)
def test_an_impossible_communication_is_refused(monkeypatch, requested, cluster, gpus, message):
    monkeypatch.setattr(strategy.tf.config, "list_physical_devices", lambda kind: [kind] * gpus)
    refused = pytest.raises(SettingsError, match=message) if message else contextlib.nullcontext()
    with refused:
        strategy.choose_strategy(settings(communication=requested), cluster)


def between_two_devices(resolver, options):
    """Returns a strategy that exchanges as one of two workers does, to be traced only."""
    return CollectiveAllReduceStrategy._from_local_devices(["/cpu:0", "/cpu:1"], options)


@pytest.mark.parametrize(
    ("requested", "gpus", "hint"),
    [
        ("auto", 0, "ring"),
        ("auto", 1, "nccl"),
        ("tcp", 1, "nccl"),  # of what are no gradients
        ("ring", 2, "ring"),
    ],
)
def test_the_collectives_of_a_step_have_a_communication_hint(monkeypatch, requested, gpus, hint):
    """TensorFlow takes NCCL for no other hint than "nccl"."""
    with monkeypatch.context() as patch:
        patch.setattr(strategy.tf.distribute, "MultiWorkerMirroredStrategy", between_two_devices)
        patch.setattr(strategy.tf.config, "list_physical_devices", lambda kind: [kind] * gpus)
        made = strategy.create_strategy(
            settings(communication=requested, strategy="multi_worker_mirrored"), ALONE
        )

    def step(value):
        context = strategy.tf.distribute.get_replica_context()
        return context.all_reduce("SUM", strategy.tf.identity(value))

    traced = strategy.tf.function(lambda: made.run(step, args=(strategy.tf.constant(1.0),)))
    operations = traced.get_concrete_function().graph.get_operations()
    hints = {one.get_attr("communication_hint") for one in operations if one.type.startswith("Collective")}
    assert hints == {hint.encode()}
