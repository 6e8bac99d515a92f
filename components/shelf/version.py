"""Version of a champion: its record, and that of the commit which has made it the champion."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

VERSIONS = "versions"
VERSION_FILE = "version.json"
CHAMPION_FILE = "champion.json"

_NAME = re.compile(r"\w[\w-]*")


def is_name(text: str) -> bool:
    """Whether a text has the form of a version's name."""
    return bool(_NAME.fullmatch(text))


@dataclass(frozen=True)
class Commit:
    """Change of the champion.

    Attributes:
        serial: Its number on the shelf, from 1; 0 where there has been none.
        how: "published", "promoted" or "rolled back".
        replaced: The version that was the champion before; "" where there was none.
        by: Who did it: user@host, or the service account.
        at: When, ISO 8601, UTC.
        removing: Versions that are being removed, and cannot become the champion any more.
    """

    serial: int = 0
    how: str = ""
    replaced: str = ""
    by: str = ""
    at: str = ""
    removing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Version:
    """Record of a version, the content of version.json and champion.json.

    Attributes:
        version: Time at which it was put on the shelf, a short digest, a random end: they sort by time.
        path: Directory of the version, relative to the champion's.
        quality: How good it is on the test split: "accuracy 0.9812", "rmse 53.2".
        fingerprint: Fingerprint of the dataset that it was judged on.
        created: Time at which it was put on the shelf, ISO 8601, UTC.
        previous: The version that it replaced as champion; "" where there was none, or it never was.
        run: Name of the run that has published it; "" where none has.
        by: Who has put it on the shelf: user@host, or the service account; "" where it is not known.
        source: Directory that it was copied from.
        metrics: Metrics of all test examples, by name.
        verdict: Words of the verdict.
        blessed: Whether the gate has blessed it.
        override: Reason for which it was promoted all the same; "" for a blessed one.
        commit: In champion.json the last change, in version.json the one that first made it the champion.
        accuracy: Accuracy on the test split, in records of earlier releases, which have no `quality`.
    """

    version: str
    path: str
    fingerprint: str
    created: str
    quality: str = ""
    previous: str = ""
    run: str = ""
    by: str = ""
    source: str = ""
    metrics: Mapping[str, float | None] = field(default_factory=dict, compare=False)
    verdict: str = ""
    blessed: bool = True
    override: str = ""
    commit: Commit = field(default=Commit(), compare=False)
    accuracy: float | None = None

    @property
    def been_champion(self) -> bool:
        """Whether it has been the champion; records of earlier releases do not say, and all of them have."""
        return bool(self.commit.serial) or not self.by

    def __post_init__(self) -> None:
        if not is_name(self.version) or self.path != f"{VERSIONS}/{self.version}":
            raise ValueError(f"{self.path!r} is not the path of a version {self.version!r}")
        if self.accuracy is not None and not self.quality:
            object.__setattr__(self, "quality", f"accuracy {self.accuracy:.4f}")
        for name in (self.previous, self.commit.replaced, *self.commit.removing):
            if name and not is_name(name):
                raise ValueError(f"{name!r} is not the name of a version")


@dataclass(frozen=True)
class Head:
    """The present champion, and what the next commit has to follow.

    Attributes:
        version: None where nothing has been published yet.
        token: Number of the last commit on a disk; in a bucket the generation of champion.json.
    """

    version: Version | None
    token: int

    @property
    def name(self) -> str:
        """Name of the present champion; "" where there is none."""
        return self.version.version if self.version else ""

    @property
    def removing(self) -> tuple[str, ...]:
        """Versions that are being removed."""
        return self.version.commit.removing if self.version else ()

    @property
    def kept(self) -> set[str]:
        """Versions that are in use: the champion, and those that it replaced."""
        found = self.version
        return {found.version, found.previous, found.commit.replaced} if found else set()
