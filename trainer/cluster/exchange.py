"""How the replicas of a synchronous strategy exchange gradients, so that N of them are one with N batches.

Keras 3 clips the gradients of each replica before it sums them, accumulates them inside a branch where
TensorFlow forbids an exchange, asks only the first replica whether they are finite, and counts a smaller
last batch as much as a full one. Here the sum comes first, exact and once for each update; what follows
works on the same numbers everywhere. Keras' side is keras/src/optimizers/base_optimizer.py
(`_backend_apply_gradients`) and keras/src/backend/tensorflow/optimizer.py.

Periodic averaging (local SGD): each replica takes steps of its own, and every few, weights are averaged.

An explicit choice: it is another algorithm than synchronous training (Stich, "Local SGD converges fast and
communicates little", 2019). Optimizers keep their own slots on each replica; a checkpoint averages them too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from shardline.trainer.cluster.collectives import Gradients, Summation, sum_by_tensorflow
from shardline.trainer.errors import ModelError

Variables = Sequence[keras.Variable]


class GradientExchange:
    """Makes every optimizer of a model exchange gradients exactly. With one replica it does nothing."""

    def __init__(self, model: keras.Model, summation: Summation) -> None:
        """Changes methods of the model's optimizers, as attributes of these very objects.

        Their class, configuration and saved form stay as they are. An optimizer that is not built yet will
        be when its first step is traced.

        Args:
            model: Compiled and built in the scope of the strategy that trains it.
            summation: Sums the gradients of all replicas.

        Raises:
            ModelError: When the model has float8 weights, which Keras updates on each replica for itself.
        """
        self._local = threading.local()
        self._sum = summation
        self._replicas: int = model.distribute_strategy.num_replicas_in_sync
        if self._replicas > 1:
            _check_weights(model)
        for optimizer in optimizers(model):
            self._prepare_apply(optimizer)
            if optimizer.built:
                self._adopt(optimizer)

    @contextlib.contextmanager
    def weighted(self, weight: tf.Tensor) -> Iterator[None]:
        """Multiplies this replica's gradients by a weight while the context lasts.

        Entered in a replica around its `train_step`. With the weight `local examples * replicas / examples
        of all replicas` a batch divided into 5 and 4 examples gives the gradients of the whole batch of 9,
        for losses that are means over the batch (the default of every Keras loss).

        Args:
            weight: float32 scalar; 0 for a replica without any examples, whose gradients then count
                nothing even when they are NaN.
        """
        self._local.weight = weight
        try:
            yield
        finally:
            self._local.weight = None

    def _prepare_apply(self, optimizer: keras.Optimizer) -> None:
        original = optimizer.apply

        def apply(grads: Gradients, trainable_variables: Variables | None = None) -> None:
            if not optimizer.built and trainable_variables is not None:
                self._build(optimizer, list(trainable_variables))
            weight = getattr(self._local, "weight", None)
            if weight is not None and self._replicas > 1:
                grads = _weighted(grads, weight)
            original(grads, trainable_variables)

        optimizer.apply = apply

    def _build(self, optimizer: keras.Optimizer, variables: Variables) -> None:
        """Creates the optimizer's variables outside the replicas, the only place where they may be created.

        An optimizer that only the model's own train_step knows comes here at its first step.
        """

        def across(strategy: tf.distribute.Strategy) -> None:
            with tf.init_scope(), strategy.scope():
                optimizer.build(variables)
            self._adopt(optimizer)

        tf.distribute.get_replica_context().merge_call(across)

    def _adopt(self, optimizer: keras.Optimizer) -> None:
        if self._replicas == 1:
            return
        for inner in _inner(optimizer):
            _exchange_before_clipping(inner, self._sum)
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            _agree_on_finite(optimizer, self._replicas)


def _check_weights(model: keras.Model) -> None:
    for variable in model.trainable_variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise ModelError(
                f"weight {variable.path!r} is quantized to float8 for training, which several replicas "
                "cannot keep in step; train it on one replica, or in bfloat16"
            )


def optimizers(model: keras.Model) -> list[keras.Optimizer]:
    """Returns the model's optimizers: the compiled one and those it holds as attributes of its own."""
    found: dict[int, keras.Optimizer] = {}
    for value in vars(model).values():
        items = value.values() if isinstance(value, dict) else value
        for item in items if isinstance(value, dict | list | tuple) else (value,):
            if isinstance(item, keras.optimizers.Optimizer):
                found[id(item)] = item
    return list(found.values())


def accumulators(model: keras.Model) -> list[keras.Variable]:
    """Returns the sums of gradients that each replica keeps for itself between two updates."""
    inner = [one for optimizer in optimizers(model) for one in _inner(optimizer)]
    return [sum_ for one in inner for sum_ in getattr(one, "_accumulated_gradients", None) or ()]


