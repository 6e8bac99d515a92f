"""Model building: a compiled model with its variables and optimizers, from a function or a program."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf
from keras.optimizers.schedules import LearningRateSchedule

from shardline.trainer.base import plugins, progress
from shardline.trainer.base.errors import ModelError, SettingsError, ShardlineError
from shardline.trainer.base.plugins import BUILT_IN, KERAS_PREFIX, import_string
from shardline.trainer.base.settings import TrainSettings
from shardline.trainer.data import Batches
from shardline.trainer.data.transforms import describe_structure
from shardline.trainer.keras_compat import keras_internals
from shardline.trainer.keras_compat.replicas import whole_batch_metrics
from shardline.trainer.keras_compat.tensorflow_internals import is_seeded
from shardline.trainer.loop.process import Process
from shardline.trainer.manifest import DatasetInfo
from shardline.trainer.models.zoo import find_application

ModelFunction = Callable[..., keras.Model]


def model_function(model: str) -> ModelFunction:
    """Returns the model function of a built-in name, keras:NAME, or `pkg.module:function`."""
    function = plugins.load(
        import_string(model), "model", ModelError, known=(*BUILT_IN, f"{KERAS_PREFIX}NAME")
    )
    if not callable(function):
        raise ModelError(f"model {model!r} is not a function but {type(function).__name__}")
    if model.startswith(KERAS_PREFIX):
        function = functools.partial(function, find_application(model.removeprefix(KERAS_PREFIX)))
    checked: ModelFunction = function
    return checked


def build(model: str, dataset: DatasetInfo, arguments: Mapping[str, Any]) -> keras.Model:
    """Calls a model function with a dataset's facts and keyword arguments; returns a compiled model."""
    function = model_function(model)
    signature = inspect.signature(function)
    try:
        signature.bind(dataset, **arguments)
    except TypeError as error:
        raise ModelError(
            f"model {model!r} cannot be called with the dataset and {sorted(arguments)}: {error}; it takes "
            f"{signature}"
        ) from None
    try:
        with keras_internals.record_jit_compile():
            built = function(dataset, **arguments)
    except ShardlineError:
        raise
    except (Exception, SystemExit) as error:  # the user's code runs here and may raise anything
        text = " ".join(f"{type(error).__name__}: {error}".split())
        file = getattr(inspect.unwrap(function), "__code__", None) and inspect.getsourcefile(function)
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
        raise ModelError(f"model {model!r} failed: {text}{where}") from error
    if not isinstance(built, keras.Model):
        raise ModelError(
            f"model {model!r} returned {type(built).__name__}, not a keras.Model; end it with 'return model'"
        )
    if not built.compiled:
        raise ModelError(f"model {model!r} returned a model that is not compiled; call model.compile(...)")
    return built


def create_variables(model: keras.Model, **batches: Any) -> None:
    """Builds model, optimizers and metrics in the strategy's scope.

    A custom `train_step` is run on trial to create its variables, whose values are then reset. `batches` has
    data of one replica, or its specification, for each step by its name, such as train_step.
    """
    is_custom = keras_internals.returns_custom_metrics(model.train_step)
    for name, data in batches.items():
        problem = f"{name} of the model failed" if is_custom else "the model cannot be built"
        what = f"{problem} on batches of {describe_structure(data)}"
        with plugins.calling(what, ModelError, explain=keras_internals.describe_model_error):
            spec = tf.nest.map_structure(_specification, data)
            with whole_batch_metrics(model, tf.nest.flatten(spec)[0].shape[0]):
                if is_custom:
                    _try_step(model, getattr(model, name), data)
                else:
                    keras_internals.build_symbolically(model, spec)


def _try_step(model: keras.Model, step: Callable[[Any], Any], data: Any) -> None:
    """Runs a step as one replica does, traced unless the model runs eagerly."""

    def take(data: Any) -> None:
        with tf.distribute.ReplicaContext(model.distribute_strategy, 0):
            step(data)

    spec = tf.nest.map_structure(_specification, data)
    with keras_internals.build_only(model):
        if not model.run_eagerly:
            tf.function(take, autograph=False).get_concrete_function(spec)
        elif isinstance(tf.nest.flatten(data)[0], tf.TensorSpec):
            take(tf.nest.map_structure(lambda part: tf.zeros(part.shape, part.dtype), spec))
        else:
            take(data)


def _specification(tensor: Any) -> tf.TensorSpec:
    return tf.TensorSpec([tensor.shape[0] or 1, *tensor.shape[1:]], tensor.dtype)


BuildModel: TypeAlias = Any  # a keras.Model, or a function that returns one


