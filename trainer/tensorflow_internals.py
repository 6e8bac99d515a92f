"""TensorFlow without its notices, and without what Keras would load beside it.

Memory that has been freed stays with this process: the next batch takes it again.

By default the C library gives large pieces back to the kernel, which clears every page of the next batch
anew. That costs as much as all copying of an image that is stored raw.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import tempfile
from collections.abc import Iterator

# What Keras loads, if it is there, for wrappers and plots that no training uses: a third of the import.
_UNUSED = ("sklearn", "matplotlib", "cv2")


def import_tensorflow() -> None:
    """Imports TensorFlow and keeps its C++ libraries' notices off standard error.

    They tell of CPU features and missing GPU drivers, some of them before their logging can be configured,
    and would bury what a person wants to read; so would its own and its friends' notices of deprecation.
    TF_CPP_MIN_LOG_LEVEL is respected where it is set. When the import fails, everything that was held back
    is printed.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # its failures arrive as exceptions
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            with _hidden(*_UNUSED):
                import tensorflow  # noqa: F401
        except BaseException:
            held.seek(0)
            os.write(stderr, held.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
    for name in ("absl", "tensorflow"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextlib.contextmanager
def _hidden(*names: str) -> Iterator[None]:
    """Lets imports of modules fail that are not loaded yet, while the context lasts."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None is the documented way
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


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
