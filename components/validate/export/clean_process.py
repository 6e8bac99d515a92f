"""Clean process: loads SavedModels with TensorFlow and numpy alone, and answers as a model server does.

Run by path (`python -I -S clean_process.py DIRECTORY...`): it imports TensorFlow from the directories, then
removes them from sys.path: neither Shardline nor a package of the model's author can be imported. Each line
of standard input is the path of a request: {"saved_model": ..., "instances": [...]}, or for a converted model
{"converted": ..., "pixels": FILE, "calls": ...}; each line of standard output the answer, {"request": NAME OF
THE FILE, "predictions": [...]}, or "error" with one line.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Answers the requests until there are no more."""
    with contextlib.suppress(AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what TensorFlow prints goes to standard error
    # Keras imports these where they are installed; serving does not need them.
    sys.modules.update(dict.fromkeys(("shardline", "sklearn", "matplotlib", "cv2")))  # type: ignore[arg-type]
    _import("tensorflow")
    for line in sys.stdin:
        answer: dict[str, Any]
        try:
            with open(line.removesuffix("\n"), encoding="utf-8") as file:
                request = json.load(file)
            answer = {"predictions": (predict_pixels if "converted" in request else predict)(request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        print(json.dumps({"request": os.path.basename(line.strip()), **answer}), file=answers, flush=True)


def predict(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of a SavedModel's answer, with None for numbers that are not finite."""
    import tensorflow as tf

    signature = _load(request["saved_model"]).signatures[request.get("signature_name", "serving_default")]
    specs, rows = signature.structured_input_signature[1], request["instances"]
    if len(specs) == 1 and not (isinstance(rows[0], dict) and set(rows[0]) == set(specs)):
        rows = [{next(iter(specs)): row} for row in rows]
    arguments = {
        name: tf.constant([_decode_input(row[name], spec) for row in rows], spec.dtype)
        for name, spec in specs.items()
    }
    return to_rows(signature(**arguments))


def to_rows(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns tensors as rows for JSON: strings as text, None for numbers that are not finite."""
    values = [_encode_output(column.numpy().tolist()) for column in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]


def predict_pixels(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of a converted model's answer, and the seconds of some calls with one image."""
    import numpy as np

    pixels, run = np.load(request["pixels"]), _load_converted(request["converted"])
    rows = [{"outputs": _encode_output(row)} for row in run(pixels).reshape(len(pixels), -1).tolist()]
    return rows + [{"seconds": each} for each in time_calls(run, pixels[:, None], request["calls"])]


def time_calls(serve: Callable[[Any], object], requests: Sequence[Any], calls: int) -> list[float]:
    """Returns the seconds of each call, after a warm-up, with one request after the other.

    There are at most so many calls, in a second at most.
    """
    for call in range(min(3, calls)):  # the first calls allocate
        serve(requests[call % len(requests)])
    seconds: list[float] = []
    while len(seconds) < calls and sum(seconds) < 1.0:
        request = requests[len(seconds) % len(requests)]
        began = time.perf_counter()
        serve(request)
        seconds.append(time.perf_counter() - began)
    return seconds


def _import(name: str) -> Any:
    plain = list(sys.path)
    sys.path.extend(sys.argv[1:])
    gc.disable()  # collections take an eighth of the import of TensorFlow, and free almost nothing
    try:
        return importlib.import_module(name)
    finally:
        sys.path[:] = plain
        gc.enable()


@functools.lru_cache(maxsize=1)
def _load_converted(file: str) -> Callable[[Any], Any]:
    if file.endswith(".onnx"):
        session = _import("onnxruntime").InferenceSession(file, providers=["CPUExecutionProvider"])
        return lambda pixels: session.run(None, {"pixels": pixels})[0]
    runner = _import("ai_edge_litert.interpreter").Interpreter(model_path=file).get_signature_runner()
    return lambda pixels: next(iter(runner(pixels=pixels).values()))


@functools.lru_cache(maxsize=4)
def _load(saved_model: str) -> Any:
    import tensorflow as tf

    return tf.saved_model.load(saved_model)


def _decode_input(value: Any, spec: Any) -> Any:
    if isinstance(value, dict):
        return base64.b64decode(value["b64"])
    if isinstance(value, list):
        return [_decode_input(item, spec) for item in value]
    return math.nan if value is None and spec.dtype.is_floating else value


def _encode_output(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, list):
        return [_encode_output(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    main()
