"""The export for LiteRT and ONNX, where what they need is installed."""

import json
import warnings

import keras
import pytest
import tensorflow as tf

from shardline.components import model_store
from shardline.components.validate.export import formats
from shardline.components.validate.rules import Gate
from shardline.components.validate.validation import validate
from shardline.trainer.base.errors import ModelError, SettingsError
from shardline.trainer.data.examples import parse_batch
from shardline.trainer.loop.build import build
from tests.helpers.datasets import write_dataset, write_table
from tests.helpers.gates import only

SHAPE = (24, 24, 3)


def require(name):
    for module in formats.FORMATS[name][1]:
        pytest.importorskip(module)


RULES = ["accuracy[format=litert] >= 0.5", "size_mb[format=onnx] <= 0.001"]


@pytest.fixture(scope="module")
def validated(tmp_path_factory):
    """Directory of a validation in all formats, and its outcome."""
    for name in formats.FORMATS:
        require(name)
    data, work = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("work")
    manifest = write_dataset(data, shape=SHAPE, records={"train": 90, "test": 70})
    model = build("mnist_cnn", manifest.info(), {"learning_rate": 0.003})
    train(model, data, manifest)
    model.save(work / "model.keras")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        gate = only(*RULES, formats=tuple(formats.FORMATS))
        outcome = validate(work / "model.keras", data, work / "out", gate=gate)
    return work / "out", outcome


def test_converted_models_have_rules_and_a_table_in_the_report(validated):
    out, outcome = validated
    accuracy, size = (rule for rule in outcome.blessing.rules if rule.verdict != "off")

    (litert,) = (one for one in outcome.evaluation.formats if one.name == "litert")
    assert (accuracy.verdict, accuracy.left, accuracy.interval) == ("passed", litert.value, litert.interval)
    assert (size.verdict, size.metric) == ("failed", "size_mb[format=onnx]")
    page = (out / model_store.REPORT_FILE).read_text()
    assert "<h2>Converted models</h2>" in page
    for name in ("SavedModel", *formats.FORMATS):
        assert page.count(f'<th scope="row">{name}</th>') == 1
    assert (out / model_store.PROFILE_FILE).is_file()


@pytest.mark.parametrize("name", formats.FORMATS)
def test_a_converted_model_is_measured_on_the_examples_of_the_export(name, validated):
    out, exported = validated[0], validated[1].evaluation
    (found,) = (one for one in exported.formats if one.name == name)

    recorded = json.loads((out / model_store.EXPORT_FILE).read_text())["formats"][name]
    assert found.size_mb == recorded["bytes"] / 1e6 == (out / recorded["file"]).stat().st_size / 1e6
    assert 0 < found.latency_p50_ms <= found.latency_p95_ms
    assert found.interval[0] <= found.value <= found.interval[1]
    assert found.value == pytest.approx(exported.metrics["accuracy"], abs=0.02)
    assert found.max_difference < 1e-5


def train(model, data, manifest):
    """Trains briefly, so that the probabilities are not all about the same."""
    paths = [str(data / shard.file) for shard in manifest.splits["train"].shards]
    for records in tf.data.TFRecordDataset(paths).batch(16).repeat(4):
        model.train_on_batch(*parse_batch(records, manifest.inputs, manifest.labels))


@keras.saving.register_keras_serializable("tests")
class IncompleteGamma(keras.layers.Layer):
    """A layer that neither of the converters knows."""

    def call(self, inputs):
        return tf.math.igamma(inputs + 1.0, inputs)


@pytest.mark.parametrize("name", ["litert", "onnx"])
@pytest.mark.filterwarnings("default")
def test_a_model_that_a_converter_does_not_know_is_refused(name, tmp_path):
    require(name)
    write_dataset(tmp_path / "data", shape=SHAPE, records={"train": 3, "test": 3})
    layers = [keras.Input(SHAPE, dtype="uint8"), keras.layers.Rescaling(1 / 255), IncompleteGamma()]
    model = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(3, "softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.save(tmp_path / "model.keras")

    with pytest.raises(ModelError, match=rf"the model cannot be converted to {name}: .*; leave it out$"):
        validate(tmp_path / "model.keras", tmp_path / "data", tmp_path / "out", gate=Gate(formats=(name,)))


@pytest.mark.parametrize(
    ("name", "found", "table", "error", "message"),
    [
        ("litert", False, False, SettingsError, r"needs ai_edge_litert, .*install 'shardline\[formats\]'"),
        ("onnx", True, True, ModelError, "only models of images with one label can be converted to onnx"),
    ],
)
def test_what_cannot_be_converted_is_refused(name, found, table, error, message, tmp_path, monkeypatch):
    manifest = (write_table if table else write_dataset)(tmp_path / "data", records={"test": 3})
    monkeypatch.setattr(formats.util, "find_spec", lambda module: found or None)

    with pytest.raises(error, match=message):
        formats.check_formats([name], manifest)
