"""Adapted layers: the examples that a model function adapts them to, and what a run keeps of them."""

import dataclasses
import shutil

import keras
import numpy as np
import pytest

from shardline.trainer import manifest as manifests
from shardline.trainer.base.errors import ModelError, SettingsError
from shardline.trainer.data.examples import describe_dataset
from shardline.trainer.loop.build import build
from shardline.trainer.models import saving
from shardline.trainer.models.saving import load_model, warm_start
from tests.helpers.datasets import write_dataset, write_labelled
from tests.trainer.test_train import run as train


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    directory = tmp_path_factory.mktemp("table")
    write_labelled(directory, "two", shards=3)
    return directory


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Another table, whose cities have other names, and so other numbers in a vocabulary."""
    directory = tmp_path_factory.mktemp("other")
    write_labelled(directory, "two", shards=3, seed=5, cities=("Aachen", "Zell", "Rom"))
    return directory


def run(dataset, out, **changes):
    return train(dataset, out, **{"model": "text", "epochs": 1, **changes})


@pytest.fixture(scope="module")
def trained(table, tmp_path_factory):
    """The directory of a run of the model `text`, which is only read."""
    directory = tmp_path_factory.mktemp("trained")
    run(table, directory)
    return directory


def vocabulary(model):
    (lookup,) = saving._lookups(model)
    return lookup.get_vocabulary()


def test_the_first_training_examples_do_not_depend_on_the_shards(table, tmp_path):
    """In the order of the split, which is that of no number of shards."""
    write_labelled(tmp_path, "two", shards=3)
    examples = describe_dataset(table).training_examples()

    assert list(examples) == ["year", "income", "city"]
    assert {name: values.dtype.kind for name, values in examples.items()} == {
        "year": "i",
        "income": "f",
        "city": "O",
    }
    assert {len(values) for values in examples.values()} == {96}
    some = describe_dataset(table).training_examples(["city"], limit=7)
    np.testing.assert_array_equal(some["city"], examples["city"][:7])
    np.testing.assert_array_equal(
        describe_dataset(tmp_path).training_examples()["income"], examples["income"]
    )


def test_training_images_are_decoded(tmp_path):
    write_dataset(tmp_path, records={"train": 6})
    assert describe_dataset(tmp_path).training_examples(limit=4)["image"].shape == (4, 12, 12, 3)


def test_what_is_not_there_is_refused(table):
    with pytest.raises(ModelError, match=r"training_examples: .*no input 'town', it has year, income, city"):
        describe_dataset(table).training_examples(["town"])
    with pytest.raises(ModelError, match=r"only the manifest .*; shardline\.trainer\.data\.describe_dataset"):
        manifests.load(table).info().training_examples()


def test_a_vocabulary_is_saved_with_the_model(trained):
    assert set(vocabulary(load_model(trained / "model.keras"))) == {"", "[UNK]", "ulm", "rom", "bern"}


def test_a_run_does_not_resume_with_another_vocabulary(trained, other, tmp_path):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    with pytest.raises(SettingsError, match=r"holds checkpoints of another run: adapted layers was 'sha256:"):
        run(other, tmp_path, epochs=2, allow_new_data=True)


def test_means_of_earlier_data_stay_in_a_run_resumed_with_new_data(table, other, tmp_path):
    model = "tests.helpers.label_models:normalized"
    run(table, tmp_path, model=model)
    before = load_model(tmp_path / "model.keras").get_layer("normalization")
    run(other, tmp_path, model=model, epochs=2, allow_new_data=True)
    after = load_model(tmp_path / "model.keras").get_layer("normalization")

    assert float(before.mean[0, 0]) != float(np.mean(describe_dataset(other).training_examples()["income"]))
    for one, two in ((before.mean, after.mean), (before.variance, after.variance)):
        np.testing.assert_array_equal(one, two)


def test_a_run_that_begins_with_a_model_takes_over_its_vocabulary(table, other, trained):
    model = build("text", describe_dataset(other), {})
    assert "zell" in vocabulary(model)
    source = load_model(trained / "model.keras")
    warm_start(model, str(trained))

    assert vocabulary(model) == vocabulary(source)
    x = {
        name: keras.ops.convert_to_tensor(one)
        for name, one in describe_dataset(table).training_examples().items()
    }
    np.testing.assert_array_equal(model(x)["kind"], source(x)["kind"])


def test_a_column_that_has_got_too_many_values_for_a_vocabulary_does_not_begin_with_one(table, tmp_path):
    """The weights have the same shapes, and would be those of other values."""
    info = describe_dataset(table)
    build("mlp", info, {"buckets": 4, "embedding": 2}).save(tmp_path / "model.keras")
    many = dataclasses.replace(
        info,
        reader=lambda names, limit: {**info.reader(names, limit), "city": np.array([b"a", b"b", b"c", b"d"])},
    )
    with pytest.raises(ModelError, match="has 1 vocabularies and the model 0: a column has too many"):
        warm_start(build("mlp", many, {"buckets": 4, "embedding": 2}), str(tmp_path))


@pytest.mark.parametrize(
    ("hparams", "message"),
    [
        ({"column": "income"}, "no text in column 'income'; city have text: name one with hparam column"),
        ({"column": "town"}, "no text in column 'town'"),
    ],
)
def test_text_names_the_columns_that_have_text(table, hparams, message):
    with pytest.raises(ModelError, match=message):
        build("text", describe_dataset(table), hparams)


def test_a_text_without_words_is_answered(table, capsys):
    model = build("text", describe_dataset(table), {})
    assert "model text reads column 'city' alone, not year, income\n" in capsys.readouterr().out
    x = {"city": np.array(["", "Ulm"]), "year": np.zeros(2, "int64"), "income": np.zeros(2, "float32")}
    assert all(np.isfinite(keras.ops.convert_to_numpy(one)).all() for one in model(x).values())
