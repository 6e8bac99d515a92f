"""Two replicas in one process (logical CPU devices) train as one with twice the batch."""

import json
import sys

import pytest

from tests.helpers import comparison, exchange_cases, programs, replicas
from tests.helpers.comparison import CASES
from tests.helpers.parameters import with_matrix

#: Those that differ most; tests of workers take others.
EVERYDAY = {"ema_overwrite", "overflow_accumulation", "sparse_accumulation", "uneven_half", "weighted_mean"}


@pytest.fixture(scope="module")
def single(request, tmp_path_factory):
    return comparison.run("one", tmp_path_factory.mktemp("one"), request)[0]


@pytest.fixture(scope="module")
def mirrored(request, tmp_path_factory):
    return comparison.run("mirrored", tmp_path_factory.mktemp("mirrored"), request)[0]


@pytest.mark.parametrize("case", with_matrix({case: case for case in CASES}, {*CASES} - EVERYDAY))
def test_two_replicas_with_batch_b_equal_one_with_batch_2b(single, mirrored, case):
    comparison.assert_equal_to_one(case, single[case], [mirrored[case]])


@pytest.mark.parametrize("case", ["half_overflow"])
def test_an_overflow_of_one_replica_keeps_all_in_step(mirrored, case):
    comparison.assert_in_step([mirrored[case]])
    assert mirrored[case]["losses"][-1] < mirrored[case]["losses"][1]


def test_every_case_is_compared():
    assert {*CASES, "half_overflow"} == {*exchange_cases.MODELS, "stretch"}


def test_what_each_replica_keeps_for_itself_is_averaged(mirrored):
    """A moving mean and an accumulated gradient."""
    first, second = (comparison.flat(replica) for replica in mirrored["merged"]["before"])
    assert first != pytest.approx(second, abs=1e-4)
    for replica in mirrored["merged"]["after"]:
        assert comparison.flat(replica) == pytest.approx((first + second) / 2, abs=1e-6)


def test_what_is_equal_on_all_replicas_is_not_changed_by_averaging():
    """A third of three times a float32 is another number for one in seven."""
    program = (
        "import keras, numpy as np\n"
        "from shardline.trainer.distribute import collectives, strategy\n"
        "from shardline.trainer.cluster import ClusterConfig\n"
        "from shardline.trainer.base.settings import TrainSettings\n"
        "settings = TrainSettings(dataset='-', model='-', cpu_devices=3)\n"
        "made = strategy.create_strategy(settings, ClusterConfig())\n"
        "with made.scope():\n"
        "    model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(50, trainable=False)])\n"
        "before = model.get_weights()\n"
        "collectives.replica_merger(made, model)()\n"
        "np.testing.assert_array_equal(before[0], model.get_weights()[0])\n"
    )
    replicas.run(["-c", program], 1)


def test_logical_cpu_devices_are_the_replicas():
    program = (
        "import json, tensorflow as tf\n"
        "from shardline.trainer.distribute import strategy\n"
        "from shardline.trainer.cluster import ClusterConfig\n"
        "from shardline.trainer.distribute.collectives import Collectives\n"
        "from shardline.trainer.base.settings import TrainSettings\n"
        "settings = TrainSettings(dataset='-', model='-', strategy='mirrored', cpu_devices=2)\n"
        "made = strategy.create_strategy(settings, ClusterConfig())\n"
        "total = Collectives(made).total([1, 2.5])\n"
        "print(json.dumps([type(made).__name__, made.num_replicas_in_sync, total]))\n"
    )
    done = programs.run(
        [sys.executable, "-c", program], cwd=replicas.ROOT, capture_output=True, text=True, timeout=120
    )

    assert done.returncode == 0, done.stderr[-5000:]
    name, count, total = json.loads(done.stdout.splitlines()[-1])
    assert name == "MirroredStrategy"
    assert count == 2
    assert total == [1.0, 2.5]  # a process counts once, however many replicas it has
