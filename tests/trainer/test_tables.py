"""Tables: columns instead of images, from the shards to a trained, saved model."""

import dataclasses
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from shardline.trainer import manifest as manifests
from shardline.trainer.base.errors import DatasetError, ModelError
from shardline.trainer.data.examples import describe_dataset
from shardline.trainer.data.pipeline import InputPipeline
from shardline.trainer.data.transforms import load_augmentation
from shardline.trainer.loop.build import build, create_variables
from shardline.trainer.manifest import DatasetInfo, Feature, Spread, Tally
from shardline.trainer.models.zoo import make_output
from shardline.trainer.sharding import EpochPlan
from tests.helpers.datasets import example_batch, write_dataset, write_table
from tests.helpers.heads import read_head
from tests.helpers.labels import LABELLED


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    directory = tmp_path_factory.mktemp("table")
    return directory, write_table(directory)


def feed(table, split, **options):
    directory, manifest = table
    plan = EpochPlan(manifest.splits[split].records, 1, 16)
    return InputPipeline(directory, manifest, split, plan, **options)


def test_a_batch_is_a_dict_of_columns(table):
    x, y = next(iter(feed(table, "train").worker_dataset(1, 0, range(1))))

    assert {name: (column.dtype.name, column.shape) for name, column in x.items()} == {
        "year": ("int64", (16,)),
        "income": ("float32", (16,)),
        "city": ("string", (16,)),
    }
    assert (y.dtype.name, y.shape) == ("int64", (16,))
    assert set(x["city"].numpy()[y.numpy() == 1]) == {b"Ulm"}


def test_a_model_function_gets_the_columns(table):
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
    model = build("mlp", describe_dataset(*table), {"learning_rate": 0.01, "label_smoothing": 0.1})
    create_variables(model, train_step=example_batch(table[1].info()))
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
    info = describe_dataset(table[0], dataclasses.replace(table[1], features=features))

    model = build("mlp", info, {"units": 4, "buckets": 16})
    create_variables(model, train_step=example_batch(info))
    assert model.optimizer.built


def described(**columns):
    """Returns the description of a table of some training examples, with a number as its label."""
    features = {
        name: Feature(
            name,
            {"f": "float32", "i": "int64"}.get(np.asarray(values).dtype.kind, "string"),
            np.asarray(values).shape[1:],
        )
        for name, values in columns.items()
    }
    return DatasetInfo(
        input_shape=(),
        labels={"label": LABELLED["regression"][0]},
        features=features,
        records={"train": 4},
        inputs=features,
        train={"label": Tally(spreads=(Spread(10.0, 30.0, 20.0, 5.0),))},
        reader=lambda names, limit: {name: np.asarray(values) for name, values in columns.items()},
    )


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_the_loss_of_a_number_takes_targets_of_either_shape(shape):
    """Those of `fit` are (batch,), and would be subtracted as a row from the column of predictions."""
    _, loss, _ = make_output(described(year=np.arange(4.0)), keras.Input((3,)))
    numbers = np.array([10.0, 20.0, 25.0, 30.0], "float32")

    assert float(loss(numbers.reshape(shape), numbers[:, None])) == 0
    assert float(loss(numbers.reshape(shape), numbers[:, None] + 5)) == pytest.approx(1)


def test_mlp_normalizes_vectors_by_position_and_embeds_each_text():
    vectors = np.array([[1.0, 10.0], [3.0, 30.0], [np.nan, 20.0], [2.0, 20.0]])
    texts = np.array([[b"a", b"x"], [b"b", b"x"], [b"a", b"y"], [b"a", b"x"]])
    columns = {"v": vectors, "od/x": vectors[:, 1], "t": texts}
    model = build("mlp", described(**columns), {"units": 4, "embedding": 3})
    inputs = {name: tf.constant(values, model.input[name].dtype) for name, values in columns.items()}

    numbers = features_of(model)(inputs).numpy()

    assert numbers.shape == (4, 2 * 3 + 2 + 1 + 1)
    np.testing.assert_array_equal(numbers[:, 7], numbers[:, 8])
    np.testing.assert_array_equal(numbers[:, 9], [0, 0, 1, 0])
    assert numbers[2, 6] == 0
    np.testing.assert_array_equal(numbers[0, :3], numbers[2, :3])


