"""Served model: a SavedModel used as a client uses it, through its signatures, and what it costs to serve.

Latency is what a client waits. Stability is whether the model says the same of an example however it is asked
(metamorphic checks): alone or in a batch, and after changes that a person hardly sees.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from shardline.components.model_store import EXPORT_FILE, Export
from shardline.components.validate.answers import (
    Predictions,
    largest_gap_of,
    name_outputs,
    read_deviations,
)
from shardline.components.validate.signatures import DEFAULT, EXAMPLE, EXAMPLES, IMAGES
from shardline.trainer.data.features import CLASS, REGRESSION
from shardline.trainer.data.manifest import Manifest
from shardline.trainer.errors import ModelError
from shardline.trainer.models.export_check import check_saved_model

#: Number of requests that `measure_costs` uses.
REQUESTS = 32

#: Calls of each kind that are timed, at most.
CALLS = 100

_WARM_UP = 3
_SECONDS = 1.0
_BATCH = 32
_MB = 1e6


Serve = Callable[[tf.Tensor], Predictions]


class ServedModel:
    """A SavedModel behind the signatures that Shardline exports, with an answer for each label of a dataset.

    Raises ModelError when there is no SavedModel, or it has another signature.

    Attributes:
        deviations: Unit in which differences of numbers are told, as `read_deviations` returns it.
        quantiles: Quantiles that it gives, by name of the label, of those of which it does.
    """

    def __init__(self, path: Path, manifest: Manifest, loaded: Any = None) -> None:
        """Takes what `tf.saved_model.load` has returned of the path, and loads it where that is not given."""
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
            why = " ".join(str(error).split())
            raise ModelError(f"cannot load the exported model {path}: {why}; export it again") from None
        outputs = self._signature(DEFAULT).structured_outputs
        self.quantiles = self._read_quantiles(outputs)
        self._names = name_outputs(manifest.labels, self.quantiles)
        if missing := [name for names in self._names.values() for name in names if name not in outputs]:
            raise ModelError(
                f"the signature {DEFAULT!r} of {path} has no output {', '.join(missing)}; export it again"
            )
        for label in self._labels:
            shape, wanted = outputs[self._names[label.name][0]].shape, len(label.outputs)
            if (found := shape[-1] if len(shape) > 1 else 1) not in (None, wanted):
                what = "classes" if label.class_names else "numbers"
                raise ModelError(
                    f"the exported model {path} has {found} {what}, the dataset has {wanted}; "
                    "evaluate it on the data that it was made for"
                )

    def _read_quantiles(self, outputs: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
        """Reads which quantiles an output has from what was written down of the export, beside it."""
        able = [label for label in self._labels if label.kind == REGRESSION and len(label.outputs) == 1]
        names = name_outputs(self._labels, [label.name for label in able])
        found = [label.name for label in able if names[label.name][-1] in outputs]
        recorded = Export.read(self.path.parent).quantiles if found else {}
        shares = {name: tuple(recorded.get(name, ())) for name in found}
        for name in found:
            if outputs[names[name][-1]].shape[-1] != len(shares[name]):
                raise ModelError(
                    f"{self.path} gives {outputs[names[name][-1]].shape[-1]} quantiles, and {EXPORT_FILE} "
                    f"beside it names {len(shares[name])}; export it again"
                )
        return shares

    def predict(self, images: tf.Tensor) -> Predictions:
        """Predicts encoded images, a string tensor of shape [n].

        Raises tf.errors.InvalidArgumentError when one of them cannot be decoded.
        """
        return self._answer(DEFAULT, {IMAGES: images})

    def predict_examples(self, serialized: tf.Tensor) -> Predictions:
        """Predicts serialized tf.train.Example, a string tensor of shape [n], of images or of tables.

        Raises ModelError when the model was exported without that signature, and
        tf.errors.InvalidArgumentError when an example lacks a column or cannot be decoded.
        """
        return self._answer(EXAMPLE, {EXAMPLES: serialized})

    def _answer(self, signature: str, request: dict[str, tf.Tensor]) -> Predictions:
        outputs = self._signature(signature)(**request)
        said, classes, quantiles = {}, {}, {}
        for label in self._labels:
            names = self._names[label.name]
            said[label.name] = outputs[names[0]].numpy().reshape(-1, len(label.outputs))
            if label.kind == CLASS:
                classes[label.name] = outputs[names[1]].numpy()
            if label.name in self.quantiles:
                quantiles[label.name] = outputs[names[1]].numpy()
        return Predictions(said, classes, quantiles)

    def _signature(self, name: str) -> Any:
        if (found := self._loaded.signatures.get(name)) is None:
            raise ModelError(f"the SavedModel {self.path} has no signature {name!r}; export it again")
        return found


def measure_costs(
    model: ServedModel, images: tf.Tensor | None, records: tf.Tensor, calls: int = CALLS
) -> dict[str, float]:
    """Returns what a model costs to serve, and how stable its answers are, by the names in SERVING.

    `images` is None for a table; `records` are the same examples, at least one; of each kind at most as many
    `calls` are timed. peak_memory_mb is the largest resident size that this process has had, TensorFlow
    included.
    """
    serve, requests = (model.predict_examples, records) if images is None else (model.predict, images)
    return {
        **measure_latency(serve, requests, calls),
        "batch_difference": batch_difference(serve, requests, model.deviations),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _MB,
        "size_mb": sum(path.stat().st_size for path in model.path.rglob("*") if path.is_file()) / _MB,
    }


def measure_latency(serve: Serve, requests: tf.Tensor, calls: int = CALLS) -> dict[str, float]:
    """Measures single requests and requests of 32 examples, each after a warm-up, for a second at most.

    `requests`, at least one, [n], are used in turn, and again when they are not enough. Throughput is in
    examples per second, in batches of 32.
    """
    single, batched = (time_calls(serve, requests, size, calls) for size in (1, _BATCH))
    return {
        **{f"latency_p{p}_ms": float(np.percentile(single, p)) * 1e3 for p in (50, 95)},
        **{f"latency_batch32_p{p}_ms": float(np.percentile(batched, p)) * 1e3 for p in (50, 95)},
        "throughput": _BATCH / float(np.mean(batched)),
    }


def batch_difference(
    serve: Serve, requests: tf.Tensor, deviations: Mapping[str, Sequence[float]] | None = None
) -> float:
    """Returns the largest difference that batch size and order make to an answer, on 32 examples.

    Numbers are told in `deviations`. It is 1 or more where an output is a number in one batch, and none in
    another.
    """
    some = requests[:REQUESTS]
    together, turned = serve(some), serve(some[::-1]).reversed()
    alone = Predictions.join([serve(some[place : place + 1]) for place in range(int(some.shape[0]))])
    return max(largest_gap_of(together, others, deviations or {}) for others in (turned, alone))


def time_calls(
    serve: Callable[[tf.Tensor], object], requests: tf.Tensor, size: int, calls: int = CALLS
) -> list[float]:
    """Returns the seconds of each call with `size` examples, after a warm-up, for a second at most."""
    count = int(requests.shape[0])
    batches = [tf.gather(requests, np.arange(start, start + size) % count) for start in range(min(count, 32))]
    for call in range(_WARM_UP):
        serve(batches[call % len(batches)])
    seconds: list[float] = []
    while len(seconds) < calls and sum(seconds) < _SECONDS:
        began = time.perf_counter()
        serve(batches[len(seconds) % len(batches)])
        seconds.append(time.perf_counter() - began)
    return seconds
