"""One published version of a model, as version.json and champion.json record it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from shardline.trainer.errors import ModelError

VERSIONS = "versions"
VERSION_FILE = "version.json"

_NAME = re.compile(r"\w[\w-]*")


@dataclass(frozen=True)
class Version:
    """One published version.

    Attributes:
        version: Time of publication and a short digest, unique; versions sort by time.
        path: Of the version's directory, relative to the champion's.
        accuracy: On the test split, 0..1.
        fingerprint: Of the dataset that it was judged on.
        created: Time of publication, ISO 8601, UTC.
        previous: The version that it replaced as champion; "" where there was none.
    """

    version: str
    path: str
    accuracy: float
    fingerprint: str
    created: str
    previous: str = ""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.version) or self.path != f"{VERSIONS}/{self.version}":
            raise ValueError(f"{self.path!r} is not the path of a version {self.version!r}")


def read_record(path: Path, remedy: str) -> Version:
    """Reads a version's record.

    Args:
        path: Of version.json or champion.json.
        remedy: What to do when it cannot be read, for the message.

    Raises:
        ModelError: When it is missing or damaged.
    """
    try:
        return Version(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{path} is damaged: {error}; {remedy}") from None


def complete_versions(champion: Path) -> list[Version]:
    """Returns the complete versions in a champion's directory, oldest first.

    Raises:
        ModelError: When the record of one is damaged.
    """
    records = sorted((champion / VERSIONS).glob(f"*/{VERSION_FILE}"))
    return [read_record(path, f"repair it, or remove {path.parent}") for path in records]
