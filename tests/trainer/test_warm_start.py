"""Warm start: a new run that begins with the weights of a trained model."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from shardline.trainer.base.errors import ModelError
from shardline.trainer.loop.build import build, create_variables
from shardline.trainer.models.saving import warm_start
from tests.helpers.datasets import example_batch, write_dataset


@pytest.fixture(scope="module")
def info(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("dataset"), records={"train": 6}).info()


@pytest.fixture
def trained(info, tmp_path):
    model = build("tests.helpers.models:synchronized", info, {})
    create_variables(model, train_step=example_batch(info))
    images = np.random.default_rng(0).integers(0, 256, (8, 12, 12, 3), np.uint8)
    model.fit(images, np.arange(8) % 3, verbose=0)
    model.save(tmp_path / "model.keras")
    return tmp_path, model


@pytest.mark.parametrize("name", ["", "model.keras"])
def test_weights_are_those_of_the_trained_model_and_the_optimizer_is_new(info, trained, name):
    directory, source = trained
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        model = build("tests.helpers.models:synchronized", info, {})
        create_variables(model, train_step=example_batch(info))
        warm_start(model, str(directory / name))

    assert model.weights[0].path != source.weights[0].path  # Keras numbers its layers
    for ours, theirs in zip(model.weights, source.weights, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(ours), keras.ops.convert_to_numpy(theirs))
    assert int(model.optimizer.iterations.numpy()) == 0
    assert not np.any(keras.ops.convert_to_numpy(model.optimizer.variables[2]))


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (
            "tests.helpers.models:momentless",
            {},
            r"weight 1 is kernel \(3, 3, 3, 4\) there and gamma \(3,\) in",
        ),
        ("mnist_cnn", {}, r"weight 1 is kernel \(3, 3, 3, 4\) there and kernel \(3, 3, 3, 32\) in the model"),
    ],
)
def test_another_architecture_is_refused(info, trained, model, arguments, message):
    other = build(model, info, arguments)
    before = [weight.numpy().copy() for weight in other.weights]

    with pytest.raises(ModelError, match=rf"model.keras is of another architecture: {message}"):
        warm_start(other, str(trained[0]))
    for weight, value in zip(other.weights, before, strict=True):
        np.testing.assert_array_equal(weight, value)


def test_a_model_with_fewer_weights_is_refused(info, trained):
    other = keras.Sequential(build("tests.helpers.models:synchronized", info, {}).layers[:-1])
    other.build((None, 12, 12, 3))

    with pytest.raises(ModelError, match=r"is kernel \(400, 3\) there and missing in the model"):
        warm_start(other, str(trained[0]))


def test_a_file_that_is_not_there_is_named(info, tmp_path):
    with pytest.raises(ModelError, match=r"no model file .*model.keras"):
        warm_start(build("mnist_cnn", info, {}), str(tmp_path))


def test_a_champion_s_directory_leads_to_the_version_in_force(info, trained):
    directory, source = trained
    (directory / "champions" / "versions" / "2").mkdir(parents=True)
    (directory / "model.keras").rename(directory / "champions" / "versions" / "2" / "model.keras")
    (directory / "champions" / "champion.json").write_text('{"path": "versions/2"}')
    model = build("tests.helpers.models:synchronized", info, {})
    create_variables(model, train_step=example_batch(info))
    warm_start(model, str(directory / "champions"))

    for ours, theirs in zip(model.weights, source.weights, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(ours), keras.ops.convert_to_numpy(theirs))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"path": "../.."}', "names a version outside"),
        ("{}", "has no text"),
        ('{"path": "v/1"}', "no model file"),
    ],
)
def test_a_champion_s_directory_that_leads_nowhere_is_refused(info, tmp_path, text, message):
    (tmp_path / "champion.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        warm_start(keras.Sequential(), str(tmp_path))
