"""Formats into which an export can be converted, by the name that a user gives; needs no TensorFlow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import util

from shardline.components import model_store
from shardline.trainer.errors import ModelError, SettingsError


@dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
        file: Name of the file in the output directory.
        extra: Shardline's extra that installs `modules`.
        modules: What converts the model and runs it.
        package: Package whose release is recorded.
    """

    file: str
    extra: str
    modules: tuple[str, ...]
    package: str


_LITERT = ("litert", ("ai_edge_litert",), "tensorflow")

FORMATS = {
    "tflite": Format(model_store.TFLITE_FILE, *_LITERT),
    "int8": Format(model_store.INT8_FILE, *_LITERT),
    "onnx": Format(model_store.ONNX_FILE, "onnx", ("tf2onnx", "onnx", "onnxruntime"), "tf2onnx"),
}


def check_names(names: Iterable[str]) -> None:
    """Raises SettingsError when a format is unknown."""
    for name in names:
        if name not in FORMATS:
            raise SettingsError(f"no format {name!r}; there are {', '.join(FORMATS)}")


def check_installed(names: Iterable[str]) -> None:
    """Raises SettingsError when a format is unknown, or what it needs is not installed."""
    check_names(names := tuple(names))
    for name in names:
        if missing := [module for module in FORMATS[name].modules if util.find_spec(module) is None]:
            raise SettingsError(
                f"the format {name} needs {', '.join(missing)}, which is not installed; "
                f"pip install 'shardline[{FORMATS[name].extra}]'"
            )


def refuse_table(names: Sequence[str]) -> None:
    """Raises ModelError when there is a format, for data that are a table."""
    if names:
        raise ModelError(
            f"only models of images can be converted to {', '.join(names)}, and the data are a table; "
            "use the SavedModel"
        )
