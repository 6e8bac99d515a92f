"""Image files behind a URL, fetched many at a time: one by one, each costs a whole round trip."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from shardline.components.preprocess import storage
from shardline.components.preprocess.sources.source import BadExample, Example

_FETCHED_TOGETHER = 64


def fetched(root: str, examples: Iterable[Example | BadExample]) -> Iterator[Example | BadExample]:
    """Yields the examples with the content of their images in the place of paths relative to a URL."""
    examples = iter(examples)
    while batch := list(islice(examples, _FETCHED_TOGETHER)):
        paths = [
            os.fspath(example.image)
            for example in batch
            if isinstance(example, Example) and isinstance(example.image, Path)
        ]
        content = storage.fetch(root, paths)
        for example in batch:
            if isinstance(example, BadExample) or not isinstance(example.image, Path):
                yield example
                continue
            found = content[os.fspath(example.image)]
            if isinstance(found, bytes):
                yield example._replace(image=found)
            else:
                yield BadExample(example.key, f"cannot be read: {storage.reason(found)}")
