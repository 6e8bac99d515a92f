"""Preprocessing against its peers, side by side: `python -m benchmarks.preprocess [--quick]`.

Every measurement is one run in a fresh process, timed after its imports. The contenders of a row take
turns (A B C A B C ...), so that a busy moment of the machine meets all of them; medians are compared.
Inputs are generated from a seed and lie in the page cache. Shardline waits until every shard is on the disk
(fsync), its peers never do; so that the machine's disk does not decide, nobody does unless --fsync is given:
then Shardline and the copy do.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import inputs

ROOT = Path(__file__).resolve().parents[1]
_SHARDLINE = "from shardline.pipelines.cli.main import main; main()"


@dataclass
class Entry:
    """One contender on one input.

    Attributes:
        name: In the tables.
        contender: In `benchmarks.contenders`.
        source: Its input.
        processes: How many processes it uses.
        records: In the input.
        megabytes: Of images in the input.
        runs: What each run took.
    """

    name: str
    contender: str
    source: str
    processes: int
    records: int
    megabytes: float
    runs: list[dict[str, float]] = field(default_factory=list)

    def median(self, what: str) -> float:
        """Returns the median over the runs of "seconds", "cpu_seconds" or "peak_mb"."""
        return statistics.median(run[what] for run in self.runs)


@dataclass(frozen=True)
class Target:
    """A ratio of two entries' speeds that is promised.

    Attributes:
        what: In the tables.
        faster: The entry in question.
        slower: The entry that it is compared with.
        least: What the ratio of their records per second must reach.
        aim: What it should reach.
    """

    what: str
    faster: str
    slower: str
    least: float
    aim: float


TARGETS = (
    Target("photos, 1 process: share of the copy", "ours", "copy", 0.80, 0.90),
    Target("photos, 1 process: share of a writer that checks nothing", "ours", "plain", 0.80, 1.0),
    Target("photos, 1 process: against one that decodes each", "ours", "decoded", 5.0, 8.0),
    Target("photos, 2 processes: share of the copy with 2", "ours x2", "copy x2", 0.72, 0.80),
    Target("photos, 2 processes: against our own 1", "ours x2", "ours", 1.7, 1.8),
    Target("photos, 1 process: against tutorial code", "ours", "tutorial", 1.9, 2.2),
    Target("photos, 2 processes: against TFDS", "ours x2", "tfds", 8.0, 10.0),
    Target("photos, 2 processes: against Beam", "ours x2", "beam", 25.0, 40.0),
    Target("small, 1 process: against tutorial code", "small ours", "small tutorial", 2.5, 3.0),
    Target("small, 1 process: share of the copy", "small ours", "small copy", 0.50, 0.65),
)


def photo_entries(workdir: Path, records: int) -> list[Entry]:
    """Makes the photos and returns who shards them."""
    directory = workdir / "photos"
    if not directory.exists():
        inputs.write_photos(directory, records)
    megabytes = sum(path.stat().st_size for path in directory.glob("*/*")) / 1e6
    return [
        Entry(name, contender, str(directory), processes, records, megabytes)
        for name, contender, processes in (
            ("copy", "copy", 1),
            ("plain", "plain", 1),
            ("decoded", "decoded", 1),
            ("ours", "ours", 1),
            ("tutorial", "tutorial", 1),
            ("trimmed", "trimmed", 1),
            ("copy x2", "copy", 2),
            ("ours x2", "ours", 2),
            ("tfds", "tfds", 1),
            ("beam", "beam", 1),
        )
        if contender != "beam" or importlib.util.find_spec("apache_beam")
    ]


def small_entries(workdir: Path, records: int) -> list[Entry]:
    """Makes the small images, as .npy and as TFRecord file, and returns who shards them."""
    entries = []
    for count, suffix in ((records, ""), (records // 20, " 1/20")):
        packed, tfrecord = workdir / f"packed{count}.npy", workdir / f"packed{count}.tfrecord"
        inputs.write_packed(packed, count)
        inputs.write_records(tfrecord, packed)
        for name, contender, source in (
            ("small copy", "copy", packed),
            ("small plain", "plain", packed),
            ("small ours", "ours", packed),
            ("small ours (tfrecord)", "ours", tfrecord),
            ("small tutorial", "tutorial", packed),
            ("small trimmed", "trimmed", packed),
        ):
            if contender == "ours" or not suffix:
                megabytes = packed.stat().st_size / 1e6
                entries.append(Entry(name + suffix, contender, str(source), 1, count, megabytes))
    return entries


def measure(entries: Sequence[Entry], workdir: Path, rounds: int) -> None:
    """Runs all entries in turn, `rounds` times."""
    for number in range(rounds):
        for entry in entries:
            out = workdir / "out"
            shutil.rmtree(out, ignore_errors=True)
            if entry.contender != "ours":
                out.mkdir()
            os.sync()  # what the last run wrote must not be written back during this one
            arguments = [entry.contender, entry.source, str(out), str(entry.processes)]
            entry.runs.append(json.loads(run(["-m", "benchmarks.contenders", *arguments])))
            print(f"round {number + 1}: {entry.name} {entry.runs[-1]['seconds']:.3f} s", file=sys.stderr)
            shutil.rmtree(out, ignore_errors=True)


def without_fsync(workdir: Path) -> None:
    """Makes os.fsync do nothing in every Python process that is started from now on."""
    site = workdir / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import os\n\nos.fsync = lambda file: None\n")
    os.environ["PYTHONPATH"] = str(site)


def start_up(workdir: Path, rounds: int) -> list[float]:
    """Returns the seconds of whole `shardline preprocess` processes over 100 images."""
    directory, seconds = workdir / "few", []
    inputs.write_photos(directory, 100)
    for number in range(rounds):
        began = time.monotonic()
        run(["-c", _SHARDLINE, "preprocess", f"images:{directory}", str(workdir / f"few{number}")])
        seconds.append(time.monotonic() - began)
    return seconds


def run(arguments: Sequence[str]) -> str:
    """Runs Python and returns the last line that it prints."""
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return done.stdout.splitlines()[-1]


def report(entries: Sequence[Entry], starts: Sequence[float]) -> str:
    """Returns everything as Markdown.

    On a machine that others use too, CPU times are the steadier measure; they do not tell how well two
    processes share the work.
    """
    by_name = {entry.name: entry for entry in entries}
    lines = [
        environment(),
        "",
        "| contender | records/s, median (spread) | MB/s | CPU s/GB | peak MB |",
        "|---|---|---|---|---|",
    ]
    for entry in entries:
        rates = [entry.records / run["seconds"] for run in entry.runs]
        lines.append(
            f"| {entry.name} | {statistics.median(rates):,.0f} ({min(rates):,.0f}-{max(rates):,.0f}) "
            f"| {entry.megabytes / entry.median('seconds'):,.0f} "
            f"| {entry.median('cpu_seconds') / entry.megabytes * 1000:.2f} | {entry.median('peak_mb'):.0f} |"
        )
    lines += [
        "",
        "| target | ratio of medians | by CPU time | at least | aim | |",
        "|---|---|---|---|---|---|",
    ]
    for target in TARGETS:
        if target.faster in by_name and target.slower in by_name:
            faster, slower = by_name[target.faster], by_name[target.slower]
            ratio = slower.median("seconds") / faster.median("seconds")
            work = slower.median("cpu_seconds") / max(faster.median("cpu_seconds"), 1e-9)
            verdict = "aim" if ratio >= target.aim else "met" if ratio >= target.least else "**missed**"
            lines.append(
                f"| {target.what} | {ratio:.2f} | {work:.2f} | {target.least} | {target.aim} | {verdict} |"
            )
    if starts:
        spread = f"{statistics.median(starts):.2f} s ({min(starts):.2f}-{max(starts):.2f})"
        lines += ["", f"Start-up: a whole `shardline preprocess` process over 100 photos takes {spread}."]
    return "\n".join(lines)


def environment() -> str:
    """Returns what was measured with, in one line."""
    packages = ("tensorflow", "tensorflow-datasets", "apache-beam", "google-crc32c", "xxhash")
    versions = []
    for package in packages:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{package} not installed")
    cores = len(os.sched_getaffinity(0))
    return f"Python {platform.python_version()}, {', '.join(versions)}; {cores} cores, {platform.machine()}"


def main() -> None:
    """Parses the options, measures, and prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="photos,small,start", help="which of photos, small, start")
    parser.add_argument("--only", help="comma-separated names of the contenders to run")
    parser.add_argument("--photos", type=int, default=20_000)
    parser.add_argument("--small", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workdir", help="where inputs and outputs go; removed at the end")
    parser.add_argument("--fsync", action="store_true", help="Shardline and the copy wait for the disk")
    parser.add_argument("--quick", action="store_true", help="few records, one round: shows that it works")
    options = parser.parse_args()
    if options.quick:
        options.photos, options.small, options.rounds = min(options.photos, 200), min(options.small, 2000), 1
    rows = options.rows.split(",")
    entries: list[Entry] = []
    starts: list[float] = []
    with tempfile.TemporaryDirectory(prefix="shardline-benchmark-", dir=options.workdir) as directory:
        workdir = Path(directory)
        if not options.fsync:
            without_fsync(workdir)
        groups = []
        if "photos" in rows:
            groups.append(photo_entries(workdir, options.photos))
        if "small" in rows:
            groups.append(small_entries(workdir, options.small))
        for group in groups:
            chosen = [e for e in group if not options.only or e.name in options.only.split(",")]
            measure(chosen, workdir, options.rounds)
            entries += chosen
        if "start" in rows:
            starts = start_up(workdir, options.rounds)
    print(report(entries, starts))


if __name__ == "__main__":
    main()
