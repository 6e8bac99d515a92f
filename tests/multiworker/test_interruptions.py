"""Replicas that are stopped or killed at any step: the job continues with the very next example."""

import json

import numpy as np
import pytest

from shardline.trainer.base import progress
from shardline.trainer.base.errors import EXIT_BAD_INPUT
from shardline.trainer.models.saving import load_model
from tests.helpers import replicas
from tests.helpers.datasets import write_dataset
from tests.helpers.history import read_history
from tests.helpers.replicas import finish

pytestmark = pytest.mark.multiworker

EPOCHS = 6


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dataset")
    write_dataset(directory, records={"train": 128, "validation": 25, "test": 8}, shards=4)
    return directory


@pytest.fixture(scope="module")
def undisturbed(dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed")
    codes, outputs = finish(start(dataset, out), seconds=240)
    assert codes == [0, 0], outputs
    return out


def start(dataset, out, model="tests.helpers.models:restless", callback="tests.helpers.models:plateau"):
    """A chief and a worker with statistics of their own, dropout, Adam, and a falling learning rate."""
    arguments = ["-m", "shardline.trainer.task", "--dataset", dataset, "--model-dir", out, "--model", model]
    arguments += [
        "--epochs",
        EPOCHS,
        "--per-replica-batch-size",
        8,
        "--deterministic",
        "--checkpoint-steps",
        3,
    ]
    arguments += ["--steps-per-execution", 1, *(["--callback", callback] if callback else [])]
    environ = {progress.EVENTS_VARIABLE: progress.secret()}
    return replicas.start([str(argument) for argument in arguments], 2, environ=environ)


def wait_for_step(chief, step):
    """Reads what the chief reports until it has done so many steps."""
    lines = []
    for line in chief.stdout:
        lines.append(line)
        event = progress.parse(line)
        if event and event.kind == "progress" and event.done >= step:
            return
    raise AssertionError(f"the chief ended before step {step}: {''.join(lines[-30:])}")


def state(out):
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in read_history(out)]
    return load_model(out / "model.keras").get_weights(), rows


def assert_same(out, undisturbed):
    (weights, rows), (wanted, wanted_rows) = state(out), state(undisturbed)
    assert rows == wanted_rows
    for one, other in zip(weights, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "kills", [[(1, 25)], pytest.param([(1, 9), (0, 25)], marks=pytest.mark.matrix)], ids=len
)
def test_killed_replicas_name_the_dead_and_end_with_the_same_bytes(dataset, undisturbed, tmp_path, kills):
    for victim, step in kills:
        jobs = start(dataset, tmp_path)
        wait_for_step(jobs[0], step)
        jobs[victim].kill()
        codes, outputs = finish(jobs, seconds=30)
        assert codes[1 - victim] == 1
        assert f"lost {('chief-0', 'worker-0')[victim]} (127.0.0.1:" in outputs[1 - victim]
    codes, outputs = finish(start(dataset, tmp_path))

    assert codes == [0, 0]
    assert "resuming after step" in outputs[0]
    assert_same(tmp_path, undisturbed)


def test_a_loss_that_is_not_finite_on_one_worker_stops_all_and_names_its_shards(dataset, tmp_path):
    codes, outputs = finish(start(dataset, tmp_path, model="tests.helpers.models:exploding"))

    assert codes == [EXIT_BAD_INPUT, EXIT_BAD_INPUT]
    error = next(e for e in map(progress.parse, outputs[0].splitlines()) if e and e.kind == "error")
    assert "the loss is not finite since step" in error.text
    assert "train-0000" in error.text
    assert json.loads((tmp_path / "settings.json").read_text())["replicas"] == 2
