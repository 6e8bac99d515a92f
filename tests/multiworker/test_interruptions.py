"""Replicas that are told to stop, or killed, at any step: the job goes on with the very next example."""

import json
import signal

import numpy as np
import pytest

from shardline.trainer import progress
from shardline.trainer.errors import EXIT_BAD_INPUT, EXIT_RESTART
from shardline.trainer.saving import load_model
from tests.helpers import replicas
from tests.helpers.datasets import write_dataset, write_labelled
from tests.helpers.history import read_history

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


def finish(jobs, seconds=60):
    """Returns exit codes and outputs."""
    outputs = [job.communicate(timeout=seconds)[0] for job in jobs]
    return [job.returncode for job in jobs], outputs


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


@pytest.mark.matrix  # of one process and in the trainer's tests of what is adapted: the same state
@pytest.mark.parametrize(("labels", "model"), [("two", "text"), ("multilabel", "mlp"), ("regression", "mlp")])
def test_a_killed_run_ends_with_the_same_bytes_for_every_kind_of_label(tmp_path, labels, model):
    """Vocabularies and means of the training split are the same in the run that goes on."""
    dataset = tmp_path / "data"
    write_labelled(dataset, labels, records={"train": 128, "validation": 25, "test": 8}, shards=4)
    codes, outputs = finish(start(dataset, tmp_path / "whole", model, ""))
    assert codes == [0, 0], outputs
    jobs = start(dataset, tmp_path / "parts", model, "")
    wait_for_step(jobs[0], 10)
    jobs[0].kill()
    finish(jobs, seconds=30)
    codes, outputs = finish(start(dataset, tmp_path / "parts", model, ""))

    assert codes == [0, 0]
    assert "resuming after step" in outputs[0]
    assert_same(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.matrix  # test_launch asks for the same of a program that fits, test_rehearsals of a job
def test_sigterm_of_one_replica_saves_and_ends_all_with_restart_me(dataset, undisturbed, tmp_path):
    jobs = start(dataset, tmp_path)
    wait_for_step(jobs[0], 17)
    jobs[1].send_signal(signal.SIGTERM)
    codes, outputs = finish(jobs)

    assert codes == [EXIT_RESTART, EXIT_RESTART]
    assert "a checkpoint was saved at step" in outputs[0]
    saved = [int(path.stem.removeprefix("ckpt-")) for path in tmp_path.glob("checkpoints/*.index")]
    assert max(saved) >= 17
    assert finish(start(dataset, tmp_path))[0] == [0, 0]
    # Statistics that each replica keeps are averaged at a checkpoint: their last bit may differ here.
    for one, other in zip(state(tmp_path)[0], state(undisturbed)[0], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    assert [row["examples"] for row in state(tmp_path)[1]] == ["128"] * EPOCHS


def test_a_loss_that_is_not_finite_on_one_worker_stops_all_and_names_its_shards(dataset, tmp_path):
    codes, outputs = finish(start(dataset, tmp_path, model="tests.helpers.models:exploding"))

    assert codes == [EXIT_BAD_INPUT, EXIT_BAD_INPUT]
    error = next(e for e in map(progress.parse, outputs[0].splitlines()) if e and e.kind == "error")
    assert "the loss is not finite since step" in error.text
    assert "train-0000" in error.text
    assert json.loads((tmp_path / "settings.json").read_text())["replicas"] == 2
