"""The golden set: some requests with their answers, by which a deployment is recognized as this model.

Both are what TensorFlow Serving's REST interface takes and gives: POST {"instances": [...]} to
/v1/models/NAME:predict, and {"predictions": [...]} comes back.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from shardline.components.export_validate import signatures
from shardline.components.export_validate.agreement import make_requests
from shardline.trainer.data.decode import parse_batch
from shardline.trainer.data.manifest import Manifest

#: How many examples are in it.
SIZE = 16


def make_golden_set(manifest: Manifest, loaded: Any, samples: Sequence[bytes]) -> dict[str, Any]:
    """Returns the golden set as plain values.

    Args:
        manifest: Of the dataset.
        loaded: The export, as `tf.saved_model.load` gives it.
        samples: Serialized tf.train.Example, at least one.
    """
    examples = tf.constant(samples[:SIZE])
    inputs, _ = parse_batch(examples, manifest.inputs)
    request = make_requests(manifest, examples, inputs)[signatures.DEFAULT]
    answer = loaded.signatures[signatures.DEFAULT](**request)
    return {
        "signature_name": signatures.DEFAULT,
        "instances": _instances(request, encoded="image" in manifest.inputs),
        "predictions": _rows({name: answer[name] for name in signatures.OUTPUTS}),
    }


def _instances(request: Mapping[str, tf.Tensor], *, encoded: bool) -> list[Any]:
    if not encoded:
        return _rows(request)
    images = request[signatures.IMAGES].numpy()
    return [{"b64": base64.b64encode(image).decode("ascii")} for image in images]


def _rows(columns: Mapping[str, tf.Tensor]) -> list[dict[str, Any]]:
    """Turns columns into rows, strings into text."""
    values = {name: _plain(column) for name, column in columns.items()}
    return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]


def _plain(column: tf.Tensor) -> list[Any]:
    if column.dtype == tf.string:
        return [value.decode("utf-8", "replace") for value in column.numpy()]
    if column.dtype.is_floating:  # JSON has no NaN
        finite = tf.math.is_finite(column).numpy().tolist()
        return [_or_null(value, good) for value, good in zip(column.numpy().tolist(), finite, strict=True)]
    return list(column.numpy().tolist())


def _or_null(value: Any, finite: Any) -> Any:
    if isinstance(value, list):
        return [one if good else None for one, good in zip(value, finite, strict=True)]
    return value if finite else None
