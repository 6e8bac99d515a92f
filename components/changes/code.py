"""The code that a result depends on: Shardline's own, the user's plug-ins, and what trains."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from shardline.trainer.models import BUILT_IN, KERAS_PREFIX

#: Before a version that is a digest of source files.
DIGEST = "sha256:"

_OWN = ("shardline.trainer", "shardline.components")
_LIBRARIES = ("tensorflow", "keras")
_SOURCE_FORMS = ("digits", "tfds", "images", "tfrecord", "table")


def code_versions(model: str, source: str) -> dict[str, str]:
    """Returns a version of everything whose change may change a result, by name; imports none of it.

    A plug-in is known by all Python files of its top-level package, or beside its module where that is in no
    package: it may import any of them.

    Args:
        model: The model function, as the pipeline's parameter has it.
        source: The source string.
    """
    versions = {"shardline": _digest(path for name in _OWN for path in _python_files(name))}
    for name in _plugin_packages(model, source):
        versions[name] = _digest(_python_files(name))
    for name in _LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _plugin_packages(model: str, source: str) -> Iterator[str]:
    references = []
    if model not in BUILT_IN and not model.startswith(KERAS_PREFIX):
        references.append(model)
    if source.partition(":")[0] not in _SOURCE_FORMS:
        references.append(source)
    for reference in references:
        package = reference.partition(":")[0].partition(".")[0]
        if package and package != "shardline":
            yield package


def _python_files(package: str) -> Iterator[Path]:
    """Yields the files of a top-level package or module; none where it is missing, as the next step says."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return
    if spec is None:
        return
    if spec.submodule_search_locations is not None:
        for location in spec.submodule_search_locations:
            yield from sorted(Path(location).rglob("*.py"))
    elif spec.origin:
        yield from sorted(Path(spec.origin).parent.glob("*.py"))


def _digest(files: Iterator[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.parent.name}/{path.name}\0".encode(errors="surrogateescape"))
        digest.update(path.read_bytes())
    return DIGEST + digest.hexdigest()[:16]
