"""The signatures of an exported model: what each of them takes, and the one answer that all of them give."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import keras
import tensorflow as tf

from shardline.trainer.data.decode import Inputs, decode_batch, decode_image
from shardline.trainer.data.manifest import Feature, Manifest
from shardline.trainer.models.head import Head

#: What a client sends: encoded images, or the columns of a table by name.
DEFAULT = "serving_default"

#: Images that are decoded already.
TENSOR = "serving_tensor"

#: Serialized tf.train.Example, as a dataset holds them; label and key are not needed.
EXAMPLE = "serving_example"

#: The argument of each signature, where it has but one.
IMAGES, PIXELS, EXAMPLES = "images", "pixels", "examples"

OUTPUTS = ("probabilities", "label", "label_name")

Answer = dict[str, tf.Tensor]

#: A `tf.function`, for which TensorFlow has no type.
Function = Any


def make_signatures(model: keras.Model, manifest: Manifest, head: Head) -> dict[str, Function]:
    """Returns the signatures of a model, by name; their docstring is that of `export.export_model`.

    Args:
        model: Takes the manifest's images or columns and gives one number per class.
        manifest: Of the dataset that the model was trained on.
        head: Whether these numbers are probabilities or logits, which get a softmax.
    """

    # Functions of their own, so that model and decoder are traced once, however many signatures there are.
    def answer_inputs(inputs: Inputs) -> Answer:
        return _answer(predict(model, inputs, head), manifest.class_names)

    inputs = manifest.inputs
    if "image" not in inputs:
        takes = {name: tf.TensorSpec([None], item.dtype) for name, item in inputs.items()}
        answer = _function(answer_inputs, takes)
        return {DEFAULT: _on_columns(answer, inputs), EXAMPLE: _on_examples(answer, inputs)}
    image = inputs["image"]
    answer = _function(answer_inputs, tf.TensorSpec([None, *image.shape], tf.uint8))
    decode = _function(lambda files: _decode_files(files, image), tf.TensorSpec([None], tf.string))
    stored = decode
    if image.encoding == "raw":
        stored = _function(lambda pixels: decode_batch(pixels, image), tf.TensorSpec([None], tf.string))
    return {
        DEFAULT: _on_images(answer, decode),
        TENSOR: _on_pixels(answer, image),
        EXAMPLE: _on_examples(answer, inputs, stored),
    }


def predict(model: keras.Model, inputs: Inputs, head: Head) -> tf.Tensor:
    """Returns a model's probabilities, float32 (n, classes), whatever its precision and its head."""
    outputs = tf.cast(model(inputs, training=False), tf.float32)
    return tf.nn.softmax(outputs) if head == "logits" else outputs


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


def _is_plain(name: str) -> bool:
    # TensorFlow has a use of its own for an argument "self".
    return bool(re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name)) and name != "self"


def _answer(probabilities: tf.Tensor, class_names: tuple[str, ...]) -> Answer:
    label = tf.argmax(probabilities, axis=-1)
    label_name = tf.gather(tf.constant(class_names), label)
    return dict(zip(OUTPUTS, (probabilities, label, label_name), strict=True))


def _on_images(answer: Function, decode: Function) -> Function:
    def serve(images: tf.Tensor) -> Any:
        return answer(decode(images))

    return _function(serve, tf.TensorSpec([None], tf.string, IMAGES))


def _on_pixels(answer: Function, image: Feature) -> Function:
    return _function(lambda pixels: answer(pixels), tf.TensorSpec([None, *image.shape], tf.uint8, PIXELS))


def _on_columns(answer: Function, columns: Mapping[str, Feature]) -> Function:
    names = argument_names(columns)

    def serve(given: dict[str, tf.Tensor]) -> Any:
        return answer({column: given[name] for column, name in names.items()})

    return _function(
        serve, {names[name]: tf.TensorSpec([None], item.dtype, names[name]) for name, item in columns.items()}
    )


def _on_examples(answer: Function, inputs: Mapping[str, Feature], decode: Function | None = None) -> Function:
    stored = {
        name: tf.io.FixedLenFeature([], "string" if decode else item.dtype) for name, item in inputs.items()
    }

    def serve(examples: tf.Tensor) -> Any:
        parsed = tf.io.parse_example(examples, stored)
        return answer(decode(parsed["image"]) if decode else parsed)

    return _function(serve, tf.TensorSpec([None], tf.string, EXAMPLES))


def _decode_files(images: tf.Tensor, image: Feature) -> tf.Tensor:
    """Decodes whole files of any size to uint8 (n, height, width, channels)."""
    return tf.map_fn(
        lambda encoded: decode_image(encoded, image),
        images,
        fn_output_signature=tf.TensorSpec(image.shape, tf.uint8),
    )


def _function(serve: Callable[..., Any], takes: Any) -> Function:
    return tf.function(serve, input_signature=[takes], autograph=False)
