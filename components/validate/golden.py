"""Golden examples of an export, requests with their answers: compared with what a clean process answers."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import itertools
import json
import math
import os
import reprlib
import site
import subprocess
import sys
import tempfile
import threading
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
class Comparison:
    """Comparison of some answers with the golden ones.

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
        found = len(predictions) if isinstance(predictions, Sequence) else "no"
        return Comparison(1.0, f"{found} answers to {len(expected)} examples")
    gaps = [_compare_row(*pair, export) for pair in zip(expected, predictions, strict=True)]
    number, worst = max(enumerate(gaps), key=lambda item: item[1].difference)
    return Comparison(worst.difference, f"example {number}: {worst.words}" if worst.words else "")


def is_answer(row: Any, export: Export) -> bool:
    """Whether a row has the outputs of an export, as its golden predictions must."""
    names = name_outputs(export.labels, export.quantiles)
    return (
        isinstance(row, dict)
        and bool(names)
        and all(
            set(names[label.name]) <= set(row) and _is_said(row, label, names[label.name], export)
            for label in export.labels
        )
    )


def _is_said(row: Mapping[str, Any], label: Label, names: Sequence[str], export: Export) -> bool:
    def is_list(said: Any, wanted: int) -> bool:
        sound = isinstance(said, list) and len(said) == wanted
        return sound and all(value is None or isinstance(value, int | float) for value in said)

    said, wanted = row[names[0]], len(label.outputs)
    if label.kind == CLASS:
        index = row[names[1]]
        return is_list(said, wanted) and isinstance(index, int) and 0 <= index < wanted
    if label.kind == MULTILABEL:
        return is_list(said, wanted) and isinstance(row[names[1]], list) and len(row[names[1]]) == wanted
    shares = export.quantiles.get(label.name)
    return is_list(said if wanted > 1 else [said], wanted) and (
        shares is None or is_list(row[names[-1]], len(shares))
    )


def _compare_row(expected: Mapping[str, Any], found: Any, export: Export) -> Comparison:
    if not isinstance(found, Mapping) or (missing := [name for name in expected if name not in found]):
        return Comparison(1.0, f"no {', '.join(missing)}" if isinstance(found, Mapping) else "no outputs")
    names = name_outputs(export.labels, export.quantiles)
    answers = (_compare_label(expected, found, label, names[label.name], export) for label in export.labels)
    return max(answers, key=lambda agreement: agreement.difference)


def _compare_label(
    expected: Mapping[str, Any], found: Mapping[str, Any], label: Label, names: Sequence[str], export: Export
) -> Comparison:
    what = "value" if label.kind == REGRESSION else "probability"
    wanted, given, of = expected[names[0]], found[names[0]], label.outputs
    if label.kind == REGRESSION and len(label.outputs) == 1:
        wanted, given = [wanted], [given]
        if shares := export.quantiles.get(label.name, ()):
            quantiles = found[names[1]] if isinstance(found[names[1]], Sequence) else ()
            wanted, given = [*wanted, *expected[names[1]]], [*given, *quantiles]
            of += tuple(f"{label.outputs[0]}, quantile {share:g}" for share in shares)
    if not isinstance(given, Sequence) or len(given) != len(wanted):
        return Comparison(
            1.0, f"no {len(wanted)} {'values' if label.kind == REGRESSION else 'probabilities'}"
        )
    units = export.deviations.get(label.name) or (1.0,) * len(wanted)
    units = (*units, *units[:1] * (len(wanted) - len(units)))
    gaps = [_gap(*three) for three in zip(wanted, given, units, strict=True)]
    gap = max(gaps)
    if other := _other_answer(expected, found, label, names, gap):
        return Comparison(max(1.0, gap), other)
    place = gaps.index(gap)
    words = f"{what} of {of[place]!r} is {_SHORT.repr(given[place])} instead of {wanted[place]}"
    return Comparison(gap, words if gap else "")


def _other_answer(
    expected: Mapping[str, Any], found: Mapping[str, Any], label: Label, names: Sequence[str], gap: float
) -> str:
    """Returns in words which other class or classes were said, but for no more than another rounding."""
    wanted, of = expected[names[0]], label.outputs
    if label.kind == CLASS:
        said, name = found[names[1]], found[names[2]]
        if (said, name) == (expected[names[1]], expected[names[2]]):
            return ""
        best, other = wanted[expected[names[1]]], wanted[of.index(name)] if name in of else None
        # Two classes that are as probable as each other.
        if None not in (best, other) and of.index(name) == said and best - other <= 2 * gap:
            return ""
        return f"{_SHORT.repr(name)} instead of {expected[names[2]]!r}"
    if label.kind == MULTILABEL and (said := found[names[1]]) != expected[names[1]]:
        if not isinstance(said, Sequence) or len(said) != len(wanted):
            return f"{names[1]} {_SHORT.repr(said)}"
        wrong = [
            name
            for name, value, one, other in zip(of, wanted, said, expected[names[1]], strict=True)
            if one != other and not (value is not None and abs(value - THRESHOLD) <= gap)
        ]
        return f"another answer to {', '.join(map(repr, wrong[:3]))}" if wrong else ""
    return ""


def _gap(expected: Any, found: Any, unit: float) -> float:
    def is_finite(value: Any) -> bool:
        try:
            return isinstance(value, int | float) and math.isfinite(value)
        except OverflowError:  # a whole number without end
            return False

    if not is_finite(expected) or not is_finite(found):
        return 1.0 if is_finite(expected) or is_finite(found) else 0.0
    return float(abs(expected - found)) / unit


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
        assert self._process.stdout is not None
        self._answers = io.BufferedReader(self._process.stdout)  # type: ignore[type-var]  # unbuffered, a FileIO
        self._numbers = itertools.count(1)

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
            raise ModelError(f"a process of its own ended on the export: {self._last_words()}")
        if cause := answer.get("error"):
            raise ModelError(f"the export cannot be used with TensorFlow alone: {cause}")
        return list(answer["predictions"])

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._answers, self._said):
            assert stream is not None
            stream.close()
        self._directory.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
