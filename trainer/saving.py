"""Saved models: written by all replicas together and kept by the chief, and loaded safely."""

from __future__ import annotations

import json
from pathlib import Path

import keras

from shardline.trainer import plugins
from shardline.trainer.errors import ModelError
from shardline.trainer.models import import_string

MODEL_FILE = "model.keras"
SETTINGS_FILE = "settings.json"
HISTORY_FILE = "history.csv"
METRICS_FILE = "metrics.json"


def save_model(model: keras.Model, directory: Path, *, scratch: Path | None) -> None:
    """Saves model.keras atomically. Collective: every replica must call it at the same point.

    Args:
        model: The model.
        directory: Where the chief writes.
        scratch: Where a replica other than the chief writes; None on the chief.
    """
    target = scratch or directory
    temporary = target / f".tmp-{MODEL_FILE}"
    model.save(temporary)
    temporary.replace(target / MODEL_FILE)


def load_model(path: Path) -> keras.Model:
    """Loads a .keras file in safe mode.

    Classes that the user registered (`keras.saving.register_keras_serializable`) are found because the
    module of the model function, named in the settings.json beside the file, is imported first.

    Raises:
        ModelError: When the file is missing, damaged, or needs code that safe mode refuses.
    """
    if not path.is_file():
        raise ModelError(f"no model file {path}; train one with 'shardline train DATASET OUT'")
    _import_model_module(path.with_name(SETTINGS_FILE))
    try:
        return keras.models.load_model(path, safe_mode=True)
    except Exception as error:  # Keras raises many kinds: of zip files, of HDF5, of deserialisation
        if "Lambda" in str(error):
            raise ModelError(
                f"{path} has a Lambda layer, whose code is not run from a file; make it a registered layer "
                "and train again"
            ) from error
        raise ModelError(f"cannot load {path}: {str(error).splitlines()[0]}") from error


def _import_model_module(settings: Path) -> None:
    if not settings.is_file():
        return
    try:
        model = json.loads(settings.read_text(encoding="utf-8"))["model"]
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(f"cannot read {settings}: {error!r}; train the model again") from None
    plugins.load(import_string(model), "model", ModelError)
