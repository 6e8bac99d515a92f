"""Transform of inputs: traced before training, saved next to the model, and served with it."""

import numpy as np
import pytest
import tensorflow as tf

from shardline.components import model_store
from shardline.components.validate.export.export import export_model, take_samples
from shardline.components.validate.export.signatures import ServedModel, make_requests
from shardline.trainer import manifest as manifests
from shardline.trainer.base.errors import ModelError
from shardline.trainer.base.settings import MODEL_FILE
from shardline.trainer.data import transforms
from shardline.trainer.data.examples import parse_batch
from shardline.trainer.models.saving import load_model
from tests.helpers.datasets import write_dataset
from tests.trainer.test_train import run

HERE = "tests.helpers.input_transforms"


@pytest.fixture(scope="module")
def info(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("images")).info()


def test_what_a_transformation_makes_of_inputs_needs_no_code_of_its_author(info, tmp_path):
    images = tf.constant(np.random.default_rng(0).integers(0, 256, (4, 12, 12, 3), np.uint8))
    module = transforms.trace("tests.helpers.models:several_inputs", info)
    transforms.save(module, tmp_path)

    made = transforms.load(tmp_path / "model.keras").prepare(images)

    np.testing.assert_array_equal(made["images"], images)
    np.testing.assert_allclose(made["mean"][:, 0], np.mean(images, axis=(1, 2, 3)) / 255, rtol=1e-5)


def test_tables_and_layers_that_it_uses_are_saved_with_it(info, tmp_path):
    module = transforms.trace(f"{HERE}:looked_up", info)
    transforms.save(module, tmp_path)

    made = transforms.load(tmp_path / "model.keras").prepare(tf.zeros((2, 12, 12, 3), tf.uint8))

    np.testing.assert_array_equal(made, [[3.0], [3.0]])


@pytest.mark.parametrize("name", ["weights_alone", "own_graph"])
def test_inputs_that_stay_as_they_are_need_no_preparation(name, info, tmp_path):
    (tmp_path / transforms.DIRECTORY).mkdir()

    module = transforms.trace(f"{HERE}:{name}", info)
    transforms.save(module, tmp_path)

    assert module is None
    assert transforms.load(tmp_path / "model.keras") is None


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("of_labels", "makes inputs out of labels, which a client does not have"),
        ("at_random", r"draws random numbers \(RandomUniform\), which belong in augment"),
        ("python", r"calls Python \(EagerPyFunc\), which a server cannot run"),
        ("mixed", "makes other inputs of an example in another batch"),
        ("doubled", "of 3 examples: their number changes"),
    ],
)
def test_a_transform_that_cannot_be_served_is_refused_before_training(name, why, info):
    with pytest.raises(ModelError, match=f"transform cannot be exported: .*{why}.*allow_unexportable"):
        transforms.trace_for_training(f"{HERE}:{name}", info, exported=True)
    assert transforms.trace_for_training(f"{HERE}:{name}", info, exported=False) is None


def test_a_model_with_several_inputs_and_outputs_is_served_as_it_was_trained(dataset, tmp_path):
    """Its second output, of no label, is for the training alone."""
    run(
        dataset,
        tmp_path,
        model="tests.helpers.models:several",
        transform="tests.helpers.models:several_inputs",
        epochs=1,
    )
    model_file = next(tmp_path.rglob("model.keras"))
    manifest = manifests.load(dataset)
    samples, out = take_samples(manifest, dataset, 20), tmp_path / "out"

    export, _ = export_model(load_model(model_file), manifest, out, model_file=model_file, samples=samples)

    assert export.max_difference < 1e-5
    images, _ = parse_batch(tf.constant(samples), manifest.inputs, manifest.labels)
    mean = tf.reduce_mean(tf.cast(images, tf.float32), axis=(1, 2, 3))[:, None] / 255
    expected = load_model(model_file)({"images": images, "mean": mean})["label"]
    stored = make_requests(manifest, tf.constant(samples), images)["serving_default"]["images"]
    found = ServedModel(out / model_store.SAVED_MODEL, manifest).predict(stored)
    np.testing.assert_allclose(found.outputs["label"], expected, atol=1e-5)
    assert transforms.load(out / MODEL_FILE) is not None
