"""`shardline.evaluate` and `predict` in one process return what Keras' do."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import shardline
from shardline.trainer.base.errors import ModelError, SettingsError
from tests.helpers.fitting import COUNT, WIDTH, batches, classes, classifier, line, numbers

WEIGHTS = np.linspace(0.0, 2.0, COUNT, dtype="float32")


def outputs_by_name() -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((WIDTH,))
    names = ("a", "b")
    model = keras.Model(inputs, {name: keras.layers.Dense(2, name=name)(inputs) for name in names})
    model.compile("sgd", dict.fromkeys(names, "mse"), metrics={"a": ["mae"]})
    return model


def outputs_in_a_list() -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((WIDTH,))
    return keras.Model(inputs, [keras.layers.Dense(1)(inputs), keras.layers.Dense(3)(inputs)])


def inputs_by_name() -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = {name: keras.Input((WIDTH,), name=name) for name in ("left", "right")}
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(list(inputs.values()))))


def dropping() -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.Input((WIDTH,)), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def pairs() -> dict[str, Any]:
    return {"left": numbers()[0], "right": -numbers()[0]}


def evaluated_by_keras(make: Any, data: Any, **options: Any) -> dict[str, float]:
    x, y, weight = (*data, None, None)[:3] if isinstance(data, tuple) else (data, None, None)
    result = make().evaluate(x, y, sample_weight=weight, verbose=0, return_dict=True, **options)
    return {name: float(value) for name, value in result.items()}


EVALUATIONS = {
    "steps": (line, numbers, {"batch_size": 7, "steps": 3}),
    "steps_beyond_the_data": (line, lambda: batches(numbers()), {"steps": 9}),
    "steps_of_unknown_length": (line, lambda: batches(numbers()).filter(lambda *_: True), {"steps": 3}),
    "repeated_dataset": (line, lambda: batches(numbers()).repeat(), {"steps": 5}),
    "classes": (classifier, classes, {}),
    "weights": (lambda: line(weighted_metrics=["mse"]), lambda: (*numbers(), WEIGHTS), {"batch_size": 7}),
    "dropout_and_normalization": (dropping, numbers, {}),
    "run_eagerly": (lambda: line(run_eagerly=True), numbers, {}),
    "steps_per_execution": (lambda: line(steps_per_execution=3), numbers, {"batch_size": 7}),
}


@pytest.mark.filterwarnings("ignore:.*ran out of data")
@pytest.mark.parametrize(("make", "data", "options"), EVALUATIONS.values(), ids=EVALUATIONS)
def test_an_evaluation_is_that_of_keras(make, data, options):
    found = shardline.evaluate(make, data(), verbose=0, **options)
    expected = evaluated_by_keras(make, data(), **options)
    assert list(found) == list(expected)
    assert found == pytest.approx(expected, rel=1e-6)
    assert all(type(value) is float for value in found.values())


def test_losses_of_several_outputs_are_means_over_the_examples():
    """Keras averages them over batches, of any size of the last."""
    x, _ = numbers()
    y = {"a": np.ones((COUNT, 2), "float32"), "b": np.zeros((COUNT, 2), "float32")}
    found = shardline.evaluate(outputs_by_name, (x, y), batch_size=16, verbose=0)
    whole = evaluated_by_keras(outputs_by_name, (x, y), batch_size=COUNT)
    assert list(found) == list(whole)
    assert found == pytest.approx(whole, rel=1e-5)


PREDICTIONS = {
    "steps": (line, lambda: numbers()[0], {"batch_size": 7, "steps": 3}),
    "steps_beyond_the_data": (line, lambda: batches(numbers()[0]), {"steps": 9}),
    "dataset_of_pairs": (line, lambda: batches(numbers()), {}),
    "outputs_by_name": (outputs_by_name, lambda: numbers()[0], {"batch_size": 7}),
    "outputs_in_a_list": (outputs_in_a_list, lambda: numbers()[0], {"batch_size": 7}),
    "inputs_by_name": (inputs_by_name, pairs, {"batch_size": 7}),
    "dropout_and_normalization": (dropping, lambda: numbers()[0], {}),
    "tensor": (line, lambda: tf.constant(numbers()[0]), {}),
}


@pytest.mark.filterwarnings("ignore:.*ran out of data")
@pytest.mark.parametrize(("make", "data", "options"), PREDICTIONS.values(), ids=PREDICTIONS)
def test_a_prediction_is_that_of_keras(make, data, options):
    found = shardline.predict(make, data(), verbose=0, **options)
    expected = make().predict(data(), verbose=0, **options)
    tf.nest.assert_same_structure(found, expected)
    for own, other in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        assert isinstance(own, np.ndarray)
        assert own.dtype == other.dtype
        np.testing.assert_allclose(own, other, rtol=1e-6, atol=1e-6)


def test_a_trained_model_is_scored_as_it_is():
    model = line()
    shardline.fit(model, numbers(), verbose=0)
    assert shardline.evaluate(model, numbers(), verbose=0) == pytest.approx(
        model.evaluate(*numbers(), verbose=0, return_dict=True), rel=1e-6
    )
    np.testing.assert_allclose(
        shardline.predict(model, numbers()[0], verbose=0), model.predict(numbers()[0], verbose=0), rtol=1e-6
    )


def test_nothing_of_the_model_is_changed():
    model = line(optimizer=keras.optimizers.Adam(use_ema=True))
    before = [weight.copy() for weight in model.get_weights()]
    shardline.evaluate(model, numbers(), verbose=0)
    shardline.predict(model, numbers()[0], verbose=0)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_the_bar_is_shown_where_it_is_asked_for(capsys):
    shardline.evaluate(line, numbers(), verbose=0)
    shardline.predict(line, numbers()[0], verbose=0)
    assert capsys.readouterr().out == ""
    shardline.evaluate(line, numbers(), verbose=1)
    assert "2/2" in capsys.readouterr().out
    shardline.predict(line, numbers()[0], verbose=1)
    assert "2/2" in capsys.readouterr().out


def uncompiled() -> keras.Model:
    return keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1)])


REFUSED = {
    "uncompiled": (lambda: shardline.evaluate(uncompiled, numbers()), ModelError, "not compiled"),
    "option": (lambda: shardline.evaluate(line, numbers(), epochs=3), SettingsError, "no argument 'epochs'"),
    "without_end": (
        lambda: shardline.predict(line, batches(numbers()).repeat()),
        SettingsError,
        "data has no end; give steps",
    ),
    "steps_beyond_the_end": (
        lambda: shardline.evaluate(line, batches(numbers()).filter(lambda *_: True), steps=5),
        SettingsError,
        "data ends before the 5 batches that are to be evaluated; give fewer steps",
    ),
    "wrong_width": (
        lambda: shardline.predict(line, np.zeros((4, WIDTH + 1), "float32")),
        ModelError,
        "predict_step of the model failed: .* expected axis -1 of input shape to have value 3",
    ),
    "wrong_targets": (
        lambda: shardline.evaluate(line, (numbers()[0], np.zeros((COUNT, 2, 2)))),
        ModelError,
        r"cannot be built on batches of .*float32 \(32, 2, 2\).*Dimensions must be equal",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_scored_is_refused_in_one_line(call, error, message):
    with pytest.raises(error, match=message) as refusal:
        call()
    assert "\n" not in refusal.value.line
