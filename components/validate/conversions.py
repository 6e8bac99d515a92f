"""Conversions of an export for devices and servers without TensorFlow: LiteRT (TFLite) and ONNX."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from shardline.components import model_store
from shardline.components.validate.signatures import PIXELS, TENSOR, largest_gap, read_batches
from shardline.trainer import files
from shardline.trainer.data.manifest import Manifest
from shardline.trainer.errors import ModelError, SettingsError

# Both converters know all operations of Keras' layers at this level, and all present runtimes have it.
_ONNX_OPSET = 17

#: Pixels, uint8 [n, height, width, channels], to probabilities, float32 [n, classes].
Predict = Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.float32]]


@dataclass(frozen=True)
class Format:
    """A format into which an export can be converted.

    Attributes:
        file: Name of the file in the output directory.
        extra: Shardline's extra that installs `modules`.
        package: Package whose release is recorded.
        convert: Makes the content of the file from the directory of a SavedModel.
        load: Makes a predicting function from that content.
    """

    file: str
    extra: str
    modules: tuple[str, ...]
    package: str
    convert: Callable[[Path], bytes]
    load: Callable[[bytes], Predict]


def check_formats(names: Sequence[str], manifest: Manifest) -> None:
    """Checks formats before any work is done for them.

    Raises SettingsError when one is unknown or its modules are missing, ModelError when the data are a table.
    """
    for name in names:
        if name not in FORMATS:
            raise SettingsError(f"no format {name!r}; there are {', '.join(FORMATS)}")
        if missing := [module for module in FORMATS[name].modules if util.find_spec(module) is None]:
            raise SettingsError(
                f"the format {name} needs {', '.join(missing)}, which is not installed; "
                f"pip install 'shardline[{FORMATS[name].extra}]'"
            )
    if names and "image" not in manifest.inputs:
        raise ModelError(
            f"only models of images can be converted to {', '.join(names)}, and the dataset is a table; "
            "use the SavedModel"
        )


def convert(name: str, out: Path, manifest: Manifest, samples: Sequence[bytes]) -> dict[str, Any]:
    """Converts the SavedModel in `out`, compares the result with it, and returns what export.json says of it.

    "max_difference" is the largest absolute difference of a probability over the samples, serialized
    tf.train.Example; None without samples. Raises ModelError when a part of the model cannot be converted.
    """
    to, saved_model = FORMATS[name], out / model_store.SAVED_MODEL
    try:
        content = to.convert(saved_model)
        # tf2onnx writes operations that it does not know as they are: only loading tells.
        predict = to.load(content)
    except Exception as error:  # The converters raise many kinds, with long texts.
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ModelError(
            f"the model cannot be converted to {name}: {reason.strip()}; leave it out"
        ) from error
    files.write_bytes(out / to.file, content)
    return {
        "file": to.file,
        "bytes": len(content),
        "converter": f"{to.package} {metadata.version(to.package)}",
        "signature": TENSOR,
        "max_difference": _compare(predict, saved_model, manifest, samples) if samples else None,
    }


def _compare(predict: Predict, saved_model: Path, manifest: Manifest, samples: Sequence[bytes]) -> float:
    loaded = tf.saved_model.load(str(saved_model))
    serve = loaded.signatures[TENSOR]
    return max(
        largest_gap(serve(**{PIXELS: pixels})["probabilities"].numpy(), predict(pixels.numpy()))
        for _, pixels in read_batches(manifest, samples)
    )


def _to_tflite(saved_model: Path) -> bytes:
    converter = tf.lite.TFLiteConverter.from_saved_model(str(saved_model), signature_keys=[TENSOR])
    return bytes(converter.convert())


def _load_tflite(content: bytes) -> Predict:
    interpreter = importlib.import_module("ai_edge_litert.interpreter").Interpreter(model_content=content)
    runner = interpreter.get_signature_runner(TENSOR)
    return lambda pixels: np.asarray(runner(**{PIXELS: pixels})["probabilities"])


def _to_onnx(saved_model: Path) -> bytes:
    loaded = tf.saved_model.load(str(saved_model))
    serve = loaded.signatures[TENSOR]
    spec = [serve.structured_input_signature[1][PIXELS]]

    def predict(pixels: tf.Tensor) -> Any:
        return serve(**{PIXELS: pixels})

    converted, _ = importlib.import_module("tf2onnx").convert.from_function(
        tf.function(predict, input_signature=spec, autograph=False), input_signature=spec, opset=_ONNX_OPSET
    )
    return bytes(converted.SerializeToString())


def _load_onnx(content: bytes) -> Predict:
    runtime = importlib.import_module("onnxruntime")
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return lambda pixels: np.asarray(session.run(["probabilities"], {PIXELS: pixels})[0])


#: Formats by the name that a user gives.
FORMATS = {
    "tflite": Format(
        model_store.TFLITE_FILE, "litert", ("ai_edge_litert",), "tensorflow", _to_tflite, _load_tflite
    ),
    "onnx": Format(
        model_store.ONNX_FILE, "onnx", ("tf2onnx", "onnx", "onnxruntime"), "tf2onnx", _to_onnx, _load_onnx
    ),
}
