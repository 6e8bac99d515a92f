"""Keras' inside: every place where the trainer leaves Keras' documented interface, and why.

What is about compiling and building is in keras_compilation.py, about losses in replica_losses.py.
tests/trainer/test_internals.py notices when a workaround is no longer needed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.random import seed_generator
from keras.src.trainers import trainer
from keras.src.utils.python_utils import is_default, pythonify_logs

from shardline.trainer.base.errors import ModelError
from shardline.trainer.keras_compat.tensorflow_internals import branch

Gradients = list[tf.Tensor | tf.IndexedSlices]
Variables = Sequence[keras.Variable]


def build_symbolically(model: keras.Model, batch: Any) -> None:
    """Builds model, optimizer and metrics at once; `Model.build` leaves optimizer and metrics out."""
    model._symbolic_build(data_batch=batch)


def all_layers(model: keras.Model) -> Iterator[keras.layers.Layer]:
    """Yields all layers of a model, those inside of others too; `Model.layers` has the outermost only."""
    yield from model._flatten_layers(include_self=False)


def own_learning_rate(optimizer: keras.Optimizer) -> Any:
    """Returns an optimizer's schedule or variable; `learning_rate` gives the schedule's present value."""
    return optimizer._learning_rate


def has_batch_hooks(callback: keras.callbacks.Callback, kind: str) -> bool:
    """Whether a callback has a hook of every step ("train" or "test") that does something.

    Keras' own ModelCheckpoint has one also where it saves by epoch.
    """
    if isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_freq == "epoch":
        return False
    names = [f"on_{kind}_batch_begin", f"on_{kind}_batch_end"]
    names += ["on_batch_begin", "on_batch_end"] if kind == "train" else []
    return not all(is_default(getattr(callback, name)) for name in names)


def returns_custom_metrics(step: Callable[..., Any]) -> bool:
    """Whether a model's `train_step` or `test_step` is not Keras' own, which returns the model's metrics."""
    return getattr(step, "__func__", step) is not getattr(keras.Model, getattr(step, "__name__", ""), None)


@contextlib.contextmanager
def record_results(model: keras.Model) -> Iterator[dict[int, keras.metrics.Metric]]:
    """Yields a model's metrics by the ids of the results that they give meanwhile."""
    found: dict[int, keras.metrics.Metric] = {}
    values = []  # the id of one that is gone may be another's

    def note(metric: keras.metrics.Metric, result: Callable[[], Any]) -> Any:
        value = result()
        values.append(value)
        found[id(value)] = metric
        return value

    with contextlib.ExitStack() as stack:
        for metric in model.metrics:
            metric.result = functools.partial(note, metric, metric.result)
            stack.callback(vars(metric).pop, "result")
        yield found


