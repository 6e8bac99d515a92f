"""Validated models that are ready to be published."""

from __future__ import annotations

import json
from pathlib import Path

from shardline.components import model_store


def write_export(directory: Path, *, blessed: bool = True, weights: bytes = b"weights") -> Path:
    """Writes a validated model as validation leaves it, without a real one in it."""
    saved_model = directory / model_store.SAVED_MODEL
    (saved_model / "variables").mkdir(parents=True)
    (saved_model / "saved_model.pb").write_bytes(b"graph")
    (saved_model / "variables" / "variables.index").write_bytes(weights)
    (directory / model_store.EXPORT_FILE).write_text(json.dumps({"fingerprint": "sha256:abc"}))
    verdict = {"blessed": blessed, "reason": "accuracy 0.9 is not >= 0.95"}
    (directory / model_store.BLESSING_FILE).write_text(json.dumps(verdict))
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    """Returns the files of a published version, but for what tells when it was published."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name != "version.json"
    }