def _inner(optimizer: keras.Optimizer) -> list[keras.Optimizer]:
    """Returns the optimizers that really update variables, inside those that only delegate to them."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return _inner(optimizer.inner_optimizer)
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        return list(optimizer.optimizers)
    return [optimizer]


def _exchange_before_clipping(optimizer: keras.Optimizer, sum_: Summation) -> None:
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
        _branch(last, finish, collect, [tf.convert_to_tensor(gradient) for gradient in gradients])

    def apply(gradients: Gradients, variables: Variables) -> None:
        (accumulate if optimizer.gradient_accumulation_steps else update)(gradients, variables)
        if optimizer.use_ema:
            optimizer._update_model_variables_moving_average(optimizer._trainable_variables)
            _overwrite_with_average(optimizer)

    optimizer._backend_apply_gradients = apply
    # They are exchanged already.
    optimizer._all_reduce_sum_gradients = lambda gradients_and_variables: gradients_and_variables


def _overwrite_with_average(optimizer: keras.Optimizer) -> None:
    if not optimizer.ema_overwrite_frequency:
        return

    def overwrite() -> None:
        for variable, average in zip(
            optimizer._trainable_variables, optimizer._model_variables_moving_average, strict=True
        ):
            variable.value.assign(average.value)

    due = tf.equal((optimizer.iterations + 1) % optimizer.ema_overwrite_frequency, 0)
    _branch(due, overwrite, lambda: None, [])


def _agree_on_finite(optimizer: keras.Optimizer, replicas: int) -> None:
    check_own = optimizer.check_finite

    def check_finite(gradients: Gradients) -> tf.Tensor:
        """Whether the gradients of all replicas are finite; one that is alone in skipping would hang them."""
        finite = tf.cast(check_own(gradients), tf.float32)
        total = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, finite)
        return tf.equal(total, float(replicas))

    optimizer.check_finite = check_finite


def _branch(
    predicate: tf.Tensor, then: Callable[..., None], otherwise: Callable[..., None], args: list[tf.Tensor]
) -> None:
    """Runs one of two functions on every replica; the predicate must be the same on all.

    The branch is taken outside the replicas, where TensorFlow lets it contain an exchange: inside, a
    cond whose branches meet the other replicas (merge_call) is refused.
    """

    def run(function: Callable[..., Any], *arguments: Any) -> tf.Tensor:
        function(*arguments)
        return tf.constant(0)

    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        tf.cond(predicate, lambda: run(then, *args), lambda: run(otherwise, *args))
        return

    def across(strategy: tf.distribute.Strategy, predicate: Any, *args: Any) -> None:
        each = strategy.extended.call_for_each_replica

        def on_all(function: Callable[..., None]) -> tf.Tensor:
            each(function, args=args)
            return tf.constant(0)

        first = strategy.experimental_local_results(predicate)[0]
        tf.cond(first, lambda: on_all(then), lambda: on_all(otherwise))

    tf.distribute.get_replica_context().merge_call(across, args=(predicate, *args))


def _weighted(gradients: Gradients, weight: tf.Tensor) -> Gradients:
    """Multiplies gradients by a weight, which is 1, and costs nothing then, but for an epoch's last step."""
    own = [gradient for gradient in gradients if gradient is not None]

    def times() -> Gradients:
        return [_times(gradient, weight) for gradient in own]

    done = iter(tf.cond(tf.equal(weight, 1.0), lambda: [tf.identity(g) for g in own], times))
    return [None if gradient is None else next(done) for gradient in gradients]


def _times(gradient: tf.Tensor | tf.IndexedSlices, weight: tf.Tensor) -> tf.Tensor | tf.IndexedSlices:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_times(gradient.values, weight), gradient.indices, gradient.dense_shape)
    return tf.math.multiply_no_nan(gradient, tf.cast(weight, gradient.dtype))


def own_gradients(replicas: int) -> Summation:
    """Returns what takes the place of a sum where nothing is exchanged.

    Keras divides every replica's loss by the number of replicas; times that number, a replica's gradients are
    those of its own batch.
    """
    return lambda gradients: [_averaging_times(gradient, replicas) for gradient in gradients]


def _averaging_times(gradient: tf.Tensor | tf.IndexedSlices, factor: int) -> tf.Tensor | tf.IndexedSlices:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def make_average(
    strategy: tf.distribute.Strategy, model: keras.Model, summation: Summation
) -> Callable[[], None]:
    """Returns a function that gives every replica the mean of the trainable weights.

    A collective, to be called inside a replica.

    Args:
        strategy: The strategy of the run.
        model: Built in its scope.
        summation: Sums over the replicas.
    """
    return lambda: average(strategy, model.trainable_variables, summation)


def make_merge(
    strategy: tf.distribute.Strategy, model: keras.Model, merge: Callable[[], None]
) -> Callable[[], None]:
    """Returns a function that makes the replicas agree on all that each has for itself: before a checkpoint.

    A collective, to be called outside the replicas.

    Args:
        strategy: The strategy of the run.
        model: Built in its scope.
        merge: Does it for what synchronous replicas have for themselves.
    """

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def merge_weights() -> None:
        variables = [*model.trainable_variables, *_slots(model)]
        strategy.run(lambda: average(strategy, variables, sum_by_tensorflow))

    def merge_all() -> None:
        merge()
        merge_weights()

    return merge_all


def _slots(model: keras.Model) -> list[keras.Variable]:
    """Returns what optimizers remember of earlier steps, as far as it can be averaged."""
    found = [variable for optimizer in optimizers(model) for variable in optimizer.variables]
    return [one for one in found if keras.backend.is_float_dtype(one.dtype) and one.shape]


def average(
    strategy: tf.distribute.Strategy, variables: Sequence[keras.Variable], summation: Summation
) -> None:
    """Gives every replica the mean of variables that each has for itself; to be called inside a replica."""
    # identity: a variable's own read has no device in a graph, and the exchange asks for one.
    own: Gradients = [tf.identity(tf.convert_to_tensor(variable)) for variable in variables]
    means = [total / strategy.num_replicas_in_sync for total in summation(own)]

    def assign(strategy: tf.distribute.Strategy, *means: Any) -> None:
        for variable, mean in zip(variables, means, strict=True):
            strategy.extended.update(
                variable.value, lambda value, new: value.assign(new), args=(mean,), group=False
            )

    tf.__internal__.distribute.interim.maybe_merge_call(assign, strategy, *means)
