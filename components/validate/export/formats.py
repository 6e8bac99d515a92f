"""Conversion of an export to LiteRT and ONNX, for devices and servers without TensorFlow.

Each converted model is measured like the export: on every example of the split, from its pixels. TensorFlow
is imported only when a model is converted.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardline.components import model_store
from shardline.components.validate.metrics.evaluation import Converted
from shardline.components.validate.metrics.metrics import MAIN
from shardline.trainer.base import files
from shardline.trainer.base.errors import ModelError, SettingsError
from shardline.trainer.base.progress import report
from shardline.trainer.data.features import CLASS, MULTILABEL
from shardline.trainer.data.manifest import Manifest

if TYPE_CHECKING:
    from shardline.components.validate.evaluate import Assessment, Examples

# The converter supports all operations of Keras' layers at this opset, and all current runtimes have it.
_ONNX_OPSET = 17

_MB = 1e6

#: Pixels, uint8 [n, height, width, channels], to probabilities or numbers, float32 [n, outputs].
Predict = Callable[[Any], Any]

#: Examples from which the converter calibrates the ranges of an int8 model.
REPRESENTATIVE = 256


@dataclass(frozen=True)
class Format:
    """One format: its file, the extra that installs `modules`, and the package whose release is recorded."""

    file: str
    extra: str
    modules: tuple[str, ...]
    package: str


FORMATS = {
    "tflite": Format(model_store.TFLITE_FILE, "litert", ("ai_edge_litert",), "tensorflow"),
    "int8": Format(model_store.INT8_FILE, "litert", ("ai_edge_litert",), "tensorflow"),
    "onnx": Format(model_store.ONNX_FILE, "onnx", ("tf2onnx", "onnx", "onnxruntime"), "tf2onnx"),
}


def check_names(names: Iterable[str]) -> None:
    """Raises SettingsError when a format is unknown."""
    for name in names:
        if name not in FORMATS:
            raise SettingsError(f"no format {name!r}; there are {', '.join(FORMATS)}")


def check_installed(names: Sequence[str], *, table: bool = False) -> None:
    """Checks formats before any work is done.

    Raises SettingsError when one is unknown, or its packages are not installed; ModelError when the data are
    a table.
    """
    check_names(names)
    for name in names:
        if missing := [module for module in FORMATS[name].modules if util.find_spec(module) is None]:
            raise SettingsError(
                f"the format {name} needs {', '.join(missing)}, which is not installed; "
                f"pip install 'shardline[{FORMATS[name].extra}]'"
            )
    if names and table:
        raise ModelError(
            f"only models of images can be converted to {', '.join(names)}, and the data are a table; "
            "use the SavedModel"
        )


def check_formats(names: Sequence[str], manifest: Manifest) -> None:
    """Checks formats for a dataset: as `check_installed`, and that it has one label (ModelError)."""
    check_installed(names, table="image" not in manifest.inputs)
    if names and len(manifest.labels) > 1:
        raise ModelError(
            f"only models of one label can be converted to {', '.join(names)}, and the dataset has "
            f"{', '.join(label.name for label in manifest.labels)}; use the SavedModel"
        )


def convert(name: str, out: Path, manifest: Manifest, representative: Sequence[bytes]) -> dict[str, Any]:
    """Converts the SavedModel in `out`, and returns the record of it for export.json.

    `representative` are serialized tf.train.Example of the training split, from which int8 is calibrated.
    Raises ModelError when a part of the model cannot be converted.
    """
    from shardline.components.validate.export.predictions import name_outputs
    from shardline.components.validate.export.signatures import TENSOR, read_batches

    target, (label,) = FORMATS[name], manifest.labels
    saved_model = str(out / model_store.SAVED_MODEL)
    try:
        if name == "onnx":
            content = _to_onnx(saved_model)
        else:
            pixels = (batch.numpy() for _, batch in read_batches(manifest, representative))
            content = _to_tflite(saved_model, pixels if name == "int8" else None)
        # tf2onnx passes unsupported operations through: only loading shows them.
        load(name, content, name_outputs(manifest.labels)[label.name][0])
    except Exception as error:  # the converters raise many kinds, with long messages
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ModelError(
            f"the model cannot be converted to {name}: {reason.strip()}; leave it out"
        ) from error
    files.write_bytes(out / target.file, content)
    return {
        "file": target.file,
        "bytes": len(content),
        "converter": f"{target.package} {metadata.version(target.package)}",
        "signature": TENSOR,
    }


def load(name: str, content: bytes, output: str = "probabilities") -> Predict:
    """Returns a function that predicts with a converted model, and returns this output of its signature."""
    import numpy as np

    from shardline.components.validate.export.signatures import PIXELS, TENSOR

    if name == "onnx":
        runtime = importlib.import_module("onnxruntime")
        session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
        return lambda pixels: np.asarray(session.run([output], {PIXELS: pixels})[0])
    interpreter = importlib.import_module("ai_edge_litert.interpreter").Interpreter(model_content=content)
    runner = interpreter.get_signature_runner(TENSOR)
    return lambda pixels: np.asarray(runner(**{PIXELS: pixels})[output])


def measure_formats(
    out: Path, formats: Iterable[str], examples: Examples, exported: Assessment
) -> Assessment:
    """Returns the assessment of an export with measurements of its formats in `out` on the same examples."""
    converted = tuple(_measure(name, out, examples, exported) for name in formats)
    return replace(exported, evaluation=replace(exported.evaluation, formats=converted))


def _measure(name: str, out: Path, examples: Examples, exported: Assessment) -> Converted:
    import numpy as np

    from shardline.components.validate.export import predictions
    from shardline.components.validate.export.signatures import REQUESTS, time_calls
    from shardline.trainer.data.decode import parse_batch

    report("validate", f"evaluating {FORMATS[name].file} on the same examples")
    manifest = examples.manifest
    (label,) = manifest.labels

    def pixels() -> Iterator[Any]:
        for batch in examples.batches(REQUESTS):
            yield parse_batch(batch.records, manifest.inputs, manifest.labels)[0]

    content = (out / FORMATS[name].file).read_bytes()
    predict = load(name, content, predictions.name_outputs(manifest.labels)[label.name][0])
    seconds = time_calls(lambda some: predict(some.numpy()), next(pixels()), 1)
    ours: Any = exported.outcomes[label.name]
    outputs = np.concatenate([predict(some.numpy()) for some in pixels()]).reshape(ours.outputs.shape)
    theirs = replace(ours, outputs=outputs.astype(ours.outputs.dtype))
    if label.kind == MULTILABEL:
        theirs = replace(theirs, predicted=(outputs >= predictions.THRESHOLD).astype(np.int64))
    if label.kind == CLASS:
        theirs = replace(theirs, predicted=outputs.argmax(axis=1))
        value, interval, _ = theirs.measure_slice(ours.true >= 0, decided=True)
    else:
        value, interval = theirs.score()[MAIN[label.kind]], theirs.intervals().get(MAIN[label.kind])
    p50, p95 = (float(np.percentile(seconds, p)) * 1e3 for p in (50, 95))
    deviations = predictions.read_deviations(manifest).get(label.name, ())
    gap = predictions.max_difference(ours.outputs, outputs, deviations)
    return Converted(name, value, interval, len(content) / _MB, p50, p95, gap)


def _to_tflite(saved_model: str, pixels: Iterator[Any] | None) -> bytes:
    """Converts to LiteRT; with pixels to calibrate on, to whole numbers of 8 bits where possible."""
    import tensorflow as tf

    from shardline.components.validate.export.signatures import PIXELS, TENSOR

    converter = tf.lite.TFLiteConverter.from_saved_model(saved_model, signature_keys=[TENSOR])
    if pixels is None:
        return bytes(converter.convert())
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: (
        (TENSOR, {PIXELS: image[None]}) for batch in pixels for image in batch
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorFlow's interpreter, which calibrates, is deprecated
        return bytes(converter.convert())


def _to_onnx(saved_model: str) -> bytes:
    import tensorflow as tf

    from shardline.components.validate.export.signatures import PIXELS, TENSOR

    loaded = tf.saved_model.load(saved_model)
    serve = loaded.signatures[TENSOR]
    spec = [serve.structured_input_signature[1][PIXELS]]
    predict = tf.function(lambda pixels: serve(**{PIXELS: pixels}), input_signature=spec, autograph=False)
    converter = importlib.import_module("tf2onnx").convert
    converted, _ = converter.from_function(predict, input_signature=spec, opset=_ONNX_OPSET)
    return bytes(converted.SerializeToString())
