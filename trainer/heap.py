"""Memory that has been freed stays with this process: the next batch takes it again.

By default the C library gives large pieces back to the kernel, which clears every page of the next batch
anew. That costs as much as all copying of an image that is stored raw.
"""

from __future__ import annotations

import contextlib
import ctypes

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

#: Bytes that may lie free at the end of a heap, and from which on a piece is a mapping of its own.
_KEPT = 256 << 20
_MAPPED = 1 << 30


def keep_freed_memory() -> None:
    """Tells the C library, where it is glibc; elsewhere nothing changes."""
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, _KEPT)
        mallopt(_M_MMAP_THRESHOLD, _MAPPED)
