"""Export: a Keras model becomes a SavedModel that takes raw encoded images."""

from __future__ import annotations

import platform
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from components.export_validate import layout
from trainer import files
from trainer.data.decode import decode_image
from trainer.data.manifest import Manifest
from trainer.models.head import Head, read_head

SIGNATURE = "serving_default"

_PACKAGES = ("shardline", "tensorflow", "keras", "numpy")


def export_model(model: keras.Model, manifest: Manifest, out: Path) -> None:
    """Writes `out`/saved_model and, when that is complete, `out`/export.json.

    The signature `serving_default` takes `images`, a string tensor of shape [n] with whole encoded files
    (PNG, JPEG, BMP, first frame of a GIF) of any size, and returns

    * `probabilities`: float32 [n, classes],
    * `label`: int64 [n], the most probable class,
    * `label_name`: string [n], its name.

    Decoding is the function that training uses, and is part of the graph. A softmax is added only to a
    model that gives logits (see `read_head`). The saved model needs nothing of Shardline to be loaded.

    A directory cannot be renamed on a Cloud Storage mount, so completeness is not told by the name of
    saved_model/ but by export.json, which is removed first and written last.

    Args:
        model: Takes uint8 images of the manifest's shape and gives one number per class.
        manifest: Of the dataset that the model was trained on.
        out: Output directory; made if it is not there. An earlier export in it is replaced.

    Raises:
        ModelError: When the model does not fit the dataset; nothing has been written then.
        SettingsError: When `out` cannot be written to.
    """
    head = read_head(model, manifest.info())
    layout.clear(out)
    serve = _serving_function(model, manifest, head)
    concrete = serve.get_concrete_function()
    # The endpoint brings its variables along; `track(model)` would store each of them a second time.
    archive = keras.export.ExportArchive()
    archive.add_endpoint(SIGNATURE, serve)
    archive.write_out(out / layout.SAVED_MODEL, verbose=False)
    files.write_json(out / layout.EXPORT_FILE, _describe(model, manifest, head, concrete, out))


def _serving_function(model: keras.Model, manifest: Manifest, head: Head) -> Any:
    image = manifest.image

    def serve(images: tf.Tensor) -> dict[str, tf.Tensor]:
        pixels = tf.map_fn(
            lambda encoded: decode_image(encoded, image),
            images,
            fn_output_signature=tf.TensorSpec(image.shape, tf.uint8),
        )
        # Mixed precision computes in 16 bits; probabilities are always served in 32.
        outputs = tf.cast(model(pixels, training=False), tf.float32)
        probabilities = tf.nn.softmax(outputs) if head == "logits" else outputs
        label = tf.argmax(probabilities, axis=-1)
        return {
            "probabilities": probabilities,
            "label": label,
            "label_name": tf.gather(tf.constant(manifest.class_names), label),
        }

    return tf.function(serve, input_signature=[tf.TensorSpec([None], tf.string, "images")], autograph=False)


def _describe(model: keras.Model, manifest: Manifest, head: Head, concrete: Any, out: Path) -> dict[str, Any]:
    """Returns what export.json says; shapes and dtypes are read from the traced function itself."""
    (positional, _) = concrete.structured_input_signature
    return {
        "format": "shardline.export",
        "format_version": 1,
        "fingerprint": manifest.fingerprint,
        "class_names": list(manifest.class_names),
        "image": asdict(manifest.image),
        "signatures": {
            SIGNATURE: {
                "inputs": {spec.name: _spec(spec) for spec in positional},
                "outputs": {name: _spec(spec) for name, spec in concrete.structured_outputs.items()},
            }
        },
        "softmax_added": head == "logits",
        "parameters": model.count_params(),
        "bytes": sum(path.stat().st_size for path in (out / layout.SAVED_MODEL).rglob("*") if path.is_file()),
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in _PACKAGES},
        },
    }


def _spec(spec: tf.TensorSpec) -> dict[str, Any]:
    return {"dtype": spec.dtype.name, "shape": spec.shape.as_list()}
