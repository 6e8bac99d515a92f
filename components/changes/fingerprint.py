"""What is known of a source's content without reading it: enough to see that it is another one."""

from __future__ import annotations

import hashlib
import io
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import cast

from shardline.components.changes.listing import File, files_below, files_matching, first_line
from shardline.components.preprocess import storage
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources import open_source
from shardline.components.preprocess.sources.columns import open_columns
from shardline.trainer import plugins
from shardline.trainer.errors import ShardlineError, SourceError

#: Ways to know a content.
LISTING, CONTENT, VERSION, OWN = "names, sizes and times", "content", "version", "its own fingerprint"


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What the content of a source was at some time.

    Attributes:
        known_by: In what way it is known; "" where it is not, and any two contents may differ.
        digest: The same for the same content, among those known in the same way.
        text: What a person may read of it: "1,234 files, 5.6 MB", or why the content is not known.
    """

    known_by: str
    digest: str
    text: str


def fingerprint(settings: PreprocessSettings, *, deep: bool) -> Fingerprint:
    """Returns the fingerprint of the source that the settings name.

    Files are known by name, size and time of change, or in a bucket by the object's generation: neither by
    where their directory is. A plug-in is known by the text that its method `fingerprint()` returns, and not
    at all without one. The digits, and datasets of TFDS without data_dir, change with their package only.

    Args:
        settings: Of them the source, data_dir, labels and features are used.
        deep: Whether files are read, and known by their content.

    Raises:
        SourceError: There is no such source, or it cannot be read.
    """
    form, _, rest = settings.source.partition(":")
    if settings.source == "digits":
        return _of_package("scikit-learn")
    if form == "tfds" and not settings.data_dir:
        return _of_package("tensorflow-datasets")
    if form in ("images", "tfds", "tfrecord", "table") and rest:
        return _of_files(_files(form, rest, settings), deep)
    return _of_plugin(settings)


def _files(form: str, rest: str, settings: PreprocessSettings) -> Iterator[File]:
    """Yields the files that a source may read."""
    if form == "images":
        labels = files_matching(settings.labels) if settings.labels else iter(())
        return itertools.chain(labels, files_below(rest))
    if form == "tfds":
        return files_below(f"{settings.data_dir.rstrip('/')}/{rest.partition(':')[0]}")
    if form == "table" and _has_images(rest, settings):
        directory = rest.rpartition("/")[0]
        return itertools.chain(files_matching(rest), files_below(directory or "."))
    return files_matching(rest)


def _has_images(table: str, settings: PreprocessSettings) -> bool:
    """Whether a table may name image files, which lie somewhere below its directory."""
    if "image" in settings.features:
        return True
    if table.lower().endswith(".parquet"):
        return "image" in open_columns(storage.resolve(table)).types
    return "image" in first_line(table)


def _of_files(files: Iterable[File], deep: bool) -> Fingerprint:
    digest = hashlib.sha256()
    count = size = 0
    for file in files:
        count += 1
        size += max(0, file.size)
        version = _content(file.path) if deep else file.version
        if not version:
            return _unknown(f"of {file.path} neither version nor time of change is known; deep=true reads it")
        digest.update(repr((file.name, file.size, version)).encode())
    text = f"{count:,} file{'' if count == 1 else 's'}, {_bytes(size)}"
    return Fingerprint(known_by=CONTENT if deep else LISTING, digest=digest.hexdigest(), text=text)


def _content(path: str) -> str:
    with storage.one_line(path), storage.open_read(path) as file:
        return hashlib.file_digest(cast(io.BufferedIOBase, file), "sha256").hexdigest()


def _of_package(package: str) -> Fingerprint:
    try:
        version = f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return _unknown(f"{package} is not installed")
    return Fingerprint(known_by=VERSION, digest=version, text=version)


def _of_plugin(settings: PreprocessSettings) -> Fingerprint:
    source = open_source(settings)
    own = getattr(source, "fingerprint", None)
    if own is None:
        return _unknown(f"{settings.source} has no method fingerprint() -> str")
    try:
        text = own()
    except ShardlineError:
        raise
    except Exception as failure:
        raise SourceError(
            f"fingerprint() of {settings.source!r} failed: {plugins.describe(failure)}"
        ) from failure
    if not isinstance(text, str) or not text:
        raise SourceError(f"fingerprint() of {settings.source!r} must return a text, got {text!r}")
    return Fingerprint(known_by=OWN, digest=hashlib.sha256(text.encode()).hexdigest(), text=text[:80])


def _unknown(why: str) -> Fingerprint:
    return Fingerprint(known_by="", digest="", text=why)


def _bytes(size: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}" if unit != "bytes" else f"{size:.0f} bytes"
        size /= 1000
    return f"{size:.3g} TB"
