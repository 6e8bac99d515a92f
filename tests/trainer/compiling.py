"""Ways to build and compile a model: `python -m tests.trainer.compiling > benchmarks/KERAS.md`.

Each is trained by Shardline, and by Keras' own `fit` on the same batches in the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import keras

from shardline.trainer.manifest import DatasetInfo
from tests.helpers import models, unexportable
from tests.trainer import own_models as own

SAME, SPARSE, ONE_HOT, BINARY = "", "sparse", "one-hot", "binary"

layers, losses, metrics, optimizers = keras.layers, keras.losses, keras.metrics, keras.optimizers
CATEGORICAL = "categorical_crossentropy"
OF_NUMBERS = "sparse_categorical_crossentropy"


@dataclass(frozen=True)
class Case:
    """One way to build and compile a model.

    Attributes:
        shown: The way, as the page has it.
        make: Makes the model for a dataset.
        labels: Form of the labels with which `fit` is compared.
        refused: What the refusal says; "" where training gives the same as `fit`.
        settings: Further settings of the run.
        classes: Number of classes of the dataset.
        tolerance: Largest difference of loss and metrics.
    """

    shown: str
    make: Callable[[DatasetInfo], Any]
    labels: str = SPARSE
    refused: str = SAME
    settings: Mapping[str, Any] = field(default_factory=dict)
    classes: int = 3
    tolerance: float = 1e-5


def compiled(
    loss: Any = OF_NUMBERS,
    metric: Any = ("accuracy",),
    optimizer: Any = "adam",
    *middle: Callable[[], Any],
    activation: str | None = "softmax",
    units: int = 0,
    **options: Any,
) -> Callable[[DatasetInfo], keras.Model]:
    """Returns a model function; stateful objects are passed as functions that make them."""

    def make(dataset: DatasetInfo) -> keras.Model:
        flat = [keras.Input(dataset.input_shape, dtype="uint8"), layers.Rescaling(1 / 255), layers.Flatten()]
        head = layers.Dense(units or dataset.num_classes, activation, dtype="float32")
        model = keras.Sequential([*flat, *(one() for one in middle), head])
        created = [one() if isinstance(one, type | functools.partial) else one for one in metric]
        model.compile(optimizer() if callable(optimizer) else optimizer, loss, metrics=created, **options)
        return model

    return make


_part = functools.partial
_of = _part(compiled, OF_NUMBERS, ("accuracy",), "adam")

LOSSES = (
    Case("`sparse_categorical_crossentropy`", compiled()),
    Case(
        "`SparseCategoricalCrossentropy(from_logits=True)`, no softmax",
        compiled(losses.SparseCategoricalCrossentropy(from_logits=True), activation=None),
    ),
    Case(
        "`SparseCategoricalCrossentropy(reduction='sum')`",
        compiled(losses.SparseCategoricalCrossentropy(reduction="sum")),
        tolerance=1e-4,
    ),
    Case("`categorical_crossentropy`", compiled(CATEGORICAL), ONE_HOT),
    Case("`crossentropy`, which takes either", compiled("crossentropy")),
    Case("`mean_squared_error`", compiled("mean_squared_error"), ONE_HOT),
    Case("`Dice()`", compiled(losses.Dice()), ONE_HOT),
    Case("`binary_crossentropy` with three classes", compiled("binary_crossentropy"), ONE_HOT),
    Case("a list of one loss, with `loss_weights`", compiled([CATEGORICAL], loss_weights=[2.0]), ONE_HOT),
    Case("your own function, with class numbers", compiled(own.of_numbers)),
    Case("your own function, with one-hot labels", compiled(own.of_one_hot), ONE_HOT),
    Case("your own `Loss`, not registered", compiled(own.OwnLoss()), ONE_HOT),
    Case(
        "`functools.partial` of a loss, with logits",
        compiled(_part(losses.sparse_categorical_crossentropy, from_logits=True), activation=None),
    ),
    Case("only `add_loss` in a layer", own.entropy),
)

TWO_CLASSES = (
    Case(
        "`binary_crossentropy`, one sigmoid",
        compiled("binary_crossentropy", activation="sigmoid", units=1),
        BINARY,
        classes=2,
    ),
    Case(
        "`BinaryCrossentropy(from_logits=True)`, one output",
        compiled(losses.BinaryCrossentropy(from_logits=True), (), activation=None, units=1),
        BINARY,
        classes=2,
    ),
    Case(
        "`BinaryFocalCrossentropy()`, `AUC()`, `F1Score()`, one sigmoid",
        compiled(
            losses.BinaryFocalCrossentropy(),
            (metrics.AUC, _part(metrics.F1Score, threshold=0.5)),
            activation="sigmoid",
            units=1,
        ),
        BINARY,
        classes=2,
    ),
    Case(
        "`binary_crossentropy`, `AUC()`, a softmax of two",
        compiled("binary_crossentropy", (metrics.AUC,)),
        ONE_HOT,
        classes=2,
    ),
    Case(
        "`hinge`, one tanh",
        compiled("hinge", activation="tanh", units=1),
        refused="end the model with a sigmoid",
        classes=2,
    ),
    Case(
        "`sparse_categorical_crossentropy`, one sigmoid",
        compiled(activation="sigmoid", units=1),
        refused="end it with Dense(2), or compile it with binary_crossentropy",
        classes=2,
    ),
)

METRICS = (
    Case(
        "`AUC()`, `Precision()`, `Recall()`",
        compiled(CATEGORICAL, (metrics.AUC, metrics.Precision, metrics.Recall)),
        ONE_HOT,
    ),
    Case("`F1Score()`, a number for each class", compiled(CATEGORICAL, (metrics.F1Score,)), ONE_HOT),
    Case(
        "`SparseTopKCategoricalAccuracy(2)`",
        compiled(metric=(_part(metrics.SparseTopKCategoricalAccuracy, 2),)),
    ),
    Case(
        "`MeanIoU(3, sparse_y_pred=False)`",
        compiled(metric=(_part(metrics.MeanIoU, 3, sparse_y_pred=False),)),
    ),
    Case("your own metric, not registered", compiled(CATEGORICAL, (unexportable.OwnMetric,)), ONE_HOT),
    Case("your own function as a metric", compiled(metric=(own.share_right,))),
    Case(
        "`weighted_metrics`, and class weights of the run",
        compiled(CATEGORICAL, (), weighted_metrics=["accuracy"]),
        ONE_HOT,
        settings={"class_weights": {"top": 3.0}},
    ),
    Case(
        "`sparse_categorical_crossentropy` with `AUC()`",
        compiled(metric=(metrics.AUC,)),
        refused="takes class numbers and the metric AUC one-hot labels",
    ),
)

OPTIMIZERS = (
    Case(
        "`SGD(momentum=0.9, nesterov=True, clipnorm=0.1)`",
        compiled(optimizer=_part(optimizers.SGD, 0.1, momentum=0.9, nesterov=True, clipnorm=0.1)),
    ),
    Case("`Adam(use_ema=True)`", compiled(optimizer=_part(optimizers.Adam, use_ema=True))),
    Case(
        "a schedule of the learning rate",
        compiled(optimizer=lambda: optimizers.Adam(optimizers.schedules.CosineDecay(0.1, 3))),
    ),
    Case(
        "`SGD(gradient_accumulation_steps=3)`",
        compiled(optimizer=_part(optimizers.SGD, 0.1, gradient_accumulation_steps=3)),
    ),
    Case(
        "`LossScaleOptimizer(SGD())`",
        compiled(optimizer=lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1))),
    ),
    Case("your own optimizer", compiled(optimizer=own.OwnSGD)),
    Case("two optimizers in your own `train_step`", own.two_optimizers),
    Case("`MultiOptimizer`", own.multi_optimizer),
)

PRECISIONS = (
    Case(
        "policy `mixed_bfloat16`",
        _of(_part(layers.Dense, 8)),
        settings={"precision": "bfloat16"},
        tolerance=1e-3,
    ),
    Case(
        "policy `mixed_float16`, its loss scaled",
        _of(_part(layers.Dense, 8)),
        settings={"precision": "float16"},
        tolerance=1e-3,
    ),
    Case("one layer in `float64`", _of(_part(layers.Dense, 8, dtype="float64"))),
)

MODELS = (
    Case("`Sequential` without `Input`", own.without_input),
    Case("functional, with branches and a shared layer", own.functional),
    Case("functional, with `keras.ops`", own.operations),
    Case("a frozen model inside a model", own.nested),
    Case("subclassed, registered", own.subclassed),
    Case("`BatchNormalization`", _of(layers.BatchNormalization)),
    Case("`SpectralNormalization(Dense)`", _of(lambda: layers.SpectralNormalization(layers.Dense(8)))),
    Case("your own layer, registered", _of(_part(unexportable.Scaled, 2.0))),
    Case("LoRA: `dense.enable_lora(2)`", own.low_rank),
    Case("your own `train_step`", models.own_step),
    Case("your own `train_step`, which returns no loss", own.silent),
    Case("your own `compute_loss`", own.own_compute_loss),
    Case("`compile(jit_compile=True)`", compiled(jit_compile=True)),
    Case("`Lambda`", unexportable.lambda_layer, refused="has a Lambda layer"),
    Case("`Lambda`, `allow_unexportable`", unexportable.lambda_layer, settings={"allow_unexportable": True}),
    Case(
        "your own layer or activation, not registered",
        unexportable.unregistered,
        refused="classes and functions of its own need @keras.saving.register_keras_serializable()",
    ),
    Case(
        "a registered layer without its `get_config`",
        unexportable.unconfigured,
        refused="give each class of its own a get_config()",
    ),
    Case(
        "a layer with weights that Keras does not know",
        unexportable.forgetful,
        refused="some of its weights are not saved",
    ),
    Case(
        "`tf.numpy_function`, `tf.py_function`", unexportable.called, refused="calls Python while it predicts"
    ),
    Case("several inputs", unexportable.two_inputs, refused="compute the others from it in layers"),
    Case("several outputs", models.two_outputs, refused="train a model with that one alone"),
    Case(
        "several inputs and outputs, with a `transform`",
        models.several,
        settings={"transform": "tests.helpers.models:several_inputs"},
    ),
    Case(
        "logits without `from_logits` in the loss",
        models.undeclared_logits,
        refused="end the model with a softmax, or compile it with from_logits=True",
    ),
    Case("more outputs than classes", models.wrong_classes, refused="or use the data that it was made for"),
    Case("not compiled", models.uncompiled, refused="call model.compile(...)"),
)

GROUPS = {
    "Losses": LOSSES,
    "Two classes": TWO_CLASSES,
    "Metrics": METRICS,
    "Optimizers": OPTIMIZERS,
    "Precision": PRECISIONS,
    "Models": MODELS,
}
CASES = {case.shown: case for group in GROUPS.values() for case in group}


def build(dataset: DatasetInfo, case: str) -> keras.Model:
    """Model function of a case, by its name."""
    return CASES[case].make(dataset)


_HEAD = """\
# What compiles in Keras

