"""Model and source work as the pipeline expects."""

from pathlib import Path

import keras
import pytest
import tensorflow as tf
from shardline import DatasetInfo, Example, PreprocessSettings, preprocess

from my_package.model import build_model
from my_package.source import Source


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    return list(Source())


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> DatasetInfo:
    """The model function's DatasetInfo, of a dataset as the pipeline writes it."""
    out: Path = tmp_path_factory.mktemp("data") / "dataset"
    return preprocess(PreprocessSettings(source="my_package.source:Source"), out).info()


def batches(examples: list[Example]) -> tf.data.Dataset:
    """Batches of images, or of the columns of a table by name, with labels."""
    inputs = [example.image for example in examples]
    if inputs[0] is None:
        names = examples[0].features
        inputs = {name: [example.features[name] for example in examples] for name in names}
    return tf.data.Dataset.from_tensor_slices((inputs, [example.label for example in examples])).batch(32)


def test_every_example_has_a_key_of_its_own(examples: list[Example]) -> None:
    assert len({example.key for example in examples}) == len(examples)


def test_every_class_has_examples(examples: list[Example]) -> None:
    assert {example.label for example in examples} == set(range(len(Source.class_names)))


def test_the_model_gives_a_probability_of_each_class(dataset: DatasetInfo, examples: list[Example]) -> None:
    answers = build_model(dataset).predict(batches(examples[:40]), verbose=0)

    assert answers.shape == (40, dataset.num_classes)
    assert answers.sum(axis=1) == pytest.approx(1, abs=1e-5)


def test_the_model_learns(dataset: DatasetInfo, examples: list[Example]) -> None:
    keras.utils.set_random_seed(0)
    model, data = build_model(dataset), batches(examples)

    before = model.evaluate(data, verbose=0, return_dict=True)["loss"]
    model.fit(data.shuffle(32), epochs=3, shuffle=False, verbose=0)

    assert model.evaluate(data, verbose=0, return_dict=True)["loss"] < before
