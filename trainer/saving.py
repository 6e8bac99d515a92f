"""Saved models: written by all replicas together and kept by the chief, loaded safely, and warm starts."""

from __future__ import annotations

import contextlib
import zipfile
from itertools import zip_longest
from pathlib import Path

import keras

from shardline.trainer import files, models, plugins
from shardline.trainer.data.features import LABEL
from shardline.trainer.errors import ModelError
from shardline.trainer.keras_compilation import reason, refuse_lambda, saveable
from shardline.trainer.models import adapted, import_string
from shardline.trainer.models.head import Heads, is_head

MODEL_FILE = "model.keras"
SETTINGS_FILE = "settings.json"
HISTORY_FILE = "history.csv"
METRICS_FILE = "metrics.json"


def save_model(model: keras.Model, directory: Path, *, scratch: Path | None) -> None:
    """Saves model.keras atomically. Collective: every replica must call it at the same point.

    The chief, which has no scratch directory, writes to `directory`, the others to `scratch`.
    """
    with saveable(model), files.replacing((scratch or directory) / MODEL_FILE) as temporary:
        model.save(temporary)


def load_model(path: Path, *, function: str = "", compiled: bool = False) -> keras.Model:
    """Loads a .keras file in safe mode, without its loss and metrics; `compiled` with them, if they can be.

    Args:
        path: The file.
        function: The model function by which it was built, pkg.module:name, or "". Its module is imported
            first and registers the user's classes (`keras.saving.register_keras_serializable`). The file
            and the settings.json beside it may be anybody's: what they name is not imported.
        compiled: Whether loss and metrics are loaded too, if they can be.

    Raises:
        ModelError: When the file is missing, damaged, or needs code that safe mode refuses or nobody named.
    """
    if not path.is_file():
        raise ModelError(f"no model file {path}; train one with 'shardline train DATASET OUT'")
    _refuse_bomb(path)
    recorded = _recorded_function(path)
    given = import_string(function or recorded) if function or recorded else ""
    if function or given.startswith(f"{models.__name__}."):
        plugins.load(given, "model", ModelError)
    if compiled:
        with contextlib.suppress(Exception):  # losses and metrics of one's own
            return keras.models.load_model(path, safe_mode=True)
    try:
        return keras.models.load_model(path, safe_mode=True, compile=False)
    except Exception as error:  # Keras raises many kinds: of zip files, of HDF5, of deserialisation
        refuse_lambda(error, str(path), "then train again")
        hint = ""
        if recorded and not function and recorded == given:
            hint = (
                f"; it may need the code of {recorded}, which is not run because a file names it: if you "
                f"trust it, give it with --model-function {recorded}, or import it where your model is built"
            )
        raise ModelError(f"cannot load {path}: {reason(error)}{hint}") from error


def _refuse_bomb(path: Path) -> None:
    """Refuses a file whose description would fill the memory: Keras reads it whole."""
    with contextlib.suppress(zipfile.BadZipFile, OSError), zipfile.ZipFile(path) as archive:
        for item in archive.infolist():
            if item.filename.endswith(".json") and item.file_size > files.MAX_TEXT_BYTES:
                raise ModelError(
                    f"{path} is no model: {item.filename} in it has {item.file_size:,} bytes; train it again"
                )


def _recorded_function(model_file: Path) -> str:
    """Returns the model function that the settings.json beside a file names; "" where there is none."""
    settings = model_file.with_name(SETTINGS_FILE)
    return _read_entry(settings, "model", "train the model again") if settings.is_file() else ""


def read_recorded_heads(model_file: Path) -> Heads | None:
    """Returns what a model's outputs are by label, as its training has recorded it; None where it has not."""
    settings = model_file.with_name(SETTINGS_FILE)
    if not settings.is_file():
        return None
    found = files.read_json(settings, ModelError).get("head")
    given = found if isinstance(found, dict) else {LABEL: found}
    heads = {str(name): str(said) for name, said in given.items() if is_head(said)}
    return heads if heads and len(heads) == len(given) else None


def _read_entry(file: Path, name: str, advice: str) -> str:
    value = files.read_json(file, ModelError).get(name)
    if not isinstance(value, str):
        raise ModelError(f"{file} has no text {name!r}, it has {value!r}; {advice}")
    return value


_CHAMPION_FILE = "champion.json"


def warm_start(model: keras.Model, path: str) -> None:
    """Gives a built model the weights of a saved one; its optimizer starts anew.

    `path`, also gs://, is a .keras file, a directory that holds model.keras, or a champion's directory, whose
    champion.json names the one in force.

    Raises:
        ModelError: As `load_model`; or the first weight that differs in name or shape.
    """
    file = _model_file(files.local_path(path))
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
    adapted.copy(source, model, str(file))


def _model_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    champion = path / _CHAMPION_FILE
    if not champion.is_file():
        return path / MODEL_FILE
    version = Path(_read_entry(champion, "path", "register a model again"))
    if version.is_absolute() or ".." in version.parts:
        raise ModelError(f"{champion} names a version outside its directory: {version}")
    return path / version / MODEL_FILE


def _describe(weight: keras.Variable | None) -> str:
    # Its path begins with names that Keras numbers as they come, dense_3, so the last part has to do.
    return "missing" if weight is None else f"{weight.name} {tuple(weight.shape)}"
