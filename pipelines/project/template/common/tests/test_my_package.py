"""The data can be preprocessed as params.toml says, and the model learns from them."""

import glob
import os
import tomllib
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import shardline
import tensorflow as tf
from shardline import DatasetInfo, PreprocessSettings
from shardline.trainer.data import describe_dataset

from my_package.model import build_model

PARAMETERS = tomllib.loads(Path(__file__).parents[1].joinpath("params.toml").read_text())


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset as the pipeline writes it."""
    path = PARAMETERS["source"].partition(":")[2]
    if os.path.isabs(path) and not glob.glob(path):
        pytest.skip(f"{path}, the source in params.toml, is not on this machine")
    known = {field.name for field in fields(PreprocessSettings)}
    given = {**PARAMETERS, **PARAMETERS.get("data_options", {})}
    settings = {name: value for name, value in given.items() if name in known}
    out = tmp_path_factory.mktemp("data") / "dataset"
    shardline.preprocess(PreprocessSettings(**settings), out)
    return out


@pytest.fixture(scope="module")
def dataset(directory: Path) -> DatasetInfo:
    """The model function's argument."""
    return describe_dataset(directory)


def test_every_class_has_training_examples(dataset: DatasetInfo) -> None:
    for tally in dataset.train.values():
        assert all(tally.counts)


def test_the_model_answers_every_example(dataset: DatasetInfo) -> None:
    inputs = dataset.training_examples(limit=40)
    batches = tf.data.Dataset.from_tensor_slices(inputs if dataset.is_table else inputs["image"]).batch(8)

    answers = build_model(dataset).predict(batches, verbose=0)

    assert answers.shape == (min(40, dataset.records["train"]), len(dataset.label.outputs))
    assert np.isfinite(answers).all()
    if dataset.class_names and dataset.label.kind == "class":
        assert answers.sum(axis=1) == pytest.approx(1, abs=1e-5)


def test_the_model_learns(dataset: DatasetInfo, directory: Path) -> None:
    size = 32 if dataset.records["train"] > 500 else 8

    trained = shardline.fit(lambda: build_model(dataset), directory, batch_size=size, epochs=3, verbose=0)

    assert min(trained.history["loss"][1:]) < trained.history["loss"][0]
