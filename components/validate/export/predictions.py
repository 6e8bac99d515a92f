"""Predictions of an exported model: names of outputs, differences, and the comparison with golden ones.

Differences of numbers are in standard deviations of the label in training, those of probabilities absolute:
a limit means the same for every label. Golden examples, requests with their predictions, are compared with
the predictions of a clean process.
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
import site
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardline.components import model_store
from shardline.components.model_store import Export
from shardline.components.text import truncate
from shardline.components.validate.export import clean_process
from shardline.trainer.base.errors import ModelError
from shardline.trainer.data.features import CLASS, MULTILABEL, REGRESSION, Label
from shardline.trainer.data.manifest import Manifest

Floats = npt.NDArray[np.float32]

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


def differences(
    expected: npt.NDArray[Any], actual: npt.NDArray[Any], deviations: Sequence[float] = ()
) -> Any:
    """Returns the absolute differences; at least 1 where only one of the two values is finite."""
    finite = np.isfinite(expected), np.isfinite(actual)
    gaps = np.abs(np.where(finite[0], expected, 0) - np.where(finite[1], actual, 0))
    gaps = gaps / np.asarray(deviations or 1.0)
    return np.where(finite[0] == finite[1], gaps, np.maximum(gaps, 1.0))


def max_difference(
    expected: npt.NDArray[Any], actual: npt.NDArray[Any], deviations: Sequence[float] = ()
) -> float:
    """Returns the largest of the `differences`."""
    return float(differences(expected, actual, deviations).max(initial=0.0))


class Comparison(NamedTuple):
    """Largest difference from the golden predictions, and which it is, or why none is known."""

    difference: float
    description: str = ""


def ask_golden(process: CleanProcess, exported: Path) -> Callable[[], Comparison]:
    """Sends the golden requests of an export to a clean process.

    Returns a function that waits for the answers and compares them; without answers the difference is 1.
    """
    export = Export.read(exported)
    request = {name: (export.golden or {})[name] for name in ("signature_name", "instances")}
    number = process.ask(exported / model_store.SAVED_MODEL, request)

    @functools.cache
    def check() -> Comparison:
        try:
            return compare(export, process.answer(number))
        except ModelError as error:
            return Comparison(1.0, str(error))

    return check


def compare(export: Export, predictions: Sequence[Mapping[str, Any]]) -> Comparison:
    """Compares predictions, one object for each golden example, with the golden ones of an export.

    The difference is 1 where a row or an output is missing, or a class does not follow from probabilities.
    """
    try:
        return max(_compare_labels(export, predictions), key=lambda comparison: comparison.difference)
    except (KeyError, ValueError) as error:
        return Comparison(1.0, f"other rows or outputs than the golden ones ({error})")


def _compare_labels(export: Export, predictions: Sequence[Mapping[str, Any]]) -> list[Comparison]:
    expected, found = (export.golden or {})["predictions"], list[Comparison]()
    for label in export.labels:
        (name, *others), shape = name_outputs(export.labels)[label.name], (len(expected), len(label.outputs))
        both = ([row[name] for row in rows] for rows in (expected, predictions))
        wanted, actual = (np.array(values, np.float64).reshape(shape) for values in both)
        gaps = differences(wanted, actual, export.deviations.get(label.name, ()))
        example, output = worst = divmod(int(gaps.argmax()), shape[1])
        noun = f"{'value' if label.kind == REGRESSION else 'probability'} of {label.outputs[output]!r}"
        text = f"example {example}: {noun} is {actual[worst]:.6g} instead of {wanted[worst]:.6g}"
        found.append(Comparison(float(gaps[worst]), text if gaps[worst] else ""))
        for example, (row, values) in enumerate(zip(predictions, actual, strict=True)):
            given, right = [row[name] for name in others], _follow(label, values)
            if given != right and np.isfinite(values).all():
                texts = f"{truncate(given, 80)} instead of {truncate(right, 80)}"
                found.append(Comparison(1.0, f"example {example}: {', '.join(others)} {texts}"))
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
