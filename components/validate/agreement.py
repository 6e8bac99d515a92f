"""Whether an export is the model it was made of: both on the same examples, through every signature.

The golden set: some requests with their answers, by which a deployment is recognized as this model.

Both are what TensorFlow Serving's REST interface takes and gives: POST {"instances": [...]} to
/v1/models/NAME:predict, and {"predictions": [...]} comes back.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from shardline.components.validate import signatures
from shardline.trainer.data.decode import encode_stored, parse_batch
from shardline.trainer.data.manifest import Manifest
from shardline.trainer.errors import DatasetError
from shardline.trainer.models.head import Head

_BATCH = 64

Probabilities = npt.NDArray[np.float32]


def largest_difference(
    model: keras.Model, head: Head, manifest: Manifest, loaded: Any, samples: Sequence[bytes]
) -> float:
    """Compares an export with its model.

    Args:
        model: The trained model, which reads examples as it did in training.
        head: Of the model.
        manifest: Of its dataset.
        loaded: The export, as `tf.saved_model.load` gives it.
        samples: Serialized tf.train.Example.

    Returns:
        The largest absolute difference between two probabilities, over all signatures, classes and examples.
        Where one is a number and the other is not, it counts as 1.

    Raises:
        DatasetError: When an example cannot be decoded.
    """

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def trained(examples: tf.Tensor) -> tuple[Any, tf.Tensor]:
        inputs, _ = parse_batch(examples, manifest.inputs)
        return inputs, signatures.predict(model, inputs, head)

    largest = 0.0
    for examples in _batches(samples):
        try:
            inputs, expected = trained(examples)
            answers = [
                loaded.signatures[name](**request)["probabilities"]
                for name, request in make_requests(manifest, examples, inputs).items()
            ]
        except tf.errors.InvalidArgumentError as error:
            reason = str(error.message).strip().partition("\n")[0]
            raise DatasetError(
                f"one of the first {len(samples):,} examples cannot be served: {reason}; "
                "preprocess the data again"
            ) from None
        largest = max(largest, *(largest_gap(expected.numpy(), answer.numpy()) for answer in answers))
    return largest


def make_requests(manifest: Manifest, examples: tf.Tensor, inputs: Any) -> dict[str, dict[str, tf.Tensor]]:
    """Returns the arguments of each signature for a batch of stored examples.

    Args:
        manifest: Of the dataset.
        examples: Serialized tf.train.Example, a string tensor of shape [n].
        inputs: What the model takes for them.
    """
    requests = {signatures.EXAMPLE: {signatures.EXAMPLES: examples}}
    if "image" in manifest.inputs:
        requests[signatures.DEFAULT] = {signatures.IMAGES: _read_images(examples, manifest)}
        requests[signatures.TENSOR] = {signatures.PIXELS: inputs}
    else:
        names = signatures.argument_names(manifest.inputs)
        requests[signatures.DEFAULT] = {names[column]: values for column, values in inputs.items()}
    return requests


def read_pixels(manifest: Manifest, samples: Sequence[bytes]) -> Iterator[tf.Tensor]:
    """Yields batches of decoded images, uint8 (n, height, width, channels)."""
    for examples in _batches(samples):
        pixels, _ = parse_batch(examples, manifest.inputs)
        yield pixels


def _read_images(examples: tf.Tensor, manifest: Manifest) -> tf.Tensor:
    """Returns the images as files, a string tensor of shape [n]."""
    stored = tf.io.parse_example(examples, {"image": tf.io.FixedLenFeature([], tf.string)})["image"]
    return tf.stack([encode_stored(one, manifest.image) for one in stored])


def _batches(samples: Sequence[bytes]) -> Iterator[tf.Tensor]:
    for start in range(0, len(samples), _BATCH):
        yield tf.constant(samples[start : start + _BATCH])


def largest_gap(expected: Probabilities, found: Probabilities) -> float:
    """Returns the largest absolute difference; 1 where one of two is a number and the other is not."""
    finite = np.isfinite(expected)
    if (finite != np.isfinite(found)).any():
        return 1.0
    return float(np.abs(np.where(finite, expected, 0) - np.where(finite, found, 0)).max())


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
