"""Keras internals: uses of Keras' undocumented interface, each with its reason.

Optimizers, metrics and random numbers, then compiling and building; losses over replicas are in replicas.py.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import re
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses.losses import LossFunctionWrapper
from keras.src.random import seed_generator
from keras.src.trainers import compile_utils, trainer
from keras.src.utils.python_utils import is_default, pythonify_logs

from shardline.trainer.base import plugins
from shardline.trainer.base.errors import ModelError
from shardline.trainer.keras_compat.tensorflow_internals import branch, patched

Gradients = list[tf.Tensor | tf.IndexedSlices]
Variables = Sequence[keras.Variable]


def build_symbolically(model: keras.Model, batch: Any) -> None:
    """Builds model, optimizer and metrics at once; `Model.build` leaves optimizer and metrics out."""
    model._symbolic_build(data_batch=batch)


def all_layers(model: keras.Model) -> Iterator[keras.layers.Layer]:
    """Yields all layers of a model, nested ones included; `Model.layers` has the outermost only."""
    yield from model._flatten_layers(include_self=False)


def own_learning_rate(optimizer: keras.Optimizer) -> Any:
    """Returns an optimizer's schedule or variable; `learning_rate` is the schedule's current value."""
    return optimizer._learning_rate


def has_batch_hooks(callback: keras.callbacks.Callback, kind: str) -> bool:
    """Whether a callback overrides a hook of every step; `kind` is "train" or "test".

    Keras' ModelCheckpoint and TensorBoard do, even if they write by epoch.
    """
    names = [f"on_{kind}_batch_begin", f"on_{kind}_batch_end"]
    names += ["on_batch_begin", "on_batch_end"] if kind == "train" else []
    own = {name for name in names if not is_default(getattr(callback, name))}
    base = _writes_by_epoch(callback)
    return any(base is None or getattr(type(callback), name) is not getattr(base, name) for name in own)


def _writes_by_epoch(callback: keras.callbacks.Callback) -> Any:
    """Returns the class of Keras whose hooks of every step do nothing, as the callback writes by epoch."""
    board, checkpoint = keras.callbacks.TensorBoard, keras.callbacks.ModelCheckpoint
    if isinstance(callback, checkpoint) and callback.save_freq == "epoch":
        return checkpoint
    by_step = isinstance(callback, board) and (callback._should_trace or callback.write_steps_per_second)
    return board if isinstance(callback, board) and callback.update_freq == "epoch" and not by_step else None


def returns_custom_metrics(step: Callable[..., Any]) -> bool:
    """Whether a `train_step` or `test_step` is the model's own; Keras' returns the model's metrics."""
    return getattr(step, "__func__", step) is not getattr(keras.Model, getattr(step, "__name__", ""), None)


@contextlib.contextmanager
def record_results(model: keras.Model) -> Iterator[dict[int, keras.metrics.Metric]]:
    """Yields the model's metrics by the ids of the results that they return in the context."""
    metrics: dict[int, keras.metrics.Metric] = {}
    values = []  # keeps the results alive, so that no id is reused

    def record(metric: keras.metrics.Metric, result: Callable[[], Any]) -> Any:
        value = result()
        values.append(value)
        metrics[id(value)] = metric
        return value

    with contextlib.ExitStack() as stack:
        for metric in model.metrics:
            metric.result = functools.partial(record, metric, metric.result)
            stack.callback(vars(metric).pop, "result")
        yield metrics


