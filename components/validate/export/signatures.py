"""Signatures of an exported model: their inputs and outputs, what they predict, and the cost of serving.

Differences of numbers are in standard deviations of the label in training, those of probabilities absolute:
a limit means the same for every label. Golden examples, requests with their predictions, are compared with
the predictions of a clean process. Latency is the time a client waits. Stability is whether the outputs for
an example are the same alone, in a batch, and in any order (metamorphic checks).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import itertools
import json
import keyword
import os
import re
import resource
import site
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from shardline.components import model_store
from shardline.components.model_store import Export
from shardline.components.text import truncate
from shardline.components.validate.export import clean_process
from shardline.trainer.base.errors import ModelError
from shardline.trainer.data.examples import Inputs, Prepare, decode_batch, decode_image, encode_stored
from shardline.trainer.keras_compat.tensorflow_internals import check_operations, check_saved_model
from shardline.trainer.manifest import CLASS, MULTILABEL, REGRESSION, Feature, Label, Manifest
from shardline.trainer.models import Heads, to_predictions

Floats = npt.NDArray[np.float32]

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

#: Seconds that a clean process may take to answer a request, TensorFlow's import included.
_TIMEOUT_S = 600.0

#: Outputs of a signature by kind of label: probabilities, [n, classes], or numbers, [n] or [n, numbers],
#: float32; then the most probable class, int64 [n], and its name, or 0 or 1 for each label, [n, classes].
OUTPUTS = {
    CLASS: ("probabilities", "label", "label_name"),
    MULTILABEL: ("probabilities", "labels"),
    REGRESSION: ("value",),
}

#: Probability from which on a multilabel prediction has a label.
THRESHOLD = 0.5


@dataclass(frozen=True)
class Predictions:
    """Predictions of a model for n examples, by name of the label.

    Attributes:
        outputs: Probabilities or numbers, float32 [n, outputs].
        classes: The most probable class, int64 [n], or 0 or 1 for each label of a multilabel, [n, outputs].
    """

    outputs: Mapping[str, Floats]
    classes: Mapping[str, npt.NDArray[np.int64]]

    @classmethod
    def join(cls, parts: Sequence[Predictions]) -> Predictions:
        """Returns the predictions of several batches, at least one, as one."""

        def joined(field: str) -> dict[str, Any]:
            names = getattr(parts[0], field)
            return {name: np.concatenate([getattr(part, field)[name] for part in parts]) for name in names}

        return cls(joined("outputs"), joined("classes"))


def name_outputs(labels: Sequence[Label]) -> dict[str, tuple[str, ...]]:
    """Returns the names of a signature's outputs by name of the label, in the order of `OUTPUTS`.

    With several labels each name begins with the label's, as in "kind_probabilities".
    """
    plain = sanitize_names([label.name for label in labels])
    return {
        label.name: tuple(
            output if len(labels) == 1 else f"{plain[label.name]}_{output}" for output in OUTPUTS[label.kind]
        )
        for label in labels
    }


def sanitize_names(names: Iterable[str]) -> dict[str, str]:
    """Returns unique names of arguments and outputs for columns, in characters that TensorFlow accepts.

    Names of ASCII letters, digits and "_" stay; "petal width (cm)" becomes "petal_width_cm".
    """

    def is_plain(name: str) -> bool:
        # TensorFlow reserves the argument "self", Python its keywords.
        is_taken = name == "self" or keyword.iskeyword(name)
        return bool(re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name)) and not is_taken

    names = list(names)
    sanitized = {name: name for name in names if is_plain(name)}
    for name in names:
        if name not in sanitized:
            plain = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")
            plain = plain if is_plain(plain) else f"column_{plain}".rstrip("_")
            while plain in sanitized.values():
                plain += "_"
            sanitized[name] = plain
    return sanitized


def read_deviations(manifest: Manifest) -> dict[str, tuple[float, ...]]:
    """Returns the standard deviation of each number in training, by name of the label; 1 where it is 0."""
    split = manifest.splits.get("train") or next(iter(manifest.splits.values()))
    return {
        label.name: tuple(spread.deviation or 1.0 for spread in split.labels[label.name].spreads)
        for label in manifest.labels
        if label.kind == REGRESSION
    }


def differences(expected: npt.NDArray[Any], found: npt.NDArray[Any], deviations: Sequence[float]) -> Any:
    """Returns the absolute differences; at least 1 where only one of the two values is finite."""
    finite = np.isfinite(expected), np.isfinite(found)
    gaps = np.abs(np.where(finite[0], expected, 0) - np.where(finite[1], found, 0))
    gaps = gaps / np.asarray(deviations or 1.0)
    return np.where(finite[0] == finite[1], gaps, np.maximum(gaps, 1.0))


def max_difference(expected: npt.NDArray[Any], found: npt.NDArray[Any], deviations: Sequence[float]) -> float:
    """Returns the largest of the `differences`."""
    return float(differences(expected, found, deviations).max(initial=0.0))


class Agreement(NamedTuple):
    """Largest difference from the golden predictions, and which it is, or why none is known."""

    difference: float
    description: str = ""


def ask_golden(process: CleanProcess, exported: Path) -> Callable[[], Agreement]:
    """Sends the golden requests of an export to a clean process.

    Returns a function that waits for the answers and compares them; without answers the difference is 1.
    """
    export = Export.read(exported)
    request = {name: (export.golden or {})[name] for name in ("signature_name", "instances")}
    number = process.ask(exported / model_store.SAVED_MODEL, request)

    @functools.cache
    def compare_answers() -> Agreement:
        try:
            return compare_golden(export, process.answer(number))
        except ModelError as error:
            return Agreement(1.0, str(error))

    return compare_answers


def compare_golden(export: Export, predictions: Sequence[Mapping[str, Any]]) -> Agreement:
    """Compares predictions, one object for each golden example, with the golden ones of an export.

    The difference is 1 where a row or an output is missing, or a class does not follow from probabilities.
    """
    try:
        return max(_compare_labels(export, predictions), key=lambda comparison: comparison.difference)
    except (KeyError, ValueError) as error:
        return Agreement(1.0, f"other rows or outputs than the golden ones ({error})")


def _compare_labels(export: Export, predictions: Sequence[Mapping[str, Any]]) -> list[Agreement]:
    expected, found = (export.golden or {})["predictions"], list[Agreement]()
    for label in export.labels:
        (name, *others), shape = name_outputs(export.labels)[label.name], (len(expected), len(label.outputs))
        both = ([row[name] for row in rows] for rows in (expected, predictions))
        wanted, actual = (np.array(values, np.float64).reshape(shape) for values in both)
        gaps = differences(wanted, actual, export.deviations.get(label.name, ()))
        example, output = worst = divmod(int(gaps.argmax()), shape[1])
        noun = f"{'value' if label.kind == REGRESSION else 'probability'} of {label.outputs[output]!r}"
        text = f"example {example}: {noun} is {actual[worst]:.6g} instead of {wanted[worst]:.6g}"
        found.append(Agreement(float(gaps[worst]), text if gaps[worst] else ""))
        for example, (row, values) in enumerate(zip(predictions, actual, strict=True)):
            given, right = [row[name] for name in others], _follow(label, values)
            if given != right and np.isfinite(values).all():
                texts = f"{truncate(given, 80)} instead of {truncate(right, 80)}"
                found.append(Agreement(1.0, f"example {example}: {', '.join(others)} {texts}"))
    return found


def _follow(label: Label, values: npt.NDArray[Any]) -> list[Any]:
    if label.kind == MULTILABEL:
        return [(values >= THRESHOLD).astype(int).tolist()]
    return [int(values.argmax()), label.outputs[int(values.argmax())]] if label.kind == CLASS else []


class CleanProcess(contextlib.AbstractContextManager["CleanProcess"]):
    """A process without Shardline that loads exports, and answers requests in order, in parallel to this."""

    def __init__(self) -> None:
        # Both processes may use a GPU, and by default TensorFlow reserves all of its memory.
        os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
        self._directory = tempfile.TemporaryDirectory(prefix="clean-")
        self._stderr = (Path(self._directory.name) / "stderr").open("w+b")
        script = str(Path(clean_process.__file__).resolve())
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", script, *_package_directories()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            bufsize=0,
            cwd=self._directory.name,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        )
        assert self._process.stdout is not None
        self._answers = io.BufferedReader(self._process.stdout)  # type: ignore[type-var]  # unbuffered, a FileIO
        self._numbers = itertools.count(1)

    def ask(self, saved_model: Path, request: Mapping[str, Any]) -> int:
        """Sends a request to a SavedModel, `instances` and perhaps `signature_name`; returns its number."""
        number = next(self._numbers)
        # By file: a pipe holds little, and is not read while TensorFlow is being imported.
        file = Path(self._directory.name) / str(number)
        file.write_text(json.dumps({"saved_model": str(saved_model.resolve()), **request}))
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` reports why the process has ended
            self._process.stdin.write(f"{file}\n".encode())
        return number

    def ask_pixels(self, converted: Path, pixels: npt.NDArray[np.uint8], calls: int) -> list[dict[str, Any]]:
        """Returns the "outputs" of a converted model for each image, then the "seconds" of timed calls."""
        file = Path(self._directory.name) / "pixels.npy"
        np.save(file, pixels)
        request = {"converted": str(converted.resolve()), "pixels": str(file), "calls": calls}
        return self.answer(self.ask(converted, request))

    def answer(self, number: int) -> list[dict[str, Any]]:
        """Waits for the answer to a request; answers to earlier requests are dropped.

        Raises ModelError with the cause where there is none.
        """
        timed_out = threading.Event()

        def kill() -> None:
            timed_out.set()
            self._process.kill()

        timer = threading.Timer(_TIMEOUT_S, kill)
        timer.start()
        lines = (json.loads(line) for line in self._answers)
        answer = next((line for line in lines if line["request"] == str(number)), None)
        timer.cancel()
        if timed_out.is_set():
            raise ModelError(f"the export gave no answer for {_TIMEOUT_S:.0f} s in a clean process")
        if answer is None:
            code = self._process.wait()
            self._stderr.seek(0)
            last = self._stderr.read().decode("utf-8", "replace").strip().splitlines()[-1:]
            cause = last[0] if last else f"exit code {code}"
            raise ModelError(f"the clean process ended while running the export: {cause}")
        if cause := answer.get("error"):
            raise ModelError(f"the export cannot be used with TensorFlow alone: {cause}")
        return list(answer["predictions"])

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._answers, self._stderr):
            assert stream is not None
            stream.close()
        self._directory.cleanup()


def _package_directories() -> Iterator[str]:
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    spec = importlib.util.find_spec("tensorflow")  # may be on PYTHONPATH only
    own = [str(Path(spec.origin).parents[1])] if spec and spec.origin else []
    for directory in dict.fromkeys((*site.getsitepackages(), *user, *own)):
        if Path(directory).is_dir():
            yield directory


def make_signatures(
    model: keras.Model, manifest: Manifest, heads: Heads, prepare: Prepare | None = None
) -> dict[str, Function]:
    """Returns the signatures of a model by name, which have the outputs `OUTPUTS`.

    `prepare` transforms a dataset's inputs for the model. Raises ModelError when it has operations that no
    server supports.
    """
    names = name_outputs(manifest.labels)

    def answer(inputs: Inputs) -> dict[str, tf.Tensor]:
        prepared = prepare(inputs) if prepare else inputs
        answers = to_predictions(model, model(prepared, training=False), heads, manifest.labels)
        named: dict[str, tf.Tensor] = {}
        for label in manifest.labels:
            values = answers[label.name]
            if label.kind == REGRESSION:  # each in the order of `OUTPUTS`
                tensors = [values[:, 0] if len(label.outputs) == 1 else values]
            elif label.kind == CLASS:
                index = tf.argmax(values, axis=-1)
                tensors = [values, index, tf.gather(tf.constant(label.outputs), index)]
            else:
                tensors = [values, tf.cast(values >= THRESHOLD, tf.int64)]
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
    return {"image": IMAGES} if "image" in inputs else sanitize_names(inputs)


def make_requests(manifest: Manifest, examples: tf.Tensor, inputs: Inputs) -> dict[str, dict[str, tf.Tensor]]:
    """Returns the arguments of each signature for stored examples, whose `inputs` the model takes."""
    if "image" not in manifest.inputs:
        names = argument_names(manifest.inputs)
        columns = {names[column]: values for column, values in inputs.items()}
        return {EXAMPLE: {EXAMPLES: examples}, DEFAULT: columns}
    stored = tf.io.parse_example(examples, {"image": tf.io.FixedLenFeature([], tf.string)})["image"]
    images = {IMAGES: encode_stored(stored, manifest.image)}
    return {EXAMPLE: {EXAMPLES: examples}, DEFAULT: images, TENSOR: {PIXELS: inputs}}


def _image_signatures(answer: Function, image: Feature, records: tf.TensorSpec) -> dict[str, Function]:
    def decode_files(files: tf.Tensor) -> tf.Tensor:
        pixels = tf.TensorSpec(image.shape, tf.uint8)
        return tf.map_fn(lambda file: decode_image(file, image), files, fn_output_signature=pixels)

    # One tf.function for all signatures: the decoder is traced once.
    decoded = stored = _function(decode_files, tf.TensorSpec([None], tf.string))
    if image.encoding == "raw":
        stored = _function(lambda raw: decode_batch(raw, image), tf.TensorSpec([None], tf.string))
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
        self.deviations = read_deviations(manifest)
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
            max_difference(values, others[name], model.deviations.get(name, ()))
            for name, values in serve(some).outputs.items()
            for others in (reversed_outputs, single_outputs)
        ),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _MB,
        "size_mb": sum(path.stat().st_size for path in model.path.rglob("*") if path.is_file()) / _MB,
    }
