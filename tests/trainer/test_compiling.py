"""What compiles in Keras trains here as Keras' own `fit` trains it, or is refused: see `compiling`."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from shardline.trainer import manifest as manifests
from shardline.trainer.base.errors import ModelError
from shardline.trainer.base.settings import TrainSettings
from shardline.trainer.data.pipeline import InputPipeline
from shardline.trainer.data.transforms import class_weights, load_transform
from shardline.trainer.sharding import EpochPlan
from shardline.trainer.train import train
from tests.helpers.datasets import write_dataset
from tests.helpers.markdown import ROOT
from tests.helpers.parameters import with_matrix
from tests.trainer.compiling import BINARY, CASES, ONE_HOT, page

#: Those that take a path of their own; the others are left to make test-all.
EVERYDAY = {
    "`sparse_categorical_crossentropy`",
    "only `add_loss` in a layer",
    "`BinaryFocalCrossentropy()`, `AUC()`, `F1Score()`, one sigmoid",
    "`weighted_metrics`, and class weights of the run",
    "two optimizers in your own `train_step`",
    "policy `mixed_float16`, its loss scaled",
    "several inputs and outputs, with a `transform`",
}
BATCH, RECORDS = 16, 48
POLICIES = {"bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    made = {classes: tmp_path_factory.mktemp("data") for classes in (2, 3)}
    for classes, directory in made.items():
        write_dataset(directory, records={"train": RECORDS}, shape=(4, 4, 1), classes=classes)
    return made


@pytest.fixture(autouse=True)
def float32():
    yield
    keras.config.set_dtype_policy("float32")


def settings_of(case, data, out):
    return TrainSettings(
        dataset=str(data),
        model_dir=str(out),
        model="tests.trainer.compiling:build",
        hparams={"case": case.shown},
        epochs=1,
        per_replica_batch_size=BATCH,
        cache="off",
        **case.settings,
    )


def examples(data, seed, transform, weights):
    """Returns what an epoch trains on, in its order, as arrays: inputs, class numbers, and weights if any."""
    manifest = manifests.load(data)
    feed = InputPipeline(
        data,
        manifest,
        "train",
        EpochPlan(RECORDS, 1, BATCH),
        shuffle_seed=seed,
        transform=load_transform(transform) if transform else None,
        class_weights=class_weights(weights, manifest),
    )
    batches = feed.worker_dataset(1, 0, range(1)).take(RECORDS // BATCH).as_numpy_iterator()
    return tf.nest.map_structure(lambda *parts: np.concatenate(parts), *batches)


def fitted(case, settings, data):
    """Returns the metrics that Keras' own `fit` gives on the same batches."""
    x, y, *weights = examples(data, settings.seed, settings.transform, settings.class_weights)
    if case.labels == ONE_HOT:
        y = np.eye(case.classes)[y]
    elif case.labels == BINARY:
        y = np.float32(y)[:, None]
    keras.utils.set_random_seed(settings.seed + 1)
    keras.config.set_dtype_policy(POLICIES.get(settings.precision, "float32"))
    model = case.make(manifests.load(data).info())
    model.run_eagerly = not model.jit_compile  # to trace the step takes five times as long
    history = model.fit(x, y, BATCH, sample_weight=weights[0] if weights else None, shuffle=False, verbose=0)
    return {name: values[-1] for name, values in history.history.items()}


def trained():
    """Returns the cases that are trained, as parameters."""
    names = {name: name for name, case in CASES.items() if not case.refused}
    return with_matrix(names, names.keys() - EVERYDAY)


@pytest.mark.parametrize("name", trained())
def test_trains_as_fit_does(datasets, tmp_path, name):
    case = CASES[name]
    data = datasets[case.classes]
    settings = settings_of(case, data, tmp_path)
    logs = train(settings, {})
    expected = fitted(case, settings, data)

    logs = {_plain(metric): value for metric, value in logs.items()}
    assert set(logs) == {_plain(metric) for metric in expected}
    for metric, value in expected.items():
        np.testing.assert_allclose(
            logs[_plain(metric)], value, rtol=case.tolerance, atol=case.tolerance, err_msg=metric
        )


def _plain(metric):
    """Returns a metric's name without the number that Keras gives to the next of its kind."""
    return re.sub(r"_\d+$", "", metric)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.refused])
def test_is_refused_before_the_first_step(datasets, tmp_path, name):
    case = CASES[name]
    with pytest.raises(ModelError) as error:
        train(settings_of(case, datasets[case.classes], tmp_path), {})
    assert case.refused in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "settings.json").exists()


def test_the_page_is_made_of_the_cases():
    assert (ROOT / "benchmarks" / "KERAS.md").read_text(encoding="utf-8") == page()
