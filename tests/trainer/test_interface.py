"""Interface of a compiled model: the form of its labels, and the meaning of its outputs."""

import dataclasses
import functools
import re
import tracemalloc

import keras
import numpy as np
import pytest

from shardline.trainer.base.errors import ModelError
from shardline.trainer.data.transforms import form_targets
from shardline.trainer.manifest import DatasetInfo, Feature, Label, Spread, Tally
from shardline.trainer.models.interface import choose_form, to_prediction
from tests.helpers.heads import read_head
from tests.helpers.labels import class_label
from tests.trainer import own_models as own

losses, metrics = keras.losses, keras.metrics


class OwnLoss(keras.losses.Loss):
    """A loss as a class without a configuration."""

    def call(self, y_true, y_pred):
        return own.of_numbers(y_true, y_pred)

    def get_config(self):
        raise NotImplementedError


class OwnSubclass(keras.losses.CategoricalCrossentropy):
    def call(self, y_true, y_pred):
        return 2 * super().call(y_true, y_pred)


@pytest.mark.parametrize(
    ("loss", "metrics", "form"),
    [
        ("sparse_categorical_crossentropy", ["accuracy"], "sparse"),
        (losses.SparseCategoricalCrossentropy(from_logits=True), [], "sparse"),
        (losses.SparseCategoricalCrossentropy(), [metrics.MeanIoU(3, sparse_y_pred=False)], "sparse"),
        ("categorical_crossentropy", ["accuracy"], "one-hot"),
        ("kl_divergence", [], "one-hot"),
        (losses.mean_squared_error, ["mae"], "one-hot"),
        # Either form would do for these: metrics say which, else class numbers.
        ("crossentropy", [], "sparse"),
        ("crossentropy", [metrics.Precision()], "one-hot"),
        (None, [metrics.CategoricalAccuracy()], "one-hot"),
        (None, [], "sparse"),
        # Losses of one's own are tried; metrics of one's own are not.
        (own.of_numbers, [], "sparse"),
        (own.of_one_hot, ["accuracy"], "one-hot"),
        (OwnLoss(), [], "sparse"),
        (OwnSubclass(), [], "one-hot"),
        (functools.partial(losses.sparse_categorical_crossentropy, from_logits=True), [], "sparse"),
        ("categorical_crossentropy", [own.of_numbers], "one-hot"),
        (lambda y_true, y_pred: "nothing that can be computed", [], "sparse"),
    ],
)
def test_labels_take_the_form_that_loss_and_metrics_need(loss, metrics, form):
    assert choose_form([loss] if loss else [], metrics, 3, 3)[0] == form


def test_a_loss_of_ones_own_is_tried_without_a_square_of_many_classes():
    tracemalloc.start()
    assert choose_form([own.of_one_hot], [], 10_000, 10_000)[0] == "one-hot"
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()


def test_a_single_output_takes_0_or_1():
    assert choose_form(["binary_crossentropy"], [metrics.AUC()], 1, 2) == (
        "binary",
        "the loss binary_crossentropy",
    )
    with pytest.raises(
        ModelError, match=r"one output and its loss sparse_cat\w+ needs one for each of 2 classes"
    ):
        choose_form(["sparse_categorical_crossentropy"], [], 1, 2)


def test_a_single_class_keeps_its_numbers():
    assert choose_form(["sparse_categorical_crossentropy"], [], 1, 1)[0] == "sparse"


def test_a_mixture_of_forms_is_refused_as_fit_refuses_it():
    with pytest.raises(
        ModelError, match=r"the loss sparse_c.* takes class numbers and the metric AUC one-hot"
    ):
        choose_form(["sparse_categorical_crossentropy"], ["accuracy", metrics.AUC()], 3, 3)
    with pytest.raises(ModelError, match=r"the metric sparse_cat.* takes class numbers and the loss categ"):
        choose_form(["categorical_crossentropy"], [metrics.SparseCategoricalAccuracy()], 3, 3)


def test_labels_in_each_form():
    numbers = np.array([2, 0])

    def formed(values, form, label):
        return form_targets(values, [label], {"label": form})

    several = Label("label", "multilabel", ("a", "b"))
    price = Label("label", "regression", ("price",))
    np.testing.assert_array_equal(formed(numbers, "sparse", class_label("abc")), [2, 0])
    np.testing.assert_array_equal(formed(numbers, "one-hot", class_label("abc")), [[0, 0, 1], [1, 0, 0]])
    np.testing.assert_array_equal(formed(np.array([1, 0]), "binary", class_label("ab")), [[1.0], [0.0]])
    assert formed(np.array([[1, 0]]), "several", several).dtype == "float32"
    np.testing.assert_array_equal(formed(np.array([1.5, 2.5]), "column", price), [[1.5], [2.5]])


