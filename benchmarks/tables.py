"""Tables: rows/s of the whole command, and memory: `python -m benchmarks.tables [--command SHARDLINE]...`.

Formats take turns, and with several commands (of other releases), these too. Peaks of memory are of the
process and its workers together; wide tables and long texts are read by one process.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

_WORDS = np.array(["alpha", "beta", "gamma", "delta", "epsilon zeta", "eta", "theta"])


def write_rows(directory: Path, rows: int) -> list[Path]:
    """Writes a table of ten floats, five whole numbers, four words and a class in three formats."""
    random = np.random.default_rng(0)
    columns = {f"float{i}": np.round(random.normal(0, 100, rows), 4) for i in range(10)}
    columns |= {f"whole{i}": random.integers(0, 1000 * 10**i, rows) for i in range(5)}
    columns |= {f"word{i}": _WORDS[random.integers(0, len(_WORDS), rows)] for i in range(4)}
    table = pa.table(columns | {"label": _WORDS[random.integers(0, 3, rows)]})
    paths = [directory / f"rows.{suffix}" for suffix in ("csv", "parquet", "jsonl")]
    pyarrow.csv.write_csv(table, paths[0])
    pyarrow.parquet.write_table(table, paths[1])
    with paths[2].open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in table.to_pylist())
    return paths


def write_wide(path: Path, rows: int) -> Path:
    """Writes a table of 5,000 floats."""
    random = np.random.default_rng(0)
    with path.open("w") as file:
        file.write(",".join(f"c{i}" for i in range(5000)) + ",label\n")
        for row in range(rows):
            file.write(",".join(map(str, np.round(random.normal(0, 9, 5000), 2))) + f",{'ab'[row % 2]}\n")
    return path


def write_texts(path: Path, rows: int) -> Path:
    """Writes a table of texts of 1 MiB."""
    with path.open("w") as file:
        file.write("text,label\n")
        file.writelines(f"{row} {'word ' * 209_700},{'ab'[row % 2]}\n" for row in range(rows))
    return path


def run(command: str, path: Path, out: Path, processes: int) -> tuple[float, float]:
    """Returns the seconds that a command takes to preprocess a table, and the peak of its memory in MB."""
    options = ["--processes", str(processes)]
    shutil.rmtree(out, ignore_errors=True)
    started, peak = time.perf_counter(), 0
    process = psutil.Popen(
        [command, "preprocess", f"table:{path}", str(out), *options], stdout=subprocess.DEVNULL
    )
    while process.poll() is None:
        try:
            family = [process, *process.children(recursive=True)]
            peak = max(peak, sum(each.memory_info().rss for each in family))
        except psutil.NoSuchProcess:
            pass
        time.sleep(0.02)
    if process.returncode:
        sys.exit(f"{command} ended with {process.returncode}")
    return time.perf_counter() - started, peak / 2**20


def main() -> None:
    """Prints a line for each table and command: seconds, rows/s and MB."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--command", action="append", help="another shardline")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--wide", type=int, nargs="*", default=[400, 2000, 8000], help="rows of 5,000 columns"
    )
    parser.add_argument("--texts", type=int, nargs="*", default=[60, 240], help="texts of 1 MB")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        sizes = dict.fromkeys(write_rows(directory, given.rows), given.rows)
        large = {write_wide(directory / f"wide{rows}.csv", rows): rows for rows in given.wide}
        large |= {write_texts(directory / f"texts{rows}.csv", rows): rows for rows in given.texts}
        found = defaultdict(list)
        for _ in range(given.rounds):
            for path in sizes | large:
                for command in given.command or ["shardline"]:
                    processes = 1 if path in large else 0
                    found[path, command].append(run(command, path, directory / "out", processes))
        for (path, command), runs in found.items():
            seconds, peaks = zip(*runs, strict=True)
            middle = statistics.median(seconds)
            print(
                f"{path.name} {command}: {middle:.2f} s ({min(seconds):.2f}-{max(seconds):.2f}), "
                f"{(sizes | large)[path] / middle:,.0f} rows/s, {max(peaks):,.0f} MB"
            )


if __name__ == "__main__":
    main()
