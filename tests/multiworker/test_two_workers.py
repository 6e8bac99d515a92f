"""Two replicas as real processes: the same numbers as one, nothing lost at save, only the chief writes."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from shardline.trainer.models.saving import load_model
from tests.helpers import replicas
from tests.helpers.datasets import read_examples, write_dataset, write_labelled
from tests.helpers.history import read_history

pytestmark = pytest.mark.multiworker


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dataset")
    write_dataset(directory, records={"train": 96, "validation": 25, "test": 8}, shards=4)
    return directory


def train(dataset, out, count, batch, *, model, epochs=2, chief=True, tmpdir=None, more=()):
    arguments = ["-m", "shardline.trainer.task", "--dataset", dataset, "--model", model, "--model-dir", out]
    arguments += ["--epochs", epochs, "--per-replica-batch-size", batch, *more]
    environ = {"TMPDIR": str(tmpdir)} if tmpdir else {}
    return replicas.run([str(a) for a in arguments], count, chief=chief, environ=environ)


def weights(out, model=""):
    return load_model(out / "model.keras", function=model).get_weights()


@pytest.mark.parametrize(
    ("model", "more", "communication"),
    [
        pytest.param("tests.helpers.models:scheduled", (), "ring", marks=pytest.mark.matrix),
        (
            "tests.helpers.models:several",
            ("--transform", "tests.helpers.models:several_inputs", "--allow-unexportable"),
            "auto",
        ),
    ],
)
def test_two_workers_with_batch_b_equal_one_worker_with_batch_2b(
    dataset, tmp_path, model, more, communication
):
    """Over 24 steps; so do mirrored devices of one process."""
    train(dataset, tmp_path / "one", 1, 16, model=model, epochs=4, more=more)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    way = (*more, "--communication", communication)
    outputs = train(dataset, tmp_path / "two", 2, 8, model=model, epochs=4, tmpdir=scratch, more=way)
    mirrored = (*more, "--cpu-devices", 2)
    train(dataset, tmp_path / "mirrored", 1, 8, model=model, epochs=4, more=mirrored)

    for other in ("two", "mirrored"):
        for one, two in zip(read_history(tmp_path / "one"), read_history(tmp_path / other), strict=True):
            for name in set(one) - {"seconds"}:
                assert float(two[name]) == pytest.approx(float(one[name]), abs=1e-5)
        for one, two in zip(*(weights(tmp_path / name, model) for name in ("one", other)), strict=True):
            np.testing.assert_allclose(two, one, atol=1e-5)
    # The worker ran the same program, said nothing, and left nothing behind.
    words = {"auto": "own Unix ring", "ring": "TensorFlow's ring (gRPC)"}
    assert f"gradients: {words[communication]} between 2 CPUs\n" in outputs[0]
    assert "epoch 4/4" in outputs[0]
    assert "epoch" not in outputs[1]
    # TensorFlow leaves the bytecode of what it has generated.
    assert {path.name for path in scratch.iterdir()} <= {"__pycache__"}
    assert sorted(p.name for p in (tmp_path / "two").iterdir()) == sorted(
        p.name for p in (tmp_path / "one").iterdir()
    )
    assert len(list((tmp_path / "two").glob("logs/train/*"))) == 1


@pytest.mark.parametrize(
    ("labels", "model", "images"),
    [
        ("two", "mlp", False),
        *(
            pytest.param(*one, marks=pytest.mark.matrix)
            for one in (
                ("regression", "mnist_cnn", True),
                ("numbers", "tests.helpers.label_models:list_of_outputs", False),
                ("multilabel", "mlp", False),
                ("two", "text", False),
                ("two", "tests.helpers.label_models:list_of_outputs", False),
            )
        ),
    ],
)
def test_two_workers_equal_one_for_every_kind_of_label(tmp_path, labels, model, images):
    """The metrics of each output's loss, too, over a validation split that ends with a smaller batch."""
    records = {"train": 96, "validation": 25, "test": 8}
    write_labelled(tmp_path / "data", labels, images=images, records=records, shards=4)
    # Of which each replica draws its own.
    more = ("--hparams", '{"dropout": 0}') if model == "text" else ()
    for name, count, batch in (("one", 1, 16), ("two", 2, 8)):
        train(tmp_path / "data", tmp_path / name, count, batch, model=model, more=more)

    for one, two in zip(*(read_history(tmp_path / name) for name in ("one", "two")), strict=True):
        found = {name: float(two[name]) for name in set(one) - {"seconds"}}
        assert found == pytest.approx({name: float(one[name]) for name in found}, rel=1e-5, abs=1e-5)
    for one, two in zip(*(weights(tmp_path / name, model) for name in ("one", "two")), strict=True):
        np.testing.assert_allclose(two, one, atol=1e-5)


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [pytest.param("multi_worker_mirrored", "float16", marks=pytest.mark.matrix), ("mirrored", "bfloat16")],
)
def test_every_synchronous_strategy_learns_in_half_precision(dataset, tmp_path, strategy, precision):
    several = strategy == "multi_worker_mirrored"
    more = ["--strategy", strategy, "--precision", precision, *([] if several else ["--cpu-devices", 2])]
    train(dataset, tmp_path, 2 if several else 1, 8, model="mnist_cnn", epochs=4, more=more)

    losses = [float(row["loss"]) for row in read_history(tmp_path)]
    assert losses[-1] < losses[0]
    assert {str(weight.dtype) for weight in weights(tmp_path)} == {"float32"}


def test_batch_normalization_of_all_replicas_is_saved(dataset, tmp_path):
    """One step over the whole split, momentum 0: the saved mean is that of all examples."""
    train(dataset, tmp_path, 2, 48, model="tests.helpers.models:momentless", epochs=1, chief=False)

    images = [tf.io.decode_png(encoded).numpy() for _, encoded, _ in read_examples(dataset, "train")]
    everything = np.stack(images).mean(axis=(0, 1, 2)) / 255
    saved = load_model(tmp_path / "model.keras").get_layer("bn").moving_mean
    np.testing.assert_allclose(keras.ops.convert_to_numpy(saved), everything, atol=1e-5)
    assert json.loads((tmp_path / "settings.json").read_text())["replicas"] == 2


def test_a_model_that_has_to_be_tried_before_training_trains_on_two_workers(dataset, tmp_path):
    """To save its statistics, of which each replica has its own, is an exchange in which all take part."""
    model = "tests.helpers.unexportable:scaled"
    outputs = train(dataset, tmp_path, 2, 24, model=model, epochs=1)

    assert "epoch 1/1" in outputs[0]
    assert len(weights(tmp_path, model)) == 6
