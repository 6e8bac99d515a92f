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
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from shardline.components.model_store import MODEL_FILE
from shardline.components.model_store.catalog import champion_directory
from shardline.components.model_store.champions import current
from shardline.components.preprocess import storage
from shardline.components.preprocess.ahead import Room, TruncatedError, in_order, persistently
from shardline.components.preprocess.listing import File, below, find_files, matching
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources import bigquery, open_source
from shardline.components.preprocess.sources.columns import is_pattern, open_table
from shardline.components.run_plugins import plugins_of
from shardline.components.text import size as size_text
from shardline.trainer import plugins
from shardline.trainer.errors import ShardlineError, SourceError

#: Ways to know a content.
CONTENT, VERSION, OWN = "content", "version", "its own fingerprint"
#: The same of a listing, by whether its versions are generations of a bucket's objects: one way is not
#: compared with another.
LISTINGS = {
    frozenset({False}): "names, sizes and times",
    frozenset({True}): "names, sizes and generations",
    frozenset({False, True}): "names, sizes, times and generations",
}
#: Before a version that is a digest of source files.
DIGEST = "sha256:"

#: Bytes of a file that is read in one request, and of those that are read at the same time.
_SMALL, _ROOM = 4 << 20, 64 << 20

_OWN = ("shardline.trainer", "shardline.components")
_LIBRARIES = ("tensorflow", "keras")


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
    at all without one. The digits, and datasets of TFDS without data_dir, change with their package only;
    tables of BigQuery are known by their time of change, rows and bytes, where these tell all.
    Raises SourceError when the source cannot be read.
    """
    form, _, rest = settings.source.partition(":")
    if settings.source == "digits":
        return _of_package("scikit-learn")
    if form == "tfds" and not settings.data_dir:
        return _of_package("tensorflow-datasets")
    if form in ("images", "text", "tfds", "tfrecord", "table") and rest:
        return _of_files(_files(form, rest, settings, deep), deep)
    if form == "bigquery":
        content, text = bigquery.version(settings.source, settings.features)
        if not content:
            return _unknown(text)
        return Fingerprint(known_by=VERSION, digest=hashlib.sha256(content.encode()).hexdigest(), text=text)
    return _of_plugin(settings)


def _files(form: str, rest: str, settings: PreprocessSettings, deep: bool) -> Iterator[File]:
    """Yields the files that a source may read."""
    if form in ("images", "text"):
        labels = matching(settings.labels) if settings.labels else iter(())
        return itertools.chain(labels, below(rest, to_read=deep))
    if form == "tfds":
        return below(f"{settings.data_dir.rstrip('/')}/{rest.partition(':')[0]}", to_read=deep)
    if form == "table" and _has_images(rest, settings):
        _, directory = open_table(rest)
        return itertools.chain(matching(rest), below(directory or ".", to_read=deep))
    return matching(rest)


def _has_images(table: str, settings: PreprocessSettings) -> bool:
    """Whether a table may name image files, which lie somewhere below its directory."""
    if "image" in settings.features:
        return True
    path = find_files(table)[0] if is_pattern(table) else storage.resolve(table)
    if not path.lower().endswith(".csv"):
        return "image" in open_table(path)[0].types  # of JSON lines, any may be the first that names one
    with storage.one_line(path), storage.open_text(path) as lines:
        return "image" in lines.readline()


def _of_files(files: Iterable[File], deep: bool) -> Fingerprint:
    digest, ways = hashlib.sha256(), set[bool]()
    count = size = 0
    for file in _with_contents(files) if deep else files:
        count += 1
        size += file.size
        ways.add(file.is_generation)
        digest.update(repr((file.name, file.size, file.version)).encode())
    text = f"{count:,} file{'' if count == 1 else 's'}, {size_text(size)}"
    known_by = CONTENT if deep else LISTINGS[frozenset(ways or {False})]
    return Fingerprint(known_by=known_by, digest=digest.hexdigest(), text=text)


def _with_contents(files: Iterable[File]) -> Iterator[File]:
    """Yields files with a digest of their content as version; those that are far are read many at a time."""
    files = iter(files)
    first, room = list(itertools.islice(files, 1)), Room(_ROOM)
    files = itertools.chain(first, files)
    is_far = any(storage.is_far(os.path.dirname(file.path)) for file in first)
    for found in in_order(partial(_with_far_content, room), files) if is_far else map(_with_content, files):
        if isinstance(found, Exception):
            raise found
        yield found


def _with_content(file: File) -> File:
    with storage.one_line(file.path), storage.open_read(file.path) as content:
        digest = hashlib.file_digest(cast(io.BufferedIOBase, content), "sha256")
    return file._replace(version=digest.hexdigest())


def _with_far_content(room: Room, file: File) -> File:
    if file.size > _SMALL:
        with room.taken(_ROOM - _SMALL):  # ranges of it are in flight
            return _with_content(file)
    with room.taken(file.size), storage.one_line(file.path):
        return file._replace(version=persistently(_digest_of, file))


def _digest_of(file: File) -> str:
    data = storage.read_whole(file.path)
    if len(data) != file.size:
        raise TruncatedError(file.path, len(data), file.size)
    return hashlib.sha256(data).hexdigest()


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


def code_versions(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Returns a version of everything whose change may change a result, by name; imports none of it.

    A plug-in of the run is known by all Python files of its top-level package, or beside its module where
    that is in no package: it may import any of them.
    """
    versions = {"shardline": _digest(path for name in _OWN for path in plugins.python_files(name))}
    for name in plugins.packages(plugins_of(parameters).values()):
        versions[name] = _digest(plugins.python_files(name))
    for name in _LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _digest(files: Iterator[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.parent.name}/{path.name}\0".encode(errors="surrogateescape"))
        digest.update(path.read_bytes())
    return DIGEST + digest.hexdigest()[:16]
