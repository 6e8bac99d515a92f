"""TensorFlow without its notices."""

from __future__ import annotations

import logging
import os
import sys
import tempfile


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
