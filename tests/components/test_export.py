"""The exported model: signatures, agreement with the trained model, golden set, what export.json says."""

import base64
import contextlib
import dataclasses
import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from shardline.components import model_store
from shardline.components.validate.export import signatures
from shardline.components.validate.export.export import (
    SAMPLES,
    export_model,
    measure_difference,
    read_revision,
    take_samples,
)
from shardline.components.validate.export.signatures import ServedModel
from shardline.trainer.base.errors import DatasetError, ModelError
from shardline.trainer.base.settings import MODEL_FILE
from shardline.trainer.data import describe_dataset
from shardline.trainer.data.examples import parse_batch
from shardline.trainer.keras_compat.tensorflow_internals import check_operations, check_saved_model
from shardline.trainer.loop.build import build
from tests.helpers.datasets import CLASS_NAMES, write_dataset, write_table

RECORDS = {"train": 12, "validation": 6, "test": SAMPLES + 4}
SHAPE = (12, 12, 3)


def image_model(*, bias=0.0):
    """Returns a small model with random weights."""
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [
            keras.Input(SHAPE, dtype="uint8"),
            keras.layers.Rescaling(1 / 64),
            keras.layers.Conv2D(4, 3, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
            keras.layers.Dense(3, "softmax", bias_initializer=keras.initializers.Constant(bias)),
        ]
    )
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


@dataclasses.dataclass(frozen=True)
class Exported:
    """A model, its dataset, and its export."""

    model: keras.Model
    manifest: object
    dataset: Path
    out: Path
    loaded: object

    @property
    def content(self):
        return json.loads((self.out / model_store.EXPORT_FILE).read_text())

    @property
    def taken(self):
        return take_samples(self.manifest, self.dataset)

    def expected(self):
        """Returns what the model gives for the samples, and what it takes for them."""
        inputs, _ = parse_batch(tf.constant(self.taken), self.manifest.inputs, self.manifest.labels)
        return np.asarray(self.model(inputs, training=False)), inputs

    def stored(self, name):
        """Returns a feature of the samples as it is stored."""
        features = [tf.train.Example.FromString(one).features.feature[name] for one in self.taken]
        return [getattr(feature, feature.WhichOneof("kind")).value[0] for feature in features]


def export(model, manifest, dataset, out, **options):
    taken = take_samples(manifest, dataset)
    _, loaded = export_model(model, manifest, out, samples=taken, **options)
    return Exported(model, manifest, dataset, out, loaded)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    directory = tmp_path_factory.mktemp("images")
    manifest = write_dataset(directory, shape=SHAPE, records=RECORDS)
    return export(image_model(), manifest, directory, tmp_path_factory.mktemp("image_export"))


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    directory = tmp_path_factory.mktemp("table")
    manifest = write_table(directory, records=RECORDS)
    keras.utils.set_random_seed(7)
    model = build("mlp", describe_dataset(directory), {"units": 8, "buckets": 16, "embedding": 2})
    return export(model, manifest, directory, tmp_path_factory.mktemp("table_export"))


def b64(values):
    return [{"b64": base64.b64encode(value).decode()} for value in values]


def test_all_signatures_agree_with_the_trained_model_in_a_clean_process(images, table, clean_process):
    """Requests and answers are JSON, as TensorFlow Serving's REST interface has them."""
    pixels = images.expected()[1].numpy().tolist()
    rows = [
        {"year": year, "income": income, "city": city.decode()}
        for year, income, city in zip(*map(table.stored, ("year", "income", "city")), strict=True)
    ]
    asked = [
        (images, {"instances": b64(images.stored("image"))}),
        (images, {"signature_name": "serving_tensor", "instances": pixels}),
        (images, {"signature_name": "serving_example", "instances": b64(images.taken)}),
        (table, {"instances": rows}),
        (table, {"signature_name": "serving_example", "instances": b64(table.taken)}),
        (images, images.content["golden"]),
        (table, table.content["golden"]),
    ]
    numbers = [clean_process.ask(one.out / model_store.SAVED_MODEL, body) for one, body in asked]
    answers = [clean_process.answer(number) for number in numbers]

    for (one, _), answer in zip(asked[:5], answers[:5], strict=True):
        expected, _ = one.expected()
        assert len(answer) == SAMPLES
        np.testing.assert_allclose([row["probabilities"] for row in answer], expected, rtol=0, atol=1e-5)
        assert [row["label"] for row in answer] == expected.argmax(axis=1).tolist()
        assert all(row["label_name"] == CLASS_NAMES[row["label"]] for row in answer)
    for one, answer in zip((images, table), answers[5:], strict=True):
        golden = one.content["golden"]["predictions"]
        assert len(golden) == 16
        assert [row["label_name"] for row in answer] == [row["label_name"] for row in golden]
        for found, expected in zip(answer, golden, strict=True):
            np.testing.assert_allclose(found["probabilities"], expected["probabilities"], rtol=0, atol=1e-5)


