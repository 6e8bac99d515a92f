"""Preprocessing far from its data: `python -m benchmarks.bucket [--photos N] [--records N] [--rounds N]`.

The source and the dataset lie on a file system where each request takes 30 ms, as in a mounted bucket
(`mount.c`, which is compiled here: it needs a C compiler, libfuse3-dev and FUSE). Contenders take turns; each
run is a fresh process, timed after its imports:

    one by one   photos opened, read and closed one after the other, of which a few are enough
    threads      as many threads as we have do the same: what this file system gives
    ours         the whole of preprocessing, from listing to manifest

Requests are counted by the simulator of the tests where SHARDLINE_GCSFUSE_SIM names it, which follows Cloud
Storage FUSE more closely.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import inputs
from benchmarks.preprocess import environment

LATENCY = 0.03
_ROOT = Path(__file__).resolve().parents[1]
_ONE_BY_ONE = 100
_THREADS = ("-o", "max_threads=400,max_idle_threads=400")


def build(workdir: Path) -> Sequence[str | Path]:
    """Compiles the file system, and returns its program and options."""
    flags = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "fuse3"], check=True, capture_output=True, text=True
    ).stdout.split()
    program = workdir / "mount"
    subprocess.run(["cc", "-O2", "-o", program, _ROOT / "benchmarks" / "mount.c", *flags], check=True)
    return [program, "-f", *_THREADS]


@contextlib.contextmanager
def mounted(
    command: Sequence[str | Path], behind: Path, bandwidth: float = 0.0
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Mounts a directory; the requests and their bytes are known after the context."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        path, counts = Path(name, "bucket"), Path(name, "counts.json")
        path.mkdir()
        settings = {"LATENCY": str(LATENCY), "BANDWIDTH": str(bandwidth), "COUNTS": str(counts)}
        program, *options = command
        server = subprocess.Popen([program, behind, path, *options], env=os.environ | settings)
        try:
            while not path.is_mount():
                if server.poll() is not None:
                    raise SystemExit("nothing can be mounted here: FUSE is needed")
                time.sleep(0.05)
            yield path, found
        finally:
            subprocess.run(["umount", path], check=True)
            server.wait()
            found.update(json.loads(counts.read_text()))


def one_by_one(photos: Path, out: Path) -> int:
    """Reads some photos as a loop does."""
    paths = sorted(photos.rglob("*.jpg"))[:_ONE_BY_ONE]
    return sum(len(path.read_bytes()) > 0 for path in paths)


def threads(photos: Path, out: Path) -> int:
    """Reads all photos with as many threads as preprocessing has."""
    from concurrent.futures import ThreadPoolExecutor

    from shardline.components.storage.prefetch import IN_FLIGHT

    paths = [entry.path for folder in os.scandir(photos) for entry in os.scandir(folder.path)]

    def read(path: str) -> int:
        file = os.open(path, os.O_RDONLY)
        try:
            return len(os.read(file, os.fstat(file).st_size))
        finally:
            os.close(file)

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        return sum(size > 0 for size in pool.map(read, paths))


def ours(photos: Path, out: Path, shards: int = 16) -> int:
    """Makes a dataset of the photos."""
    return _preprocess(f"images:{photos}", out, shards)


def records(source: Path, out: Path) -> int:
    """Makes a dataset of a TFRecord file in 200 shards."""
    return _preprocess(f"tfrecord:{source}", out, 200)


def _preprocess(source: str, out: Path, shards: int) -> int:
    from shardline.components.preprocess.run import preprocess
    from shardline.components.preprocess.settings import PreprocessSettings

    settings = PreprocessSettings(source=source, shards=shards, processes=1)
    return preprocess(settings, out).records


CONTENDERS: dict[str, Callable[[Path, Path], int]] = {
    "one by one": one_by_one, "threads": threads, "ours": ours, "records": records,
}  # fmt: skip


def measure(contender: str, source: Path, out: Path) -> dict[str, float]:
    """Returns what one run took, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.bucket", "--only", contender, str(source), str(out)]
    answer = subprocess.run(command, check=True, capture_output=True, text=True, cwd=_ROOT).stdout
    result: dict[str, float] = json.loads(answer.splitlines()[-1])
    return result


