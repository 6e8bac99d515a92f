"""Conversions of an export for devices and servers without TensorFlow: LiteRT (TFLite) and ONNX.

Each is measured as the export is: on every example of the split, from its pixels.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from shardline.components import model_store
from shardline.components.validate.answers import largest_gap, name_outputs, read_deviations
from shardline.components.validate.classes import ClassOutcomes
from shardline.components.validate.evaluate import Examples, Measured, Outcomes
from shardline.components.validate.evaluation import Converted, Interval
from shardline.components.validate.formats import FORMATS, check_installed, refuse_table
from shardline.components.validate.metrics import MAIN
from shardline.components.validate.resampling import share_interval
from shardline.components.validate.served import REQUESTS, time_calls
from shardline.components.validate.signatures import PIXELS, TENSOR, read_batches
from shardline.trainer import files
from shardline.trainer.data.decode import parse_batch
from shardline.trainer.data.manifest import Manifest
from shardline.trainer.errors import ModelError
from shardline.trainer.progress import say

# Both converters know all operations of Keras' layers at this level, and all present runtimes have it.
_ONNX_OPSET = 17

_MB = 1e6

#: Pixels, uint8 [n, height, width, channels], to probabilities, float32 [n, classes].
Pixels = npt.NDArray[np.uint8]
Predict = Callable[[Pixels], npt.NDArray[np.float32]]

#: Examples by which the ranges of numbers are found that an int8 model has to hold.
REPRESENTATIVE = 256


def check_formats(names: Sequence[str], manifest: Manifest) -> None:
    """Checks formats before any work is done for them.

    Raises SettingsError when one is unknown or its modules are missing, ModelError when the data are a table
    or have several labels.
    """
    check_installed(names)
    if "image" not in manifest.inputs:
        refuse_table(names)
    if names and len(manifest.labels) > 1:
        raise ModelError(
            f"only models of one label can be converted to {', '.join(names)}, and the dataset has "
            f"{', '.join(label.name for label in manifest.labels)}; use the SavedModel"
        )


def convert(
    name: str, out: Path, manifest: Manifest, samples: Sequence[bytes], representative: Sequence[bytes]
) -> dict[str, Any]:
    """Converts the SavedModel in `out`, compares the result with it, and returns what export.json says of it.

    Args:
        name: Name of the format.
        out: Directory with the SavedModel, which gets the file.
        manifest: Manifest of the dataset.
        samples: Serialized tf.train.Example; "max_difference" is the largest absolute difference of a
            probability over them, None without any.
        representative: The same, of the training split: int8 finds the ranges of numbers in them.

    Raises:
        ModelError: When a part of the model cannot be converted.
    """
    to, saved_model = FORMATS[name], out / model_store.SAVED_MODEL
    pixels = (batch.numpy() for _, batch in read_batches(manifest, representative))
    try:
        content = _WAYS[name][0](saved_model, pixels)
        # tf2onnx writes operations that it does not know as they are: only loading tells.
        predict = load(name, content)
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


def load(name: str, content: bytes) -> Predict:
    """Returns the predicting function of a converted model."""
    return _WAYS[name][1](content)


def measure_formats(
    out: Path, formats: Sequence[str], examples: Examples, exported: Measured
) -> tuple[Converted, ...]:
    """Measures the formats in `out` on the examples on which the export itself was measured."""
    found = []
    for name in formats:
        say("validate", f"evaluating {FORMATS[name].file} on the same examples")
        found.append(_measure(name, out, examples, exported))
    return tuple(found)


def _measure(name: str, out: Path, examples: Examples, exported: Measured) -> Converted:
    content = (out / FORMATS[name].file).read_bytes()
    predict = load(name, content)
    seconds = time_calls(lambda some: predict(some.numpy()), next(_pixels(examples)), 1)
    said = np.concatenate([predict(some.numpy()) for some in _pixels(examples)])
    (ours,) = exported.outcomes.values()
    value, interval = _quality(ours, said)
    p50, p95 = (float(np.percentile(seconds, p)) * 1e3 for p in (50, 95))
    return Converted(
        name=name,
        value=value,
        interval=interval,
        size_mb=len(content) / _MB,
        latency_p50_ms=p50,
        latency_p95_ms=p95,
        max_difference=largest_gap(ours.said, said.reshape(ours.said.shape), _deviations(examples.manifest)),
    )


def _quality(exported: Outcomes, said: npt.NDArray[np.float32]) -> tuple[float, Interval]:
    """Returns the metric that counts first of the answers of a converted model, and its interval."""
    if isinstance(exported, ClassOutcomes):
        right = int((said.argmax(axis=1) == exported.labels).sum())
        return right / len(said), share_interval(right, len(said), exported.copies)
    same: Any = exported
    found = replace(same, said=said.reshape(exported.said.shape).astype(exported.said.dtype))
    metric = MAIN[exported.label.kind]
    return found.score()[metric], found.intervals()[metric]


def _deviations(manifest: Manifest) -> Sequence[float]:
    return read_deviations(manifest).get(manifest.labels[0].name, ())


def _pixels(examples: Examples) -> Iterator[tf.Tensor]:
    for batch in examples.batches(REQUESTS):
        yield parse_batch(batch.records, examples.manifest.inputs, examples.manifest.labels)[0]


def _compare(predict: Predict, saved_model: Path, manifest: Manifest, samples: Sequence[bytes]) -> float:
    loaded = tf.saved_model.load(str(saved_model))
    serve = loaded.signatures[TENSOR]
    (names,) = name_outputs(manifest.labels).values()

    def gap(pixels: tf.Tensor) -> float:
        expected = serve(**{PIXELS: pixels})[names[0]].numpy()
        return largest_gap(expected, predict(pixels.numpy()).reshape(expected.shape), _deviations(manifest))

    return max(gap(pixels) for _, pixels in read_batches(manifest, samples))


def _to_tflite(saved_model: Path, _: Iterator[Pixels]) -> bytes:
    return bytes(_tflite_converter(saved_model).convert())


def _to_int8(saved_model: Path, pixels: Iterator[Pixels]) -> bytes:
    """Quantizes weights and activations; what has no operation on whole numbers stays as it is."""
    converter = _tflite_converter(saved_model)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: (
        (TENSOR, {PIXELS: image[np.newaxis]}) for batch in pixels for image in batch
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorFlow's own interpreter, which counts them, is deprecated
        return bytes(converter.convert())


def _tflite_converter(saved_model: Path) -> Any:
    return tf.lite.TFLiteConverter.from_saved_model(str(saved_model), signature_keys=[TENSOR])


def _load_tflite(content: bytes) -> Predict:
    interpreter = importlib.import_module("ai_edge_litert.interpreter").Interpreter(model_content=content)
    runner = interpreter.get_signature_runner(TENSOR)
    return lambda pixels: np.asarray(runner(**{PIXELS: pixels})["probabilities"])


def _to_onnx(saved_model: Path, _: Iterator[Pixels]) -> bytes:
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


_WAYS: dict[str, tuple[Callable[[Path, Iterator[Pixels]], bytes], Callable[[bytes], Predict]]] = {
    "tflite": (_to_tflite, _load_tflite),
    "int8": (_to_int8, _load_tflite),
    "onnx": (_to_onnx, _load_onnx),
}