def test_export_json_says_what_was_exported(images, table):
    content = images.content
    found = content["signatures"]

    assert content["fingerprint"] == images.manifest.fingerprint
    assert [one["outputs"] for one in content["labels"]] == [list(CLASS_NAMES)]
    assert content["parameters"] == images.model.count_params()
    assert content["versions"]["tensorflow"] == tf.__version__
    assert found["serving_default"]["outputs"] == {
        "probabilities": {"dtype": "float32", "shape": [None, 3]},
        "label": {"dtype": "int64", "shape": [None]},
        "label_name": {"dtype": "string", "shape": [None]},
    }
    assert {name: one["inputs"] for name, one in found.items()} == {
        "serving_default": {"images": {"dtype": "string", "shape": [None]}},
        "serving_tensor": {"pixels": {"dtype": "uint8", "shape": [None, 12, 12, 3]}},
        "serving_example": {"examples": {"dtype": "string", "shape": [None]}},
    }
    columns = table.content["signatures"]
    assert columns["serving_default"]["inputs"] == {
        "year": {"dtype": "int64", "shape": [None]},
        "income": {"dtype": "float32", "shape": [None]},
        "city": {"dtype": "string", "shape": [None]},
    }
    assert set(columns) == {"serving_default", "serving_example"}


def test_an_example_without_a_column_is_refused(table):
    served = ServedModel(table.out / model_store.SAVED_MODEL, table.manifest, table.loaded)

    with pytest.raises(tf.errors.InvalidArgumentError, match=r"city.*is required but could not be found"):
        served.predict(tf.constant([without(table.taken[0], "city")]))
    assert len(served.predict(tf.constant([without(table.taken[0], "label")])).classes["label"]) == 1


def without(example, name):
    parsed = tf.train.Example.FromString(example)
    del parsed.features.feature[name]
    return parsed.SerializeToString()