def flat_logs(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns logs as callbacks get them: flat, sorted by name, numbers as floats."""
    flat: dict[str, Any] = pythonify_logs(logs)
    return flat


def random_state() -> keras.Variable:
    """Returns the state of `keras.random` without a seed; called in the strategy's scope, may create it."""
    return seed_generator.global_seed_generator().state


@contextlib.contextmanager
def record_jit_compile() -> Iterator[None]:
    """Records the `jit_compile` argument of models compiled in the context, for `requested_jit_compile`.

    A model keeps only the value that Keras resolves, and under a strategy "auto" becomes False
    (keras/src/trainers/trainer.py, `_resolve_auto_jit_compile`).
    """
    compile_ = trainer.Trainer.compile
    signature = inspect.signature(compile_)

    @functools.wraps(compile_)
    def recorded(self: keras.Model, *args: Any, **options: Any) -> None:
        compile_(self, *args, **options)
        arguments = signature.bind(self, *args, **options).arguments
        vars(self)["_requested_jit_compile"] = arguments.get("jit_compile", "auto")

    with patched(trainer.Trainer, "compile", recorded):
        yield


def requested_jit_compile(model: keras.Model) -> bool | str:
    """Returns the `jit_compile` passed to a model's `compile`: True, False or "auto"."""
    requested: bool | str = vars(model).get("_requested_jit_compile", "auto")
    return requested


def supports_xla(model: keras.Model) -> bool:
    """Whether XLA can compile a model's layers, as `fit` decides for `jit_compile="auto"`."""
    return bool(trainer.model_supports_jit(model))


# Odd and large, so that seeds of different replicas, layers and steps do not collide.
_NEXT_REPLICA = 0x9E3779B1


@contextlib.contextmanager
def random_per_replica() -> Iterator[None]:
    """Makes a function traced in the context, outside the replicas, draw different numbers on each replica.

    Keras' generators have the same state on all replicas (keras/src/random/seed_generator.py); here the
    replica's number is mixed into each seed, and the first replica's draws stay the same. `keras.random`
    without a seed has a generator for each thread, and replicas may have their own threads: all use this
    thread's.
    """
    draw, find = keras.random.SeedGenerator.next, seed_generator.global_seed_generator
    shared = seed_generator.global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)

    def draw_by_replica(self: keras.random.SeedGenerator, ordered: bool = True) -> tf.Tensor:
        seed, context = draw(self, ordered=ordered), tf.distribute.get_replica_context()
        if context is None or context.num_replicas_in_sync == 1:
            return seed
        replica = tf.cast(context.replica_id_in_sync_group, seed.dtype)
        return seed + tf.stack([replica * _NEXT_REPLICA, tf.zeros((), seed.dtype)])

    with (
        patched(keras.random.SeedGenerator, "next", draw_by_replica),
        patched(seed_generator, "global_seed_generator", lambda: shared or find()),
    ):
        yield


def optimizers(model: keras.Model) -> list[keras.Optimizer]:
    """Returns the model's optimizers: the compiled one, and those in its attributes.

    With its own `train_step`, those in the attributes of nested models and layers are included; Keras'
    `train_step` uses the compiled one only.
    """
    own_step = type(model).train_step is not keras.Model.train_step
    layers = model._flatten_layers() if own_step else [model]
    return list({id(each): each for layer in layers for each in _optimizers_in(vars(layer))}.values())


def _optimizers_in(value: Any) -> Iterator[keras.Optimizer]:
    if isinstance(value, keras.optimizers.Optimizer):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in list(value.values()) if isinstance(value, dict) else value:
            yield from _optimizers_in(item)


def accumulators(model: keras.Model) -> list[keras.Variable]:
    """Returns the sums of gradients that each replica has for itself between two updates."""
    updating = updating_optimizers(model)
    return [sum_ for each in updating for sum_ in getattr(each, "_accumulated_gradients", None) or ()]


def updating_optimizers(model: keras.Model) -> list[keras.Optimizer]:
    """Returns the optimizers that update the model's variables, inside those that only delegate to them."""
    return [inner for optimizer in optimizers(model) for inner in inner_optimizers(optimizer)]


def inner_optimizers(optimizer: keras.Optimizer) -> list[keras.Optimizer]:
    """Returns the optimizers that update variables, inside one that may only delegate to them."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return inner_optimizers(optimizer.inner_optimizer)
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        return list(optimizer.optimizers)
    return [optimizer]


def moving_averages(optimizer: keras.Optimizer) -> list[tuple[keras.Variable, keras.Variable]]:
    """Returns an optimizer's variables with their moving averages; empty if it keeps none."""
    if not (optimizer.use_ema and optimizer.built):  # the default of some MultiOptimizers has no weights
        return []
    averages = optimizer._model_variables_moving_average
    pairs = zip(optimizer._trainable_variables, averages, strict=True)
    return [(variable, average) for variable, average in pairs if average is not None]


