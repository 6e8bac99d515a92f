"""Callbacks on two workers: a decision of one holds for all, and each runs where it should."""

import json

import keras
import pytest

from shardline.trainer.base.errors import EXIT_BAD_INPUT, EXIT_FAILED
from tests.helpers import replicas
from tests.helpers.datasets import write_dataset
from tests.helpers.history import read_history
from tests.helpers.replicas import finish

pytestmark = pytest.mark.multiworker

HERE = "tests.multiworker.test_callbacks:"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dataset")
    write_dataset(directory, records={"train": 64, "validation": 16, "test": 8})
    return directory


def start(dataset, out, callback, *more, model="restless"):
    arguments = ["-m", "shardline.trainer.task", "--dataset", dataset, "--model-dir", out, "--epochs", "3"]
    arguments += ["--model", f"tests.helpers.models:{model}", "--callback", HERE + callback]
    return replicas.start(
        [str(argument) for argument in (*arguments, "--per-replica-batch-size", 8, *more)], 2
    )


def is_worker():
    import os

    return json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "worker"


class StopsTheWorker(keras.callbacks.Callback):
    """Stops the training on the worker only, in the middle of the second epoch."""

    def on_train_batch_end(self, batch, logs=None):
        if is_worker() and self.model.optimizer.iterations.numpy() == 6:
            self.model.stop_training = True


def test_a_training_that_is_stopped_on_one_replica_stops_on_all(dataset, tmp_path):
    codes, outputs = finish(start(dataset, tmp_path, "StopsTheWorker"))

    assert codes == [0, 0], outputs
    assert "training ends after 6 steps: a callback has stopped it" in outputs[0]
    assert [row["examples"] for row in read_history(tmp_path)] == ["64", "32"]


class AsksOnTheChief(keras.callbacks.Callback):
    """Reads a metric, which is a question to all replicas, on the chief only."""

    on = "chief"

    def on_epoch_end(self, epoch, logs=None):
        self.model.metrics[0].result()


def test_a_metric_that_only_the_chief_reads_is_an_error_at_once(dataset, tmp_path):
    codes, outputs = finish(start(dataset, tmp_path, "AsksOnTheChief"))

    assert codes == [EXIT_BAD_INPUT, EXIT_FAILED], outputs
    assert "on_epoch_end of AsksOnTheChief, which runs on the chief alone, reads a metric" in outputs[0]
    assert "lost chief-0" in outputs[1]


def writers(directory):
    """Callbacks that write to one path, as they are used with `fit`."""
    return [
        keras.callbacks.ModelCheckpoint(directory / "weights.weights.h5", save_weights_only=True),
        keras.callbacks.ModelCheckpoint(directory / "epoch-{epoch}.keras", monitor="val_loss"),
        keras.callbacks.CSVLogger(directory / "log.csv", append=True),
        keras.callbacks.EarlyStopping("val_loss", patience=9, restore_best_weights=True),
        Counting(),
        NamesItsSaving(),
    ]


class Counting(keras.callbacks.Callback):
    """Remembers something else on each replica."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def on_epoch_end(self, epoch, logs=None):
        self.count += 10 if is_worker() else 1

    def on_train_end(self, logs=None):
        print(f"counted {self.count}", flush=True)


class NamesItsSaving(keras.callbacks.Callback):
    """Says when the trained model is saved."""

    def on_train_end(self, logs=None):
        save = self.model.save
        self.model.save = lambda *path: print("saves the model", flush=True) or save(*path)


def test_callbacks_that_write_run_on_the_chief_and_all_resume_with_its_state(dataset, tmp_path):
    """Each has statistics of its own (BatchNormalization), of which a model that is saved has the mean."""
    codes, outputs = finish(start(dataset, tmp_path, "writers", "--max-steps", 6))
    assert codes == [0, 0], outputs
    codes, outputs = finish(start(dataset, tmp_path, "writers"))
    assert codes == [0, 0], outputs

    assert "resuming after step 6" in outputs[0]
    # Of the second epoch, which was cut short, each replica has seen the end twice, and the chief kept one.
    assert "counted 3" in outputs[0]
    assert "counted 21" in outputs[1]
    assert ["saves the model" in output for output in outputs] == [True, False]
    assert sorted(path.name for path in tmp_path.glob("epoch-*")) == [f"epoch-{n}.keras" for n in (1, 2, 3)]
    saved, last = (keras.saving.load_model(tmp_path / name) for name in ("epoch-3.keras", "model.keras"))
    images = keras.ops.ones((1, 12, 12, 3), "uint8")
    assert float(keras.ops.max(keras.ops.abs(saved(images) - last(images)))) < 0.5
    assert len((tmp_path / "log.csv").read_text().splitlines()) >= 4


class OnlyTheChief(keras.callbacks.Callback):
    """Changes the learning rate of one replica."""

    on = "chief"

    def on_epoch_begin(self, epoch, logs=None):
        self.model.optimizer.learning_rate = 0.1


def test_replicas_whose_weights_part_are_an_error(dataset, tmp_path):
    codes, outputs = finish(start(dataset, tmp_path, "OnlyTheChief"))

    assert codes == [EXIT_BAD_INPUT] * 2, outputs
    for output in outputs:
        assert "the replicas' learning rates are not the same after step 4" in output
        assert "must run on all" in output


class Sleeper(keras.callbacks.Callback):
    """Never comes back, on the worker."""

    def on_epoch_end(self, epoch, logs=None):
        import threading

        if is_worker():
            threading.Event().wait()


@pytest.mark.matrix  # takes seconds; of one process test_watchdog asks for the same
def test_a_run_that_hangs_ends_and_names_where_each_replica_waits(dataset, tmp_path):
    codes, outputs = finish(start(dataset, tmp_path, "Sleeper", "--stall-timeout", 10))

    assert codes == [EXIT_FAILED] * 2, outputs
    assert "chief-0 has made no progress for 10 s (stall_timeout), after step 4, to agree" in outputs[0]
    assert "worker-0 has made no progress for 10 s (stall_timeout), in on_epoch_end of Sleeper" in outputs[1]
    assert "test_callbacks.py" in outputs[1]  # the stack
