"""Options of `compile` and settings of the optimizer: applied, or refused before training."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from shardline.trainer.base.errors import ModelError, SettingsError
from shardline.trainer.base.settings import TrainSettings
from shardline.trainer.keras_compat.keras_internals import build_symbolically
from shardline.trainer.keras_compat.replicas import loss_couples_examples
from shardline.trainer.loop import loop
from shardline.trainer.loop.build import accumulate_gradients, build, learning_rates
from shardline.trainer.loop.loop import own_statistics
from shardline.trainer.manifest import load
from shardline.trainer.train import train
from tests.helpers import losses, models
from tests.helpers.history import read_history


def settings(dataset, **changes):
    return TrainSettings(**{"dataset": str(dataset), "model": "tests.helpers.models:plain", **changes})


def uses_xla(dataset, name="plain", strategy="one_device", jit_compile="auto", **hparams):
    run = SimpleNamespace(settings=settings(dataset, jit_compile=jit_compile), strategy_name=strategy)
    return loop.uses_xla(run, build(f"tests.helpers.models:{name}", load(dataset).info(), hparams))


def test_xla_compiles_where_it_is_asked_to_and_else_on_a_gpu(dataset, monkeypatch):
    assert not uses_xla(dataset)
    assert uses_xla(dataset, jit_compile="on")
    assert uses_xla(dataset, "by_xla")
    assert not uses_xla(dataset, "by_xla", jit_compile="off")

    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: ["a GPU"] if kind == "GPU" else [])
    assert uses_xla(dataset)
    assert not uses_xla(dataset, jit_compile="off")
    assert not uses_xla(dataset, "by_xla", asked=False)
    assert not uses_xla(dataset, strategy="multi_worker_mirrored")


@pytest.mark.parametrize(("name", "option"), [("by_xla", "jit_compile"), ("eager", "run_eagerly")])
def test_what_several_replicas_cannot_do_is_refused(dataset, name, option):
    with pytest.raises(
        ModelError, match=rf"compile\({option}=True\) needs strategy one_device.*has mirrored"
    ):
        uses_xla(dataset, name, strategy="mirrored")


@pytest.mark.parametrize(("name", "option"), [("by_xla", "jit_compile"), ("eager", "run_eagerly")])
def test_what_parameter_servers_cannot_do_is_refused(dataset, name, option):
    model = build(f"tests.helpers.models:{name}", load(dataset).info(), {})
    run = SimpleNamespace(
        settings=settings(dataset),
        strategy_name="parameter_server",
        strategy=None,
        data=None,
        validation=None,
    )
    with pytest.raises(ModelError, match=rf"compile\({option}=True\) needs .*has parameter_server"):
        loop.make_engine(run, model, None)


def test_xla_cannot_compile_what_runs_eagerly(dataset):
    with pytest.raises(SettingsError, match="exclude each other"):
        uses_xla(dataset, "eager", jit_compile="on")


def test_a_step_that_is_to_run_eagerly_does(dataset, tmp_path):
    models.Eager.steps = 0
    made = settings(dataset, model="tests.helpers.models:eager", model_dir=str(tmp_path), epochs=2)
    logs = train(made, {})

    assert models.Eager.steps == 1 + 12  # the first builds, and changes nothing
    assert [(row["calls"], row["val_calls"]) for row in read_history(tmp_path)] == [("6.0", "2.0")] * 2
    assert logs["val_accuracy"] > 0.3


class OnlyItsOwn(keras.Model):
    """Has an optimizer of its own and none of `compile`."""

    def __init__(self):
        super().__init__()
        self.mine = keras.optimizers.SGD(0.1)


def with_optimizer(optimizer):
    model = OnlyItsOwn() if optimizer is None else keras.Sequential([keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    return model


def by_path(variable):
    return keras.optimizers.SGD(0.1)


def several_optimizers():
    first, second = keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.01)
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(first, {".*kernel": second}))


def test_accumulation_is_set_in_each_of_several_optimizers():
    model = with_optimizer(several_optimizers())
    accumulate_gradients(model, 4)

    inner = model.optimizer.optimizers
    assert [one.gradient_accumulation_steps for one in inner] == [4, 4]
    assert not model.optimizer.gradient_accumulation_steps
    assert learning_rates(model) == pytest.approx([0.01, 0.1])


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (None, "needs a model that is compiled with an optimizer"),
        (keras.optimizers.MultiOptimizer(by_path), "needs a MultiOptimizer with an OptimizerMap"),
    ],
)
def test_an_optimizer_that_cannot_accumulate_is_refused(optimizer, message):
    with pytest.raises(SettingsError, match=f"gradient_accumulation_steps {message}"):
        accumulate_gradients(with_optimizer(optimizer), 4)


@pytest.mark.parametrize(
    ("build", "differs"),
    [
        (losses.plain("mse"), False),
        (losses.plain(losses.mean_square), False),
        (losses.plain(keras.losses.Huber(reduction="sum")), False),
        (losses.plain(keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")), False),
        (losses.subclassed(losses.Computing), False),
        (losses.plain(losses.Contrastive()), True),
        (losses.plain(lambda y, y_pred: keras.losses.dice(y, y_pred)), True),
        (losses.regularized(activity_regularizer=losses.Together()), True),
        (losses.regularized(activity_regularizer="l2", kernel_regularizer="l2"), False),
        (losses.subclassed(losses.Interacting), True),
        (losses.subclassed(losses.Noisy), None),
        (losses.subclassed(losses.ByHand), False),
    ],
)
def test_a_loss_that_couples_examples_is_detected(build, differs):
    random = np.random.default_rng(0)
    x, y = (random.normal(size=(16, width)).astype("float32") for width in (6, 1))
    batch = (tf.constant(x), tf.constant(y), tf.constant(np.arange(16.0, dtype="float32")))
    model = build()
    build_symbolically(model, batch)
    before = [variable.numpy() for variable in model.variables]
    assert loss_couples_examples(model, batch) is differs
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_layers_that_normalize_over_the_batch_are_detected():
    normalization = keras.layers.BatchNormalization
    inner = keras.Sequential(
        [keras.Input((2,)), normalization(name="inside"), normalization(synchronized=True)]
    )
    frozen = normalization(name="frozen", trainable=False)
    model = keras.Sequential([keras.Input((2,)), inner, normalization(name="outside"), frozen])
    assert own_statistics(model) == ["inside", "outside"]
