"""The simulator of a mounted bucket, which fails now and then: `python FILE SIMULATOR DIRECTORY MOUNTPOINT`.

FAULTS is the share of requests that fail, 0..1: a read brings an error or less than there is, and the upload
of a file an error. A 429 or a 503 that Cloud Storage FUSE has met again and again becomes an EIO.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import random
import sys
import threading
import types
from typing import Any


def load(path: str) -> types.ModuleType:
    """Returns a program as a module."""
    spec = importlib.util.spec_from_file_location("simulator", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(program: str, behind: str, mountpoint: str) -> None:
    """Serves until it is unmounted."""
    simulator = load(program)
    fuse = simulator.fuse
    share, dice, lock = float(os.environ["FAULTS"]), random.Random(0), threading.Lock()

    def fails() -> bool:
        with lock:
            return dice.random() < share

    class Faulty(simulator.Fs):  # type: ignore[misc, name-defined]
        def init_with_config(self, connection: Any, config: Any) -> None:
            config.direct_io = 1  # so that a short read is seen as one

        def read(self, path: str, size: int, offset: int, handle: int) -> Any:
            if fails():
                raise fuse.FuseOSError(errno.EIO)
            data = super().read(path, size, offset, handle)
            return data[: len(data) // 2] if fails() else data

        def flush(self, path: str, handle: int) -> Any:
            if fails():
                raise fuse.FuseOSError(errno.EIO)
            return super().flush(path, handle)

        def fsync(self, path: str, only_data: int, handle: int) -> Any:
            if fails():
                raise fuse.FuseOSError(errno.EIO)
            return super().fsync(path, only_data, handle)

    fuse.FUSE(Faulty(behind), mountpoint, foreground=True, attr_timeout=simulator.TTL, entry_timeout=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
