"""Work directory: OUT/.shardline, in which a dataset is built, and the dataset that it leaves in OUT.

Everything in it can be read by another process or a later run:

    lock                one whole run at a time
    plan.json           settings, image locations and the shards to write (`plan`)
    planned             its hash, in a bucket: written last, when parts can begin
    spool, copies/      images of sources that can be read only once, and copies of remote source files
    keys                hashes of the keys, where the records' digests are of the content
    buckets/, rows/SHARD   records of the survey, and of one shard, in order
    SHARD               a complete shard that is not yet part of a dataset
    done/NAME.mark      completion markers of shards, with hashes of their contents (`write.markers`)
    rejected.jsonl, examples.keys   files of the dataset
    publishing          the fingerprint of the dataset whose shards are being moved to OUT

On a mounted bucket each change of a file uploads all of it, and a rename copies it. There all this is on
scratch, a directory of this run on this machine's disk. In the bucket are the lock, markers, what parts on
other machines need of the plan, and shards, under their final names at once unless another dataset is there.

The lock on a disk is flock, which the kernel releases however its holder ends. In a mounted bucket, where
flock is only known to one machine, it is a file that is created exclusively and names its holder. The lock of
a killed run is taken over if this machine sees that its holder has ended; otherwise when the engine that
retries the task says so, or a person removes the file. A run that has lost its lock writes nothing more.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from shardline.components.storage import remote_files
from shardline.components.storage.prefetch import ordered_map, with_retries
from shardline.trainer.base import crash, files
from shardline.trainer.base.errors import DatasetError, RunError, SettingsError
from shardline.trainer.base.files import TEMPORARY
from shardline.trainer.data import manifest as manifests
from shardline.trainer.data.manifest import KEYS_FILE, MANIFEST_FILE

NAME = ".shardline"
REJECTED_FILE = "rejected.jsonl"

_SHARD = re.compile(r"[a-z]+-\d{5,}-of-\d{5,}\.tfrecord")
_UNFINISHED = f"{TEMPORARY}{'[0-9a-f]' * 16}-*"
# Completion markers; one that is being written has a temporary name with the same ending.
_MARKERS = "[!.]*.mark"
_LOCK = "lock"

# Interval of checking who holds a bucket's lock, and age at which one without a name is of a killed run.
_GUARD_SECONDS, _EMPTY_LOCK_SECONDS = 0.5, 2.0
_ATTEMPTS = 10

#: Files that are copied to or from a bucket at the same time; each may take 4 MiB of memory.
CONCURRENT_COPIES = 16


class WorkDirectory:
    """Paths inside the work directory of `out`, and on scratch.

    Attributes:
        is_remote: Whether `out` is on a mounted bucket, or on another file system behind a network.
        scratch: The directory in `out`, or where that is remote, one on this machine's disk.
        guard: In a bucket, name and content of the file that names the writing run.
    """

    def __init__(self, out: Path, scratch: Path | None = None, guard: Sequence[str] = ()) -> None:
        self.out = out
        self.guard = guard
        self.path = out / NAME
        self.is_remote = files.is_mounted(out)
        self.scratch = scratch or self.path
        self.plan = self.scratch / "plan.json"
        self.spool = self.scratch / "spool"
        self.copies = self.scratch / "copies"
        self.keys = self.scratch / "keys"
        self.buckets = self.scratch / "buckets"
        self.rejected = self.scratch / REJECTED_FILE
        self.key_hashes = self.scratch / KEYS_FILE
        self.done = self.scratch / "done"
        self.publishing = self.path / "publishing"
        self._checked = 0.0

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> WorkDirectory:
        """Returns the work directory that another process of the run describes by its `arguments`."""
        return cls(Path(arguments["out"]), Path(arguments["scratch"]), arguments["guard"])

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of `from_arguments` in another process of the run, as JSON."""
        return {"out": str(self.out), "scratch": str(self.scratch), "guard": self.guard}

    def check(self) -> None:
        """Raises RunError if another run has taken over, before this one changes its files."""
        now = time.time()  # the only clock that runs on while the machine is suspended
        if not self.guard or now - self._checked < _GUARD_SECONDS:
            return
        if read_small(self.path / self.guard[0]) != self.guard[1]:
            raise RunError(f"another run has taken over {self.out}, or has planned it again; see that one")
        self._checked = now

    @functools.cached_property
    def shards(self) -> Path:
        """The directory of shards until the dataset is complete: the final one where possible."""
        is_separate = not self.is_remote or (self.out / MANIFEST_FILE).exists() or self.publishing.exists()
        return self.path if is_separate else self.out

    def records_path(self, shard: str) -> Path:
        """Returns the path of a shard's records."""
        return self.scratch / "rows" / shard

    def discard_plan(self) -> None:
        """Removes the files of a survey, for a new one; completed shards stay."""
        for path in (self.plan, self.spool, self.keys, self.rejected, *self.unfinished_files()):
            path.unlink(missing_ok=True)
        for directory in (self.buckets, self.scratch / "rows", self.copies):
            shutil.rmtree(directory, ignore_errors=True)
        for directory in (self.scratch / "rows", self.done):
            directory.mkdir(exist_ok=True)

    def marker_files(self) -> list[Path]:
        """Returns the files of the markers; for a bucket, local copies of those that can be read."""
        if self.is_remote:
            present = {path.name for path in self.path.glob(_MARKERS)}
            self.fetch(sorted(present - {path.name for path in self.done.glob(_MARKERS)}), self.done)
        return sorted(self.done.glob(_MARKERS))

    def fetch(self, names: Iterable[str], directory: Path) -> list[Exception]:
        """Copies files of the work directory in a bucket to scratch, in parallel; returns the errors."""

        def copy(name: str) -> None:
            remote_files.fetch(str(self.path / name), str(directory / Path(name).name))

        directory.mkdir(exist_ok=True)
        copied = ordered_map(copy, names, size=lambda _: 1, in_flight=CONCURRENT_COPIES)
        return [each for each in copied if isinstance(each, Exception)]

    def unfinished_files(self) -> list[Path]:
        """Returns the unfinished files of killed processes; only valid while no other process writes."""
        directories = {self.out, self.scratch, self.done}
        return [path for directory in directories for path in directory.glob(_UNFINISHED)]

    def remove(self) -> None:
        """Removes all but the lock in a bucket and `publishing`; RunError if another run holds it."""
        self.check()
        kept = {self.publishing, *([self.path / _LOCK] if self.is_remote else [])}

        def remove(path: Path) -> None:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

        for _ in ordered_map(remove, {*self.path.glob("*")} - kept, size=lambda _: 1):
            pass


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """Makes a directory on this disk for a run, and removes it, and those of killed runs."""
    host, pid, began = _process_identity().split()
    prefix = f"shardline-{os.getuid()}-{xxhash.xxh3_64_hexdigest(host.encode())}-"
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        number, _, rest = path.name.removeprefix(prefix).partition("-")
        if number.isdecimal() and _start_time(int(number)) != rest.partition("-")[0]:
            shutil.rmtree(path, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{prefix}{pid}-{began}-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def check(out: Path, *, overwrite: bool) -> None:
    """Refuses a directory that cannot become the dataset, before any work is done."""
    try:
        if out.is_dir():
            _refuse_content(out, overwrite=overwrite)
        parent = next(parent for parent in (out.absolute(), *out.absolute().parents) if parent.exists())
    except OSError as error:
        raise SettingsError(f"cannot use {out} as dataset directory: {error.strerror}") from None
    if not parent.is_dir():
        raise SettingsError(f"cannot write the dataset {out}: {parent} is a file; give a directory")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise SettingsError(f"cannot write the dataset {out}: no permission to write in {parent}")


@contextlib.contextmanager
def hold(out: Path, *, shared: bool = False, take_over: bool = False) -> Iterator[WorkDirectory]:
    """Makes the work directory and holds its lock; at the end removes it, and `out`, if they are empty.

    `shared`: whether others that write shards of the same plan may hold it too; in a bucket no lock is used.
    `take_over`: whether a run that holds it in a bucket is known to have ended. Any other is a RunError.
    """
    work = WorkDirectory(out)

    def remove_empty() -> None:
        with contextlib.suppress(OSError):
            # `publishing` is removed last: it says that the rest belongs to a complete dataset.
            if os.listdir(work.path) == [work.publishing.name]:
                work.publishing.unlink()
            work.path.rmdir()
            if not (out / MANIFEST_FILE).exists():
                out.rmdir()

    with contextlib.ExitStack() as stack:
        with crash.output_errors(f"write the dataset {out}"):
            if work.is_remote:
                work = WorkDirectory(out, stack.enter_context(_scratch()))
            stack.callback(remove_empty)
            if work.is_remote:
                with_retries(lambda path: path.mkdir(parents=True, exist_ok=True), work.path)
                if not shared:
                    name = stack.enter_context(bucket_lock(work.path / _LOCK, take_over=take_over))
                    work.guard = (_LOCK, name)
            else:
                stack.enter_context(disk_lock(work.path / _LOCK, shared=shared))
        yield work


def publish(work: WorkDirectory, shards: list[str], fingerprint: str) -> None:
    """Moves the shards to `out`, or copies them to a bucket, before the manifest is written.

    The manifest of an earlier dataset is removed first.
    """
    work.check()
    notice = work.scratch / work.publishing.name
    files.write_text(notice, fingerprint)
    if work.is_remote:
        remote_files.upload(notice, work.publishing)
    for name in (MANIFEST_FILE, REJECTED_FILE, KEYS_FILE):
        (work.out / name).unlink(missing_ok=True)
    wanted = set(shards)
    earlier = [path for path in work.out.iterdir() if _SHARD.fullmatch(path.name) and path.name not in wanted]
    for path in (*earlier, *work.unfinished_files()):
        path.unlink()
    for shard in shards if work.shards != work.out else ():
        if (work.shards / shard).exists():
            (work.shards / shard).replace(work.out / shard)
    for path in (work.rejected, work.key_hashes):  # a source without keys has no identities
        if path.exists() and path.stat().st_size:
            (remote_files.upload if work.is_remote else Path.replace)(path, work.out / path.name)
    files.sync(work.out)


def is_published(work: WorkDirectory) -> bool:
    """Returns whether an interrupted run has completed the dataset, and only not removed its work files."""
    try:
        return work.publishing.read_text() == manifests.load(work.out).fingerprint
    except (OSError, DatasetError):
        return False


def _refuse_content(out: Path, *, overwrite: bool) -> None:
    work, own = WorkDirectory(out), {MANIFEST_FILE, REJECTED_FILE, KEYS_FILE}
    present = sorted(path.name for path in {*out.iterdir()} - {work.path, *work.unfinished_files()})
    # An empty work directory is the last trace of a run, removed after everything else.
    bare = work.path.is_dir() and not any(work.path.iterdir())
    if not present or bare or is_published(work):
        return
    try:
        dataset = manifests.load(out)
    except DatasetError:
        others = [name for name in present if not _SHARD.fullmatch(name) and name not in own]
        begun = work.publishing.exists() or (work.is_remote and work.path.is_dir())
        if MANIFEST_FILE in present or others or not begun:
            raise SettingsError(
                f"{out} holds something that is not a complete Shardline dataset "
                f"({(others or present)[0]!r}); give an empty or new directory"
            ) from None
        return
    if not overwrite:
        raise SettingsError(
            f"{out} holds a dataset already ({dataset.source}, {dataset.fingerprint[:15]}); "
            "give another directory, or overwrite it with --overwrite"
        )
    if others := sorted(set(present) - {shard.file for shard in dataset.shards} - own):
        raise SettingsError(
            f"{out} holds {others[0]!r} next to a Shardline dataset; give an empty or new directory"
        )


@contextlib.contextmanager
def disk_lock(path: Path, *, shared: bool) -> Iterator[None]:
    """Holds a lock on this machine's disk, and makes its directory; RunError where another run has it."""
    # An earlier run may remove the directory, or the lock while we wait for it.
    for attempt in range(_ATTEMPTS):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            if attempt == _ATTEMPTS - 1:
                raise
            continue
        try:
            if not files.lock(lock, shared=shared):
                break
            try:
                is_in_place = os.path.samestat(os.fstat(lock), path.stat())
            except FileNotFoundError:
                is_in_place = False
            if is_in_place:
                os.truncate(lock, 0)
                os.write(lock, _process_identity().encode())
                yield
                return
        finally:
            os.close(lock)
    raise _in_use(path, read_small(path))


@contextlib.contextmanager
def bucket_lock(path: Path, *, take_over: bool) -> Iterator[str]:
    """Holds a lock in a mounted bucket, and yields its content; RunError where another run has it."""
    name = f"{_process_identity()} {secrets.token_hex(8)}"
    if not _create_exclusively(path, name):
        if not (holder := read_small(path)):
            time.sleep(_EMPTY_LOCK_SECONDS)
            holder = read_small(path)
        if holder and not take_over:
            host, pid, *rest = [*holder.split(), "", ""]
            is_local = host == _process_identity().split()[0] and pid.isdecimal()
            if not is_local or _start_time(int(pid)) == rest[0]:  # else this machine sees that it has ended
                raise _in_use(path, holder, f"; if it was killed, remove {path}")
        path.unlink(missing_ok=True)
        if not _create_exclusively(path, name):
            raise _in_use(path, read_small(path))
    try:
        yield name
    finally:
        with contextlib.suppress(OSError):
            if read_small(path) == name:
                path.unlink()


def read_small(path: Path) -> str:
    """Returns the content of a small file, "" where there is none."""
    try:
        return with_retries(Path.read_bytes, path)[:4096].decode(errors="replace")
    except FileNotFoundError:
        return ""


def _process_identity() -> str:
    """Returns the unique identity of this process: machine and its boot, process number and start time."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # Containers may share the machine's name, each with its own process numbers.
    numbers = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()}/{boot}/{numbers} {os.getpid()} {_start_time(os.getpid())}"


def _start_time(pid: int) -> str:
    """Returns the start time of a process of this machine, "" if there is none with this number."""
    try:
        state, *others = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state == "Z" else others[18]
    except (OSError, IndexError):
        return ""


def _create_exclusively(path: Path, name: str) -> bool:
    def write(path: Path) -> None:
        try:
            with path.open("xb") as file:
                file.write(name.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:  # it exists, perhaps from an earlier attempt whose response was lost
            if error.errno not in (errno.EEXIST, errno.ESTALE):
                raise

    with_retries(write, path)
    return read_small(path) == name


def _in_use(path: Path, holder: str, remedy: str = "") -> RunError:
    machine, pid, *_ = [*holder.split(), "?", "?"]
    return RunError(
        f"another run is writing {path.parent.parent} (process {pid} on {machine.partition('/')[0]}); wait "
        f"until it has ended, or give another directory{remedy}"
    )
