"""Image files that are far: each read in one request, many at a time where their content is needed early."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from shardline.components.preprocess import storage
from shardline.components.preprocess.ahead import TruncatedError, in_order, is_transient, persistently
from shardline.components.preprocess.sources import WHOLE_FILE, BadExample, Example, Span
from shardline.trainer.errors import BadRecordError, SourceError


def read_far(path: str, key: str, surveyed: int, size: int = 0, generation: int = 0) -> bytes:
    """Returns the content of an image file that is far, in as few requests as there can be.

    Args:
        path: The file.
        key: What messages call it.
        surveyed: A file of a mount that has changed since then is refused, in nanoseconds since the epoch.
        size: What a listing said, in bytes; 0 where it said nothing.
        generation: The same of an object's generation.

    Raises:
        BadRecordError: It cannot be read.
        SourceError: It has changed since it was surveyed, or the bucket does not answer.
    """

    def read(path: str) -> tuple[bytes, int]:
        if not storage.is_remote(path):
            return _read_mounted(path)
        data = storage.read_whole(path, generation)
        if len(data) < size:
            raise TruncatedError(path, len(data), size)
        return data, 0

    try:
        data, changed_at = persistently(read, path)
    except FileNotFoundError:
        if generation:
            raise changed(key, "was replaced or removed") from None
        raise BadRecordError(key, "there is no such file (any more)") from None
    except Exception as error:
        if is_transient(error):
            raise SourceError(
                f"cannot read {path!r}, however often it is tried: {storage.reason(error)}; run again, it "
                "will go on from there"
            ) from None
        raise BadRecordError(key, f"cannot be read ({storage.reason(error)})") from None
    if changed_at > surveyed or (size and len(data) != size):
        raise changed(key, "changed")
    return data


def _read_mounted(path: str) -> tuple[bytes, int]:
    """Returns the content of a file, and when it changed, in nanoseconds since the epoch."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(file)
        data = os.read(file, status.st_size)
        while len(data) < status.st_size and (more := os.read(file, status.st_size - len(data))):
            data += more
    finally:
        os.close(file)
    if len(data) < status.st_size:
        raise TruncatedError(path, len(data), status.st_size)
    return data, status.st_ctime_ns


def brought(examples: Iterable[Example | BadExample]) -> Iterator[Example | BadExample]:
    """Yields examples, with the content of their images in the place of files that are far.

    So that what must be looked at twice is read once. The first image tells for all of them.
    """
    examples = iter(examples)
    before = []
    for example in examples:
        before.append(example)
        if isinstance(example, Example):
            break
    if not before or not _far_path(before[-1]):
        yield from chain(before, examples)
        return
    for found in in_order(_bring, chain(before, examples), size=_size):
        if isinstance(found, Exception):
            raise found
        yield found


def _bring(example: Example | BadExample) -> Example | BadExample:
    path = _far_path(example)
    if not path or not isinstance(example, Example):
        return example
    try:
        size, generation = _listed(example.image)
        return example._replace(image=read_far(path, example.key, sys.maxsize, size, generation))
    except BadRecordError as error:
        return BadExample(error.name, error.reason)


def _size(example: Example | BadExample) -> int:
    image = example.image if isinstance(example, Example) else None
    return len(image) if isinstance(image, bytes) else 0


def _listed(image: object) -> tuple[int, int]:
    """Returns size and generation of a whole file, 0 where they are not known."""
    return (~image.length, image.offset) if isinstance(image, Span) else (0, 0)


def _far_path(example: Example | BadExample) -> str:
    """Returns the path of an example's image if it is a file that is far."""
    image = example.image if isinstance(example, Example) else None
    path = image.file if isinstance(image, Span) and image.length <= WHOLE_FILE else image
    text = str(path) if isinstance(path, str | Path) else ""
    return text if text and storage.is_far(os.path.dirname(text)) else ""


def changed(name: str, how: str) -> SourceError:
    """Returns the error of a source that changed between the survey and the writing."""
    return SourceError(f"{name!r} {how} while it was read; run again when nothing writes to the source")
