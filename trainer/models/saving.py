"""Saved models: saving, loading in safe mode, and warm starts."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import zipfile
from itertools import zip_longest
from pathlib import Path
from typing import Any

import keras

from shardline.trainer import models
from shardline.trainer.base import files, plugins
from shardline.trainer.base.errors import ModelError, RunError
from shardline.trainer.base.plugins import import_string
from shardline.trainer.base.settings import MODEL_FILE, SETTINGS_FILE, initial_model_file, read_entry
from shardline.trainer.keras_compat.keras_internals import all_layers, refuse_lambda, saveable, short_message
from shardline.trainer.keras_compat.tensorflow_internals import local_mean_reads
from shardline.trainer.manifest import LABEL
from shardline.trainer.models.interface import HEADS, Heads

METRICS_FILE = "metrics.json"


def save_model(model: keras.Model, directory: Path) -> None:
    """Saves model.keras atomically. For the chief alone, once all replicas have merged their variables."""
    variables = [*model.variables, *(model.optimizer.variables if model.optimizer else ())]
    size = sum(math.prod(variable.shape) * 4 for variable in variables)
    with (
        saveable(model),
        local_mean_reads(model.distribute_strategy, sums=True),
        files.replacing(directory / MODEL_FILE, size) as temporary,
    ):
        model.save(temporary)


def load_model(path: Path, *, function: str = "", compiled: bool = False) -> keras.Model:
    """Loads a .keras file in safe mode. The file, and settings.json next to it, are not trusted.

    Args:
        path: The file.
        function: Model function by which it was built, pkg.module:name, or "". Its module is imported first
            and registers the user's classes; a function that a file names is not imported.
        compiled: Whether loss and metrics are loaded too, if they can be.

    Raises:
        ModelError: The file is missing or damaged, or needs code that safe mode refuses or is not named.
    """
    if not path.is_file():
        raise ModelError(f"no model file {path}; train one with 'shardline train DATASET OUT'")
    with contextlib.suppress(zipfile.BadZipFile, OSError), zipfile.ZipFile(path) as archive:
        for item in archive.infolist():  # Keras reads it whole
            if item.filename.endswith(".json") and item.file_size > files.MAX_TEXT_BYTES:
                raise ModelError(
                    f"{path} is no model: {item.filename} in it has {item.file_size:,} bytes; train it again"
                )
    settings = path.with_name(SETTINGS_FILE)
    recorded = read_entry(settings, "model", "train the model again") if settings.is_file() else ""
    reference = import_string(function or recorded) if function or recorded else ""
    if function or reference.startswith(f"{models.__name__}."):
        plugins.load(reference, "model", ModelError)
    if compiled:
        with contextlib.suppress(Exception):  # custom losses and metrics
            return keras.models.load_model(path, safe_mode=True)
    try:
        return keras.models.load_model(path, safe_mode=True, compile=False)
    except Exception as error:  # Keras raises many kinds: of zip files, of HDF5, of deserialisation
        refuse_lambda(error, str(path), "then train again")
        hint = ""
        if recorded and not function and recorded == reference:
            hint = (
                f"; it may need the code of {recorded}, which is not run because a file names it: if you "
                f"trust it, set --model-function {recorded}, or import it where your model is built"
            )
        kind = RunError if files.cannot_read_now(error) else ModelError
        raise kind(f"cannot load {path}: {short_message(error)}{hint}") from error


def read_recorded_heads(model_file: Path) -> Heads | None:
    """Returns the heads of a model that its training has recorded; None if there are none."""
    settings = model_file.with_name(SETTINGS_FILE)
    if not settings.is_file():
        return None
    value = files.read_json(settings, ModelError).get("head")
    recorded = value if isinstance(value, dict) else {LABEL: value}
    heads = {str(name): str(head) for name, head in recorded.items() if head in HEADS}
    return heads if heads and len(heads) == len(recorded) else None


def warm_start(model: keras.Model, path: str) -> None:
    """Sets the weights of a built model to those of a saved one; its optimizer keeps its initial state.

    `path`, also gs://, is a .keras file, a directory with model.keras, or a champion's directory with
    champion.json. A ModelError names the first weight that differs in name or shape.
    """
    file = initial_model_file(path)
    source = load_model(file)
    pairs = list(zip_longest(source.weights, model.weights))
    for number, (theirs, ours) in enumerate(pairs, start=1):
        if _describe(theirs) != _describe(ours):
            raise ModelError(
                f"{file} is of another architecture: weight {number} is {_describe(theirs)} there and "
                f"{_describe(ours)} in the model; start from a model of the same function and "
                "the same number of classes"
            )
    for theirs, ours in pairs:
        ours.assign(keras.ops.convert_to_numpy(theirs))
    # Vocabularies are not weights, and means and variances take effect when they are finalized.
    lookups = _lookups(source), _lookups(model)
    if [type(layer) for layer in lookups[0]] != [type(layer) for layer in lookups[1]]:
        raise ModelError(
            f"{file} has {len(lookups[0])} vocabularies and the model {len(lookups[1])}: a column has too "
            "many values for one now, or had before; train without initial_model"
        )
    for theirs, ours in zip(*lookups, strict=True):
        if _vocabulary(theirs) != _vocabulary(ours):
            ours.set_vocabulary(theirs.get_vocabulary(include_special_tokens=False))
    refresh_adapted(model)


def _describe(weight: keras.Variable | None) -> str:
    # Its path begins with names that Keras numbers by creation, dense_3: only the last part is comparable.
    return "missing" if weight is None else f"{weight.name} {tuple(weight.shape)}"


def adapted_layers(model: keras.Model, *, numbers: bool = False) -> dict[str, str]:
    """Returns a digest of adapted layers, which must be the same in a resumed run; {} without such layers.

    With `numbers` it includes means and variances, which are weights and restored from a checkpoint.
    """
    facts: list[Any] = [_vocabulary(layer) for layer in _lookups(model)]
    facts += [list(layer.bin_boundaries) for layer in _layers(model, keras.layers.Discretization)]
    if numbers:
        normalizations = _layers(model, keras.layers.Normalization)
        facts += [
            [keras.ops.convert_to_numpy(weight).tolist() for weight in n.weights] for n in normalizations
        ]
    if not facts:
        return {}
    text = json.dumps(facts, default=str)
    return {"adapted layers": "sha256:" + hashlib.sha256(text.encode()).hexdigest()[:16]}


def refresh_adapted(model: keras.Model) -> None:
    """Finalizes normalization layers whose means and variances were assigned as weights."""
    for layer in _layers(model, keras.layers.Normalization):
        layer.finalize_state()


def _lookups(model: keras.Model) -> list[Any]:
    return _layers(model, keras.layers.StringLookup, keras.layers.IntegerLookup)


def _layers(model: keras.Model, *kinds: type) -> list[Any]:
    return [layer for layer in all_layers(model) if isinstance(layer, kinds)]


def _vocabulary(layer: Any) -> list[str]:
    return [str(word) for word in layer.get_vocabulary()]