def refuse_float8(model: keras.Model) -> None:
    """Raises ModelError for weights that Keras overwrites with their "gradient" on each replica alone."""
    for variable in model.trainable_variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise ModelError(
                f"weight {variable.path!r} is quantized to float8 for training, which several replicas "
                "cannot keep in step; train it on one replica, or in bfloat16"
            )


def before_apply(
    optimizer: keras.Optimizer, prepare: Callable[[Gradients, Variables | None], Gradients]
) -> None:
    """Makes an optimizer apply the gradients that `prepare` returns for a step's gradients and variables."""
    original = optimizer.apply

    def apply(grads: Gradients, trainable_variables: Variables | None = None) -> None:
        original(prepare(grads, trainable_variables), trainable_variables)

    optimizer.apply = apply


def update_after_gradients(optimizer: keras.Optimizer) -> None:
    """Makes an optimizer update no weight before all gradients are computed.

    TensorFlow copies a variable that is updated before an op has read its old value
    (tensorflow/core/kernels/training_op_helpers.h, `PrepareToUpdateVariable`), as the gradients of the layer
    below do: a tenth of a step's time. Keras' own IdentityN of all gradients is optimized away.
    """

    def wait(gradients: Gradients, _: Variables | None) -> Gradients:
        computed = [gradient for gradient in gradients if gradient is not None]
        with tf.control_dependencies(tf.nest.flatten(computed, expand_composites=True)):
            return [None if gradient is None else tf.identity(gradient) for gradient in gradients]

    before_apply(optimizer, wait)


def before_gradient(
    optimizer: keras.Optimizer, weigh: Callable[[keras.Optimizer, tf.Tensor], tf.Tensor]
) -> None:
    """Applies `weigh` after an optimizer's `scale_loss`, the last call on a loss in Keras' `train_step`."""
    original = optimizer.scale_loss
    optimizer.scale_loss = lambda loss: weigh(optimizer, original(loss))


def exchange_before_clipping(optimizer: keras.Optimizer, sum_: Callable[[Gradients], Gradients]) -> None:
    """Makes an optimizer sum gradients over the replicas before anything else, once for each update.

    Keras clips each replica's gradients before it sums them, and accumulates them inside a cond, where
    TensorFlow forbids an exchange (keras-team/keras#20582). This replaces `_backend_apply_gradients` of
    keras/src/optimizers/base_optimizer.py.
    """

    def update(gradients: Gradients, variables: Variables) -> None:
        summed = optimizer._clip_gradients(sum_(gradients))
        optimizer._apply_weight_decay(variables)
        optimizer._backend_update_step(summed, variables, optimizer.learning_rate)

    def accumulate(gradients: Gradients, variables: Variables) -> None:
        """Accumulates each replica's own gradients, and exchanges their mean at the last of the steps."""
        steps = optimizer.gradient_accumulation_steps
        sums = [optimizer._accumulated_gradients[optimizer._get_variable_index(v)] for v in variables]

        def finish(*gradients: tf.Tensor) -> None:
            update([(new + sum_) / steps for new, sum_ in zip(gradients, sums, strict=True)], variables)
            optimizer._backend_reset_gradient_accumulators()

        def collect(*gradients: tf.Tensor) -> None:
            optimizer._backend_increment_gradient_accumulators(list(gradients), sums)

        last = tf.equal((optimizer._iterations + 1) % steps, 0)
        branch(last, finish, collect, [tf.convert_to_tensor(gradient) for gradient in gradients])

    def apply(gradients: Gradients, variables: Variables) -> None:
        (accumulate if optimizer.gradient_accumulation_steps else update)(gradients, variables)
        if optimizer.use_ema:
            optimizer._update_model_variables_moving_average(optimizer._trainable_variables)
            if frequency := optimizer.ema_overwrite_frequency:
                branch(tf.equal((optimizer.iterations + 1) % frequency, 0), overwrite, lambda: None, [])

    def overwrite() -> None:
        for variable, average in moving_averages(optimizer):
            variable.value.assign(average.value)

    optimizer._backend_apply_gradients = apply
    # `apply` has summed them already.
    optimizer._all_reduce_sum_gradients = lambda gradients_and_variables: gradients_and_variables


