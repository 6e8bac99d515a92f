"""Inputs made by chance, for as long as there is time: what each reader makes of them, and what it costs.

python -m benchmarks.fuzz --minutes 10

The targets and their inputs are those of tests/unit/test_properties.py and test_records.py, from other seeds
in each run. A fault is an exception that is none of ours, or an input that takes more than five seconds. Each
target has a process of its own, with a limit of memory.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import random
import resource
import sys
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from shardline.components.text import table
from shardline.trainer.base import progress
from shardline.trainer.base.errors import ShardlineError
from tests.helpers import strategies
from tests.helpers.mutations import damaged
from tests.helpers.strategies import Target
from tests.unit.test_records import READERS


def _record(name: str) -> Target:
    read, record = READERS[name]

    def call(content: Any) -> Any:
        with tempfile.TemporaryDirectory() as directory:
            return read(Path(directory), content)

    return Target(damaged(record), call)


TARGETS = strategies.TARGETS | {name: _record(name) for name in READERS if name not in ("rules", "study")}

_LIMIT_S = 5
_MEMORY = 2 << 30
#: Inputs from one seed: Hypothesis keeps what it has drawn.
_ROUND = 50
_SHOWN = 3


def fuzz(name: str, seconds: float, first_seed: int) -> dict[str, Any]:
    """Gives a target inputs for a time, and returns what came of them."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY,) * 2)
    before, end = _peak_mb(), time.monotonic() + seconds
    counts: collections.Counter[str] = collections.Counter()
    faults: dict[str, str] = {}
    longest = 0.0
    target, number = TARGETS[name], first_seed
    while time.monotonic() < end:
        for content in _draw(target, number):
            start = time.monotonic()
            outcome, fault = _read(target, content)
            took = time.monotonic() - start
            if took > _LIMIT_S:
                outcome, fault = "fault", f"{took:.0f} s"
            longest = max(longest, took)
            counts[outcome] += 1
            if fault:
                faults.setdefault(fault, repr(content)[:2000])
            if time.monotonic() > end:
                break
        number += 1
    return {
        "target": name,
        **counts,
        "longest_s": longest,
        "memory_mb": _peak_mb() - before,
        "faults": faults,
    }


def _draw(target: Target, number: int) -> list[Any]:
    drawn: list[Any] = []

    @seed(number)
    @settings(
        max_examples=_ROUND,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def draw(data: Any) -> None:
        drawn.append(data.draw(target.inputs))

    draw()
    return drawn


def _read(target: Target, content: Any) -> tuple[str, str]:
    """Returns how an input came out, and the place of an exception that is none of ours."""
    try:
        with progress.sink(lambda event: None):
            target.read(content)
    except ShardlineError:
        return "refused", ""
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.filename.rpartition('/')[2]}:{place.lineno}"
        return "fault", f"{type(error).__name__} in {where}: {str(error)[:100]}"
    return "read", ""


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10, help="of all targets together, two at a time")
    parser.add_argument("--seed", type=int, default=random.randrange(10**9), help="of the first inputs")
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(TARGETS)}; all unless given")
    options = parser.parse_args()
    names = options.targets or list(TARGETS)
    seconds = 60 * options.minutes * 2 / len(names)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context, max_tasks_per_child=1) as pool:
        found = [pool.submit(fuzz, name, seconds, options.seed) for name in names]
        results = [item.result() for item in found]
    head = ("target", "inputs", "read", "refused", "faults", "longest", "memory")
    print(f"seed {options.seed}\n{table(head, map(_row, results))}")
    for result in results:
        for fault, content in list(result["faults"].items())[:_SHOWN]:
            print(f"\n{result['target']}: {fault}\n{content}")
    sys.exit(any(result["faults"] for result in results))


def _row(result: dict[str, Any]) -> tuple[str, ...]:
    counts = [result.get(name, 0) for name in ("read", "refused", "fault")]
    numbers = [f"{number:,}" for number in (sum(counts), *counts)]
    return (result["target"], *numbers, f"{result['longest_s']:.2f} s", f"{result['memory_mb']:.0f} MB")


if __name__ == "__main__":
    main()