def test_images_stored_as_raw_values_are_served_too_and_logits_compared_behind_their_softmax(tmp_path):
    manifest = write_dataset(tmp_path / "data", shape=SHAPE, records={"test": 8}, encoding="raw")
    layers = [keras.Input(SHAPE, dtype="uint8"), keras.layers.Rescaling(1 / 64), keras.layers.Flatten()]
    model = keras.Sequential([*layers, keras.layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    content = export(model, manifest, tmp_path / "data", tmp_path / "out").content

    assert content["max_difference"] <= 1e-5
    assert base64.b64decode(content["golden"]["instances"][0]["b64"]).startswith(b"\x89PNG")
    sums = [sum(row["probabilities"]) for row in content["golden"]["predictions"]]
    assert sums == pytest.approx([1.0] * 8, abs=1e-5)


@pytest.mark.parametrize(("bias", "difference"), [(float("nan"), 1.0), (0.0, 1e-5), ([99.0, 0.0, 0.0], 1.0)])
def test_an_export_that_is_not_the_model_shows(bias, difference, images):
    other = image_model(bias=bias)

    heads = {"label": "probabilities"}
    found = measure_difference(other, heads, images.manifest, images.loaded, images.taken[:9])

    assert found == pytest.approx(difference, abs=0.2 if difference == 1 else 1e-5)


@keras.saving.register_keras_serializable("tests")
class InPython(keras.layers.Layer):
    """A layer whose graph calls back into this process."""

    def call(self, inputs):
        return tf.ensure_shape(tf.numpy_function(lambda x: x, [inputs], tf.float32), inputs.shape)


def test_a_model_that_calls_python_is_refused_and_nothing_written(images, tmp_path):
    base = image_model()
    model = keras.Sequential([*base.layers[:1], InPython(), *base.layers[1:]])
    model.build((None, *SHAPE))
    model.compile("sgd", "sparse_categorical_crossentropy")

    with pytest.raises(ModelError, match=r"calls Python while it predicts \(.*PyFunc.*replace tf.py_func"):
        export_model(model, images.manifest, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_model_file_lies_beside_the_export_even_where_it_lay_before(images, tmp_path):
    model_file = tmp_path / "model.keras"
    images.model.save(model_file)
    trained = model_file.read_bytes()

    export_model(images.model, images.manifest, tmp_path, model_file=model_file, settings={"model": "mine"})

    assert (tmp_path / MODEL_FILE).read_bytes() == trained
    content = json.loads((tmp_path / model_store.EXPORT_FILE).read_text())
    assert content["settings"] == {"model": "mine"}


def test_samples_are_test_examples_first(tmp_path):
    manifest = write_dataset(tmp_path, records={"train": 5, "validation": 4, "test": 3})

    keys = [
        tf.train.Example.FromString(one).features.feature["key"].bytes_list.value[0].decode().split("/")[0]
        for one in take_samples(manifest, tmp_path, 10)
    ]

    assert keys == ["test"] * 3 + ["validation"] * 4 + ["train"] * 3


def test_a_damaged_sample_is_refused(images, tmp_path):
    copy = tmp_path / "data"
    shutil.copytree(images.dataset, copy)
    shard = copy / images.manifest.splits["test"].shards[0].file
    shard.write_bytes(shard.read_bytes()[:-5] + b"12345")

    with pytest.raises(DatasetError, match=r"is damaged: .*; preprocess the data again"):
        take_samples(images.manifest, copy, 1000)

    broken = [without(images.taken[0], "image")]
    with pytest.raises(DatasetError, match="one of the first 1 examples cannot be served"):
        export_model(images.model, images.manifest, tmp_path / "out", samples=broken)
    assert not (tmp_path / "out" / model_store.EXPORT_FILE).exists()


def test_columns_keep_names_that_can_be_arguments():
    wanted = {"year": "year", "petal width (cm)": "petal_width_cm", "Größe": "Gr_e", "self": "column_self"}
    wanted |= {"from": "column_from", "column_class": "column_class", "class": "column_class_"}
    wanted |= {"a b": "a_b_", "a_b": "a_b", "a-b": "a_b__", "1st": "column_1st"}
    wanted |= {"猫": "column", "犬": "column_"}

    assert signatures.argument_names([*wanted]) == wanted


def test_columns_of_any_name_are_served(table, tmp_path):
    renamed = {"year": "self", "income": "income (€)", "city": "from"}
    features = tuple(
        dataclasses.replace(one, name=renamed.get(one.name, one.name)) for one in table.manifest.features
    )
    manifest = dataclasses.replace(table.manifest, features=features)
    samples = []
    for example in table.taken[:5]:
        parsed = tf.train.Example.FromString(example)
        for old, new in renamed.items():
            parsed.features.feature[new].CopyFrom(parsed.features.feature.pop(old))
        samples.append(parsed.SerializeToString())

    # The names of Keras' inputs are free; it finds the columns by the keys of the dict.
    by_old_name = table.model

    class Renamed(keras.Model):
        def __init__(self):
            super().__init__()
            self.by_old_name = by_old_name  # whose tables are exported

        def call(self, columns, training=False):
            return self.by_old_name({old: columns[new] for old, new in renamed.items()}, training=training)

    model = Renamed()
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.loss = by_old_name.loss
    export_model(model, manifest, tmp_path, samples=samples)

    content = json.loads((tmp_path / model_store.EXPORT_FILE).read_text())
    arguments = {name: column["argument"] for name, column in content["inputs"].items()}
    assert arguments == {"self": "column_self", "income (€)": "income", "from": "column_from"}
    assert set(content["signatures"]["serving_default"]["inputs"]) == set(arguments.values())
    assert content["max_difference"] <= 1e-5


def test_the_git_revision_is_that_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert read_revision() is None

    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *command], check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    assert read_revision() == head.stdout.strip()

    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_revision() is None
    monkeypatch.setenv("SHARDLINE_REVISION", "what the image was built from")
    assert read_revision() == "what the image was built from"


@pytest.mark.parametrize(
    ("operation", "refused"),
    [
        ("SentencepieceOp", r"not TensorFlow's own \(SentencepieceOp\)"),
        ("XlaCallModule", ""),
        *((name, f"reads or writes files .*{name}") for name in ("ReadFile", "TFRecordDatasetV2", "SaveV2")),
        ("InitializeTableFromTextFileV2", ""),  # the vocabulary of a table
        ("ReadVariableOp", ""),
        ("TensorArrayWriteV3", ""),
        ("PrintV2", ""),
    ],
)
def test_operations_that_no_server_has_are_refused(operation, refused):
    graph = tf.compat.v1.GraphDef()
    graph.node.add(op="Identity", name="x")
    graph.library.function.add().node_def.add(op=operation, name="y")

    concrete = SimpleNamespace(graph=SimpleNamespace(as_graph_def=lambda: graph))

    with pytest.raises(ModelError, match=refused) if refused else contextlib.nullcontext():
        check_operations(concrete)


def test_what_saves_the_variables_of_a_saved_model_is_no_operation_of_the_model(tmp_path):
    def check(function):
        module = tf.Module()
        module.serve = tf.function(function, input_signature=[tf.TensorSpec([], tf.string)])
        module.weight = tf.Variable(1.0)
        tf.saved_model.save(module, str(tmp_path))
        check_saved_model(tmp_path)

    check(lambda text: tf.strings.upper(text))
    with pytest.raises(ModelError, match=r"reads or writes files .*ReadFile"):
        check(lambda text: tf.cond(text == "", lambda: "", lambda: tf.io.read_file(text)))
    with pytest.raises(ModelError, match=r"reads or writes files .*PrintV2"):
        check(lambda text: tf.print("x", output_stream="file:///x") and text)