def features_of(model):
    """Returns what a built-in model makes of columns before its first dense layer."""
    first = next(layer for layer in model.layers if isinstance(layer, keras.layers.Dense))
    return keras.Model(model.input, first.input)


def test_columns_are_normalized_whatever_their_scale():
    """From the first step on; a deviation by squares would be lost in float32."""
    rng = np.random.default_rng(0)
    columns = {"income": rng.normal(5e6, 10.0, 512), "share": rng.normal(0, 1e-2, 512)}
    columns = {name: values.astype("float32") for name, values in columns.items()}
    features = features_of(build("mlp", described(**columns), {}))

    found = np.asarray(features(columns))
    np.testing.assert_allclose(found.mean(axis=0), 0.0, atol=0.05)  # 5e6 in float32: to 0.5
    np.testing.assert_allclose(found.std(axis=0), 1.0, atol=0.02)
    extremes = {"income": np.array([0.0], "float32"), "share": np.array([1e9], "float32")}
    assert np.asarray(features(extremes)).tolist() == [[-10.0, 10.0]]


def test_a_missing_number_counts_as_the_mean_and_is_marked():
    columns = {"age": np.array([1, np.nan, 3, 2], "float32"), "size": np.array([1, 2, 1, 2], "float32")}
    features = features_of(build("mlp", described(**columns), {}))

    filled = np.asarray(features(columns))
    assert filled[1].tolist() == [0.0, 1.0, 1.0]  # age, size, and whether the age is missing
    assert filled[:, 2].tolist() == [0, 1, 0, 0]
    # A column of which the training split has every number is filled, and has no mark.
    gone = np.asarray(features({**columns, "size": np.full(4, np.nan, "float32")}))
    assert gone[:, 1].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("missing", ["", "never seen"])
def test_few_texts_are_looked_up_and_many_are_hashed(missing):
    columns = {"city": np.array([b"Ulm", b"Rom", b"", b"Rom"], object)}
    few = features_of(build("mlp", described(**columns), {"buckets": 8}))
    many = features_of(build("mlp", described(**columns), {"buckets": 3}))

    rows = {"city": np.array(["Ulm", "Rom", missing, "Rom"], object)}
    for features, kind in ((few, keras.layers.StringLookup), (many, keras.layers.Hashing)):
        assert any(isinstance(layer, kind) for layer in features.layers)
        found = np.asarray(features(rows))
        np.testing.assert_array_equal(found[1], found[3])
    assert len({tuple(row) for row in np.asarray(few(rows)).tolist()}) == 3


def test_rare_texts_share_the_embedding_of_unknown_ones():
    shops = [b"east"] * 300 + [b"west"] * 300 + [b"%d" % i for i in range(100)]
    columns = {"shop": np.array(shops, object), "name": np.array([b"n%d" % i for i in range(700)], object)}
    model = build("mlp", described(**columns), {})

    rows = {"shop": np.array(["east", "west", "7", "8", "new"], object), "name": np.array(["n1"] * 5, object)}
    found = np.asarray(features_of(model)(rows))
    assert len({tuple(row) for row in found.tolist()}) == 3
    tables = [layer for layer in model.layers if isinstance(layer, keras.layers.Embedding)]
    # As wide as three values need; and a column in which nothing repeats has few buckets.
    assert {(table.input_dim, table.output_dim) for table in tables} == {(1024, 3), (16, 8)}


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("city (of birth)/now", "mlp"),
        ("od280/od315_of_diluted_wines", "text"),
        ("dense", "mlp"),
        ("cast_1", "text"),
    ],
)
def test_a_column_may_have_any_name(name, model, tmp_path):
    columns = {name: np.array([1, 2, 3, 4], "float32"), f"{name} 2": np.array([b"a b", b"b", b"", b"c"])}
    if model == "text":
        columns = {name: columns[f"{name} 2"], f"{name} 2": columns[name]}
    info = described(**columns)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        built = build(model, info, {})
        create_variables(built, train_step=(info.training_examples(), np.zeros(4, "float32")))
        assert read_head(built, info) == "numbers"
        built.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras", safe_mode=True)
    np.testing.assert_array_equal(loaded(columns), built(columns))


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
    create_variables(model, train_step=example_batch(table[1].info()))

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
