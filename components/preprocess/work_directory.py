"""Work directory: OUT/.shardline, in which a dataset is built, and the dataset that it leaves in OUT.

Everything in it can be read by another process or a later run:

    lock                one whole run at a time: flock, which the kernel releases however its holder ends
    plan.json           settings, image locations and the shards to write (`plan`)
    spool, copies/      images of sources that can be read only once, and copies of source files in buckets
    keys                hashes of the keys, where the records' digests are of the content
    buckets/, rows/SHARD   records of the survey, and of one shard, in order
    SHARD               a complete shard that is not yet part of a dataset
    done/SHARD.mark     completion markers of shards, with hashes of their contents (`write`)
    rejected.jsonl, examples.keys   files of the dataset
    publishing          fingerprint of the dataset whose shards are moved to OUT; empty in a bucket (`begin`)

Where OUT is in a bucket, all this is in a directory of this run on this machine's disk. In the bucket are
shards, under their final names at once, their markers, and what parts on other machines need of the plan.
Nothing is locked there: on the platform every task has a directory of its own. The manifest of an earlier
dataset is removed before any of these is written, and the new one is written last.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from shardline.components.storage import Storage
from shardline.trainer import manifest as manifests
from shardline.trainer.base import crash, files
from shardline.trainer.base.errors import DatasetError, RunError, SettingsError
from shardline.trainer.base.files import TEMPORARY
from shardline.trainer.manifest import KEYS_FILE, MANIFEST_FILE, Manifest

NAME = ".shardline"
REJECTED_FILE = "rejected.jsonl"

_SHARD = re.compile(r"[a-z]+-\d{5,}-of-\d{5,}\.tfrecord")
_UNFINISHED = f"{TEMPORARY}{'[0-9a-f]' * 16}-*"
_DATASET_FILES = (MANIFEST_FILE, REJECTED_FILE, KEYS_FILE)
_ROWS, _DONE = "rows/", "done/"


class WorkDirectory:
    """Paths of a work directory.

    Attributes:
        path: The directory in `out`, or where that is in a bucket, one on this machine's disk.
        storage, shared: `out`, and the work directory where parts on other machines see it.
    """

    def __init__(self, out: Path, path: Path | None = None) -> None:
        self.out = out
        self.path = path or out / NAME
        self.storage = Storage(out)
        self.shared = Storage(self.storage.location(NAME))
        self.plan = self.path / "plan.json"
        self.spool = self.path / "spool"
        self.copies = self.path / "copies"
        self.keys = self.path / "keys"
        self.buckets = self.path / "buckets"
        self.checked = self.buckets / "checked"
        self.rejected = self.path / REJECTED_FILE
        self.key_hashes = self.path / KEYS_FILE
        self.done = self.path / _DONE
        self.publishing = self.path / "publishing"

    @property
    def arguments(self) -> dict[str, str]:
        """Arguments of the class, as texts, in another process of the run."""
        return {"out": str(self.out), "path": str(self.path)}

    def records_path(self, shard: str) -> Path:
        """Returns the path of a shard's records."""
        return self.path / _ROWS / shard

    def discard_plan(self) -> None:
        """Removes the files of a survey, for a new one; completed shards stay."""
        for path in (self.plan, self.spool, self.keys, self.rejected, *self.unfinished_files()):
            path.unlink(missing_ok=True)
        for directory in (self.buckets, self.path / _ROWS, self.copies):
            shutil.rmtree(directory, ignore_errors=True)
        for directory in (self.path / _ROWS, self.done):
            directory.mkdir(exist_ok=True)

    def unfinished_files(self) -> list[Path]:
        """Returns the unfinished files of killed processes; only valid while no other process writes."""
        directories = (self.path, self.done) if self.storage.is_remote else (self.out, self.path, self.done)
        return [path for each in directories for path in each.glob(_UNFINISHED)]

    def upload_plan(self, shards: Iterable[str]) -> None:
        """Copies a written plan to the bucket, where parts on other machines find it."""
        names = [path.name for path in (self.spool, self.rejected) if path.exists()]
        self.shared.put(self.path, [*names, *(_ROWS + shard for shard in shards)])
        self.shared.put(self.path, [self.plan.name])

    def fetch_plan(self) -> None:
        """Copies a plan from the bucket, but for the records of its shards."""
        names = {self.plan.name, self.spool.name, self.rejected.name}
        self.shared.get(self.path, names & _names(self.shared))

    def fetch_records(self, shards: Iterable[str]) -> None:
        """Copies the records of shards from the bucket."""
        self.shared.get(self.path, (_ROWS + shard for shard in shards))

    def shard_sizes(self) -> dict[str, int]:
        """Returns the sizes of the complete shards by name."""
        if self.storage.is_remote:
            return {each.name: each.size for each in self.storage.entries()}
        # An interrupted run has moved some to `out`.
        directories = (self.out, self.path) if self.publishing.exists() else (self.path,)
        sizes = dict[str, int]()
        for path in (path for directory in directories for path in directory.glob("[!.]*.tfrecord")):
            with contextlib.suppress(FileNotFoundError):  # another part replaces it
                sizes[path.name] = path.stat().st_size
        return sizes

    def begin(self) -> None:
        """In a bucket, says that the shards in `out` are a run's, and removes an earlier manifest."""
        if self.storage.is_remote:
            self.publishing.touch()
            self.shared.put(self.path, [self.publishing.name])
            self.storage.remove([MANIFEST_FILE])

    def add_shard(self, temporary: Path, shard: str) -> None:
        """Adds a shard that was written under a temporary name."""
        temporary.replace(self.path / shard)
        if self.storage.is_remote:
            self.storage.put(self.path, [shard])
            (self.path / shard).unlink()

    def add_marker(self, name: str, content: bytes) -> None:
        """Adds the completion marker of a shard that was added."""
        files.write_bytes(self.done / name, content)
        self.shared.put(self.path, [_DONE + name])

    def markers(self) -> list[Path]:
        """Returns the files of the completion markers; those in a bucket are copied here."""
        self.done.mkdir(exist_ok=True)
        there = (_DONE + name for name in _names(self.shared, _DONE))
        self.shared.get(self.path, [name for name in there if not (self.path / name).exists()])
        return sorted(self.done.glob("[!.]*.mark"))

    def remove_marker(self, name: str) -> None:
        """Removes a completion marker."""
        (self.done / name).unlink()
        self.shared.remove([_DONE + name])

    def dataset(self) -> Manifest:
        """Returns the manifest of the dataset in `out`; DatasetError where there is none that is valid."""
        if not self.storage.is_remote:
            return manifests.load(self.out)
        with tempfile.TemporaryDirectory() as name:
            self.storage.get(Path(name), {MANIFEST_FILE} & _names(self.storage))
            return manifests.load(Path(name))

    def publish(self, manifest: Manifest) -> None:
        """Makes the shards the dataset in `out`; the manifest of an earlier one is removed first."""
        new = [path for path in (self.rejected, self.key_hashes) if path.exists() and path.stat().st_size]
        kept = {shard.file for split in manifest.splits.values() for shard in split.shards}
        if self.storage.is_remote:
            there = _names(self.storage)
            old = {name for name in there if _SHARD.fullmatch(name) or name in _DATASET_FILES}
            self.storage.remove(old - kept)
            self.storage.put(self.path, [path.name for path in new])
            manifests.save(manifest, self.path)
            self.storage.put(self.path, [MANIFEST_FILE])
            return
        files.write_text(self.publishing, manifest.fingerprint)
        for name in _DATASET_FILES:
            (self.out / name).unlink(missing_ok=True)
        earlier = [path for path in self.out.glob("*.tfrecord") if _SHARD.fullmatch(path.name)]
        for path in (*(path for path in earlier if path.name not in kept), *self.unfinished_files()):
            path.unlink()
        for path in (*(self.path / shard for shard in kept), *new):
            if path.exists():
                path.replace(self.out / path.name)
        files.sync(self.out)
        manifests.save(manifest, self.out)

    def is_published(self) -> bool:
        """Returns whether an interrupted run has completed the dataset, but for removing its work files."""
        try:
            if self.storage.is_remote:
                return bool(_names(self.shared)) and bool(self.dataset())
            return self.publishing.read_text() == self.dataset().fingerprint
        except (FileNotFoundError, NotADirectoryError, DatasetError):
            return False

    def remove(self) -> None:
        """Removes all but `publishing`, which says that the rest belongs to a complete dataset."""
        if self.storage.is_remote:
            folders = (_ROWS, _DONE, "")
            self.shared.remove(each + name for each in folders for name in _names(self.shared, each))
        for path in {*self.path.glob("*")} - {self.publishing}:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _names(storage: Storage, folder: str = "") -> set[str]:
    return {each.name for each in storage.entries(folder)}


