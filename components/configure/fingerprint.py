"""Fingerprints of everything that a result depends on: the source's content, and the code.

Content is identified by the names, sizes and versions of its files; code by the text of Shardline's own and
the user's plug-in modules, and by the versions of the training libraries. No module is imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardline.components.model_store import MODEL_FILE
from shardline.components.model_store.champions import champion_directory, current
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources import bigquery, is_plugin, open_source
from shardline.components.preprocess.sources.columns import is_pattern, open_table
from shardline.components.storage import remote_files
from shardline.components.storage.remote_files import File, files_below, find_files, match_files
from shardline.components.text import size as size_text
from shardline.trainer.base import crash, plugins
from shardline.trainer.base.errors import ShardlineError, SourceError
from shardline.trainer.base.settings import plugin_references

#: How a listing is identified, by whether its versions are generations of a bucket's objects.
_LISTINGS = {
    frozenset({False}): "names, sizes and times",
    frozenset({True}): "names, sizes and generations",
    frozenset({False, True}): "names, sizes, times and generations",
}
#: Prefix of a version that is a digest of source files.
DIGEST = "sha256:"

_OWN = ("shardline.trainer", "shardline.components")
_LIBRARIES = ("tensorflow", "keras")


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """A source's content at some time.

    Attributes:
        known_by: How the content is identified; "" where it is not, and any two contents may differ.
        digest: Equal for equal content with the same `known_by`.
        text: Description for people: "1,234 files, 5.6 MB", or why the content is not known.
    """

    known_by: str
    digest: str
    text: str


def fingerprint(settings: PreprocessSettings) -> Fingerprint:
    """Returns the fingerprint of the source that the settings name.

    Files are identified by name, size and modification time, or in a bucket by the object's generation, not
    by the path of their directory. A plug-in is identified by the text that its method `fingerprint()`
    returns, and not at all without one. The digits, and datasets of TFDS without data_dir, change with their
    package only; tables of BigQuery are identified by modification time, rows and bytes where possible.
    Raises SourceError when the source cannot be read.
    """
    form, _, rest = settings.source.partition(":")
    if settings.source == "digits" or (form == "tfds" and not settings.data_dir):
        package = "tensorflow-datasets" if form == "tfds" else "scikit-learn"
        if version := plugins.installed_version(package):
            return Fingerprint(known_by="version", digest=version, text=f"{package} {version}")
        return Fingerprint(known_by="", digest="", text=f"{package} is not installed")
    if form == "bigquery":
        content, text = bigquery.version(settings.source, settings.features)
        digest = hashlib.sha256(content.encode()).hexdigest() if content else ""
        return Fingerprint(known_by="version" if content else "", digest=digest, text=text)
    if not rest or form not in ("images", "text", "tfds", "tfrecord", "table"):
        return _fingerprint_of_plugin(settings)
    if form in ("images", "text"):
        labels = match_files(settings.labels) if settings.labels else iter(())
        return _fingerprint_of_files(itertools.chain(labels, files_below(rest)))
    if form == "tfds":
        return _fingerprint_of_files(files_below(f"{settings.data_dir.rstrip('/')}/{rest.partition(':')[0]}"))
    if form == "table" and _has_images(rest, settings):
        _, directory = open_table(rest)
        return _fingerprint_of_files(itertools.chain(match_files(rest), files_below(directory or ".")))
    return _fingerprint_of_files(match_files(rest))


def _has_images(table: str, settings: PreprocessSettings) -> bool:
    """Whether a table may name image files, which are below its directory."""
    if "image" in settings.features:
        return True
    path = find_files(table)[0] if is_pattern(table) else remote_files.resolve(table)
    if not path.lower().endswith(".csv"):
        return "image" in open_table(path)[0].types  # any of the JSON lines may name one
    with remote_files.as_source_error(path), remote_files.as_text(remote_files.open_read(path)) as lines:
        return "image" in lines.readline()


def _fingerprint_of_files(files: Iterable[File]) -> Fingerprint:
    digest, kinds = hashlib.sha256(), set[bool]()
    count = size = 0
    for file in files:
        count += 1
        size += file.size
        kinds.add(file.is_generation)
        digest.update(repr((file.name, file.size, file.version)).encode())
    text = f"{count:,} file{'' if count == 1 else 's'}, {size_text(size)}"
    return Fingerprint(known_by=_LISTINGS[frozenset(kinds or {False})], digest=digest.hexdigest(), text=text)


def _fingerprint_of_plugin(settings: PreprocessSettings) -> Fingerprint:
    source = open_source(settings)
    own = getattr(source, "fingerprint", None)
    if own is None:
        why = f"{settings.source} has no method fingerprint() -> str"
        return Fingerprint(known_by="", digest="", text=why)
    with plugins.calling(f"fingerprint() of {settings.source!r} failed", SourceError):
        text = own()
    if not isinstance(text, str) or not text:
        raise SourceError(f"fingerprint() of {settings.source!r} must return a text, got {text!r}")
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Fingerprint(known_by="its own fingerprint", digest=digest, text=text[:80])


def initial_model_digest(uri: str) -> str:
    """Returns the digest of the model file that training starts from; "" where it cannot be read here.

    `uri` is a file, a directory that holds one, or a model store, as in the trainer's option.
    """
    try:
        path = champion_directory(uri)
        if path.is_dir():
            champion = current(path)
            path = path / (champion.path if champion else "") / MODEL_FILE
        with path.open("rb") as file:
            return DIGEST + hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except (OSError, ShardlineError) as error:
        if crash.is_machine_failure(error):
            raise
        return ""  # only the replicas mount it, or it is missing, which training reports


def code_versions(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Returns the versions of all code that may change a result, by name; imports none of it.

    A plug-in's version is a digest of all Python files of its top-level package, or of its module's directory
    where it has no package: it may import any of them.
    """
    versions = {"shardline": _digest(path for name in _OWN for path in plugins.python_files(name))}
    for name in plugins.packages(plugins_of(parameters).values()):
        versions[name] = _digest(plugins.python_files(name))
    return versions | {name: version for name in _LIBRARIES if (version := plugins.installed_version(name))}


def plugins_of(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Returns the import strings among the parameters of a run, by the parameter that names each."""
    options = parameters.get("train_options")
    if isinstance(options, str):  # from a command line
        with contextlib.suppress(ValueError):
            options = json.loads(options)
    options = options if isinstance(options, Mapping) else {}
    training = plugin_references({**options, "model": parameters.get("model")})
    plugin_names = {
        name if name == "model" else f"train_options.{name}": value for name, value in training.items()
    }
    source = parameters.get("source")
    if isinstance(source, str) and is_plugin(source):
        plugin_names["source"] = source
    return plugin_names


def _digest(files: Iterator[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.parent.name}/{path.name}\0".encode(errors="surrogateescape"))
        digest.update(path.read_bytes())
    return DIGEST + digest.hexdigest()[:16]
