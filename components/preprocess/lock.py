"""Lock of a dataset directory: one whole run at a time.

On a disk it is flock, which the kernel gives back however its holder ends. In a mounted bucket flock is known
to one machine alone: there the lock is a file that is created exclusively (Cloud Storage FUSE: generation 0)
and names its holder. One that a killed run has left is taken over where this machine sees that its holder has
ended; elsewhere the engine says so that starts the task again, or a person removes the file. Whoever has lost
it writes nothing more: it is read again before each upload (`WorkDirectory.check`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from shardline.components.preprocess.ahead import persistently
from shardline.trainer import files
from shardline.trainer.errors import RunError

_ATTEMPTS = 10
# A run may have been killed between the creation of its lock and the upload of its name.
_EMPTY_SECONDS = 2.0


@contextlib.contextmanager
def flocked(path: Path, *, shared: bool) -> Iterator[None]:
    """Holds a lock on this machine's disk, and makes its directory.

    Raises RunError where another run has it, unless both are `shared`.
    """
    # The run that was there before may remove the directory, or the lock while we wait for it.
    for attempt in range(_ATTEMPTS):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            if attempt == _ATTEMPTS - 1:
                raise
            continue
        try:
            if _is_taken(lock, path, shared=shared):
                yield
                return
        finally:
            os.close(lock)
    raise _in_use(path, read(path))


def _is_taken(lock: int, path: Path, *, shared: bool) -> bool:
    """Takes the lock and returns whether its file is still in its place."""
    try:
        if not files.lock(lock, shared=shared):
            raise _in_use(path, read(path))
        if not os.path.samestat(os.fstat(lock), path.stat()):
            return False
        os.truncate(lock, 0)
        os.write(lock, here().encode())
        return True
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def created(path: Path, *, take_over: bool) -> Iterator[str]:
    """Holds a lock in a mounted bucket, and yields what it says.

    `take_over`: whether it is known that a run that had it has ended, wherever it was. Raises RunError where
    another run has it.
    """
    name = f"{here()} {secrets.token_hex(8)}"
    if not _create(path, name):
        if not (holder := read(path)):
            time.sleep(_EMPTY_SECONDS)
            holder = read(path)
        if holder and not take_over and not _has_ended(holder):
            raise _in_use(path, holder, f"; if it was killed, remove {path}")
        path.unlink(missing_ok=True)
        if not _create(path, name):
            raise _in_use(path, read(path))
    try:
        yield name
    finally:
        with contextlib.suppress(OSError):
            if read(path) == name:
                path.unlink()


def read(path: Path) -> str:
    """Returns what a small file says, "" where there is none."""
    try:
        return persistently(Path.read_bytes, path)[:4096].decode(errors="replace")
    except FileNotFoundError:
        return ""


def here() -> str:
    """Returns what tells this process from all others: machine, its start, number, and when it began."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # Containers may have the machine's name, each with numbers of processes of its own.
    numbers = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()}/{boot}/{numbers} {os.getpid()} {began(os.getpid())}"


def began(pid: int) -> str:
    """Returns when a process of this machine began, "" where there is none with this number."""
    try:
        state, *others = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state == "Z" else others[18]
    except (OSError, IndexError):
        return ""


def _create(path: Path, name: str) -> bool:
    """Creates the file, and says whether this is the one who did."""

    def write(path: Path) -> None:
        try:
            with path.open("xb") as file:
                file.write(name.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:  # it is there, perhaps by the try before, whose answer was lost
            if error.errno not in (errno.EEXIST, errno.ESTALE):
                raise

    persistently(write, path)
    return read(path) == name


def _has_ended(holder: str) -> bool:
    """Returns whether this machine sees that the process has ended."""
    host, pid, *rest = [*holder.split(), "", ""]
    return host == here().split()[0] and pid.isdecimal() and began(int(pid)) != rest[0]


def _in_use(path: Path, holder: str, remedy: str = "") -> RunError:
    machine, pid, *_ = [*holder.split(), "?", "?"]
    host = machine.partition("/")[0]
    return RunError(
        f"another run is writing {path.parent.parent} (process {pid} on {host}); wait until "
        f"it has ended, or give another directory{remedy}"
    )