Here is one of each kind of ways to build and compile a model: Shardline trains it as Keras' own `fit` does,
or refuses it. A test trains each in both ways on the same batches: loss and metrics differ by less than
0.00001 (0.001 in half precision). `python -m tests.trainer.compiling` prints this page.

Labels take the form that loss and metrics need: class numbers, one-hot, or 0 and 1 for a single output. The
log says which.
"""
_REFUSED = """\
## Refused

Training stops before the first step; `allow_unexportable` trains what only cannot be exported.

| way | the message says |
|---|---|
"""
_FORMS = {SPARSE: "Class numbers", ONE_HOT: "One-hot labels", BINARY: "0 or 1"}


def page() -> str:
    """Returns the page of the documentation."""
    parts = [_HEAD]
    for title, group in GROUPS.items():
        ways: dict[str, list[str]] = {}
        for case in group:
            if not case.refused:
                ways.setdefault(_FORMS[case.labels], []).append(case.shown)
        lines = [f"- {form}: {'; '.join(shown)}." for form, shown in ways.items()]
        parts.append("\n".join([f"## {title}", "", *lines, ""]))
    refused = [f"| {case.shown} | {case.refused} |" for case in CASES.values() if case.refused]
    return "\n".join([*parts, "\n".join([_REFUSED + refused[0], *refused[1:], ""])])


if __name__ == "__main__":
    print(page(), end="")
