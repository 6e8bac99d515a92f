"""What each file of tests costs: seconds of processor time, of its own and of the programs that it starts.

`tests/weights.txt` holds the figures of a whole run on one machine. A run with `--weights FILE` writes its
own and says which files have grown by more than a fifth, as a share of the whole.
"""

from __future__ import annotations

import collections
import resource
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

RECORDED = Path(__file__).parents[1] / "weights.txt"
#: A file grows by more than this share, and by more than these seconds, or nothing is said.
GROWTH, SECONDS = 0.2, 3.0

#: Seconds of processor time, seconds from begin to end, and the number of tests.
Weight = tuple[float, float, int]


def read_weights(path: Path) -> dict[str, Weight]:
    """Returns the weights in a file, by file of tests."""
    rows = (line.split() for line in path.read_text().splitlines() if line[:1] not in ("", "#"))
    return {name: (float(busy), float(wall), int(count)) for busy, wall, count, name in rows}


def grown(before: dict[str, Weight], after: dict[str, Weight]) -> list[str]:
    """Returns a line for each file that has grown; the machine's speed is that of the files in both."""
    common = before.keys() & after.keys()
    speed = sum(after[name][0] for name in common) / max(sum(before[name][0] for name in common), 1e-9)
    lines = list[str]()
    for name in sorted(common, key=lambda name: before[name][0] * speed - after[name][0]):
        expected, found = before[name][0] * speed, after[name][0]
        if found > expected * (1 + GROWTH) and found > expected + SECONDS:
            lines.append(f"{name} took {found:.0f} s of processor time, {expected:.0f} s were expected")
    return lines


class Weights:
    """Plug-in of pytest that weighs each test, in each process of pytest, and sums up in the first."""

    def __init__(self, output: str) -> None:
        self._output = output
        self._found: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0, 0])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Weighs a test with what is made for it, and taken down after it."""
        busy, began = _processor_seconds(), time.monotonic()
        try:
            return (yield)
        finally:
            found = self._found[item.nodeid.partition("::")[0]]
            found[0] += _processor_seconds() - busy
            found[1] += time.monotonic() - began
            found[2] += 1

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Hands over the weights of this process to the first, if it is not the first itself."""
        output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["weights"] = dict(self._found)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Receives the weights of another process."""
        for name, values in getattr(node, "workeroutput", {}).get("weights", {}).items():
            self._found[name] = [a + b for a, b in zip(self._found[name], values, strict=True)]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Prints what has grown, and writes the weights."""
        found = {name: (busy, wall, int(count)) for name, (busy, wall, count) in self._found.items()}
        lines = grown(read_weights(RECORDED), found) if RECORDED.exists() else []
        if lines:
            terminalreporter.section("tests that take longer than recorded in tests/weights.txt")
            terminalreporter.write_line("\n".join(lines))
        rows = sorted(((*weight, name) for name, weight in found.items()), reverse=True)
        text = "".join(f"{busy:8.1f} {wall:8.1f} {count:5} {name}\n" for busy, wall, count, name in rows)
        Path(self._output).parent.mkdir(parents=True, exist_ok=True)
        Path(self._output).write_text(f"# busy    wall tests file\n{text}")


def _processor_seconds() -> float:
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, kinds))
