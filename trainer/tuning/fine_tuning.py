"""Fine-tuning: layers that are frozen at first and trained later."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import keras

from shardline.trainer.errors import SettingsError
from shardline.trainer.tuning.optimizer import innermost

# BatchNormalization stays frozen, with the statistics that it was trained on: new ones of small batches
# would undo what the loaded weights know. https://keras.io/guides/transfer_learning/
_STAY_FROZEN = (keras.layers.BatchNormalization,)


class FrozenLayers:
    """The layers that a model function has frozen, and that are to be trained from some epoch on."""

    def __init__(self, model: keras.Model):
        """Looks for them.

        Raises:
            SettingsError: When no layer with weights is frozen.
        """
        self._model = model
        layers = list(model._flatten_layers(include_self=False))
        self._layers = [layer for layer in layers if not layer.trainable]
        if not any(layer.weights or not layer.built for layer in self._layers):
            raise SettingsError(
                "unfreeze_at_epoch is set, but the model has no frozen layers: give weights, or set "
                "trainable=False on the layers that are to be trained later"
            )

    @contextlib.contextmanager
    def thawed(self) -> Iterator[None]:
        """Makes the layers trainable for a moment, so that the optimizer is built for their weights too."""
        self.unfreeze()
        try:
            yield
        finally:
            for layer in self._layers:
                layer.trainable = False

    def unfreeze(self) -> None:
        """Makes the layers trainable, all but BatchNormalization."""
        for layer in self._layers:
            layer.trainable = True
        for layer in self._layers:
            if isinstance(layer, _STAY_FROZEN):
                layer.trainable = False


class Unfreeze(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Unfreezes layers at the start of an epoch. For every replica."""

    def __init__(self, frozen: FrozenLayers, epoch: int, learning_rate: float, changed: Callable[[], None]):
        """Sets when and how.

        Args:
            frozen: The layers.
            epoch: From 1.
            learning_rate: From then on; 0 keeps it.
            changed: Called when the set of trainable weights has changed.
        """
        super().__init__()
        self._frozen: FrozenLayers | None = frozen
        self._epoch = epoch
        self._learning_rate = learning_rate
        self._changed = changed

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Unfreezes in the chosen epoch, or in a later one where the run has resumed."""
        if self._frozen is None or epoch + 1 < self._epoch:
            return
        self._frozen.unfreeze()
        self._frozen = None
        if self._learning_rate and epoch + 1 == self._epoch:
            innermost(self.model.optimizer).learning_rate = self._learning_rate
        self._changed()
