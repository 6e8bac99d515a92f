"""Export: a Keras model becomes a SavedModel that takes what clients have.

The operations of an exported graph: whether a server has all of them.

Where a model comes from: releases of what it was exported with, and the revision of the code around it.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from shardline.components import model_store
from shardline.components.validate import signatures
from shardline.components.validate.agreement import largest_difference, make_golden_set
from shardline.components.validate.conversions import check_formats, convert
from shardline.trainer import files
from shardline.trainer.data.manifest import Manifest
from shardline.trainer.errors import ModelError
from shardline.trainer.models.head import Head, read_head

_CALLS_OF_PYTHON = ("PyFunc", "PyFuncStateless", "EagerPyFunc")

# TensorFlow's own, though not in tf.raw_ops: the inner ones, and XlaCallModule of models from JAX.
_INNER = ("_", "Xla")


def check_operations(concrete: Any) -> None:
    """Checks that a traced function can be run where there is neither our code nor the user's.

    Args:
        concrete: A concrete function.

    Raises:
        ModelError: When it calls Python, or operations of a library that TensorFlow does not bring along.
    """
    graph = concrete.graph.as_graph_def()
    functions = {function.signature.name for function in graph.library.function}
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    used = {node.op for node in nodes} - functions
    if calls := sorted(used.intersection(_CALLS_OF_PYTHON)):
        raise ModelError(
            f"the model calls Python while it predicts ({', '.join(calls)}), which a server cannot run; "
            "replace tf.py_function and tf.numpy_function by operations of TensorFlow or Keras"
        )
    if foreign := sorted(
        name for name in used if not name.startswith(_INNER) and not hasattr(tf.raw_ops, name)
    ):
        raise ModelError(
            f"the model needs operations that are not TensorFlow's own ({', '.join(foreign)}), which a "
            "server does not have; do without them"
        )


_PACKAGES = ("shardline", "tensorflow", "keras", "numpy")

# As `git rev-parse HEAD`, with "-dirty" where files differ from it.
_DESCRIBE = ("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def read_versions() -> dict[str, str]:
    """Returns the releases of Python and of the packages that decide what an export is."""
    return {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in _PACKAGES},
    }


def read_revision() -> str | None:
    """Returns the git revision of the working directory, or the image's own; None where neither is known."""
    try:
        described = subprocess.run(_DESCRIBE, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        # There is no git in the image: docker/Dockerfile writes down what it was built from.
        return os.environ.get("SHARDLINE_REVISION") or None
    return described.stdout.strip()


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
    model_store.clear(out)
    # The endpoints bring their variables along; `track(model)` would store each of them a second time.
    archive = keras.export.ExportArchive()
    for name, function in functions.items():
        archive.add_endpoint(name, function)
    archive.write_out(out / model_store.SAVED_MODEL, verbose=False)
    if model_file is not None:
        _copy(model_file, out / model_store.MODEL_FILE)
        if (
            beside := model_file.with_name(model_store.SETTINGS_FILE)
        ).is_file():  # it names the model's module
            _copy(beside, out / model_store.SETTINGS_FILE)
    loaded = tf.saved_model.load(str(out / model_store.SAVED_MODEL))
    content = _describe(model, manifest, head, loaded, out) | {"settings": dict(settings or {})}
    if samples:
        content["compared_examples"] = len(samples)
        content["max_difference"] = largest_difference(model, head, manifest, loaded, samples)
    if formats:
        content["formats"] = {name: convert(name, out, manifest, samples) for name in formats}
    if samples:
        content["golden"] = make_golden_set(manifest, loaded, samples)
    files.write_json(out / model_store.EXPORT_FILE, content)


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
        "bytes": sum(
            path.stat().st_size for path in (out / model_store.SAVED_MODEL).rglob("*") if path.is_file()
        ),
        "versions": read_versions(),
        "git_revision": read_revision(),
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
