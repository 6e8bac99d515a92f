"""Answers of an exported model: what its signatures give, how far two are apart, and the golden ones.

A difference of numbers is told in standard deviations of the label in training, one of probabilities as it
is, so that a limit means the same for every label. Golden examples, requests with their answers, are compared
with what a clean process or a server answers.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import itertools
import json
import math
import os
import re
import reprlib
import site
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from shardline.components import model_store
from shardline.components.model_store import Export
from shardline.components.validate.export import clean_process
from shardline.trainer.base.errors import ModelError
from shardline.trainer.data.features import CLASS, MULTILABEL, REGRESSION, Label
from shardline.trainer.data.manifest import Manifest

Floats = npt.NDArray[np.float32]

#: Seconds that a clean process may take from the request to the answer, TensorFlow's import included.
_LIMIT_S = 600.0

#: What a server sends may be anything, of any length.
_SHORT = reprlib.Repr()
_SHORT.maxstring = 80

#: Outputs of a signature by kind of label, that of the probabilities or numbers first.
OUTPUTS = {
    CLASS: ("probabilities", "label", "label_name"),
    MULTILABEL: ("probabilities", "labels"),
    REGRESSION: ("value",),
}

#: One more of a label of one number, of a model that gives quantiles.
QUANTILES = "quantiles"

#: From this probability on, an example is said to have one of several labels.
THRESHOLD = 0.5


@dataclass(frozen=True)
class Predictions:
    """Answers of a model to n examples, by name of the label.

    Attributes:
        said: Probabilities or numbers, float32 [n, outputs].
        classes: The most probable class, int64 [n], or 0 or 1 of each of several labels, [n, outputs].
        quantiles: Quantiles where the model gives them, float32 [n, quantiles].
    """

    said: Mapping[str, Floats]
    classes: Mapping[str, npt.NDArray[np.int64]]
    quantiles: Mapping[str, Floats] = field(default_factory=dict)

    @classmethod
    def join(cls, parts: Sequence[Predictions]) -> Predictions:
        """Returns the answers to several batches as one; there is at least one."""

        def joined(of: str) -> dict[str, Any]:
            names = getattr(parts[0], of)
            return {name: np.concatenate([getattr(part, of)[name] for part in parts]) for name in names}

        return cls(joined("said"), joined("classes"), joined("quantiles"))

    def reversed(self) -> Predictions:
        """Returns the answers in the opposite order."""
        parts: tuple[Mapping[str, Any], ...] = (self.said, self.classes, self.quantiles)
        return Predictions(*({name: values[::-1] for name, values in part.items()} for part in parts))


def name_outputs(labels: Sequence[Label], quantiles: Collection[str] = ()) -> dict[str, tuple[str, ...]]:
    """Returns the names of a signature's outputs by name of the label, in the order of `OUTPUTS`.

    Of several labels each name begins with the label's, as in "kind_probabilities". The labels in `quantiles`
    have one more, for these.
    """
    plain = name_plainly([label.name for label in labels])
    return {
        label.name: tuple(
            output if len(labels) == 1 else f"{plain[label.name]}_{output}"
            for output in (*OUTPUTS[label.kind], *([QUANTILES] if label.name in quantiles else []))
        )
        for label in labels
    }


def name_plainly(names: Iterable[str]) -> dict[str, str]:
    """Returns names of arguments and outputs for columns, as TensorFlow wants them, no two the same.

    A name of ASCII letters, digits and "_" stays; "petal width (cm)" becomes "petal_width_cm".
    """

    def is_plain(name: str) -> bool:
        # TensorFlow has a use of its own for an argument "self".
        return bool(re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name)) and name != "self"

    names = list(names)
    found = {name: name for name in names if is_plain(name)}
    for name in names:
        if name not in found:
            plain = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")
            plain = plain if is_plain(plain) else f"column_{plain}".rstrip("_")
            while plain in found.values():
                plain += "_"
            found[name] = plain
    return found


def read_deviations(manifest: Manifest) -> dict[str, tuple[float, ...]]:
    """Returns the standard deviation of each number in training, by name of the label; 1 where it is 0."""
    split = manifest.splits.get("train") or next(iter(manifest.splits.values()))
    return {
        label.name: tuple(spread.deviation or 1.0 for spread in split.labels[label.name].spreads)
        for label in manifest.labels
        if label.kind == REGRESSION
    }


def gaps(expected: npt.NDArray[Any], found: npt.NDArray[Any], deviations: Sequence[float] = ()) -> Any:
    """Returns the differences; at least 1 where one of two is a number and the other is not."""
    finite = np.isfinite(expected), np.isfinite(found)
    apart = np.abs(np.where(finite[0], expected, 0) - np.where(finite[1], found, 0))
    apart = apart / np.asarray(deviations or 1.0)
    return np.where(finite[0] == finite[1], apart, np.maximum(apart, 1.0))


def largest_gap(
    expected: npt.NDArray[Any], found: npt.NDArray[Any], deviations: Sequence[float] = ()
) -> float:
    """Returns the largest of the `gaps`."""
    return float(gaps(expected, found, deviations).max(initial=0.0))


def largest_gap_of(
    ours: Predictions, theirs: Predictions, deviations: Mapping[str, Sequence[float]]
) -> float:
    """Returns the largest difference between answers to the same examples, over all labels."""
    pairs = ((ours.said, theirs.said), (ours.quantiles, theirs.quantiles))
    return max(
        largest_gap(values, others[name], deviations.get(name, ()))
        for some, others in pairs
        for name, values in some.items()
    )


@dataclass(frozen=True)
class Comparison:
    """Comparison of some answers with the golden ones.

    Attributes:
        difference: Largest difference of a probability, or of a number in standard deviations; at least 1
            where a label is another one, an answer is missing, or only one of two numbers is finite.
        words: What differs most, or why nothing could be compared.
    """

    difference: float
    words: str = ""


def start() -> CleanProcess:
    """Starts a clean process, a context manager."""
    return CleanProcess()


def ask(process: CleanProcess, exported: Path) -> Callable[[], Comparison]:
    """Asks a clean process for an export's golden answers.

    Returns what waits for them and compares them; where there are none, nothing agrees.
    """
    export = Export.read(exported)
    golden = export.golden or {}
    request = {name: golden[name] for name in ("signature_name", "instances")}
    number = process.ask(exported / model_store.SAVED_MODEL, request)

    @functools.cache
    def check() -> Comparison:
        try:
            return compare(export, process.answer(number))
        except ModelError as error:
            return Comparison(1.0, str(error))

    return check


def compare(export: Export, predictions: Any) -> Comparison:
    """Compares answers, one object for each golden example, with the golden ones of an export."""
    expected = (export.golden or {}).get("predictions", [])
    if not isinstance(predictions, Sequence) or len(predictions) != len(expected):
        many = len(predictions) if isinstance(predictions, Sequence) else "no"
        return Comparison(1.0, f"{many} answers to {len(expected)} examples")
    rows = []
    for wanted, found in zip(expected, predictions, strict=True):
        if not isinstance(found, Mapping):
            rows.append(Comparison(1.0, "no outputs"))
        elif missing := [name for name in wanted if name not in found]:
            rows.append(Comparison(1.0, f"no {', '.join(missing)}"))
        else:
            labels = [_compare_label(wanted, found, label, export) for label in export.labels]
            rows.append(max(labels, key=lambda one: one.difference))
    number, worst = max(enumerate(rows), key=lambda item: item[1].difference)
    return Comparison(worst.difference, f"example {number}: {worst.words}" if worst.words else "")


def is_answer(row: Any, export: Export) -> bool:
    """Whether a row has the outputs of an export, as its golden predictions must."""

    def has_shape(name: str, *wanted: int) -> bool:
        return np.array(row[name], np.float64).shape == wanted

    try:
        for label in export.labels:
            names, many = name_outputs(export.labels, export.quantiles)[label.name], len(label.outputs)
            first = () if label.kind == REGRESSION and many == 1 else (many,)
            is_sound = all(name in row for name in names) and has_shape(names[0], *first)
            if label.kind == CLASS:
                is_sound = is_sound and type(row[names[1]]) is int and 0 <= row[names[1]] < many
            elif label.kind == MULTILABEL:
                is_sound = is_sound and has_shape(names[1], many)
            elif shares := export.quantiles.get(label.name):
                is_sound = is_sound and has_shape(names[1], len(shares))
            if not is_sound:
                return False
    except (LookupError, TypeError, ValueError, OverflowError):
        return False
    return bool(export.labels)


def _compare_label(
    expected: Mapping[str, Any], found: Mapping[str, Any], label: Label, export: Export
) -> Comparison:
    names = name_outputs(export.labels, export.quantiles)[label.name]
    wanted, given, of = expected[names[0]], found[names[0]], label.outputs
    units = export.deviations.get(label.name, ())
    if label.kind == REGRESSION and len(label.outputs) == 1:
        wanted, given = [wanted], [given]
        if shares := export.quantiles.get(label.name, ()):
            quantiles = found[names[1]] if isinstance(found[names[1]], Sequence) else ()
            wanted, given = [*wanted, *expected[names[1]]], [*given, *quantiles]
            of += tuple(f"{label.outputs[0]}, quantile {share:g}" for share in shares)
            units = units[:1] * len(of)
    what = ("value", "values") if label.kind == REGRESSION else ("probability", "probabilities")
    if not isinstance(given, Sequence) or len(given) != len(wanted):
        return Comparison(1.0, f"no {len(wanted)} {what[1]}")
    golden, said = [*map(_number, wanted)], [*map(_number, given)]
    apart = gaps(np.array(golden), np.array(said), units)
    place, gap = int(apart.argmax()), float(apart.max())
    if np.isfinite([*golden, *said]).all() and (other := _other_answer(found, label, names, said)):
        return Comparison(max(1.0, gap), other)
    words = f"{what[0]} of {of[place]!r} is {_SHORT.repr(given[place])} instead of {wanted[place]}"
    return Comparison(gap, words if gap else "")


def _other_answer(found: Mapping[str, Any], label: Label, names: Sequence[str], given: Sequence[Any]) -> str:
    """Returns in words which class or labels were said that do not follow from the probabilities."""
    if label.kind == CLASS:
        place = max(range(len(given)), key=given.__getitem__)
        said, name, best = found[names[1]], found[names[2]], label.outputs[place]
        return "" if (said, name) == (place, best) else f"{_SHORT.repr(name)} instead of {best!r}"
    if label.kind == MULTILABEL and (said := found[names[1]]) != [int(one >= THRESHOLD) for one in given]:
        return f"{names[1]} {_SHORT.repr(said)} are not those from {THRESHOLD} on"
    return ""


def _number(value: Any) -> float:
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # a whole number without end
        return math.nan


class CleanProcess:
    """A process without Shardline in which exports are loaded; it answers in order, beside this one."""

    def __init__(self) -> None:
        # Both of us may use a GPU, where TensorFlow takes all memory for the first that comes.
        os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
        self._directory = tempfile.TemporaryDirectory(prefix="clean-")
        self._said = (Path(self._directory.name) / "stderr").open("w+b")
        script = str(Path(clean_process.__file__).resolve())
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", script, *_directories()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
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
        # A pipe holds little, and nobody reads it while TensorFlow is being imported.
        file = Path(self._directory.name) / str(number)
        file.write_text(json.dumps({"saved_model": str(saved_model.resolve()), **request}))
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # what has become of it is said instead of an answer
            self._process.stdin.write(f"{file}\n".encode())
        return number

    def answer(self, number: int) -> list[dict[str, Any]]:
        """Waits for the answer to a request, the last one or later than all that were waited for.

        Raises ModelError with the cause where there is none.
        """
        over = threading.Event()

        def end() -> None:
            over.set()
            self._process.kill()

        late = threading.Timer(_LIMIT_S, end)
        late.start()
        # Of other answers whoever has asked no longer wants to know.
        lines = (json.loads(line) for line in self._answers)
        answer = next((one for one in lines if one["request"] == str(number)), None)
        late.cancel()
        if over.is_set():
            raise ModelError(f"the export gave no answer for {_LIMIT_S:.0f} s in a process of its own")
        if answer is None:
            code = self._process.wait()
            self._said.seek(0)
            last = self._said.read().decode("utf-8", "replace").strip().splitlines()[-1:]
            words = last[0] if last else f"exit code {code}"
            raise ModelError(f"a process of its own ended on the export: {words}")
        if cause := answer.get("error"):
            raise ModelError(f"the export cannot be used with TensorFlow alone: {cause}")
        return list(answer["predictions"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._answers, self._said):
            assert stream is not None
            stream.close()
        self._directory.cleanup()


def _directories() -> Iterator[str]:
    """Yields the directories from which this interpreter imports packages, TensorFlow among them."""
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    found = importlib.util.find_spec("tensorflow")  # perhaps on PYTHONPATH alone
    own = [str(Path(found.origin).parents[1])] if found and found.origin else []
    for directory in dict.fromkeys((*site.getsitepackages(), *user, *own)):
        if Path(directory).is_dir():
            yield directory
