"""Own logs: what a step of the user's own returns beside metrics, over all replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from shardline.trainer.errors import ModelError
from shardline.trainer.keras_internals import flat_logs, noting_results, random_by_replica, returns_own_logs

#: Shapes of metrics by name; () for a number.
Shapes = dict[str, tuple[int, ...]]


class OwnLogs:
    """What a `train_step` or `test_step` of the user's own returns beside metrics: the last values.

    Attributes:
        in_place: Whether the step returns other names than the metrics have, so that these are not shown.
        shapes: Names and shapes of what is shown in their place.
    """

    def __init__(
        self,
        model: keras.Model,
        step: Callable[[Any], Any],
        strategy: tf.distribute.Strategy,
        batches: Iterator[Any],
        *,
        sized: bool = False,
    ):
        """Traces a step that is not Keras' own, to learn the names, types and shapes of what it returns.

        A step that is to run eagerly may be of the kind that cannot be traced: its metrics alone are shown.
        """
        self.in_place = False
        self.shapes: Shapes = {}
        self._kept: dict[str, tf.Variable] = {}
        self._metrics: dict[str, keras.metrics.Metric] = {}
        if not returns_own_logs(step) or model.run_eagerly:
            return
        with noting_results(model) as results:
            found = _returned(step, strategy, batches, sized=sized)
        self.in_place = found.keys() != flat_logs(model.get_metrics_result()).keys()
        if self.in_place:
            self.shapes = {name: tuple(value.shape) for name, value in found.items()}
            self._metrics = {
                name: results[id(value)] for name, value in found.items() if id(value) in results
            }
            with strategy.scope():
                self._kept = {
                    name: _replica_variable(shape)
                    for name, shape in self.shapes.items()
                    if name not in self._metrics
                }

    def keep(self, logs: Mapping[str, Any], weight: tf.Tensor) -> None:
        """Keeps a replica's values, inside of it, with its weight among all (1 for an equal share)."""
        if self.in_place:
            flat = flat_logs(logs)
            for name, variable in self._kept.items():
                variable.assign(tf.cast(flat[name], tf.float32) * weight)

    def read(self) -> dict[str, tf.Tensor]:
        """Returns the means over all replicas, and results of metrics as they are over all of them."""
        kept = {name: tf.convert_to_tensor(variable) for name, variable in self._kept.items()}
        return {**kept, **{name: metric.result() for name, metric in self._metrics.items()}}


def _returned(
    step: Callable[[Any], Any], strategy: tf.distribute.Strategy, batches: Iterator[Any], *, sized: bool
) -> dict[str, tf.Tensor]:
    """Returns the numbers that a step returns by name, as one replica traces it; a ModelError for no dict."""
    found: dict[str, tf.Tensor] = {}

    def take(data: Any) -> None:
        found.update(known_numbers(step, step(data[0] if sized else data)))

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def once(batches: Iterator[Any]) -> None:
        with random_by_replica():
            strategy.run(take, args=(next(batches),))

    once.get_concrete_function(batches)
    return found


def known_numbers(step: Callable[[Any], Any], logs: Any) -> dict[str, tf.Tensor]:
    """Returns, of what a step has returned, the numbers by name whose shapes are known while it is traced.

    A ModelError says that it was no dict.
    """
    if not isinstance(logs, Mapping):
        raise ModelError(
            f"{getattr(step, '__name__', 'step')} of the model returned {type(logs).__name__}, not a "
            'dict; return numbers by name such as {"loss": loss}, as Keras wants it'
        )
    values = {name: tf.convert_to_tensor(value) for name, value in flat_logs(logs).items()}
    return {
        name: value
        for name, value in values.items()
        if value.shape.is_fully_defined() and (value.dtype.is_floating or value.dtype.is_integer)
    }


def _replica_variable(shape: tf.TensorShape) -> tf.Variable:
    """Returns a variable of which each replica has its own value, and all together the mean."""
    return tf.Variable(
        tf.zeros(shape),
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.MEAN,
    )
