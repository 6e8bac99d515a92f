"""The simulator of a mounted bucket, which fails now and then: `python FILE SIMULATOR DIRECTORY MOUNTPOINT`.

FAULTS is the share of requests that fail, 0..1: a read brings an error or less than there is, and the upload
of a file an error. A 429 or a 503 that Cloud Storage FUSE has met again and again becomes an EIO. A file that
somebody else has written since it was opened is not written again but ESTALE, by the object's generation.
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

    request, syncing = simulator.req, threading.local()

    def checked_request(kind: str, path: str = "", size: int = 0) -> None:
        request(kind, path, size)
        if kind == "put" and (check := getattr(syncing, "check", None)):
            check()  # by what is there when it arrives

    simulator.req = checked_request

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

        def _open(self, path: str, create: bool = False, trunc: bool = False) -> int:
            handle: int = super()._open(path, create, trunc)
            file = self.h[handle][0]
            file.gen = "none" if create else file.gen or self._generation(path)
            return handle

        def _sync(self, file: Any, path: str) -> None:
            def check() -> None:
                if file.gen != self._generation(path):
                    file.dirty = False
                    raise fuse.FuseOSError(errno.ESTALE)

            with file.lock:
                syncing.check, written = check, file.dirty
                try:
                    super()._sync(file, path)
                finally:
                    syncing.check = None
                if written:
                    file.gen = self._generation(path)

        def _generation(self, path: str) -> Any:
            try:
                status = os.stat(self.p(path))
            except FileNotFoundError:
                return "none"
            return status.st_ino, status.st_mtime_ns

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
