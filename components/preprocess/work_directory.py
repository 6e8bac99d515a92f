"""Work directory: OUT/.shardline, in which a dataset is built, and the dataset that it leaves in OUT.

Everything in it can be read by another process or a later run:

    lock                flock: one run at a time
    claim-N             the same on a mounted bucket, where a lock is known to one machine alone (`claims`)
    chunk-I.N           who writes some of the shards, where tasks write them together
    plan.json           settings, places and shards that are to be written (`plan`)
    spool               images of sources that can be read only once
    copies/             files of the source that are far (`copies`)
    keys                hashes of the keys, where the rows' digests are of the content
    buckets/            rows of the survey, when they are many
    rows/SHARD          rows of one shard, in order
    SHARD               a shard that is whole, but not yet part of a dataset
    done/NAME.mark      shards that are done as the plan wants them, and hashes of their images (`marks`)
    rejected.jsonl      examples that were left out
    examples.keys       what each example is known by in other datasets
    publishing          the fingerprint of the dataset whose shards are being moved to OUT

On a mounted bucket each change of a file is an upload of the whole, and a rename a copy. There all this is on
scratch, a directory of this run on this machine's disk; in the bucket are claims, marks, and shards, which
get their own names at once where no dataset is in the way: without a manifest they are none.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import xxhash

from shardline.components.preprocess import claims, storage
from shardline.components.preprocess.ahead import persistently
from shardline.components.preprocess.claims import Claim, Claims, Pulse
from shardline.trainer import files
from shardline.trainer.data import manifest as manifests
from shardline.trainer.data.manifest import KEYS_FILE, MANIFEST_FILE
from shardline.trainer.errors import DatasetError, RunError, SettingsError, SourceError
from shardline.trainer.files import TEMPORARY

NAME = ".shardline"
REJECTED_FILE = "rejected.jsonl"

_SHARD = re.compile(r"[a-z]+-\d{5,}-of-\d{5,}\.tfrecord")
_UNFINISHED = f"{TEMPORARY}{'[0-9a-f]' * 16}-*"
# Marks have the names of shards; one that is being written has a temporary name that ends as they do.
_MARKS = "[!.]*.mark"
_ATTEMPTS = 10
_NO_LOCKS = {errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL}


class WorkDirectory:
    """Paths inside the work directory of `out`, and on scratch.

    Attributes:
        is_far: Whether `out` is on a mounted bucket, or on another file system behind a network.
        path: The directory in `out`.
        scratch: The same one, or where that is far, one on this machine's disk that is given.
    """

    def __init__(self, out: Path, scratch: Path | None = None) -> None:
        self.out = out
        self.path = out / NAME
        self.is_far = files.is_mounted(out)
        self.scratch = scratch or self.path
        self.plan = self.scratch / "plan.json"
        self.spool = self.scratch / "spool"
        self.copies = self.scratch / "copies"
        self.keys = self.scratch / "keys"
        self.buckets = self.scratch / "buckets"
        self.rejected = self.scratch / REJECTED_FILE
        self.identities = self.scratch / KEYS_FILE
        self.done = self.scratch / "done"
        self.publishing = self.path / "publishing"
        self.claim: Claim | None = None
        self.pulse = Pulse(self.scratch / "pulse")

    @classmethod
    def of(cls, given: Mapping[str, str]) -> WorkDirectory:
        """Returns the one that another process of a run has `given`."""
        return cls(Path(given["out"]), Path(given["scratch"]))

    @property
    def given(self) -> dict[str, str]:
        """What another process of the run finds it by."""
        return {"out": str(self.out), "scratch": str(self.scratch)}

    @functools.cached_property
    def shards(self) -> Path:
        """The directory of shards until the dataset is complete: the one where they stay, if it can be."""
        in_the_way = not self.is_far or (self.out / MANIFEST_FILE).exists() or self.publishing.exists()
        return self.path if in_the_way else self.out

    def rows(self, shard: str) -> Path:
        """Returns the file with the rows of a shard."""
        return self.scratch / "rows" / shard

    def shard(self, shard: str) -> Path:
        """Returns a shard, where it is until the dataset is complete."""
        return self.shards / shard

    def find_shard(self, shard: str) -> Path:
        """Returns a shard where it is now: an interrupted run may have moved it already."""
        moved = self.out / shard
        return moved if self.publishing.exists() and not self.shard(shard).exists() else self.shard(shard)

    def forget_plan(self) -> None:
        """Removes what a survey makes, so that a new one starts from nothing; what is done stays."""
        for path in (self.plan, self.spool, self.keys, self.rejected, *self.left_over()):
            path.unlink(missing_ok=True)
        for directory in (self.buckets, self.scratch / "rows", self.copies):
            shutil.rmtree(directory, ignore_errors=True)
        for directory in (self.scratch / "rows", self.done):
            directory.mkdir(exist_ok=True)

    def forget_shards(self, wanted: Collection[str]) -> None:
        """Removes shards of an earlier plan; those of the files in `wanted` stay."""
        for path in self.shards.glob("*.tfrecord"):
            if path.name not in wanted:
                path.unlink()

    def bring_marks(self) -> None:
        """Copies marks that are in the bucket to scratch: of a machine that was lost, or of other tasks.

        What cannot be read is left half-way: another task may be writing it at this moment (`marks.load`).
        """
        self.done.mkdir(exist_ok=True)
        if self.is_far:
            for path in self.path.glob(_MARKS):
                if not (self.done / path.name).exists():
                    with contextlib.suppress(OSError, SourceError):
                        storage.fetch(str(path), str(self.done / path.name))

    def marks(self) -> list[Path]:
        """Returns the files of the marks that are on this machine, in order."""
        return sorted(self.done.glob(_MARKS))

    def left_over(self) -> list[Path]:
        """Returns the unfinished files of processes that were killed; only where nobody else is at work."""
        directories = {self.out, self.scratch, self.done}
        return [path for directory in directories for path in directory.glob(_UNFINISHED)]

    def has_marks(self) -> bool:
        """Returns whether a shard is done."""
        return bool(self.marks())

    def remove(self) -> None:
        """Removes the work directory, and `out` too if nothing else is in it; not if it is another run's."""
        if self.claim and not self.claim.holds():
            return
        # What says that the dataset is complete goes last: whoever finds the rest knows what it is.
        for path in sorted(self.path.glob("*"), key=lambda path: path == self.publishing):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif not self.claim or path != self.claim.path:
                path.unlink(missing_ok=True)
        if self.claim:  # until then nobody else begins
            self.claim.release()
        with contextlib.suppress(OSError):
            self.path.rmdir()
            if not (self.out / MANIFEST_FILE).exists():
                self.out.rmdir()


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """Makes a directory on this machine's disk for a run, and removes it, and those of runs that were killed.

    Nothing is taken over from these: what another machine has done since is in the bucket.
    """
    host, pid, began = claims.here().split()
    prefix = f"shardline-{os.getuid()}-{xxhash.xxh3_64_hexdigest(host.encode())}-"
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        number, _, rest = path.name.removeprefix(prefix).partition("-")
        if number.isdecimal() and claims.began(int(number)) != rest.partition("-")[0]:
            shutil.rmtree(path, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{prefix}{pid}-{began}-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def check(out: Path, *, overwrite: bool) -> None:
    """Refuses a directory that cannot become the dataset, before any work is done.

    That is a file, something else than the beginning of a dataset, a whole one that is not to be overwritten,
    or what cannot be written.
    """
    try:
        if out.is_dir():
            _refuse_content(out, overwrite=overwrite)
        elif out.exists():
            raise SettingsError(f"{out} is a file; give a directory for the dataset")
        parent = next(parent for parent in (out.absolute(), *out.absolute().parents) if parent.exists())
    except OSError as error:
        raise SettingsError(f"cannot use {out} as dataset directory: {error.strerror}") from None
    if not parent.is_dir():
        raise SettingsError(f"cannot write the dataset {out}: {parent} is a file")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise SettingsError(f"cannot write the dataset {out}: no permission to write in {parent}")


@contextlib.contextmanager
def locked(out: Path, *, shared: bool = False) -> Iterator[WorkDirectory]:
    """Makes the work directory and holds its lock; where the file system has no locks, goes without.

    `shared`: whether others that write shards of the same plan may hold it too. Another run that holds it is
    a RunError.
    """
    work = WorkDirectory(out)
    if work.is_far:
        with _scratch() as scratch:
            work = WorkDirectory(out, scratch)
            with _claimed(work, shared=shared):
                yield work
        return
    # The run that was there before may remove the directory, or the lock while we wait for it.
    for attempt in range(_ATTEMPTS):
        try:
            work.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(work.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and attempt < _ATTEMPTS - 1:
                continue
            raise SettingsError(f"cannot write the dataset {out}: {error.strerror}") from None
        try:
            if _lock(lock, work.path / "lock", out, shared=shared):
                yield work
                return
        finally:
            os.close(lock)
    raise _in_use(out)


@contextlib.contextmanager
def _claimed(work: WorkDirectory, *, shared: bool) -> Iterator[None]:
    """Makes the work directory in a bucket, and holds a claim instead of a lock.

    Those that write shards of the same plan claim parts of it.
    """
    try:
        persistently(lambda path: path.mkdir(parents=True, exist_ok=True), work.path)
        claim = None if shared else Claims(work.path, work.pulse).wait_for("claim", lambda: _in_use(work.out))
    except OSError as error:
        raise SettingsError(f"cannot write the dataset {work.out}: {error.strerror}") from None
    with claim or contextlib.nullcontext():
        work.claim = claim
        yield


def publish(work: WorkDirectory, shards: list[str], fingerprint: str) -> None:
    """Moves the shards to `out`, in place of what was there; the manifest is written after that.

    The manifest of an earlier dataset goes first. Files are moved one by one: Cloud Storage, mounted as a
    directory, cannot rename directories.
    """
    if work.claim:
        work.claim.check()
    _announce(work, fingerprint)
    (work.out / MANIFEST_FILE).unlink(missing_ok=True)
    for name in (REJECTED_FILE, KEYS_FILE):
        (work.out / name).unlink(missing_ok=True)
    wanted = set(shards)
    earlier = [path for path in work.out.iterdir() if _SHARD.fullmatch(path.name) and path.name not in wanted]
    for path in (*earlier, *work.left_over()):
        path.unlink()
    for shard in shards if work.shards != work.out else ():
        if work.shard(shard).exists():
            work.shard(shard).replace(work.out / shard)
    for path in (work.rejected, work.identities):  # a source without keys has no identities
        if path.exists() and path.stat().st_size:
            _bring(path, work)
    files.sync(work.out)


def _announce(work: WorkDirectory, fingerprint: str) -> None:
    """Writes `publishing`; a half-written one names no dataset that there is."""
    if work.is_far:
        (work.scratch / work.publishing.name).write_text(fingerprint)
        storage.upload(work.scratch / work.publishing.name, work.publishing)
    else:
        files.write_text(work.publishing, fingerprint)


def _bring(path: Path, work: WorkDirectory) -> None:
    """Brings a file from scratch to `out`, where it is the only one or, if that is far, a copy.

    Of what fails in a bucket all is tried again, and then it must still be there.
    """
    if work.is_far:
        storage.upload(path, work.out / path.name)
    else:
        path.replace(work.out / path.name)


def is_published(work: WorkDirectory) -> bool:
    """Returns whether an interrupted run had completed the dataset, and only not removed its traces."""
    try:
        return work.publishing.read_text() == manifests.load(work.out).fingerprint
    except (OSError, DatasetError):
        return False


def _refuse_content(out: Path, *, overwrite: bool) -> None:
    work, own = WorkDirectory(out), {MANIFEST_FILE, REJECTED_FILE, KEYS_FILE}
    there = sorted(path.name for path in {*out.iterdir()} - {work.path, *work.left_over()})
    if not there or is_published(work):
        return
    try:
        dataset = manifests.load(out)
    except DatasetError:
        others = [name for name in there if not _SHARD.fullmatch(name) and name not in own]
        begun = work.publishing.exists() or (work.is_far and work.path.is_dir())
        if MANIFEST_FILE in there or others or not begun:
            raise SettingsError(
                f"{out} holds something that is not a complete Shardline dataset ({(others or there)[0]!r}); "
                "give an empty or new directory"
            ) from None
        return
    if not overwrite:
        raise SettingsError(
            f"{out} holds a dataset already ({dataset.source}, {dataset.fingerprint[:15]}); "
            "give another directory, or overwrite it with --overwrite"
        )
    named = {shard.file for shard in dataset.shards}
    others = sorted(set(there) - named - own)
    if others:
        raise SettingsError(
            f"{out} holds {others[0]!r} beside a Shardline dataset; give an empty or new directory"
        )


def _lock(lock: int, path: Path, out: Path, *, shared: bool) -> bool:
    """Takes the lock and returns whether its file is still in its place."""
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(lock), path.stat())
    except BlockingIOError:
        raise _in_use(out) from None
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return True


def _in_use(out: Path) -> RunError:
    return RunError(f"another run is writing {out}; wait until it has ended, or give another directory")
