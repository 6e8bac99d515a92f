"""A mounted bucket: a file system that behaves as Cloud Storage FUSE is documented to; it counts requests."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

_SECONDS = 20.0

#: Seconds that a request takes, unless a test says otherwise: enough for an order to show.
_LATENCIES = {f"LAT_{kind}": "0.002" for kind in ("GET", "STAT", "LIST", "PUT", "COPY", "DELETE")}


@dataclass
class Mount:
    """A mounted bucket: where it is seen, the directory behind it, and, once unmounted, its requests."""

    path: Path
    behind: Path
    process: subprocess.Popen[bytes]
    counts: Path
    requests: Mapping[str, int] = field(default_factory=dict)
    bytes: Mapping[str, int] = field(default_factory=dict)

    def unmount(self) -> None:
        """Unmounts it and reads how many requests there were of each kind, and their bytes."""
        end = time.monotonic() + _SECONDS
        # A read that somebody still waits for keeps it busy.
        while (done := subprocess.run(["umount", str(self.path)], capture_output=True, text=True)).returncode:
            assert time.monotonic() < end, done.stderr
            time.sleep(0.02)
        self.process.wait(_SECONDS)
        found = json.loads(self.counts.read_text())
        self.requests, self.bytes = found["requests"], found["bytes"]


def simulator() -> str:
    """Returns the program that mounts, or skips the test where there is none."""
    program = os.environ.get("SHARDLINE_GCSFUSE_SIM", "")
    if not program:
        pytest.skip("SHARDLINE_GCSFUSE_SIM names no simulator of a mounted bucket")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("FUSE cannot be used here")
    if importlib.util.find_spec("mfusepy") is None:
        pytest.skip("mfusepy is not installed")
    return program


@contextlib.contextmanager
def mounted(behind: Path, **environment: str) -> Iterator[Mount]:
    """Mounts a directory as a bucket while the context lasts; with FAULTS, see `faulty_bucket`."""
    program = simulator()
    faulty = [str(Path(__file__).with_name("faulty_bucket.py"))] if "FAULTS" in environment else []
    with tempfile.TemporaryDirectory(prefix="mounted-") as name:
        path, counts, log = Path(name, "bucket"), Path(name, "counts.json"), Path(name, "log")
        path.mkdir()
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", *faulty, program, str(behind), str(path)],
                env=os.environ | _LATENCIES | {"COUNTS": str(counts)} | environment,
                stdout=output,
                stderr=output,
            )
        mount = Mount(path, behind, process, counts)
        try:
            _wait_for(path, process, log)
            yield mount
        finally:
            try:
                if process.poll() is None:
                    mount.unmount()
            finally:
                if path.is_mount():
                    process.kill()
                    subprocess.run(["umount", "--lazy", str(path)], check=False, capture_output=True)


def _wait_for(path: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _SECONDS
    while not path.is_mount():
        if process.poll() is not None:
            pytest.skip(f"nothing can be mounted here: {log.read_text()[-200:]}")
        assert time.monotonic() < end, "the simulator mounts nothing"
        time.sleep(0.02)