def flat_logs(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns logs as callbacks get them: flat, sorted by name, numbers as floats, all else as it is."""
    flat: dict[str, Any] = pythonify_logs(logs)
    return flat


def random_state() -> keras.Variable:
    """Returns the state behind `keras.random` without a seed, created in the strategy's scope if need be."""
    return seed_generator.global_seed_generator().state


@contextlib.contextmanager
def record_jit_compile() -> Iterator[None]:
    """Notes what models that are compiled meanwhile ask of XLA, for `requested_jit_compile`.

    A model keeps only what Keras makes of it, and under a strategy that is False where it was "auto"
    (keras/src/trainers/trainer.py, `_resolve_auto_jit_compile`).
    """
    compile_ = trainer.Trainer.compile
    signature = inspect.signature(compile_)

    @functools.wraps(compile_)
    def noted(self: keras.Model, *args: Any, **options: Any) -> None:
        compile_(self, *args, **options)
        vars(self)["_asked_for_xla"] = signature.bind(self, *args, **options).arguments.get(
            "jit_compile", "auto"
        )

    with patched(trainer.Trainer, "compile", noted):
        yield


def requested_jit_compile(model: keras.Model) -> bool | str:
    """Returns the `jit_compile` that a model was compiled with: True, False or "auto"."""
    asked: bool | str = vars(model).get("_asked_for_xla", "auto")
    return asked


def supports_xla(model: keras.Model) -> bool:
    """Whether XLA can compile a model's layers, as `fit` finds it out for `jit_compile="auto"`."""
    return bool(trainer.model_supports_jit(model))


# Odd and large, so that no sum with it is a seed that another replica, layer or step has.
_NEXT_REPLICA = 0x9E3779B1


@contextlib.contextmanager
def random_per_replica() -> Iterator[None]:
    """Makes what is traced meanwhile, from outside the replicas, draw other numbers on each of them.

    Keras' generators start alike on all replicas and stay alike (keras/src/random/seed_generator.py); what is
    drawn from them gets the replica's number here, and the first replica's draws stay as they are.
    `keras.random` without a seed has a generator by thread, and replicas may have threads of their own: all
    take this thread's.
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


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Gives an attribute another value while the context lasts."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def optimizers(model: keras.Model) -> list[keras.Optimizer]:
    """Returns the model's optimizers: the compiled one, and those that it and models inside of it hold.

    Keras' own `train_step` uses the compiled one only: one that a part has kept, of its own compilation,
    counts where the model has a `train_step` of its own.
    """
    own_step = type(model).train_step is not keras.Model.train_step
    parts = model._flatten_layers() if own_step else [model]
    return list({id(one): one for part in parts for one in _optimizers_in(vars(part))}.values())


def _optimizers_in(value: Any) -> Iterator[keras.Optimizer]:
    if isinstance(value, keras.optimizers.Optimizer):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in list(value.values()) if isinstance(value, dict) else value:
            yield from _optimizers_in(item)


def accumulators(model: keras.Model) -> list[keras.Variable]:
    """Returns the sums of gradients that each replica keeps for itself between two updates."""
    found = updating_optimizers(model)
    return [sum_ for one in found for sum_ in getattr(one, "_accumulated_gradients", None) or ()]


def updating_optimizers(model: keras.Model) -> list[keras.Optimizer]:
    """Returns the optimizers that update the model's variables, inside those that only delegate to them."""
    return [one for optimizer in optimizers(model) for one in inner_optimizers(optimizer)]


def inner_optimizers(optimizer: keras.Optimizer) -> list[keras.Optimizer]:
    """Returns the optimizers that update variables, inside one that may only delegate to them."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return inner_optimizers(optimizer.inner_optimizer)
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        return list(optimizer.optimizers)
    return [optimizer]


def moving_averages(optimizer: keras.Optimizer) -> list[tuple[keras.Variable, keras.Variable]]:
    """Returns an optimizer's variables, each with its moving average; none where it keeps no averages."""
    if not (optimizer.use_ema and optimizer.built):  # the default of some MultiOptimizers has no weights
        return []
    averages = optimizer._model_variables_moving_average
    pairs = zip(optimizer._trainable_variables, averages, strict=True)
    return [(variable, average) for variable, average in pairs if average is not None]


def current_rates(model: keras.Model) -> list[Any]:
    """Returns the learning rates with which a model's optimizers take their next update."""
    return [one.learning_rate for one in updating_optimizers(model)]


def refuse_float8(model: keras.Model) -> None:
    """Refuses weights that Keras overwrites with their "gradient", on each replica for itself."""
    for variable in model.trainable_variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise ModelError(
                f"weight {variable.path!r} is quantized to float8 for training, which several replicas "
                "cannot keep in step; train it on one replica, or in bfloat16"
            )


def before_apply(
    optimizer: keras.Optimizer, prepare: Callable[[Gradients, Variables | None], Gradients]
) -> None:
    """Makes an optimizer apply what `prepare` returns for a step's gradients and variables."""
    original = optimizer.apply

    def apply(grads: Gradients, trainable_variables: Variables | None = None) -> None:
        original(prepare(grads, trainable_variables), trainable_variables)

    optimizer.apply = apply


def update_after_gradients(optimizer: keras.Optimizer) -> None:
    """Makes an optimizer update no weight before all gradients are known.

    TensorFlow copies a variable that is updated while an op is still to come that takes its old value
    (tensorflow/core/kernels/training_op_helpers.h, `PrepareToUpdateVariable`), as the gradients of the layer
    below do: a tenth of a step's time. Keras' own IdentityN of all gradients is optimized away.
    """

    def wait(gradients: Gradients, _: Variables | None) -> Gradients:
        known = [gradient for gradient in gradients if gradient is not None]
        with tf.control_dependencies(tf.nest.flatten(known, expand_composites=True)):
            return [None if gradient is None else tf.identity(gradient) for gradient in gradients]

    before_apply(optimizer, wait)


def before_gradient(
    optimizer: keras.Optimizer, weigh: Callable[[keras.Optimizer, tf.Tensor], tf.Tensor]
) -> None:
    """Makes an optimizer scale a loss to what `weigh` makes of it; Keras' `train_step` does so last."""
    original = optimizer.scale_loss
    optimizer.scale_loss = lambda loss: weigh(optimizer, original(loss))


def exchange_before_clipping(optimizer: keras.Optimizer, sum_: Callable[[Gradients], Gradients]) -> None:
    """Makes an optimizer sum gradients over the replicas first, once for each update.

    Keras clips each replica's gradients and sums them afterwards, and accumulates them inside a cond where
    TensorFlow forbids an exchange (keras-team/keras#20582). This replaces `_backend_apply_gradients` of
    keras/src/optimizers/base_optimizer.py.
    """

    def update(gradients: Gradients, variables: Variables) -> None:
        summed = optimizer._clip_gradients(sum_(gradients))
        optimizer._apply_weight_decay(variables)
        optimizer._backend_update_step(summed, variables, optimizer.learning_rate)

    def accumulate(gradients: Gradients, variables: Variables) -> None:
        """Adds up each replica's own gradients, and exchanges their mean in the last of every few steps."""
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
    # They are exchanged already.
    optimizer._all_reduce_sum_gradients = lambda gradients_and_variables: gradients_and_variables


def agree_on_finite(optimizer: keras.optimizers.LossScaleOptimizer, replicas: int) -> None:
    """Makes a loss-scaling optimizer skip a step on all replicas when the gradients of one overflow.

    Keras takes each replica's own for summed ones (keras/src/optimizers/loss_scale_optimizer.py,
    `check_finite`); a replica that skips alone would leave the others waiting.
    """
    check_own = optimizer.check_finite

    def check_finite(gradients: Gradients) -> tf.Tensor:
        finite = tf.cast(check_own(gradients), tf.float32)
        total = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, finite)
        return tf.equal(total, float(replicas))

    optimizer.check_finite = check_finite


class OwnMetrics(keras.StatelessScope):  # type: ignore[misc]  # keras has no types
    """Gives a step metric variables of its own while it lasts; all other variables are assigned as ever.

    Keras adds to a variable by reading it and writing it back, so that of two workers' additions at once
    one is lost. Counters (`optimizer.iterations`) are added to in one operation on their server.
    """

    def __init__(self, metrics: Variables, counters: Variables):
        zeros = [(variable, tf.zeros(variable.shape, variable.dtype)) for variable in metrics]
        # The losses that layers add go to the scope, or nowhere.
        super().__init__(zeros, collect_losses=True, initialize_variables=False)
        self._counters = {id(counter) for counter in counters}

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Takes an assignment, as Keras calls it."""
        variable, value = update
        if id(variable) in self.state_mapping:
            super().add_update(update)
        elif id(variable) in self._counters:
            variable._value.assign_add(tf.ones((), variable.dtype))
        else:
            variable._direct_assign(value)

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor:
        """Returns the step's own value, or the variable that all workers share."""
        return self.state_mapping.get(id(variable), variable._value)
