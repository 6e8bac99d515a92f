"""One process of several: what it computes by itself of a model that all of them train together."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.losses import loss as losses

from shardline.trainer.errors import SettingsError
from shardline.trainer.keras_internals import all_layers, replaced
from shardline.trainer.replica_losses import undivided_losses
from shardline.trainer.tensorflow_internals import has_several_workers, own_replica

_COMPUTING = ("evaluate", "predict", "predict_on_batch", "test_on_batch")
_TRAINING = ("fit", "train_on_batch")

# Examples of each half of a batch on which a loss is tried, and how far rounding alone takes halves apart.
_TRIED = 4
_ROUNDING, _ROUNDING_OF_HALF = 1e-3, 3e-2


def let_keras_compute() -> None:
    """Makes Keras' own methods do under a strategy of several workers what they do in one process.

    There `evaluate` and `test_on_batch` fail (keras-team/keras#20585), and `predict` meets the others for
    each batch (keras/src/backend/tensorflow/trainer.py, `_multi_worker_concat`). What trains is refused.
    """
    for names, do in ((_COMPUTING, _computed), (_TRAINING, _refused)):
        for name in names:
            setattr(keras.Model, name, _here(getattr(keras.Model, name), do))


def _here(method: Callable[..., Any], do: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method of Keras that `do` takes over where several workers have the model."""

    @functools.wraps(method)
    def call(model: keras.Model, *args: Any, **options: Any) -> Any:
        # None of a model that was built outside of a strategy.
        if has_several_workers(getattr(model, "_distribute_strategy", None)):
            return do(method, model, *args, **options)
        return method(model, *args, **options)

    return call


def _computed(method: Callable[..., Any], model: keras.Model, *args: Any, **options: Any) -> Any:
    strategy = model.distribute_strategy
    replica = own_replica(strategy)

    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        """Lets variables be made, which may not be inside a replica."""
        replica.__exit__(None, None, None)
        try:
            with strategy.scope():
                yield
        finally:
            replica.__enter__()

    alone = types.SimpleNamespace(
        run=lambda step, args: step(*args), experimental_distribute_dataset=lambda data: data, scope=scope
    )
    with replica, undivided_losses(), replaced(model, "_distribute_strategy", alone):
        return method(model, *args, **options)


def _refused(method: Callable[..., Any], model: keras.Model, *args: Any, **options: Any) -> Any:
    raise SettingsError(
        f"{method.__name__} of Keras would train {model.name!r} on each process by itself, apart from the "
        "others; train it with shardline.fit, which takes the same arguments"
    )


def own_statistics(model: keras.Model) -> list[str]:
    """Returns the layers that normalize each replica's part of a batch by that part's own statistics."""
    kind = keras.layers.BatchNormalization
    found = [layer for layer in all_layers(model) if isinstance(layer, kind)]
    return [layer.name for layer in found if layer.trainable and not layer.synchronized]


def takes_batch_as_one(model: keras.Model, batch: Any) -> bool | None:
    """Whether a loss of a batch is another than the mean of its halves', on which two replicas would train.

    It is tried on some examples, and leaves the model as it is. None says that it cannot be known: the model
    is not computed so, or draws random numbers.
    """
    tolerance = _ROUNDING if model.compute_dtype == "float32" else _ROUNDING_OF_HALF
    try:
        rows = min(int(tf.nest.flatten(batch)[0].shape[0]) // 2, _TRIED)
        parts = slice(2 * rows), slice(rows), slice(rows, 2 * rows)
        whole, *halves = (_losses(model, batch, part) for part in parts)
        if np.allclose(whole, np.mean(halves, axis=0), rtol=tolerance, atol=1e-6):
            return False
        again = _losses(model, batch, slice(2 * rows))
    except Exception:  # the user's code runs here and may raise anything
        return None
    return True if np.array_equal(whole, again) else None


def _losses(model: keras.Model, batch: Any, rows: slice) -> np.ndarray[Any, Any]:
    """Returns the loss of some rows of a batch, and the losses that layers have added, outside of training.

    Reductions are plain means, since `replica_losses` makes all others exact.
    """
    part = tf.nest.map_structure(lambda one: one[rows], batch)
    x, y, weight = keras.utils.unpack_x_y_sample_weight(part)
    # It has no value of its own of a variable, for which regularizers of weights ask it.
    state = [(one, one.value) for one in model.trainable_variables if one.regularizer]
    with (
        own_replica(model.distribute_strategy),
        undivided_losses(),
        replaced(losses, "reduce_weighted_values", lambda values, *_, **__: tf.reduce_mean(values)),
        replaced(keras.random.SeedGenerator, "next", None),  # whoever draws fails
        keras.StatelessScope(state, collect_losses=True, initialize_variables=False),
    ):
        given = model(x, training=False)
        loss = model.compute_loss(x=x, y=y, y_pred=given, sample_weight=weight, training=False)
        return np.array([float(one) for one in (loss, *model.losses)])
