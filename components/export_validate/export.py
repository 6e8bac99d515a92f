"""Export: a Keras model becomes a SavedModel that takes what clients have."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from shardline.components.export_validate import layout, provenance, signatures
from shardline.components.export_validate.agreement import largest_difference
from shardline.components.export_validate.conversions import check_formats, convert
from shardline.components.export_validate.golden import make_golden_set
from shardline.components.export_validate.operations import check_operations
from shardline.trainer import files
from shardline.trainer.data.manifest import Manifest
from shardline.trainer.models.head import Head, read_head


def export_model(
    model: keras.Model,
    manifest: Manifest,
    out: Path,
    *,
    model_file: Path | None = None,
    samples: Sequence[bytes] = (),
    settings: Mapping[str, Any] | None = None,
    formats: Sequence[str] = (),
) -> None:
    """Writes `out`/saved_model, a copy of the model file and, when both are complete, `out`/export.json.

    The SavedModel has these signatures:

    * `serving_default` of images: `images`, a string tensor of shape [n] with whole encoded files (PNG, JPEG,
      BMP, first frame of a GIF) of any size; of a table: a tensor [n] per column, named after it;
    * `serving_tensor` of images: `pixels`, uint8 [n, height, width, channels];
    * `serving_example`: `examples`, a string tensor of shape [n] with serialized tf.train.Example.

    Each returns

    * `probabilities`: float32 [n, classes],
    * `label`: int64 [n], the most probable class,
    * `label_name`: string [n], its name.

    Decoding is the function that training uses, and is part of the graph. A softmax is added only to a
    model that gives logits (see `read_head`). The saved model needs nothing of Shardline to be loaded.

    A directory cannot be renamed on a Cloud Storage mount, so completeness is not told by the name of
    saved_model/ but by export.json, which is removed first and written last.

    Args:
        model: Takes uint8 images of the manifest's shape, or its columns, and gives one number per class.
        manifest: Of the dataset that the model was trained on.
        out: Output directory; made if it is not there. An earlier export in it is replaced.
        model_file: The model.keras that the model was loaded from.
        samples: Serialized tf.train.Example on which the export, loaded again, is compared with the model,
            and from which the golden set is taken.
        settings: Of the training, for export.json.
        formats: Into which `serving_tensor` is converted as well: "onnx", "tflite".

    Raises:
        ModelError: When the model does not fit the dataset or cannot be served, and nothing was written then;
            or when it cannot be converted.
        DatasetError: When one of the samples cannot be decoded.
        SettingsError: When `out` cannot be written to, or what a format needs is not installed.
    """
    check_formats(formats, manifest)
    head = read_head(model, manifest.info())
    functions = signatures.make_signatures(model, manifest, head)
    for function in functions.values():
        check_operations(function.get_concrete_function())
    layout.clear(out)
    # The endpoints bring their variables along; `track(model)` would store each of them a second time.
    archive = keras.export.ExportArchive()
    for name, function in functions.items():
        archive.add_endpoint(name, function)
    archive.write_out(out / layout.SAVED_MODEL, verbose=False)
    if model_file is not None:
        _copy(model_file, out / layout.MODEL_FILE)
        if (beside := model_file.with_name(layout.SETTINGS_FILE)).is_file():  # it names the model's module
            _copy(beside, out / layout.SETTINGS_FILE)
    loaded = tf.saved_model.load(str(out / layout.SAVED_MODEL))
    content = _describe(model, manifest, head, loaded, out) | {"settings": dict(settings or {})}
    if samples:
        content["compared_examples"] = len(samples)
        content["max_difference"] = largest_difference(model, head, manifest, loaded, samples)
    if formats:
        content["formats"] = {name: convert(name, out, manifest, samples) for name in formats}
    if samples:
        content["golden"] = make_golden_set(manifest, loaded, samples)
    files.write_json(out / layout.EXPORT_FILE, content)


def _copy(source: Path, target: Path) -> None:
    """Copies a file under a temporary name, then renames it; a file that lies there already stays."""
    if target.exists() and source.samefile(target):
        return
    temporary = target.with_name(f".tmp-{target.name}")
    shutil.copyfile(source, temporary)
    temporary.replace(target)


def _describe(model: keras.Model, manifest: Manifest, head: Head, loaded: Any, out: Path) -> dict[str, Any]:
    """Returns what export.json says; shapes and dtypes are those of the signatures as they were saved."""
    return {
        "format": "shardline.export",
        "format_version": 1,
        "fingerprint": manifest.fingerprint,
        "class_names": list(manifest.class_names),
        "inputs": {
            name: {**asdict(manifest.inputs[name]), "argument": argument}
            for name, argument in signatures.argument_names(manifest.inputs).items()
        },
        "signatures": {name: _describe_signature(one) for name, one in loaded.signatures.items()},
        "softmax_added": head == "logits",
        "parameters": model.count_params(),
        "bytes": sum(path.stat().st_size for path in (out / layout.SAVED_MODEL).rglob("*") if path.is_file()),
        "versions": provenance.read_versions(),
        "git_revision": provenance.read_revision(),
    }


def _describe_signature(signature: Any) -> dict[str, Any]:
    _, inputs = signature.structured_input_signature
    outputs = signature.structured_outputs
    return {
        "inputs": {name: _spec(spec) for name, spec in inputs.items()},
        "outputs": {name: _spec(outputs[name]) for name in signatures.OUTPUTS},
    }


def _spec(spec: tf.TensorSpec) -> dict[str, Any]:
    return {"dtype": spec.dtype.name, "shape": spec.shape.as_list()}
