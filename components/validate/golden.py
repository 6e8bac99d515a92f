"""Golden examples of an export, requests with their answers: compared with what a clean process answers."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import json
import math
import os
import reprlib
import select
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from shardline.components import model_store
from shardline.components.model_store import Export
from shardline.components.validate import clean_process
from shardline.components.validate.answers import THRESHOLD, name_outputs
from shardline.trainer.data.features import CLASS, MULTILABEL, REGRESSION, Label
from shardline.trainer.errors import ModelError

#: Seconds that the process may take from the request to the answer, TensorFlow's import included.
_LIMIT_S = 600.0

#: What a server sends may be anything, of any length.
_SHORT = reprlib.Repr()
_SHORT.maxstring = 80


@dataclass(frozen=True)
class Agreement:
    """Agreement of some answers with the golden ones.

    Attributes:
        difference: Largest difference of a probability, or of a number in standard deviations; at least 1
            where a label is another one, an answer is missing, or only one of two numbers is finite.
        words: What differs most, or why nothing could be compared; "" where nothing differs.
    """

    difference: float
    words: str = ""


def start() -> CleanProcess:
    """Starts a clean process, a context manager."""
    return CleanProcess()


def ask(process: CleanProcess, exported: Path) -> Callable[[], Agreement]:
    """Asks a clean process for an export's golden answers.

    Returns what waits for them and compares them; where there are none, nothing agrees.
    """
    export = Export.read(exported)
    golden = export.golden or {}
    request = {name: golden[name] for name in ("signature_name", "instances")}
    number = process.ask(exported / model_store.SAVED_MODEL, request)

    @functools.cache
    def check() -> Agreement:
        try:
            return compare(export, process.answer(number))
        except ModelError as error:
            return Agreement(1.0, str(error))

    return check


def compare(export: Export, predictions: Any) -> Agreement:
    """Compares answers, one object for each golden example, with the golden ones of an export."""
    expected = (export.golden or {}).get("predictions", [])
    if not isinstance(predictions, Sequence) or len(predictions) != len(expected):
        found = len(predictions) if isinstance(predictions, Sequence) else "no"
        return Agreement(1.0, f"{found} answers to {len(expected)} examples")
    gaps = [_compare_row(*pair, export) for pair in zip(expected, predictions, strict=True)]
    number, worst = max(enumerate(gaps), key=lambda item: item[1].difference)
    return Agreement(worst.difference, f"example {number}: {worst.words}" if worst.words else "")


def is_answer(row: Any, export: Export) -> bool:
    """Whether a row has the outputs of an export, as its golden predictions must."""
    names = name_outputs(export.labels, export.quantiles)
    return (
        isinstance(row, dict)
        and bool(names)
        and all(
            set(names[label.name]) <= set(row)
            and _is_said(row, label, names[label.name])
            and _is_list(row[names[label.name][-1]], export.quantiles.get(label.name))
            for label in export.labels
        )
    )


def _is_said(row: Mapping[str, Any], label: Label, names: Sequence[str]) -> bool:
    said, wanted = row[names[0]], len(label.outputs)
    if label.kind == REGRESSION and wanted == 1:
        said = [said]
    if not _is_list(said, label.outputs):
        return False
    if label.kind == CLASS:
        return isinstance(row[names[1]], int) and 0 <= row[names[1]] < wanted
    return label.kind == REGRESSION or (isinstance(row[names[1]], list) and len(row[names[1]]) == wanted)


def _is_list(said: Any, wanted: Sequence[Any] | None) -> bool:
    """Whether it is as many numbers, or None for what is no number, as are wanted; None wants nothing."""
    if wanted is None:
        return True
    sound = isinstance(said, list) and len(said) == len(wanted)
    return sound and all(value is None or isinstance(value, int | float) for value in said)


def _compare_row(expected: Mapping[str, Any], found: Any, export: Export) -> Agreement:
    if not isinstance(found, Mapping) or (missing := [name for name in expected if name not in found]):
        return Agreement(1.0, f"no {', '.join(missing)}" if isinstance(found, Mapping) else "no outputs")
    names = name_outputs(export.labels, export.quantiles)
    answers = (_compare_label(expected, found, label, names[label.name], export) for label in export.labels)
    return max(answers, key=lambda agreement: agreement.difference)


def _compare_label(
    expected: Mapping[str, Any], found: Mapping[str, Any], label: Label, names: Sequence[str], export: Export
) -> Agreement:
    what = "value" if label.kind == REGRESSION else "probability"
    wanted, given, of = expected[names[0]], found[names[0]], label.outputs
    if label.kind == REGRESSION and len(label.outputs) == 1:
        wanted, given = [wanted], [given]
        if shares := export.quantiles.get(label.name, ()):
            quantiles = found[names[1]] if isinstance(found[names[1]], Sequence) else ()
            wanted, given = [*wanted, *expected[names[1]]], [*given, *quantiles]
            of += tuple(f"{label.outputs[0]}, quantile {share:g}" for share in shares)
    if not isinstance(given, Sequence) or len(given) != len(wanted):
        return Agreement(1.0, f"no {len(wanted)} {'values' if label.kind == REGRESSION else 'probabilities'}")
    units = export.deviations.get(label.name) or (1.0,) * len(wanted)
    units = (*units, *units[:1] * (len(wanted) - len(units)))
    gaps = [_gap(*three) for three in zip(wanted, given, units, strict=True)]
    gap = max(gaps)
    if other := _other_answer(expected, found, label, names, gap):
        return Agreement(max(1.0, gap), other)
    place = gaps.index(gap)
    words = f"{what} of {of[place]!r} is {_SHORT.repr(given[place])} instead of {wanted[place]}"
    return Agreement(gap, words if gap else "")


def _other_answer(
    expected: Mapping[str, Any], found: Mapping[str, Any], label: Label, names: Sequence[str], gap: float
) -> str:
    """Returns in words which other class or classes were said, but for no more than another rounding."""
    wanted = expected[names[0]]
    if label.kind == CLASS:
        said, name = found[names[1]], found[names[2]]
        if (said, name) == (expected[names[1]], expected[names[2]]):
            return ""
        if _is_tie(wanted, expected[names[1]], (said, name), label.outputs, gap):
            return ""
        return f"{_SHORT.repr(name)} instead of {expected[names[2]]!r}"
    if label.kind == MULTILABEL and (said := found[names[1]]) != expected[names[1]]:
        if isinstance(said, Sequence) and len(said) == len(wanted):
            three = zip(label.outputs, wanted, zip(said, expected[names[1]], strict=True), strict=True)
            wrong = [
                name
                for name, value, (one, other) in three
                if one != other and not (value is not None and abs(value - THRESHOLD) <= gap)
            ]
            return f"another answer to {', '.join(map(repr, wrong[:3]))}" if wrong else ""
        return f"{names[1]} {_SHORT.repr(said)}"
    return ""


def _gap(expected: Any, found: Any, unit: float) -> float:
    finite = [_is_finite(value) for value in (expected, found)]
    if not all(finite):
        return 1.0 if any(finite) else 0.0
    return float(abs(expected - found)) / unit


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # a whole number without end
        return False


def _is_tie(
    wanted: Sequence[Any], label: int, found: tuple[Any, Any], names: Sequence[str], gap: float
) -> bool:
    """Whether another label is no more than another rounding: two classes are as probable as each other."""
    other = next((place for place in range(len(names)) if place == found[0]), None)
    if other is None or names[other] != found[1] or None in (wanted[label], wanted[other]):
        return False
    return bool(wanted[label] - wanted[other] <= 2 * gap)


class CleanProcess:
    """A process without Shardline in which exports are loaded; TensorFlow's import begins at once.

    It waits for requests: what is asked of it is answered in order, while this process does other things.
    """

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
        self._read, self._numbers = b"", itertools.count(1)

    def ask(self, saved_model: Path, request: Mapping[str, Any]) -> int:
        """Sends a request to a SavedModel: `instances`, and the `signature_name` unless it is the default.

        Returns the number by which the answer is asked for.
        """
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
        while (answer := json.loads(self._line()))["request"] != str(number):
            pass  # whoever has asked no longer wants to know
        if cause := answer.get("error"):
            raise ModelError(f"the export cannot be used with TensorFlow alone: {cause}")
        return list(answer["predictions"])

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._said):
            assert stream is not None
            stream.close()
        self._directory.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        descriptor, end = self._process.stdout.fileno(), time.monotonic() + _LIMIT_S
        while b"\n" not in self._read:
            if not select.select([descriptor], [], [], max(0.0, end - time.monotonic()))[0]:
                raise ModelError(f"the export gave no answer for {_LIMIT_S:.0f} s in a process of its own")
            if not (some := os.read(descriptor, 1 << 16)):
                raise ModelError(f"a process of its own ended on the export: {self._last_words()}")
            self._read += some
        line, _, self._read = self._read.partition(b"\n")
        return line

    def _last_words(self) -> str:
        code = self._process.wait()
        self._said.seek(0)
        lines = self._said.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {code}"


def _directories() -> Iterator[str]:
    """Yields the directories from which this interpreter imports packages, TensorFlow among them."""
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    found = importlib.util.find_spec("tensorflow")  # perhaps on PYTHONPATH alone
    own = [str(Path(found.origin).parents[1])] if found and found.origin else []
    for directory in dict.fromkeys((*site.getsitepackages(), *user, *own)):
        if Path(directory).is_dir():
            yield directory
