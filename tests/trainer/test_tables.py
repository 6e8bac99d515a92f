"""Tables: columns instead of images, from the shards to a trained, saved model."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from shardline.trainer.data import manifest as manifests
from shardline.trainer.data.pipeline import Feed
from shardline.trainer.data.sharding import EpochPlan
from shardline.trainer.data.transforms import load_augmentation
from shardline.trainer.errors import DatasetError, ModelError
from shardline.trainer.models.build import build, create_variables
from shardline.trainer.models.head import read_head
from shardline.trainer.models.mlp import Standardization
from tests.helpers.datasets import example_batch, write_dataset, write_table


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    directory = tmp_path_factory.mktemp("table")
    return directory, write_table(directory)


def feed(table, split, **options):
    directory, manifest = table
    plan = EpochPlan(manifest.splits[split].records, 1, 16)
    return Feed(directory, manifest, split, plan, **options)


def test_a_batch_is_a_dict_of_columns(table):
    x, y = next(iter(feed(table, "train").worker_dataset(1, 0, range(1))))

    assert {name: (column.dtype.name, column.shape) for name, column in x.items()} == {
        "year": ("int64", (16,)),
        "income": ("float32", (16,)),
        "city": ("string", (16,)),
    }
    assert (y.dtype.name, y.shape) == ("int64", (16,))
    assert set(x["city"].numpy()[y.numpy() == 1]) == {b"Ulm"}


def test_a_model_is_told_the_columns(table):
    info = table[1].info()

    assert info.is_table
    assert info.input_shape == ()
    assert list(info.inputs) == ["year", "income", "city"]


def test_a_dataset_of_images_with_columns_beside_them_is_one_of_images(tmp_path, table):
    manifest = write_dataset(tmp_path, records={"train": 6})
    both = dataclasses.replace(manifest, features=manifest.features + table[1].features[2:])

    assert list(both.info().inputs) == ["image"]
    assert not both.info().is_table


def test_a_column_with_several_values_is_refused(table):
    words = manifests.Feature("words", "int64", (None,))
    varying = dataclasses.replace(table[1], features=(*table[1].features, words))
    with pytest.raises(
        DatasetError, match=r"column 'words' has values of shape \(None,\), and a model takes one"
    ):
        varying.info()


def test_examples_with_nothing_but_a_label_are_refused(table):
    bare = dataclasses.replace(table[1], features=table[1].features[:2])

    with pytest.raises(DatasetError, match="neither an image nor columns"):
        bare.info()


def test_rows_are_augmented_and_weighted(table):
    augmentation = load_augmentation("tests.helpers.augmentations:age", table[1].info())
    plain = feed(table, "train").worker_dataset(1, 0, range(1))
    aged = feed(table, "train", augmentation=augmentation, class_weights=(1.0, 2.0, 3.0))

    for (x, y), (ours, labels, weights) in zip(plain, aged.worker_dataset(1, 0, range(1)), strict=True):
        assert np.all(ours["year"] > x["year"])
        np.testing.assert_array_equal(ours["city"], x["city"])
        np.testing.assert_array_equal(labels, y)
        np.testing.assert_array_equal(weights, y.numpy() + 1.0)


def test_mlp_learns_a_table_and_is_saved_with_everything(table, tmp_path):
    model = build("mlp", table[1].info(), {"learning_rate": 0.01, "label_smoothing": 0.1})
    create_variables(model, example_batch(table[1].info()))
    batches = feed(table, "train", shuffle_seed=1).worker_dataset(1, 0, range(15))
    for x, y in batches:
        model.train_on_batch(x, y)
    model.reset_metrics()
    for x, y in feed(table, "test").worker_dataset(1, 0, range(1)):
        logs = model.test_on_batch(x, y, return_dict=True)
    assert logs["accuracy"] > 0.9

    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras", safe_mode=True)
    np.testing.assert_array_equal(loaded(x), model(x))


@pytest.mark.parametrize("kept", [["city"], ["year"]])
def test_mlp_takes_any_kind_of_columns_alone(table, kept):
    features = tuple(f for f in table[1].features if f.name in ["label", "key", *kept])
    info = dataclasses.replace(table[1], features=features).info()

    model = build("mlp", info, {"units": 4, "buckets": 16})
    create_variables(model, example_batch(info))
    assert model.optimizer.built


def test_columns_are_standardized_whatever_their_scale():
    """From the first batch on; a variance by squares would be lost in float32."""
    rng = np.random.default_rng(0)
    columns = np.stack([rng.normal(5e6, 10.0, 512), rng.normal(0, 1e-2, 512)], axis=1).astype("float32")
    layer = Standardization(dtype="float32")
    layer.build((None, 2))
    for batch in np.split(columns, 8):
        layer(batch, training=True)

    standardized = np.asarray(layer(columns))
    np.testing.assert_allclose(standardized.mean(axis=0), 0.0, atol=0.05)  # 5e6 in float32: to 0.5
    np.testing.assert_allclose(standardized.std(axis=0), 1.0, atol=0.02)
    assert np.asarray(layer(np.array([[0.0, 1e9]], "float32"))).tolist() == [[-10.0, 10.0]]


def test_replicas_standardize_alike():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        layer = Standardization(dtype="float32")
        layer.build((None, 1))
    values = tf.reshape(tf.range(8.0), (8, 1))
    tf.function(lambda: strategy.run(lambda: layer(values, training=True)))()

    assert float(layer.mean.numpy()[0]) == pytest.approx(3.5)
    assert float(layer.variance.numpy()[0]) == pytest.approx(5.25)


@pytest.mark.parametrize("model", ["mnist_cnn", "resnet50", "keras:MobileNetV2"])
def test_models_of_images_refuse_a_table(table, model):
    with pytest.raises(ModelError, match=f"{model} takes images, and the dataset is a table; use mlp"):
        build(model, table[1].info(), {})


def test_mlp_refuses_images(tmp_path):
    manifest = write_dataset(tmp_path, records={"train": 6})

    with pytest.raises(ModelError, match="mlp takes a table, and the dataset has images"):
        build("mlp", manifest.info(), {})


def test_a_model_may_take_some_of_the_columns(table):
    model = build("tests.helpers.models:by_year", table[1].info(), {})
    create_variables(model, example_batch(table[1].info()))

    x, y = next(iter(feed(table, "train").worker_dataset(1, 0, range(1))))
    years = {"year": x["year"]}
    np.testing.assert_array_equal(model(x), model(years))
    assert np.isfinite(model.train_on_batch(x, y))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "by_height",
            r"does not take this dataset's columns, year int64, income float32, city string:.*height",
        ),
        # Keras would give it the first column in alphabetical order, the city.
        (
            "by_dict_of_year",
            r"takes a dict of year, the dataset has the columns city, income, year; to use some",
        ),
    ],
)
def test_a_model_of_other_columns_is_refused(table, name, message):
    with pytest.raises(ModelError, match=message):
        read_head(build(f"tests.helpers.models:{name}", table[1].info(), {}), table[1].info())


def test_a_table_model_of_other_classes_is_refused(table):
    with pytest.raises(ModelError, match=r"output is shape \(n, 5\), the dataset has 3 classes"):
        read_head(build("tests.helpers.models:by_year", table[1].info(), {"classes": 5}), table[1].info())
