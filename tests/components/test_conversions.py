"""The export for LiteRT and ONNX, where what they need is installed."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from shardline.components import model_store
from shardline.components.validate import conversions
from shardline.components.validate.export import export_model, take_samples
from shardline.trainer.errors import ModelError, SettingsError
from shardline.trainer.models.build import build
from tests.helpers.datasets import write_dataset, write_table

SHAPE = (24, 24, 3)


def require(name):
    for module in conversions.FORMATS[name].modules:
        pytest.importorskip(module)


@pytest.mark.parametrize("name", ["tflite", "onnx"])
@pytest.mark.filterwarnings("default")  # of the converters, which are not ours
def test_a_converted_model_says_what_the_export_says(name, tmp_path):
    require(name)
    manifest = write_dataset(tmp_path / "data", shape=SHAPE, records={"test": 70})
    model = build("mnist_cnn", manifest.info(), {})
    taken = take_samples(manifest, tmp_path / "data")

    export_model(model, manifest, tmp_path / "out", samples=taken, formats=[name])

    found = json.loads((tmp_path / "out" / model_store.EXPORT_FILE).read_text())["formats"][name]
    file = tmp_path / "out" / found["file"]
    assert found["bytes"] == file.stat().st_size > 1000
    assert 0.0 <= found["max_difference"] <= 1e-5
    predict = conversions.FORMATS[name].load(file.read_bytes())
    for count in (1, 3):
        pixels = np.random.default_rng(count).integers(0, 256, (count, *SHAPE), np.uint8)
        np.testing.assert_allclose(predict(pixels), model(pixels, training=False), rtol=0, atol=1e-5)

    export_model(model, manifest, tmp_path / "out")
    assert not file.exists()


@keras.saving.register_keras_serializable("tests")
class IncompleteGamma(keras.layers.Layer):
    """A layer that neither of the converters knows."""

    def call(self, inputs):
        return tf.math.igamma(inputs + 1.0, inputs)


@pytest.mark.parametrize("name", ["tflite", "onnx"])
@pytest.mark.filterwarnings("default")
def test_a_model_that_a_converter_does_not_know_is_refused(name, tmp_path):
    require(name)
    manifest = write_dataset(tmp_path / "data", shape=SHAPE, records={"test": 3})
    layers = [keras.Input(SHAPE, dtype="uint8"), keras.layers.Rescaling(1 / 255), IncompleteGamma()]
    model = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(3, "softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")

    with pytest.raises(ModelError, match=rf"the model cannot be converted to {name}: .*; leave it out$"):
        export_model(model, manifest, tmp_path / "out", formats=[name])
    assert not (tmp_path / "out" / model_store.EXPORT_FILE).exists()


def test_an_unknown_format_is_refused_with_the_known_ones(tmp_path):
    manifest = write_dataset(tmp_path / "data", records={"test": 3})

    with pytest.raises(SettingsError, match=r"no format 'coreml'; there are tflite, onnx"):
        conversions.check_formats(["coreml"], manifest)


def test_a_missing_converter_is_named_with_its_extra(tmp_path, monkeypatch):
    manifest = write_dataset(tmp_path / "data", records={"test": 3})
    monkeypatch.setattr(conversions.util, "find_spec", lambda name: None)

    with pytest.raises(SettingsError, match=r"needs ai_edge_litert, .*pip install 'shardline\[litert\]'"):
        conversions.check_formats(["tflite"], manifest)


def test_tables_are_not_converted(tmp_path, monkeypatch):
    manifest = write_table(tmp_path / "data", records={"test": 3})
    monkeypatch.setattr(conversions.util, "find_spec", lambda name: object())

    with pytest.raises(ModelError, match="only models of images can be converted to onnx"):
        conversions.check_formats(["onnx"], manifest)
