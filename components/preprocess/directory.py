"""The dataset directory that is written: complete, or as it was before."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trainer.data import manifest as manifests
from trainer.data.manifest import MANIFEST_FILE
from trainer.errors import DatasetError, RunError, SettingsError

_STAGING_PREFIX = ".shardline-"


def check(out: Path) -> None:
    """Refuses a directory that cannot become the dataset, before any work is done.

    Raises:
        SettingsError: It is a file, holds something else than a Shardline dataset, or cannot be written.
    """
    try:
        _replaceable_files(out)
        parent = _existing(out)
    except OSError as error:
        raise SettingsError(f"cannot use {out} as dataset directory: {error.strerror}") from None
    if not parent.is_dir():
        raise SettingsError(f"cannot write the dataset {out}: {parent} is a file")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise SettingsError(f"cannot write the dataset {out}: no permission to write in {parent}")


@contextlib.contextmanager
def staging(out: Path) -> Iterator[Path]:
    """Gives a temporary directory whose files become the dataset when the context ends.

    It lies in `out`, or in the nearest directory above that exists, and so on the same disk.

    When it ends with an error, `out` stays as it was. Files are moved one by one, the manifest last:
    Cloud Storage, mounted as a directory, cannot rename directories.

    Raises:
        RunError: Writing failed (no space left, a disk that went away).
        SettingsError: `out` cannot be written, or something else appeared in it meanwhile.
    """
    try:
        temporary = Path(tempfile.mkdtemp(prefix=_STAGING_PREFIX, dir=_existing(out)))
    except OSError as error:
        raise SettingsError(f"cannot write the dataset {out}: {error.strerror}") from None
    try:
        yield temporary
        _publish(temporary, out)
    except OSError as error:
        raise RunError(f"cannot write the dataset {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _publish(temporary: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for old in _replaceable_files(out):
        old.unlink(missing_ok=True)
    for shard in sorted(temporary.glob("*.tfrecord")):
        shard.replace(out / shard.name)
    (temporary / MANIFEST_FILE).replace(out / MANIFEST_FILE)


def _replaceable_files(out: Path) -> list[Path]:
    """Returns the files of the dataset that is in `out`, the manifest first; none if there is nothing."""
    if not out.exists():
        return []
    if not out.is_dir():
        raise SettingsError(f"{out} is a file; give a directory for the dataset")
    there = {path.name for path in out.iterdir() if not path.name.startswith(_STAGING_PREFIX)}
    if not there:
        return []
    try:
        dataset = manifests.load(out)
    except DatasetError:
        raise SettingsError(
            f"{out} holds something that is not a complete Shardline dataset; give an empty or new directory"
        ) from None
    names = [MANIFEST_FILE, *(shard.file for split in dataset.splits.values() for shard in split.shards)]
    others = sorted(there - set(names))
    if others:
        raise SettingsError(
            f"{out} holds {others[0]!r} beside a Shardline dataset; give an empty or new directory"
        )
    return [out / name for name in names]


def _existing(path: Path) -> Path:
    """Returns the path itself or its nearest ancestor that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
