"""Latency: how long a client waits for the exported model, and what the model costs in memory."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tensorflow as tf

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
