"""Files of hashes, 16 bytes for each example: which of many hashes repeat another one.

They are looked through in parts that each fit into memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

from shardline.components.preprocess.planning import rows

_BYTES = rows.DIGEST_BYTES

# Hashes that are in memory together (about 16 MB).
_TOGETHER = 131_072

# More than any hash.
_END = b"\xff" * (_BYTES + 1)


def repeated(paths: Iterable[Path], records: int) -> tuple[int, set[bytes]]:
    """Returns how many hashes repeat an earlier one, and which do.

    Args:
        paths: Files of hashes.
        records: Number of hashes in all of them.
    """
    files, parts = list(paths), records // _TOGETHER + 1
    repeats, found = 0, set()
    bounds = [*(((part << 16) // parts).to_bytes(2) for part in range(parts)), _END]
    for least, end in pairwise(bounds):
        seen: set[bytes] = set()
        for path in files:
            for block in _blocks(path):
                hashes = [each for (each,) in block if least <= each < end]
                before = len(seen)
                if not seen.isdisjoint(hashes) or len(set(hashes)) < len(hashes):
                    for each in hashes:
                        if each in seen:
                            found.add(each)
                        seen.add(each)
                else:
                    seen.update(hashes)
                repeats += len(hashes) - (len(seen) - before)
    return repeats, found


def read(path: Path) -> Iterator[bytes]:
    """Yields the hashes of one file, in order."""
    for block in _blocks(path):
        for (each,) in block:
            yield each


def _blocks(path: Path) -> Iterator[Iterator[tuple[bytes]]]:
    with path.open("rb") as file:
        while block := file.read(_BYTES * 4096):
            yield struct.iter_unpack(f"{_BYTES}s", block)