def only(contender: str, source: str, out: str) -> None:
    """Runs one contender in this process."""
    import shardline.components.preprocess.write.shard_writer  # noqa: F401  # what is imported first, is not timed
    from benchmarks.contenders import peak_mb

    start, cpu = time.monotonic(), time.process_time()
    done = CONTENDERS[contender](Path(source), Path(out))
    result = {
        "records": done,
        "seconds": time.monotonic() - start,
        "cpu": time.process_time() - cpu,
        "peak_mb": peak_mb(),
    }
    print(json.dumps(result))


def compare_photos(program: Sequence[str | Path], workdir: Path, rounds: int, bandwidth: float) -> None:
    """Prints speeds over photos."""
    photos, size = workdir / "bucket" / "photos", 0
    size = sum(path.stat().st_size for path in photos.rglob("*.jpg"))
    runs: dict[str, list[dict[str, float]]] = {}
    for number in range(rounds):
        for name in ("threads", "ours", *(["one by one"] if not number else [])):
            out = Path("out", f"{name}-{number}-{bandwidth:.0f}")
            with mounted(program, workdir / "bucket", bandwidth) as (path, _):
                runs.setdefault(name, []).append(measure(name, path / "photos", path / out))
    limit = f"{bandwidth / 1e6:.0f} MB/s" if bandwidth else "no limit"
    each = size / len(list(photos.rglob("*.jpg")))
    print(f"\nPhotos, mean {each / 1e3:.0f} kB, {LATENCY * 1e3:.0f} ms a request, {limit}:\n")
    print("| contender | records/s, median (spread) | MB/s | share of the line | CPU ms a record | peak MB |")
    print("|---|---|---|---|---|---|")
    for name, found in runs.items():
        rates = sorted(run["records"] / run["seconds"] for run in found)
        rate = statistics.median(rates)
        share = f"{rate * each / bandwidth:.2f}" if bandwidth else "-"
        cpu = statistics.median(run["cpu"] / run["records"] for run in found)
        peak = max(run["peak_mb"] for run in found)
        spread = f"{rates[0]:,.0f}-{rates[-1]:,.0f}"
        speed = f"{rate:,.0f} ({spread}) | {rate * each / 1e6:,.1f}"
        print(f"| {name} | {speed} | {share} | {cpu * 1e3:.2f} | {peak:.0f} |")


def count_requests(program: Sequence[str | Path], workdir: Path, count: int) -> None:
    """Prints the requests and bytes of small records in 200 shards, beyond what must be read and written."""
    source = workdir / "bucket" / "records.tfrecord"
    inputs.write_packed(workdir / "packed.npy", count)
    inputs.write_records(source, workdir / "packed.npy")
    if simulator := os.environ.get("SHARDLINE_GCSFUSE_SIM"):
        Path(workdir / "simulator").write_text(
            f'#!/bin/sh\nexec {sys.executable} -W ignore {simulator} "$@"\n'
        )
        (workdir / "simulator").chmod(0o755)
        program = [workdir / "simulator"]
    with mounted(program, workdir / "bucket") as (path, found):
        result = measure("records", path / "records.tfrecord", path / "out" / f"records-{count}")
    out = workdir / "bucket" / "out" / f"records-{count}"
    shards, read = list(out.glob("*.tfrecord")), source.stat().st_size
    written = sum(path.stat().st_size for path in out.iterdir() if path.is_file())
    beyond = sum(found["requests"].values()) - 1 - len(shards)
    moved = sum(found["bytes"].values()) - read - written
    print(
        f"\n{count:,} records of {read / count:.0f} B in {len(shards)} shards: {beyond:,} requests beyond a "
        f"read and a write each ({found['requests']}), {moved:,} bytes beyond source and output, "
        f"{moved / written:.4f} of the output; {result['records'] / result['seconds']:,.0f} records/s, "
        f"peak {result['peak_mb']:.0f} MB"
    )


def main() -> None:
    """Measures, and prints tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--photos", type=int, default=10_000)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs=3, metavar=("CONTENDER", "SOURCE", "OUT"))
    options = parser.parse_args()
    if options.only:
        only(*options.only)
        return
    print(environment())
    with tempfile.TemporaryDirectory(prefix="bucket-") as name:
        workdir = Path(name)
        (workdir / "bucket" / "out").mkdir(parents=True)
        program = build(workdir)
        inputs.write_photos(workdir / "bucket" / "photos", options.photos)
        for bandwidth in (0.0, 125e6):
            compare_photos(program, workdir, options.rounds, bandwidth)
        for count in (options.records // 10, options.records):
            count_requests(program, workdir, count)


if __name__ == "__main__":
    main()
