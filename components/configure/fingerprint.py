"""Fingerprints of what a result depends on: the source's content, and the code.

A content is known by its files' names, sizes and versions, without reading it; code by the text of
Shardline's own, of the user's plug-ins, and by the versions of the libraries that train. None is imported.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, cast

from shardline.components.champions import champion_directory, current
from shardline.components.model_store import MODEL_FILE
from shardline.components.preprocess import storage
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources import open_source
from shardline.components.preprocess.sources.table import Columns
from shardline.components.text import size as size_text
from shardline.trainer import plugins
from shardline.trainer.errors import ShardlineError, SourceError
from shardline.trainer.models import BUILT_IN, KERAS_PREFIX

#: What file systems call the version of a file, the surest first.
_VERSIONS = (
    "generation", "etag", "ETag", "md5Hash", "crc32c", "checksum",
    "mtime", "LastModified", "last_modified", "updated", "created",
)  # fmt: skip
#: Ways to know a content.
LISTING, CONTENT, VERSION, OWN = "names, sizes and times", "content", "version", "its own fingerprint"
#: Before a version that is a digest of source files.
DIGEST = "sha256:"

_OWN = ("shardline.trainer", "shardline.components")
_LIBRARIES = ("tensorflow", "keras")
_SOURCE_FORMS = ("digits", "tfds", "images", "tfrecord", "table")


class File(NamedTuple):
    """One file of a source, here or behind a URL.

    `name` is relative to the directory that was listed, else the whole path; `size` is in bytes, -1 where the
    file system does not say. `version` is the time of change in nanoseconds, or what a remote file system has
    in its place; "" for none.
    """

    name: str
    path: str
    size: int
    version: str


def files_below(directory: str) -> Iterator[File]:
    """Yields all files below a directory that are not hidden, sorted folder by folder."""
    root = storage.resolve(directory)
    if storage.is_remote(root):
        for name, details in storage.describe_below(root).items():
            yield _remote_file(name, f"{root.rstrip('/')}/{name}", details)
        return
    yield from _below(root, "")


def files_matching(pattern: str) -> Iterator[File]:
    """Yields the files that match a pattern with *, ?, [] and **, sorted; SourceError where none does."""
    pattern = storage.resolve(pattern)
    if storage.is_remote(pattern):
        for url, details in storage.describe_files(pattern).items():
            yield _remote_file(url, url, details)
        return
    for path in storage.find_files(pattern):
        with storage.one_line(path):
            status = os.stat(path)
        yield File(path, path, status.st_size, str(status.st_mtime_ns))


def _below(directory: str, prefix: str) -> Iterator[File]:
    with storage.one_line(directory, "the directory "), os.scandir(directory) as entries:
        visible = sorted((entry for entry in entries if entry.name[0] != "."), key=lambda entry: entry.name)
    for entry in visible:
        if entry.is_dir(follow_symlinks=False):
            yield from _below(entry.path, f"{prefix}{entry.name}/")
            continue
        with storage.one_line(entry.path):
            status = entry.stat()
        yield File(prefix + entry.name, entry.path, status.st_size, str(status.st_mtime_ns))


def _remote_file(name: str, url: str, details: Mapping[str, Any]) -> File:
    version = next((str(details[key]) for key in _VERSIONS if details.get(key)), "")
    size = details.get("size")
    return File(name, url, -1 if size is None else int(size), version)


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """A source's content at some time.

    Attributes:
        known_by: In what way it is known; "" where it is not, and any two contents may differ.
        digest: The same for the same content, among those known in the same way.
        text: For a person: "1,234 files, 5.6 MB", or why the content is not known.
    """

    known_by: str
    digest: str
    text: str


def fingerprint(settings: PreprocessSettings, *, deep: bool) -> Fingerprint:
    """Returns the fingerprint of the source that the settings name; `deep` reads its files.

    Files are known by name, size and time of change, or in a bucket by the object's generation: neither by
    where their directory is. A plug-in is known by the text that its method `fingerprint()` returns, and not
    at all without one. The digits, and datasets of TFDS without data_dir, change with their package only.
    Raises SourceError when the source cannot be read.
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
    path = storage.resolve(table)
    if path.lower().endswith(".parquet"):
        return "image" in Columns(path).types
    with storage.one_line(path), storage.open_text(path) as lines:
        return "image" in lines.readline()


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
    text = f"{count:,} file{'' if count == 1 else 's'}, {size_text(size)}"
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
    with plugins.calling(f"fingerprint() of {settings.source!r} failed", SourceError):
        text = own()
    if not isinstance(text, str) or not text:
        raise SourceError(f"fingerprint() of {settings.source!r} must return a text, got {text!r}")
    return Fingerprint(known_by=OWN, digest=hashlib.sha256(text.encode()).hexdigest(), text=text[:80])


def _unknown(why: str) -> Fingerprint:
    return Fingerprint(known_by="", digest="", text=why)


def initial_model(uri: str) -> str:
    """Returns the digest of the model file that training starts from; "" where it cannot be read here.

    `uri` is what the trainer's option takes: a file, a directory that holds one, or a champion's directory.
    """
    try:
        path = champion_directory(uri)
        if path.is_dir():
            champion = current(path)
            path = path / (champion.path if champion else "") / MODEL_FILE
        with path.open("rb") as file:
            return DIGEST + hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except (OSError, ShardlineError):
        return ""  # on a disk that only the replicas mount, or missing, as training says


def code_versions(model: str, source: str) -> dict[str, str]:
    """Returns a version of everything whose change may change a result, by name; imports none of it.

    The model function and the source may be plug-ins. A plug-in is known by all Python files of its top-level
    package, or beside its module where that is in no package: it may import any of them.
    """
    versions = {"shardline": _digest(path for name in _OWN for path in plugins.python_files(name))}
    for name in _plugin_packages(model, source):
        versions[name] = _digest(plugins.python_files(name))
    for name in _LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _plugin_packages(model: str, source: str) -> Iterator[str]:
    own_model = model not in BUILT_IN and not model.startswith(KERAS_PREFIX)
    own_source = source.partition(":")[0] not in _SOURCE_FORMS
    for reference in ([model] if own_model else []) + ([source] if own_source else []):
        package = reference.partition(":")[0].partition(".")[0]
        if package and package != "shardline":
            yield package


def _digest(files: Iterator[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.parent.name}/{path.name}\0".encode(errors="surrogateescape"))
        digest.update(path.read_bytes())
    return DIGEST + digest.hexdigest()[:16]
