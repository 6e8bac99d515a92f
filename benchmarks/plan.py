"""The plan of many records: `python -m benchmarks.plan [RECORDS ...]` prints its memory, scratch and time.

Each number of records is planned in a fresh process: small images as spans of one file, which is not read.
Then what finishing a dataset does with all of them: the keys of the examples, and the search for equal
content among as many hashes. What 100 million would take is computed from the last two.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from shardline.components.preprocess import write
from shardline.components.preprocess.plan.plan import Plan
from shardline.components.preprocess.plan.records import find_repeated
from shardline.components.preprocess.run import plan_dataset
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources.example import Example, Span
from shardline.components.preprocess.work_directory import WorkDirectory

_MANY = 100_000_000
_SIZE = 824


class Records:
    """So many small images of ten classes, with keys like paths."""

    class_names = tuple(f"class{label}" for label in range(10))

    def __init__(self) -> None:
        self._count, self._file = int(os.environ["SHARDLINE_RECORDS"]), __file__

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Example]:
        for index in range(self._count):
            yield Example(f"class{index % 10}/{index:09d}.png", index % 10, Span(self._file, 0, _SIZE))


class Watch:
    """The largest size that a directory has had, looked at ten times a second, in bytes."""

    def __init__(self, directory: Path) -> None:
        self.largest = 0
        self._directory = directory
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def end(self) -> None:
        """Stops looking."""
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(0.1):
            command = ["du", "-sb", str(self._directory)]
            found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
            self.largest = max(self.largest, int(found[0]) if found else 0)


def measure(records: int, out: Path) -> dict[str, float]:
    """Plans so many records in `out` and returns seconds of each step, and MB of memory and scratch."""
    os.environ["SHARDLINE_RECORDS"] = str(records)
    watch, began = Watch(out.parent), time.process_time()
    plan_dataset(PreprocessSettings(source="benchmarks.plan:Records", processes=1), out)
    planned = time.process_time()
    work = WorkDirectory(out)
    write._write_keys(Plan.load(work.plan), work)
    rng = np.random.default_rng(0)
    blocks = (rng.integers(0, 2**64, 4096, np.uint64).tobytes() for _ in range(-(-records // 4096)))
    assert not sum(len(hashes) for hashes, _ in find_repeated(blocks, records, work.path))
    watch.end()
    peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024
    return {
        "records": records,
        "plan_seconds": planned - began,
        "finish_seconds": time.process_time() - planned,
        "peak_mb": peak,
        "scratch_mb": watch.largest / 2**20,
    }


def main() -> None:
    """Measures every number of records that is given, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=int, nargs="*", default=[50_000, 500_000, 5_000_000])
    parser.add_argument("--workdir", help="where scratch goes; removed at the end")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    found = []
    for records in options.records:
        with tempfile.TemporaryDirectory(prefix="shardline-plan-", dir=options.workdir) as directory:
            if options.here:
                print(json.dumps(measure(records, Path(directory, "out"))))
                continue
            command = [sys.executable, "-m", "benchmarks.plan", "--here", str(records)]
            command += ["--workdir", directory]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            found.append(json.loads(output.splitlines()[-1]))
            print(f"{records:,} records are planned", file=sys.stderr)
    if found:
        print(report(found))


def report(found: list[dict[str, float]]) -> str:
    """Returns a table, with what 100 million would take: for each what the last two differ by."""
    names = ("plan_seconds", "finish_seconds", "peak_mb", "scratch_mb")
    lines = [
        "| records | plan, CPU s | finish, CPU s | peak memory, MB | scratch, MB |",
        "|---|---|---|---|---|",
    ]
    if len(found) > 1:
        first, last = found[-2:]
        for_each = {n: (last[n] - first[n]) / (last["records"] - first["records"]) for n in names}
        more = _MANY - last["records"]
        found = [*found, {"records": _MANY} | {n: last[n] + more * max(for_each[n], 0) for n in names}]
    for each in found:
        values = " | ".join(f"{each[name]:,.1f}" for name in names)
        computed = " (computed)" if each["records"] == _MANY and len(found) > 1 else ""
        lines.append(f"| {each['records']:,.0f}{computed} | {values} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
