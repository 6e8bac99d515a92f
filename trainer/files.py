"""Files that are never half-written, and the two spellings of a Cloud Storage path."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Names, in the environment, the directory that stands in for /gcs/ on a machine where it is not mounted.
GCS_ROOT_VARIABLE = "SHARDLINE_GCS_ROOT"


def local_path(uri: str | os.PathLike[str]) -> Path:
    """Returns the path under which this machine sees a URI: gs://bucket/x is /gcs/bucket/x on Vertex."""
    text = os.fspath(uri)
    for prefix in ("gs://", "/gcs/"):
        if text.startswith(prefix):
            return Path(os.environ.get(GCS_ROOT_VARIABLE) or "/gcs", text.removeprefix(prefix).lstrip("/"))
    return Path(text)


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a whole file or nothing: temporary name, fsync, rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a whole UTF-8 text file or nothing."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Mapping[str, Any] | list[Any]) -> None:
    """Writes a whole JSON file (indented, keys in the given order, no NaN) or nothing."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n")
