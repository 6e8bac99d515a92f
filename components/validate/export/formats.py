"""Conversion of an export to ONNX and LiteRT by Keras, for devices and servers without TensorFlow.

Each converted model is measured like the export: on every example of the split, from its pixels, in the clean
process. TensorFlow is imported only when a model is converted.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shardline.components import model_store
from shardline.components.validate.metrics import MAIN
from shardline.components.validate.metrics.evaluation import Converted
from shardline.trainer.base.errors import ModelError, SettingsError
from shardline.trainer.base.progress import report
from shardline.trainer.manifest import CLASS, MULTILABEL, Manifest

if TYPE_CHECKING:
    from shardline.components.validate.evaluate import Assessment, Examples
    from shardline.components.validate.export.signatures import CleanProcess


Format = Literal["onnx", "litert"]
#: The file of each format, and the modules that convert to it and run it.
FORMATS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "onnx": (model_store.ONNX_FILE, ("tf2onnx", "onnx", "onnxruntime")),
    "litert": (model_store.LITERT_FILE, ("ai_edge_litert",)),
}


def check_formats(names: Sequence[str], manifest: Manifest | None = None, *, table: bool = False) -> None:
    """Checks formats before any work is done, with the manifest where it is known.

    Raises SettingsError when the packages of one are not installed; ModelError when the data are
    a table, or have several labels.
    """
    for name in names:
        if missing := [module for module in FORMATS[name][1] if util.find_spec(module) is None]:
            raise SettingsError(
                f"the format {name} needs {', '.join(missing)}, which is not installed; "
                "pip install 'shardline[formats]'"
            )
    is_table = table or (manifest is not None and "image" not in manifest.inputs)
    if names and (is_table or (manifest and len(manifest.labels) > 1)):
        data = "are a table" if is_table else "have several labels"
        raise ModelError(
            f"only models of images with one label can be converted to {', '.join(names)}; the data {data}"
        )


def convert_export(
    name: str, out: Path, answer: Any, parts: Sequence[Any], manifest: Manifest
) -> dict[str, Any]:
    """Converts what the signature `serving_tensor` answers, and returns the record of it for export.json.

    `parts` have the variables of `answer`. Raises ModelError when one of them cannot be converted.
    """
    import keras
    import tensorflow as tf

    from shardline.components.validate.export.signatures import PIXELS, TENSOR, name_outputs

    output, shape = name_outputs(manifest.labels)[manifest.labels[0].name][0], manifest.inputs["image"].shape

    class Served(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.parts = parts

        def call(self, pixels: Any) -> dict[str, Any]:
            return {output: answer(pixels)[output]}

    file = out / FORMATS[name][0]
    try:
        served = Served()
        served(tf.zeros((1, *shape), tf.uint8))
        spec = [tf.TensorSpec([None, *shape], tf.uint8, PIXELS)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the converters, about numpy
            served.export(file, format=name, input_signature=spec, verbose=False)
    except Exception as error:  # the converters raise many kinds, with long messages
        raise _refusal(name, str(error) or type(error).__name__) from error
    return {"file": file.name, "bytes": file.stat().st_size, "signature": TENSOR}


def measure_formats(
    out: Path, formats: Iterable[str], examples: Examples, exported: Assessment, clean: CleanProcess
) -> Assessment:
    """Returns the assessment of an export with measurements of its formats in `out` on the same examples.

    Raises ModelError when a converted model does not run.
    """
    converted = tuple(_measure(name, out, examples, exported, clean) for name in formats)
    return replace(exported, evaluation=replace(exported.evaluation, formats=converted))


def _measure(
    name: str, out: Path, examples: Examples, exported: Assessment, clean: CleanProcess
) -> Converted:
    import numpy as np

    from shardline.components.validate.export import signatures
    from shardline.trainer.data.examples import parse_batch

    file, manifest = out / FORMATS[name][0], examples.manifest
    report("validate", f"evaluating {file.name} on the same examples")
    (label,) = manifest.labels

    def answers() -> Iterator[Any]:
        for number, batch in enumerate(examples.batches(signatures.REQUESTS)):
            pixels: Any = parse_batch(batch.records, manifest.inputs, manifest.labels)[0]
            yield clean.ask_pixels(file, pixels.numpy(), calls=0 if number else signatures.CALLS)

    try:
        rows = [row for answer in answers() for row in answer]
    except ModelError as error:
        raise _refusal(name, str(error).rpartition("alone: ")[2]) from None
    seconds = [row["seconds"] for row in rows if "seconds" in row]
    ours: Any = exported.outcomes[label.name]
    found = [row["outputs"] for row in rows if "outputs" in row]
    outputs = np.array(found, ours.outputs.dtype).reshape(ours.outputs.shape)
    theirs = replace(ours, outputs=outputs)
    if label.kind == MULTILABEL:
        theirs = replace(theirs, predicted=(outputs >= signatures.THRESHOLD).astype(np.int64))
    if label.kind == CLASS:
        theirs = replace(theirs, predicted=outputs.argmax(axis=1))
    value, interval = theirs.score()[MAIN[label.kind]], theirs.intervals().get(MAIN[label.kind])
    p50, p95 = (float(np.percentile(seconds, p)) * 1e3 for p in (50, 95))
    deviations = signatures.read_deviations(manifest).get(label.name, ())
    gap = signatures.max_difference(ours.outputs, outputs, deviations)
    return Converted(name, value, interval, file.stat().st_size / 1e6, p50, p95, gap)


def _refusal(name: str, reason: str) -> ModelError:
    first = reason.strip().splitlines()[0]
    return ModelError(f"the model cannot be converted to {name}: {first}; leave it out")