def agree_on_finite(optimizer: keras.optimizers.LossScaleOptimizer, replicas: int) -> None:
    """Makes a loss-scaling optimizer skip a step on all replicas when the gradients of one overflow.

    Keras checks each replica's own gradients as if they were summed
    (keras/src/optimizers/loss_scale_optimizer.py, `check_finite`); the others would wait for a replica that
    skips alone.
    """
    check_own = optimizer.check_finite

    def check_finite(gradients: Gradients) -> tf.Tensor:
        finite = tf.cast(check_own(gradients), tf.float32)
        total = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, finite)
        return tf.equal(total, float(replicas))

    optimizer.check_finite = check_finite


class OwnMetrics(keras.StatelessScope):  # type: ignore[misc]  # keras has no types
    """Scope in which a step has its own metric variables; all other variables are assigned as usual.

    Keras adds to a variable by a read and a write, which loses one of two workers' concurrent additions.
    Counters (`optimizer.iterations`) are incremented in one operation on their server.
    """

    def __init__(self, metrics: Variables, counters: Variables):
        zeros = [(variable, tf.zeros(variable.shape, variable.dtype)) for variable in metrics]
        # The scope must collect the losses that layers add.
        super().__init__(zeros, collect_losses=True, initialize_variables=False)
        self._counters = {id(counter) for counter in counters}

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Handles an assignment; called by Keras."""
        variable, value = update
        if id(variable) in self.state_mapping:
            super().add_update(update)
        elif id(variable) in self._counters:
            variable._value.assign_add(tf.ones((), variable.dtype))
        else:
            variable._direct_assign(value)

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor:
        """Returns the step's own value, else the variable shared by all workers; called by Keras."""
        return self.state_mapping.get(id(variable), variable._value)


def compiled_losses(model: keras.Model) -> list[Any]:
    """Returns the losses passed to `compile`, and those in a model's attributes for its own `train_step`."""
    passed = getattr(model, "loss", None)
    passed = list(passed.values()) if isinstance(passed, dict) else passed
    passed = passed if isinstance(passed, list | tuple) else [passed]
    whole = compile_utils.CompileLoss
    held = [
        value
        for value in vars(model).values()
        if isinstance(value, keras.Loss) and not isinstance(value, whole)
    ]
    return list({id(loss): loss for loss in (*passed, *held) if loss is not None}.values())


def compiled_metrics(model: keras.Model) -> list[Any]:
    """Returns the metrics as they were passed to `compile`; `Model.metrics` has them built."""
    compiled = getattr(model, "_compile_metrics", None)
    nested = compiled and (compiled._user_metrics, compiled._user_weighted_metrics)
    return [metric for metric in keras.tree.flatten(nested) if metric is not None]


def passed_metrics(model: keras.Model) -> Any:
    """Returns the metrics in the structure passed to `compile`; None for none, or with weighted ones."""
    compiled = getattr(model, "_compile_metrics", None)
    return None if compiled is None or compiled._user_weighted_metrics else compiled._user_metrics


def compute_loss(loss: Any, y_true: Any, y_pred: Any) -> Any:
    """Computes a loss passed to `compile` (a name, function or object) as `Model.compute_loss` does."""
    return compile_utils.get_loss(loss, y_true, y_pred)(y_true, y_pred)


def wrapped_function(loss_or_metric: Any) -> Any:
    """Returns the function that a loss or metric wraps; any other one unchanged."""
    if isinstance(loss_or_metric, LossFunctionWrapper):
        return loss_or_metric.fn
    is_wrapper = isinstance(loss_or_metric, keras.metrics.MeanMetricWrapper)
    return loss_or_metric._fn if is_wrapper else loss_or_metric


def compiled_name(loss_or_metric: Any) -> str:
    """Returns the name of a loss or metric passed to `compile` as a name, function or object."""
    inner = wrapped_function(loss_or_metric)
    if isinstance(inner, str):
        return inner
    return str(getattr(inner, "__name__", type(inner).__name__))


def attached_logits(outputs: Any) -> Any:
    """Returns the logits that a softmax or sigmoid of Keras attaches to its outputs; None for others."""
    return getattr(outputs, "_keras_logits", None)


def refuse_lambda(error: Exception, what: str, otherwise: str) -> None:
    """Raises ModelError for a Lambda layer, if loading a model in safe mode failed on one."""
    if "Lambda" in str(error):
        raise ModelError(
            f"{what} has a Lambda layer, whose code is not run from a file; make it a layer of its own, with "
            f"@keras.saving.register_keras_serializable(); {otherwise}"
        ) from error