SEVERAL = Label("label", "multilabel", ("a", "b", "c"))
PRICE = Label("label", "regression", ("price",))
PRICES = (Spread(3.0, 90.0, 20.0, 9.0),)


@pytest.fixture
def two_classes():
    image = {"image": Feature("image", "uint8", (4, 4, 1))}
    return DatasetInfo((4, 4, 1), {"label": class_label(("no", "yes"))}, image, {}, image)


def own_of_logits(y_true, y_pred):
    return keras.losses.binary_crossentropy(y_true, y_pred, from_logits=True)


own_of_logits.from_logits = True


def ending(units, activation, loss, bias="zeros"):
    layers = [keras.layers.Rescaling(1 / 255), keras.layers.Flatten()]
    head = keras.layers.Dense(units, activation, bias_initializer=bias)
    model = keras.Sequential([keras.Input((4, 4, 1), dtype="uint8"), *layers, head])
    model.compile("sgd", loss)
    return model


LOGITS = losses.BinaryCrossentropy(from_logits=True)


@pytest.mark.parametrize(
    ("activation", "loss", "head"),
    [
        ("sigmoid", "binary_crossentropy", "probability"),
        ("linear", LOGITS, "logit"),
        # A function has no configuration, and says it by an attribute.
        ("linear", own_of_logits, "logit"),
        # Keras finds the logits behind the sigmoid.
        ("sigmoid", LOGITS, "probability"),
    ],
)
def test_one_output_for_two_classes(two_classes, activation, loss, head):
    model = ending(1, activation, loss)

    assert read_head(model, two_classes) == head
    probabilities = to_prediction(model(np.zeros((1, 4, 4, 1), np.uint8)), head, class_label(("no", "yes")))
    np.testing.assert_allclose(probabilities, [[0.5, 0.5]])


def test_a_single_logit_that_looks_like_a_probability_is_a_logit(two_classes):
    assert read_head(ending(1, "linear", LOGITS, keras.initializers.Constant(0.5)), two_classes) == "logit"


def test_a_single_number_that_is_no_probability_is_refused(two_classes):
    with pytest.raises(ModelError, match="end the model with a sigmoid"):
        read_head(ending(1, "linear", "binary_crossentropy"), two_classes)
    three = dataclasses.replace(two_classes, labels={"label": class_label("abc")})
    with pytest.raises(ModelError, match=re.escape("(n, 1), the dataset has 3 classes")):
        read_head(ending(1, "sigmoid", "binary_crossentropy"), three)


def of_a_label(label, activation, loss, spreads=()):
    """Returns the description of images with a label, and a model that ends so."""
    image = {"image": Feature("image", "uint8", (4, 4, 1))}
    info = DatasetInfo((4, 4, 1), {"label": label}, image, {}, image, {"label": Tally(spreads=spreads)})
    return ending(len(label.outputs), activation, loss), info


@pytest.mark.parametrize(
    ("label", "activation", "loss", "spreads", "message"),
    [
        (SEVERAL, "softmax", "binary_crossentropy", (), "ends with a softmax, whose numbers sum to 1"),
        (
            SEVERAL,
            "sigmoid",
            "categorical_crossentropy",
            (),
            "loss categorical_crossentropy is for one class",
        ),
        (PRICE, "sigmoid", "mse", PRICES, "a softmax or sigmoid, which gives 0 to 1, and 'price' is 3 to 90"),
        (PRICE, None, "sparse_categorical_crossentropy", PRICES, "is for classes"),
    ],
)
def test_an_output_that_can_never_be_a_label_is_refused(label, activation, loss, spreads, message):
    model, info = of_a_label(label, activation, loss, spreads)
    with pytest.raises(ModelError, match=message):
        read_head(model, info)


@pytest.mark.parametrize(
    ("label", "activation", "loss", "spreads", "head"),
    [
        (SEVERAL, "sigmoid", "binary_crossentropy", (), "probabilities"),
        (SEVERAL, None, LOGITS, (), "logits"),
        (PRICE, None, "mse", PRICES, "numbers"),
        (PRICE, "sigmoid", "mse", (Spread(0.0, 1.0, 0.5, 0.1),), "numbers"),
    ],
)
def test_an_output_of_each_kind_of_label(label, activation, loss, spreads, head):
    assert read_head(*of_a_label(label, activation, loss, spreads)) == head
