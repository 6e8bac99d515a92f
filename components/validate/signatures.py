"""Signatures of an exported model: what each takes, the answer that all give, and requests to them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from shardline.trainer.data.decode import Inputs, decode_batch, decode_image, encode_stored, parse_batch
from shardline.trainer.data.features import Feature
from shardline.trainer.data.manifest import Manifest
from shardline.trainer.models.head import Head, to_probabilities

#: What a client sends: encoded images, or the columns of a table by name.
DEFAULT = "serving_default"

#: Decoded images.
TENSOR = "serving_tensor"

#: Serialized tf.train.Example, as a dataset holds them; label and key are not needed.
EXAMPLE = "serving_example"

#: The argument of each signature that has only one.
IMAGES, PIXELS, EXAMPLES = "images", "pixels", "examples"

OUTPUTS = ("probabilities", "label", "label_name")

_BATCH = 64

Answer = dict[str, tf.Tensor]

#: A `tf.function`, for which TensorFlow has no type.
Function = Any


def make_signatures(model: keras.Model, manifest: Manifest, head: Head) -> dict[str, Function]:
    """Returns the signatures of a model by name, as `export.export_model` documents them."""

    def answer(inputs: Inputs) -> Answer:
        probabilities = to_probabilities(model(inputs, training=False), head)
        label = tf.argmax(probabilities, axis=-1)
        label_name = tf.gather(tf.constant(manifest.class_names), label)
        return dict(zip(OUTPUTS, (probabilities, label, label_name), strict=True))

    if "image" in manifest.inputs:
        return _image_signatures(answer, manifest.inputs["image"])
    return _table_signatures(answer, manifest.inputs)


def argument_names(inputs: Collection[str]) -> dict[str, str]:
    """Returns, by input of the model, the name of its argument in `serving_default`.

    An image goes into "images". A column keeps its name if that is made of ASCII letters, digits and "_", as
    TensorFlow wants it; "petal width (cm)" becomes "petal_width_cm". No two columns have the same.
    """
    if "image" in inputs:
        return {"image": IMAGES}
    names = {column: column for column in inputs if _is_plain(column)}
    for column in inputs:
        if column not in names:
            plain = re.sub(r"[^A-Za-z0-9]+", "_", column).strip("_")
            plain = plain if _is_plain(plain) else f"column_{plain}".rstrip("_")
            while plain in names.values():
                plain += "_"
            names[column] = plain
    return names


def make_requests(manifest: Manifest, examples: tf.Tensor, inputs: Inputs) -> dict[str, dict[str, tf.Tensor]]:
    """Returns the arguments of each signature for stored examples, whose `inputs` the model takes."""
    if "image" not in manifest.inputs:
        names = argument_names(manifest.inputs)
        columns = {names[column]: values for column, values in inputs.items()}
        return {EXAMPLE: {EXAMPLES: examples}, DEFAULT: columns}
    stored = tf.io.parse_example(examples, {"image": tf.io.FixedLenFeature([], tf.string)})["image"]
    images = tf.stack([encode_stored(one, manifest.image) for one in stored])
    return {EXAMPLE: {EXAMPLES: examples}, DEFAULT: {IMAGES: images}, TENSOR: {PIXELS: inputs}}


def read_batches(manifest: Manifest, samples: Sequence[bytes]) -> Iterator[tuple[tf.Tensor, Any]]:
    """Yields serialized examples in batches of up to 64, as they are stored and as the model takes them."""
    for start in range(0, len(samples), _BATCH):
        examples = tf.constant(samples[start : start + _BATCH])
        yield examples, parse_batch(examples, manifest.inputs)[0]


def largest_gap(expected: npt.NDArray[np.float32], found: npt.NDArray[np.float32]) -> float:
    """Returns the largest absolute difference; 1 where one of two is a number and the other is not."""
    finite = np.isfinite(expected)
    if (finite != np.isfinite(found)).any():
        return 1.0
    return float(np.abs(np.where(finite, expected, 0) - np.where(finite, found, 0)).max())


def _is_plain(name: str) -> bool:
    # TensorFlow has a use of its own for an argument "self".
    return bool(re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name)) and name != "self"


def _image_signatures(answer: Callable[[Inputs], Answer], image: Feature) -> dict[str, Function]:
    # Functions of their own, so that model and decoder are traced once, however many signatures there are.
    answer = _function(answer, tf.TensorSpec([None, *image.shape], tf.uint8))
    decode = _function(lambda files: _decode_files(files, image), tf.TensorSpec([None], tf.string))
    stored = decode
    if image.encoding == "raw":
        stored = _function(lambda pixels: decode_batch(pixels, image), tf.TensorSpec([None], tf.string))
    parse = {"image": tf.io.FixedLenFeature([], "string")}
    return {
        DEFAULT: _function(lambda images: answer(decode(images)), tf.TensorSpec([None], tf.string, IMAGES)),
        TENSOR: _function(
            lambda pixels: answer(pixels), tf.TensorSpec([None, *image.shape], tf.uint8, PIXELS)
        ),
        EXAMPLE: _function(
            lambda examples: answer(stored(tf.io.parse_example(examples, parse)["image"])),
            tf.TensorSpec([None], tf.string, EXAMPLES),
        ),
    }


def _table_signatures(
    answer: Callable[[Inputs], Answer], columns: Mapping[str, Feature]
) -> dict[str, Function]:
    answer = _function(answer, {name: tf.TensorSpec([None], item.dtype) for name, item in columns.items()})
    names = argument_names(columns)
    parse = {name: tf.io.FixedLenFeature([], item.dtype) for name, item in columns.items()}
    return {
        DEFAULT: _function(
            lambda given: answer({column: given[name] for column, name in names.items()}),
            {names[name]: tf.TensorSpec([None], item.dtype, names[name]) for name, item in columns.items()},
        ),
        EXAMPLE: _function(
            lambda examples: answer(tf.io.parse_example(examples, parse)),
            tf.TensorSpec([None], tf.string, EXAMPLES),
        ),
    }


def _decode_files(images: tf.Tensor, image: Feature) -> tf.Tensor:
    """Decodes whole files of any size to uint8 (n, height, width, channels)."""
    return tf.map_fn(
        lambda encoded: decode_image(encoded, image),
        images,
        fn_output_signature=tf.TensorSpec(image.shape, tf.uint8),
    )


def _function(serve: Callable[..., Any], takes: Any) -> Function:
    return tf.function(serve, input_signature=[takes], autograph=False)
