"""A SavedModel, used as a client would use it: through its serving signature.

Latency: how long a client waits for the exported model, and what the model costs in memory.

Stability: whether a model says the same of an example however it is asked (metamorphic checks).
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from shardline.components.validate.signatures import DEFAULT, EXAMPLE, OUTPUTS
from shardline.trainer.errors import ModelError


@dataclass(frozen=True)
class Predictions:
    """What a model says of some images.

    Attributes:
        probabilities: float32 [n, classes].
        labels: int64 [n].
    """

    probabilities: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]


class ServedModel:
    """A SavedModel behind the signature that Shardline exports."""

    def __init__(self, path: Path, classes: int) -> None:
        """Loads the model.

        Args:
            path: Directory of the SavedModel.
            classes: Number of probabilities per image that are expected.

        Raises:
            ModelError: When there is no SavedModel, or it has another signature.
        """
        self._path = path
        try:
            # The signature alone does not keep the variables alive, the loaded object does.
            self._loaded = tf.saved_model.load(str(path))
        except (OSError, ValueError, tf.errors.OpError) as error:
            raise ModelError(f"cannot load the exported model {path}: {error}; export it again") from None
        self._serve = self._loaded.signatures.get(DEFAULT)
        if self._serve is None:
            raise ModelError(f"the SavedModel {path} has no signature {DEFAULT!r}; export it again")
        outputs = self._serve.structured_outputs
        if missing := [name for name in OUTPUTS if name not in outputs]:
            raise ModelError(
                f"the signature {DEFAULT!r} of {path} has no output {', '.join(missing)}; export it again"
            )
        if (found := outputs["probabilities"].shape[-1]) not in (None, classes):
            raise ModelError(
                f"the exported model {path} tells {found} classes apart, the dataset has {classes}; "
                "evaluate it on the data that it was made for"
            )

    def predict(self, images: tf.Tensor) -> Predictions:
        """Predicts a batch.

        Args:
            images: Encoded images, a string tensor of shape [n].

        Raises:
            tf.errors.InvalidArgumentError: When one of them cannot be decoded.
        """
        outputs = self._serve(images=images)
        return Predictions(outputs["probabilities"].numpy(), outputs["label"].numpy())

    def predict_examples(self, serialized: tf.Tensor) -> Predictions:
        """Predicts a batch of examples as a dataset holds them: of images or of tables.

        Args:
            serialized: tf.train.Example, a string tensor of shape [n].

        Raises:
            ModelError: When the model was exported without that signature.
            tf.errors.InvalidArgumentError: When one of them lacks a column or cannot be decoded.
        """
        serve = self._loaded.signatures.get(EXAMPLE)
        if serve is None:
            raise ModelError(f"the SavedModel {self._path} has no signature {EXAMPLE!r}; export it again")
        outputs = serve(examples=serialized)
        return Predictions(outputs["probabilities"].numpy(), outputs["label"].numpy())


_WARM_UP = 3
_MOST_CALLS = 100
_SECONDS = 1.0
_BATCH = 32
_MB = 1e6

Serve = Callable[[tf.Tensor], object]


def measure_latency(serve: Serve, requests: tf.Tensor) -> dict[str, float]:
    """Measures single requests and requests of 32 examples, each after a warm-up, for a second at most.

    Args:
        serve: Answers some requests.
        requests: At least one, [n]; they are used in turn, and again when they are not enough.

    Returns:
        latency_p50_ms and latency_p95_ms of single requests, latency_batch32_p50_ms and
        latency_batch32_p95_ms of whole batches, and throughput, the examples per second in batches of 32.
    """
    single, batched = _time(serve, requests, 1), _time(serve, requests, _BATCH)
    return {
        "latency_p50_ms": _percentile(single, 50),
        "latency_p95_ms": _percentile(single, 95),
        "latency_batch32_p50_ms": _percentile(batched, 50),
        "latency_batch32_p95_ms": _percentile(batched, 95),
        "throughput": _BATCH / float(np.mean(batched)),
    }


def size_mb(directory: Path) -> float:
    """Returns the size of the files in a directory, in MB."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()) / _MB


def peak_memory_mb() -> float:
    """Returns the largest resident size that this process has had, TensorFlow included, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _MB


def _time(serve: Serve, requests: tf.Tensor, size: int) -> list[float]:
    """Returns the seconds of each call with `size` examples."""
    count = int(requests.shape[0])
    batches = [tf.gather(requests, np.arange(start, start + size) % count) for start in range(min(count, 32))]
    for call in range(_WARM_UP):
        serve(batches[call % len(batches)])
    seconds: list[float] = []
    while len(seconds) < _MOST_CALLS and sum(seconds) < _SECONDS:
        began = time.perf_counter()
        serve(batches[len(seconds) % len(batches)])
        seconds.append(time.perf_counter() - began)
    return seconds


def _percentile(seconds: list[float], percent: float) -> float:
    return float(np.percentile(seconds, percent)) * 1e3


_EXAMPLES = 32
_JPEG_QUALITY = 90
_SHIFT = 1

Answer = Callable[[tf.Tensor], Predictions]


def batch_difference(serve: Answer, requests: tf.Tensor) -> float:
    """Returns the largest difference that batch size and order make to a probability, on 32 examples.

    Examples with an output that is not finite are left out.

    Args:
        serve: Answers some requests.
        requests: At least one, [n].
    """
    some = requests[:_EXAMPLES]
    together = serve(some).probabilities
    turned = serve(some[::-1]).probabilities[::-1]
    alone = np.concatenate([serve(some[place : place + 1]).probabilities for place in range(len(together))])
    differences = np.abs(np.stack([turned, alone]) - together)
    finite = differences[np.isfinite(differences)]
    return float(finite.max()) if finite.size else 0.0


def flips(serve: Answer, images: tf.Tensor) -> dict[str, float]:
    """Returns on which share of 32 images a change that a person hardly sees changes the predicted class.

    Args:
        serve: Answers some encoded images.
        images: At least one, a string tensor of shape [n].

    Returns:
        jpeg_flips for encoding as a JPEG of quality 90, shift_flips for a shift by one pixel.
    """
    some = images[:_EXAMPLES]
    predicted = serve(some).labels
    changes: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {"jpeg_flips": _as_jpeg, "shift_flips": _shifted}
    return {
        name: float((serve(tf.stack([change(image) for image in some])).labels != predicted).mean())
        for name, change in changes.items()
    }


def _as_jpeg(image: tf.Tensor) -> tf.Tensor:
    return tf.io.encode_jpeg(_decode(image), quality=_JPEG_QUALITY)


def _shifted(image: tf.Tensor) -> tf.Tensor:
    pixels: npt.NDArray[Any] = _decode(image).numpy()
    edges = ((_SHIFT, 0), (_SHIFT, 0), (0, 0))
    return tf.io.encode_png(np.pad(pixels, edges, mode="edge")[:-_SHIFT, :-_SHIFT])


def _decode(image: tf.Tensor) -> tf.Tensor:
    return tf.io.decode_image(image, expand_animations=False)
