"""Signatures of an exported model: their inputs and outputs, requests, and the cost of serving.

Latency is the time a client waits. Stability is whether the outputs for an example are the same alone, in a
batch, and in any order (metamorphic checks).
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from shardline.components.validate.export import clean_process, predictions
from shardline.components.validate.export.predictions import Predictions, name_outputs
from shardline.trainer.base.errors import ModelError
from shardline.trainer.data import decode
from shardline.trainer.data.decode import Inputs, Prepare
from shardline.trainer.data.features import CLASS, REGRESSION, Feature
from shardline.trainer.data.manifest import Manifest
from shardline.trainer.keras_compat.operations import check_operations, check_saved_model
from shardline.trainer.models.interface import Heads, output_order, to_predictions

#: What a client sends: whole encoded files, PNG or JPEG of any size, string [n], or the columns of a table,
#: [n] each, by name.
DEFAULT = "serving_default"

#: Decoded images, uint8 [n, height, width, channels].
TENSOR = "serving_tensor"

#: Serialized tf.train.Example, as a dataset holds them, string [n]; label and key are not needed.
EXAMPLE = "serving_example"

#: The argument of each signature that has only one.
IMAGES, PIXELS, EXAMPLES = "images", "pixels", "examples"

#: Number of requests that `measure_costs` uses, and of examples in a batch.
REQUESTS = 32

#: Timed calls of each kind, at most.
CALLS = 100

_MB = 1e6

#: A `tf.function`, for which TensorFlow has no type.
Function = Any


def make_signatures(
    model: keras.Model, manifest: Manifest, heads: Heads, prepare: Prepare | None = None
) -> dict[str, Function]:
    """Returns the signatures of a model by name, which have the outputs `predictions.OUTPUTS`.

    `prepare` transforms a dataset's inputs for the model. Raises ModelError when it has operations that no
    server supports.
    """
    names, order = name_outputs(manifest.labels), output_order(model, manifest.labels)

    def answer(inputs: Inputs) -> dict[str, tf.Tensor]:
        prepared = prepare(inputs) if prepare else inputs
        outputs = model(prepared, training=False)
        answers = to_predictions(outputs, heads, manifest.labels, order)
        named: dict[str, tf.Tensor] = {}
        for label in manifest.labels:
            values = answers[label.name]
            if label.kind == REGRESSION:  # each in the order of `predictions.OUTPUTS`
                tensors = [values[:, 0] if len(label.outputs) == 1 else values]
            elif label.kind == CLASS:
                index = tf.argmax(values, axis=-1)
                tensors = [values, index, tf.gather(tf.constant(label.outputs), index)]
            else:
                tensors = [values, tf.cast(values >= predictions.THRESHOLD, tf.int64)]
            named.update(zip(names[label.name], tensors, strict=True))
        return named

    specs = {name: tf.TensorSpec([None, *item.shape], item.dtype) for name, item in manifest.inputs.items()}
    traced = _function(answer, specs.get("image", specs))
    # The other signatures add only operations of Shardline; tracing them here would take long.
    check_operations(traced.get_concrete_function())
    records = tf.TensorSpec([None], tf.string, EXAMPLES)
    if "image" in manifest.inputs:
        return _image_signatures(traced, manifest.inputs["image"], records)
    arguments = argument_names(manifest.inputs)
    columns = {name: tf.io.FixedLenFeature(item.shape, item.dtype) for name, item in manifest.inputs.items()}
    argument_specs = {
        arguments[name]: tf.TensorSpec([None, *item.shape], item.dtype, arguments[name])
        for name, item in manifest.inputs.items()
    }

    def answer_columns(values: Mapping[str, tf.Tensor]) -> Any:
        return traced({name: values[argument] for name, argument in arguments.items()})

    return {
        DEFAULT: _function(answer_columns, argument_specs),
        EXAMPLE: _function(lambda examples: traced(tf.io.parse_example(examples, columns)), records),
    }


def argument_names(inputs: Collection[str]) -> dict[str, str]:
    """Returns the arguments of `serving_default` by input of the model; that of an image is "images"."""
    return {"image": IMAGES} if "image" in inputs else predictions.sanitize_names(inputs)


def make_requests(manifest: Manifest, examples: tf.Tensor, inputs: Inputs) -> dict[str, dict[str, tf.Tensor]]:
    """Returns the arguments of each signature for stored examples, whose `inputs` the model takes."""
    if "image" not in manifest.inputs:
        names = argument_names(manifest.inputs)
        columns = {names[column]: values for column, values in inputs.items()}
        return {EXAMPLE: {EXAMPLES: examples}, DEFAULT: columns}
    stored = tf.io.parse_example(examples, {"image": tf.io.FixedLenFeature([], tf.string)})["image"]
    images = tf.stack([decode.encode_stored(image, manifest.image) for image in stored])
    return {EXAMPLE: {EXAMPLES: examples}, DEFAULT: {IMAGES: images}, TENSOR: {PIXELS: inputs}}


def _image_signatures(answer: Function, image: Feature, records: tf.TensorSpec) -> dict[str, Function]:
    def decode_files(files: tf.Tensor) -> tf.Tensor:
        pixels = tf.TensorSpec(image.shape, tf.uint8)
        return tf.map_fn(
            lambda encoded: decode.decode_image(encoded, image), files, fn_output_signature=pixels
        )

    # One tf.function for all signatures: the decoder is traced once.
    decoded = stored = _function(decode_files, tf.TensorSpec([None], tf.string))
    if image.encoding == "raw":
        stored = _function(
            lambda pixels: decode.decode_batch(pixels, image), tf.TensorSpec([None], tf.string)
        )
    parse, pixels = {"image": tf.io.FixedLenFeature([], "string")}, [None, *image.shape]
    return {
        DEFAULT: _function(lambda images: answer(decoded(images)), tf.TensorSpec([None], tf.string, IMAGES)),
        TENSOR: _function(lambda pixels: answer(pixels), tf.TensorSpec(pixels, tf.uint8, PIXELS)),
        EXAMPLE: _function(
            lambda examples: answer(stored(tf.io.parse_example(examples, parse)["image"])), records
        ),
    }


def _function(serve: Callable[..., Any], spec: Any) -> Function:
    return tf.function(serve, input_signature=[spec], autograph=False)


class ServedModel:
    """A SavedModel with the signatures that Shardline exports, and outputs for each label of a dataset.

    Raises ModelError when there is no SavedModel, it is damaged, or it has other outputs. `deviations` is the
    unit of differences of numbers, by name of the label.
    """

    def __init__(self, path: Path, manifest: Manifest, loaded: Any = None) -> None:
        """Loads the path, unless `loaded` is the result of `tf.saved_model.load`."""
        self.path = path
        self.deviations = predictions.read_deviations(manifest)
        self._labels = manifest.labels
        try:
            check_saved_model(path)
            # The signatures alone do not keep the variables alive, the loaded object does.
            self._loaded = loaded or tf.saved_model.load(str(path))
        except (ModelError, MemoryError):
            raise
        except Exception as error:  # of a damaged one TensorFlow raises anything
            reason = " ".join(str(error).split())
            raise ModelError(f"cannot load the exported model {path}: {reason}; export it again") from None
        self._names = name_outputs(manifest.labels)
        self._sent = (DEFAULT, IMAGES) if "image" in manifest.inputs else (EXAMPLE, EXAMPLES)

    def predict(self, requests: tf.Tensor) -> Predictions:
        """Predicts for encoded images, or for rows of a table as serialized tf.train.Example, [n].

        Raises tf.errors.InvalidArgumentError when one lacks a column or cannot be decoded.
        """
        signature, argument = self._sent
        outputs, classes = {}, {}
        try:
            answer = self._loaded.signatures[signature](**{argument: requests})
            for label in self._labels:
                names = self._names[label.name]
                outputs[label.name] = answer[names[0]].numpy().reshape(len(requests), len(label.outputs))
                if label.kind != REGRESSION:
                    classes[label.name] = answer[names[1]].numpy()
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(
                f"the exported model {self.path} has another signature, output or number of classes than "
                f"the dataset ({error}); evaluate it on the data that it was made for, or export it again"
            ) from None
        return Predictions(outputs, classes)


def measure_costs(model: ServedModel, requests: tf.Tensor, calls: int = CALLS) -> dict[str, float]:
    """Returns the cost of serving a model, and the stability of its outputs, by the names in SERVING.

    `requests` are at least one example, as `ServedModel.predict` takes them. Calls with one example and with
    32 are timed after a warm-up; throughput is in examples per second, in batches of 32. peak_memory_mb is
    the largest resident size of this process, TensorFlow included.
    """
    serve, count, some = model.predict, int(requests.shape[0]), requests[:REQUESTS]

    def time_batches(size: int) -> list[float]:
        starts = range(min(count, REQUESTS))
        batches = [tf.gather(requests, np.arange(start, start + size) % count) for start in starts]
        return clean_process.time_calls(serve, batches, calls)

    single, batched = time_batches(1), time_batches(REQUESTS)
    reversed_outputs = {name: values[::-1] for name, values in serve(some[::-1]).outputs.items()}
    single_outputs = Predictions.join([serve(some[i : i + 1]) for i in range(int(some.shape[0]))]).outputs
    return {
        **{f"latency_p{p}_ms": float(np.percentile(single, p)) * 1e3 for p in (50, 95)},
        **{f"latency_batch32_p{p}_ms": float(np.percentile(batched, p)) * 1e3 for p in (50, 95)},
        "throughput": REQUESTS / float(np.mean(batched)),
        # The effect of batch size and order on the outputs.
        "batch_difference": max(
            predictions.max_difference(values, others[name], model.deviations.get(name, ()))
            for name, values in serve(some).outputs.items()
            for others in (reversed_outputs, single_outputs)
        ),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _MB,
        "size_mb": sum(path.stat().st_size for path in model.path.rglob("*") if path.is_file()) / _MB,
    }
