"""What a run has written about its epochs."""

from __future__ import annotations

import csv
from pathlib import Path

from shardline.trainer.base.settings import HISTORY_FILE


def read_history(directory: Path) -> list[dict[str, str]]:
    """Returns the rows of a model directory's history.csv; none where there is no such file."""
    path = directory / HISTORY_FILE
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