def check_output(out: Path, *, overwrite: bool) -> None:
    """Refuses a directory that cannot become the dataset, before any work is done."""
    if files.bucket_uri(out):
        _refuse_content(out, overwrite=overwrite)
        return
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
def hold(out: Path, *, shared: bool = False) -> Iterator[WorkDirectory]:
    """Makes the work directory of `out` and locks it on a disk; removes it, and `out`, if empty at the end.

    `shared`: whether others that write shards of the same plan may hold it too. Any other is a RunError.
    """
    with contextlib.ExitStack() as stack:
        with crash.output_errors(f"write the dataset {out}"):
            if files.bucket_uri(out):
                work = WorkDirectory(out, stack.enter_context(_scratch()))
                work.shared.check()  # a missing permission shows now, and not after the survey
            else:
                work = WorkDirectory(out)
                stack.callback(_remove_empty, work)
                stack.enter_context(_lock(work, shared=shared))
        yield work


def _remove_empty(work: WorkDirectory) -> None:
    with contextlib.suppress(OSError):
        if os.listdir(work.path) == [work.publishing.name]:
            work.publishing.unlink()
        work.path.rmdir()
        if not (work.out / MANIFEST_FILE).exists():
            work.out.rmdir()


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """Makes a directory on this disk for a run, and removes those of killed runs."""
    prefix = f"shardline-{socket.gethostname()}@"  # containers with other processes may share the disk
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        if not Path("/proc", path.name.removeprefix(prefix).partition("-")[0]).exists():
            shutil.rmtree(path, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{prefix}{os.getpid()}-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextlib.contextmanager
def _lock(work: WorkDirectory, *, shared: bool) -> Iterator[None]:
    path, owner = work.path / "lock", "?"
    for _ in range(10):
        work.path.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # an earlier run has just removed the directory
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            if files.lock(lock, shared=shared) and os.path.samestat(os.fstat(lock), path.stat()):
                break
            owner = os.pread(lock, 400, 0).decode().strip()
            os.close(lock)
    else:
        raise RunError(
            f"another run is writing {work.out} ({owner}); wait until it has ended, or give another directory"
        )
    try:
        os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".ljust(400).encode(), 0)
        yield
    finally:
        os.close(lock)


def _refuse_content(out: Path, *, overwrite: bool) -> None:
    work = WorkDirectory(out)
    if work.storage.is_remote:
        found, begun = _names(work.storage), bool(_names(work.shared))
    else:
        found = {path.name for path in {*out.iterdir()} - {*work.unfinished_files()}}
        begun = work.publishing.exists()
    present = sorted(found - {NAME, f"{NAME}/"})
    if not present or work.is_published():
        return
    try:
        dataset = work.dataset()
    except DatasetError:
        others = [name for name in present if not _SHARD.fullmatch(name) and name not in _DATASET_FILES]
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
    if others := sorted(set(present) - {shard.file for shard in dataset.shards} - {*_DATASET_FILES}):
        raise SettingsError(
            f"{out} holds {others[0]!r} next to a Shardline dataset; give an empty or new directory"
        )
