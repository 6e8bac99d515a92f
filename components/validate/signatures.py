"""Signatures of an exported model: what each takes, the answer that all give, and requests to them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from shardline.components.validate.answers import THRESHOLD, name_outputs, name_plainly
from shardline.trainer.data.decode import (
    Inputs,
    Prepare,
    decode_batch,
    decode_image,
    encode_stored,
    parse_batch,
)
from shardline.trainer.data.features import CLASS, REGRESSION, Feature
from shardline.trainer.data.manifest import Manifest
from shardline.trainer.models.export_check import check_operations
from shardline.trainer.models.head import Heads, output_order, to_answers, to_quantiles
from shardline.trainer.models.zoo import quantiles_of_head

#: What a client sends: encoded images, or the columns of a table by name.
DEFAULT = "serving_default"

#: Decoded images.
TENSOR = "serving_tensor"

#: Serialized tf.train.Example, as a dataset holds them; label and key are not needed.
EXAMPLE = "serving_example"

#: The argument of each signature that has only one.
IMAGES, PIXELS, EXAMPLES = "images", "pixels", "examples"

_BATCH = 64

Answer = dict[str, tf.Tensor]

#: A `tf.function`, for which TensorFlow has no type.
Function = Any


def make_signatures(
    model: keras.Model, manifest: Manifest, heads: Heads, prepare: Prepare | None = None
) -> dict[str, Function]:
    """Returns the signatures of a model by name, as `export.export_model` documents them.

    The model takes the inputs of a dataset as `prepare` gives them; None where it takes them as they are.

    Raises:
        ModelError: When the model has operations that no server gives.
    """
    names, order = name_outputs(manifest.labels, read_quantiles(heads)), output_order(model, manifest.labels)

    def answer(inputs: Inputs) -> Answer:
        taken = prepare(inputs) if prepare else inputs
        outputs = model(taken, training=False)
        said = to_answers(outputs, heads, manifest.labels, order)
        quantiles = to_quantiles(outputs, heads, manifest.labels, order)
        found: Answer = {}
        for label in manifest.labels:  # in the order of `answers.OUTPUTS`
            values = said[label.name]
            if label.kind == REGRESSION:
                told = [values[:, 0] if len(label.outputs) == 1 else values]
            elif label.kind == CLASS:
                index = tf.argmax(values, axis=-1)
                told = [values, index, tf.gather(tf.constant(label.outputs), index)]
            else:
                told = [values, tf.cast(values >= THRESHOLD, tf.int64)]
            if label.name in quantiles:
                told.append(quantiles[label.name])
            found.update(zip(names[label.name], told, strict=True))
        return found

    specs = {name: tf.TensorSpec([None, *item.shape], item.dtype) for name, item in manifest.inputs.items()}
    traced = _function(answer, specs.get("image", specs))
    # All else in the signatures is ours. To trace those here takes long, and saving traces them again.
    check_operations(traced.get_concrete_function())
    if "image" in manifest.inputs:
        return _image_signatures(traced, manifest.inputs["image"])
    return _table_signatures(traced, manifest.inputs)


def read_quantiles(heads: Heads) -> dict[str, tuple[float, ...]]:
    """Returns the quantiles that a model gives, by name of the label, of those of which it does."""
    found = {name: quantiles_of_head(head) for name, head in heads.items()}
    return {name: quantiles for name, quantiles in found.items() if quantiles}


def argument_names(inputs: Collection[str]) -> dict[str, str]:
    """Returns, by input of the model, the name of its argument in `serving_default`; "images" of an image."""
    if "image" in inputs:
        return {"image": IMAGES}
    return name_plainly(inputs)


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
        yield examples, parse_batch(examples, manifest.inputs, manifest.labels)[0]


def _image_signatures(answer: Function, image: Feature) -> dict[str, Function]:
    # A function of its own, so that the decoder is traced once, however many signatures there are.
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


def _table_signatures(answer: Function, columns: Mapping[str, Feature]) -> dict[str, Function]:
    names = argument_names(columns)
    parse = {name: tf.io.FixedLenFeature(item.shape, item.dtype) for name, item in columns.items()}
    return {
        DEFAULT: _function(
            lambda given: answer({column: given[name] for column, name in names.items()}),
            {
                names[name]: tf.TensorSpec([None, *item.shape], item.dtype, names[name])
                for name, item in columns.items()
            },
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