def build_with_variables(
    process: Process, build_model: BuildModel, settings: TrainSettings, **steps: Batches
) -> keras.Model:
    """Returns the model with all variables of some steps, whose batches are by name, such as train_step.

    Raises ModelError if it is none, or not compiled though it has to be, or was built for other devices.
    """
    compiled = "predict_step" not in steps
    if compiled or process.replicas > 1:
        _refuse_composites(steps.values())
    if settings.deterministic:
        tf.config.experimental.enable_op_determinism()
    if not is_seeded():
        keras.utils.set_random_seed(settings.seed + 1)
    if process.is_alone and isinstance(build_model, keras.Model):
        strategy = build_model.distribute_strategy
        if strategy is not process.strategy and compiled:
            _report_ready_model()
    else:
        strategy = process.strategy
    model = build_model
    with strategy.scope():
        if not isinstance(model, keras.Model):
            if not callable(model):
                raise ModelError(f"build_model is {type(model).__name__}, not a function or a keras.Model")
            with keras_internals.record_jit_compile(), plugins.calling("build_model failed", ModelError):
                model = model()
    if not isinstance(model, keras.Model):
        legacy = type(model).__module__.startswith("tf_keras")
        why = "; tf.keras is Keras 2 here (TF_USE_LEGACY_KERAS): import keras instead" if legacy else ""
        raise ModelError(f"build_model returns {type(model).__name__}, not a keras.Model{why}")
    if compiled and not model.compiled:
        raise ModelError("build_model returns a model that is not compiled; call model.compile(...)")
    # Outside the scope: in it, a model that was built in no scope takes the scope's strategy for its own.
    if not process.is_alone and model.distribute_strategy is not process.strategy:
        raise ModelError(
            "the model was built outside the strategy of this process; build it in "
            "shardline.strategy().scope(), or pass the function that builds it"
        )
    with strategy.scope():
        if compiled:
            accumulate_gradients(model, settings.gradient_accumulation_steps)
            create_variables(
                model, **{name: _replica_part(batches, process.replicas) for name, batches in steps.items()}
            )
        elif not model.built:
            model(keras.utils.unpack_x_y_sample_weight(steps["predict_step"].first_batch)[0])
    return model


@functools.cache
def _report_ready_model() -> None:
    """Reports, once, that the program will be refused on several processes."""
    progress.report(
        "train",
        "this model trains in one process only; for several pass the function that builds it, or build it in "
        "shardline.strategy().scope()",
    )


def _refuse_composites(data: Iterable[Batches]) -> None:
    parts = [part for batches in data for part in tf.nest.flatten(batches.first_batch)]
    if kinds := sorted({type(part).__name__ for part in parts} & {"SparseTensor", "RaggedTensor"}):
        raise SettingsError(
            f"the data yields {' and '.join(kinds)}, which cannot be divided among replicas; make it dense "
            "by data.map, with tf.sparse.to_dense or RaggedTensor.to_tensor"
        )


def _replica_part(batches: Batches, replicas: int) -> Any:
    share = 1 if batches.is_per_process else replicas
    return tf.nest.map_structure(lambda part: part[: max(1, len(part) // share)], batches.first_batch)


def accumulate_gradients(model: keras.Model, steps: int) -> None:
    """Sets the steps of an update in a compiled model that is not yet built, or has them already."""
    if steps == 1:
        return
    if model.optimizer is None:
        raise SettingsError("gradient_accumulation_steps needs a model that is compiled with an optimizer")
    inner = keras_internals.inner_optimizers(model.optimizer)
    if not inner:
        raise SettingsError("gradient_accumulation_steps needs a MultiOptimizer with an OptimizerMap")
    for optimizer in inner:
        own = optimizer.gradient_accumulation_steps
        if own and own != steps:
            raise SettingsError(
                f"gradient_accumulation_steps is {steps}, but the model's optimizer has its own {own}; set "
                "one of them"
            )
        if not own and optimizer.built:
            raise SettingsError(
                "gradient_accumulation_steps needs an optimizer that has not been built; build_model has "
                "built it"
            )
        optimizer.gradient_accumulation_steps = steps


def learning_rates(model: keras.Model) -> list[float | dict[str, Any]]:
    """Returns the learning rate of each of a model's optimizers: a number, or a schedule's configuration."""
    return [
        _describe(keras_internals.own_learning_rate(optimizer))
        for optimizer in keras_internals.updating_optimizers(model)
    ]


def _describe(rate: Any) -> float | dict[str, Any]:
    if isinstance(rate, LearningRateSchedule):
        try:
            serialized: dict[str, Any] = keras.saving.serialize_keras_object(rate)
        except NotImplementedError:  # a custom schedule without get_config
            serialized = {}
        return {"class_name": type(rate).__name__, "config": serialized.get("config", {})}
    if callable(rate):
        return {"class_name": plugins.identify(rate), "config": {}}
    return float(str(np.float32(rate.numpy())))  # 0.001 as it was written


def apply_changed_rates(model: keras.Model, before: Sequence[Any], now: Sequence[Any]) -> None:
    """Sets changed learning rates of optimizers that were restored with their earlier ones."""
    for optimizer, old, new in zip(keras_internals.updating_optimizers(model), before, now, strict=False):
        if isinstance(new, float) and old != new:
            keras_internals.own_learning_rate(optimizer).assign(new)


def finalize(model: keras.Model) -> None:
    """Sets trained weights to their moving averages, as the end of `fit` does."""
    trained = {id(variable) for variable in model.trainable_variables}
    for optimizer in keras_internals.inner_optimizers(model.optimizer) if model.optimizer is not None else ():
        for variable, average in keras_internals.moving_averages(optimizer):
            if id(variable) in trained:
                variable.assign(average)