def short_message(error: BaseException) -> str:
    """Returns an exception of Keras in one line, without colours, arguments and configurations."""
    text = re.sub(r"\x1b\[\d+m", "", str(error)).rpartition("Exception encountered: ")[2]
    for end in ("Arguments received by", "Full object config", "config={", "Make sure custom classes"):
        text = text.partition(end)[0]
    text = " ".join(text.split()).rstrip(". ")
    return re.sub(r"^'(.*)'$", r"\1", text) or type(error).__name__


def describe_model_error(error: BaseException) -> str:
    """Returns one line on an exception of a user's model; errors of Keras are shortened."""
    of_keras = "Exception encountered: " in str(error) or "Arguments received by" in str(error)
    return short_message(error) if of_keras else plugins.describe(error)


@contextlib.contextmanager
def saveable(model: keras.Model) -> Iterator[None]:
    """Saves the model without its compilation if that cannot be serialized (functools.partial)."""
    try:
        json.dumps(model.get_compile_config())
    except Exception:  # the user's code runs here and may raise anything
        model.get_compile_config = lambda: None
        try:
            yield
        finally:
            del model.get_compile_config
    else:
        yield


def weigh_output_losses(model: keras.Model) -> None:
    """Makes the loss metrics of each output of a built model exact means over the examples.

    Keras weighs them by the batch's static size, if known, or averages over batches
    (keras/src/trainers/compile_utils.py, `CompileLoss.call`; keras-team/keras#19363).
    """
    compiled = model._compile_loss
    if compiled is None or not compiled.metrics:
        return
    batch = threading.local()
    call = compiled.call

    def counted_call(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        batch.examples = tf.shape(tf.nest.flatten(y_pred)[0])[0]
        return call(y_true, y_pred, sample_weight)

    compiled.call = counted_call

    def weigh(update: Callable[..., Any]) -> Callable[..., Any]:
        return lambda value, sample_weight=None: update(
            value, sample_weight=batch.examples if sample_weight is None else sample_weight
        )

    for metric in compiled.metrics:
        if metric is not None:
            metric.update_state = weigh(metric.update_state)


@contextlib.contextmanager
def undo_patches(model: keras.Model) -> Iterator[None]:
    """Restores, at the end, the methods that training replaces on a model's optimizers and losses."""
    losses_ = model._compile_loss
    owners = [*optimizers(model), *([losses_, *losses_.metrics] if losses_ is not None else [])]
    before = [dict(vars(owner)) for owner in owners]
    try:
        yield
    finally:
        for owner, kept in zip(owners, before, strict=True):
            for name, value in list(vars(owner).items()):
                if isinstance(value, types.FunctionType) and kept.get(name) is not value:
                    object.__delattr__(owner, name)


@contextlib.contextmanager
def build_only(model: keras.Model) -> Iterator[None]:
    """Makes a step that runs or is traced in the context create its variables, and change none.

    Variables and other objects of a layer's `build` are created outside the traced function and replica.
    Optimizers are built, but neither exchange nor apply gradients.
    """
    initialize, build = keras.Variable._initialize_with_initializer, keras.layers.Layer._maybe_build

    def initialize_outside(self: keras.Variable, initializer: Callable[..., Any]) -> None:
        with tf.init_scope():
            initialize(self, initializer)

    def build_outside(self: keras.layers.Layer, call_spec: Any) -> None:
        with contextlib.nullcontext() if is_default(self.build) else tf.init_scope():
            build(self, call_spec)

    def build_optimizer(optimizer: keras.Optimizer, _: Any, variables: Any = None) -> None:
        if variables is not None and not optimizer.built:
            optimizer.build(list(variables))

    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(keras.Variable, "_initialize_with_initializer", initialize_outside))
        stack.enter_context(patched(keras.layers.Layer, "_maybe_build", build_outside))
        if model.run_eagerly:
            stack.enter_context(patched(keras.Variable, "assign", lambda self, value: value))
        for optimizer in optimizers(model):
            optimizer.apply = functools.partial(build_optimizer, optimizer)
            stack.callback(object.__delattr__, optimizer, "apply")
        yield
