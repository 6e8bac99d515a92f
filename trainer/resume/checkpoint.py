"""Checkpoints: what a restarted job continues from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from trainer import files
from trainer.errors import SettingsError

_IDENTITY_FILE = "run.json"


class Checkpoints:
    """Saves and restores model, optimizer and epoch. Every replica takes part; the chief's copy is kept."""

    def __init__(
        self, model: keras.Model, directory: Path, *, scratch: Path | None, identity: Mapping[str, Any]
    ):
        """Prepares the directory. Must be called inside the strategy's scope.

        Args:
            model: Compiled and built.
            directory: Where checkpoints are read from, and where the chief writes them.
            scratch: Where a replica other than the chief writes; None on the chief.
            identity: What makes this run this run; another run's checkpoints are refused.

        Raises:
            SettingsError: When the directory holds checkpoints of another run.
        """
        self._directory = directory
        self._epoch = tf.Variable(0, dtype=tf.int64, trainable=False)
        # As plain lists: from the model object TensorFlow would find its weights, but not the random state
        # of dropout.
        self._checkpoint = tf.train.Checkpoint(
            model=[variable.value for variable in model.variables],
            optimizer=[variable.value for variable in model.optimizer.variables],
            epoch=self._epoch,
        )
        _claim(directory, dict(identity), write=scratch is None)
        self._manager = tf.train.CheckpointManager(self._checkpoint, str(scratch or directory), max_to_keep=2)

    def restore(self) -> int:
        """Restores the newest checkpoint and returns the number of epochs done, 0 when there is none."""
        newest = tf.train.latest_checkpoint(str(self._directory))
        if newest is None:
            return 0
        self._checkpoint.restore(newest).assert_existing_objects_matched()
        return int(self._epoch.numpy())

    def save(self, epochs_done: int) -> None:
        """Saves a checkpoint. Collective: every replica must call it at the same point."""
        self._epoch.assign(epochs_done)
        self._manager.save()


def _claim(directory: Path, identity: dict[str, Any], *, write: bool) -> None:
    path = directory / _IDENTITY_FILE
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        differing = sorted(key for key in identity if found.get(key) != identity[key])
        if differing:
            raise SettingsError(
                f"{directory} holds checkpoints of another run: "
                + ", ".join(f"{key} was {found.get(key)!r}, is {identity[key]!r}" for key in differing)
                + "; choose another directory or delete that one"
            )
    elif write:
        directory.mkdir(parents=True, exist_ok=True)
        files.write_json(path, identity)
