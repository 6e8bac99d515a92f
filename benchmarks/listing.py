"""A bucket of many files, listed, fingerprinted and preprocessed: `python -m benchmarks.listing [--names N]`.

The bucket's API is a fake on this machine, in a process of its own; each request takes --latency seconds. Up
to 10,000 of the photos are preprocessed, by one process. Requests, seconds and peak memory are those of the
process that does so.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

from PIL import Image

from tests.helpers.fake_storage import fake_storage

ROOT = Path(__file__).resolve().parents[1]
_BUCKET = "bucket"
_WAYS = ("fingerprint", "images", "preprocess")
_PREPROCESSED = 10_000


class Photos(dict[str, bytes]):
    """Objects whose names are sorted."""

    def __init__(self, names: int, folders: int) -> None:
        few = [f"few/class-{i % 2}/IMG_{i:09}.jpeg" for i in range(min(names, _PREPROCESSED))]
        many = [f"photos/class-{i * folders // names:05}/IMG_{i:09}.jpeg" for i in range(names)]
        self.sorted = [*sorted(few), *many]
        photo = io.BytesIO()
        Image.effect_noise((256, 256), 50).save(photo, "jpeg")
        super().__init__(dict.fromkeys(self.sorted, photo.getvalue()))


def serve(names: int, folders: int, latency: float, requests: Synchronized[int], url: Any) -> None:
    """Serves the bucket until it is killed, and counts the requests."""

    def count(_: int) -> str:
        requests.value += 1
        return ""

    with fake_storage(_BUCKET, Photos(names, folders), count, latency) as found:
        url.send(found)
        time.sleep(1e6)


def measure(way: str) -> None:
    """Lists the bucket once, in this process, and prints what came of it."""
    from shardline.components.changes import fingerprint
    from shardline.components.preprocess.run import preprocess
    from shardline.components.preprocess.settings import PreprocessSettings
    from shardline.components.preprocess.sources import open_source

    settings = PreprocessSettings(source=f"images:gs://{_BUCKET}/photos")
    begin = time.perf_counter()
    if way == "fingerprint":
        found = fingerprint(settings).text
    elif way == "preprocess":
        settings = PreprocessSettings(source=f"images:gs://{_BUCKET}/few", processes=1)
        with tempfile.TemporaryDirectory() as directory:
            records = preprocess(settings, Path(directory, "out")).records
        found = f"{records / (time.perf_counter() - begin):,.0f} photos/s"
    else:
        source = open_source(settings)
        found = f"{sum(1 for _ in source):,} examples of {len(source.class_names):,} classes"
    seconds = time.perf_counter() - begin
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu = usage.ru_utime + usage.ru_stime
    print(f"{seconds:.1f} | {cpu:.1f} | {usage.ru_maxrss >> 10} MB | {found} |", flush=True)


def main() -> None:
    """Prints a row for each way to use a listing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", type=int, default=1_000_000)
    parser.add_argument("--folders", type=int, default=10)
    parser.add_argument("--latency", type=float, default=0.03)
    parser.add_argument("--measure", choices=_WAYS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        measure(given.measure)
        return
    requests = multiprocessing.Value("q", 0)
    here, there = multiprocessing.Pipe()
    arguments = given.names, given.folders, given.latency, requests, there
    server = multiprocessing.Process(target=serve, args=arguments, daemon=True)
    server.start()
    environment = os.environ | {"STORAGE_EMULATOR_HOST": here.recv()}
    print(f"{given.names:,} names in {given.folders:,} folders, {given.latency * 1e3:g} ms a request\n")
    print(
        "| | requests | seconds | CPU seconds | peak memory | found |\n|---|---|---|---|---|---|", flush=True
    )
    for way in _WAYS:
        requests.value = 0
        command = [sys.executable, "-m", "benchmarks.listing", "--measure", way]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
        print(f"| {way} | {requests.value:,} | {done.stdout.strip().splitlines()[-1]}", flush=True)
    server.kill()


if __name__ == "__main__":
    main()
