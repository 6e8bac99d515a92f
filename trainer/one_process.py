"""One process of several: what it computes by itself of a model that all of them train together."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras

from shardline.trainer.errors import SettingsError
from shardline.trainer.keras_internals import all_layers, replaced
from shardline.trainer.replica_losses import undivided_losses
from shardline.trainer.tensorflow_internals import has_several_workers, own_replica

_COMPUTING = ("evaluate", "predict", "predict_on_batch", "test_on_batch")
_TRAINING = ("fit", "train_on_batch")


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
