"""The catalog of a model store: its versions, which of them is the champion, and the place that has them.

    CHAMPION/champion.json         `Catalog`: the records of all versions, and which is the champion
    CHAMPION/versions/<version>/   a version: a copy of the directory that a validation fills

A version never changes, and is one because champion.json lists it; any other directory is a copy that is
being made, or that a killed publisher has left. champion.json is replaced in one step and only as it was read
(`places`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from shardline.components.model_store.backends import BucketBackend, DiskBackend, TextFile
from shardline.components.runs.record import on_platform
from shardline.components.text import truncate
from shardline.trainer.base import files
from shardline.trainer.base.deserialize import restore
from shardline.trainer.base.errors import ModelError, SettingsError

CHAMPION_FILE = "champion.json"
VERSIONS = "versions"

PROMOTE = "shardline champion promote"

Place = DiskBackend | BucketBackend

#: How the URI of a place in a bucket begins.
_MOUNTED = ("gs://", "/gcs/")
#: The name of a version, as anybody may give it.
NAME = re.compile(r"\w[\w-]*")
#: What may lie beside the first champion: what was begun, the history of runs, and what a new disk has.
_BESIDE = {VERSIONS, "runs", "datasets", "latest.json", "lost+found"}


@dataclass(frozen=True)
class Commit:
    """Change by which a version became the champion.

    Attributes:
        serial: Its number in the model store, from 1; 0 where there has been none.
        how: "published", "promoted" or "rolled back".
        replaced: The version that was the champion before; "" where there was none.
        by: Who did it, user@host or the service account, `at` (ISO 8601, UTC).
    """

    serial: int = 0
    how: str = ""
    replaced: str = ""
    by: str = ""
    at: str = ""


@dataclass(frozen=True)
class Version:
    """Record of a version.

    Attributes:
        version: Time at which it was put there, a short digest, a random end: they sort by time.
        quality: How good it is on the test split: "accuracy 0.9812", "rmse 53.2".
        fingerprint: Fingerprint of the dataset that it was judged on.
        created: Time at which it was put there, ISO 8601, UTC.
        previous: The version that it replaced as champion; "" where there was none, or it never was.
        run: Name of the run that has published it; "" where none has.
        by: Who has put it there: user@host, or the service account.
        source: Directory that it was copied from.
        override: Reason for which it was promoted all the same; "" for a blessed one.
        commit: The last change that made it the champion.
    """

    version: str
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

    def __post_init__(self) -> None:
        for name in (self.version, self.previous, self.commit.replaced):
            if name and not NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not the name of a version")

    @property
    def path(self) -> str:
        """Its directory, relative to the champion's."""
        return f"{VERSIONS}/{self.version}"

    @property
    def been_champion(self) -> bool:
        """Whether it is the champion or has been."""
        return bool(self.commit.serial)


@dataclass(frozen=True)
class Catalog:
    """Content of champion.json.

    Attributes:
        version: The champion; "" where there is none yet.
        path: Its directory, for whoever reads nothing else.
        versions: All versions, oldest first.
    """

    version: str = ""
    path: str = ""
    versions: tuple[Version, ...] = field(kw_only=True)

    def __post_init__(self) -> None:
        known = {item.version: item.path for item in self.versions}
        if len(known) < len(self.versions) or "" in known:
            raise ValueError("its versions have no names of their own")
        if (self.version or self.path) and known.get(self.version) != self.path:
            raise ValueError(f"{self.version!r} in {self.path!r} is none of its versions")

    @property
    def champion(self) -> Version | None:
        """The present champion; None where nothing has been published yet."""
        return self.find(self.version)

    def find(self, name: str) -> Version | None:
        """Returns a version by its name."""
        return next((item for item in self.versions if item.version == name), None)

    def require(self, name: str, place: Place) -> Version:
        """Returns a version by its name; raises ModelError, with those that there are."""
        if found := self.find(name):
            return found
        known = ", ".join(item.version for item in self.versions) or "none"
        raise ModelError(f"no version {name} in {place.where('')}; there are {known}")

    def published(self, mark: str) -> Version | None:
        """Returns the version of a run or a source, and of this content, by the digest in its name."""
        return next((item for item in self.versions if f"-{mark}-" in item.version), None)

    def having(self, version: Version) -> Catalog:
        """Returns the catalog with a version added, or in the place of its earlier record."""
        others = [item for item in self.versions if item.version != version.version]
        return replace(self, versions=tuple(sorted([*others, version], key=lambda item: item.version)))

    def committed(self, version: Version, how: str, by: str) -> Catalog:
        """Returns the catalog in which a version is the champion."""
        serial = max((item.commit.serial for item in self.versions), default=0) + 1
        at = datetime.now(UTC).isoformat(timespec="microseconds")
        done = replace(version, commit=Commit(serial, how, self.version, by, at))
        return replace(self.having(done), version=done.version, path=done.path)


def champion_directory(uri: str) -> Path:
    """Returns the local path of a directory's URI: a local directory, or gs:// or /gcs/ through the mount.

    Raises SettingsError when the bucket is not mounted: a directory made in its place would be lost.
    """
    path = files.local_path(uri)
    if uri.startswith(_MOUNTED):
        bucket = files.local_path(f"gs://{uri.removeprefix('gs://').removeprefix('/gcs/').partition('/')[0]}")
        if not bucket.is_dir():
            raise SettingsError(
                f"cannot reach {uri}: {bucket} is not mounted here; on Vertex grant the service account "
                "access to the bucket, elsewhere give a local directory"
            )
    return path


def refuse_container(name: str, uri: str) -> None:
    """Refuses a directory of the container, on the platform: what is written there ends with the task.

    `name` is the parameter's. Raises SettingsError.
    """
    if uri and not uri.startswith(_MOUNTED) and on_platform():
        raise SettingsError(
            f"{name} is {uri!r}, a directory of this container, which is thrown away with it; give "
            f"{name}=gs://BUCKET/PATH"
        )


def open_store(champion: str | os.PathLike[str]) -> Place:
    """Returns the model store at a path or URI: a bucket goes through the storage client.

    Where SHARDLINE_GCS_ROOT stands in for the mount, a bucket is a directory there. Raises SettingsError when
    it lacks the bucket, or a URI names none.
    """
    uri = os.fspath(champion)
    if not uri.startswith(_MOUNTED):
        return DiskBackend(Path(uri))
    if os.environ.get(files.GCS_ROOT_VARIABLE):
        return DiskBackend(champion_directory(uri), mounted=True)
    return BucketBackend(uri)


def require_store(uri: str | os.PathLike[str]) -> None:
    """Refuses a local directory that is not there, and any that holds something other than champions.

    A disk that is not mounted, and the directory of one model, would look like a place without a champion. A
    prefix in a bucket is there as soon as the bucket is. Raises SettingsError.
    """
    place = open_store(uri)
    if isinstance(place, DiskBackend) and not place.mounted and not place.path.is_dir():
        raise SettingsError(
            f"there is no directory {place.path} for champions: mount the disk that it is on, or begin anew "
            f"with mkdir -p {place.path}"
        )
    refuse_others(place)


def refuse_others(place: Place) -> None:
    """Refuses a place that holds something, but no champions: the directory of one model, or of a dataset."""
    found = [name for name in place.names("") if not name.startswith(".")]
    others = [name for name in found if name not in _BESIDE]
    if not others or VERSIONS in found or place.read(CHAMPION_FILE).text is not None:
        return
    there = f"{CHAMPION_FILE}, {VERSIONS}/), but {truncate(', '.join(others), 80)}"
    raise SettingsError(
        f"{place.where('')} holds no champions ({there}; give the directory of champions, or a new one, "
        f"in which '{PROMOTE} DIR MODEL/' makes a model the champion"
    )


def read_catalog(place: Place) -> tuple[Catalog, TextFile]:
    """Returns the catalog, and champion.json as it was seen.

    Raises ModelError where champion.json is damaged or gone: that is no empty place, in which the first model
    would be blessed. Its versions are there still, and can be published anew elsewhere.
    """
    file, seen = place.where(CHAMPION_FILE), place.read(CHAMPION_FILE)
    command = f"{PROMOTE} ANOTHER {place.where(VERSIONS)}/VERSION/"
    remedy = f"restore it, or begin anew with one of its versions: {command}"
    if seen.text is None:
        if not place.names(VERSIONS):
            return Catalog(versions=()), seen
        seen = place.read(CHAMPION_FILE)  # the first one may have come meanwhile
        if seen.text is None:
            raise ModelError(f"{file} is gone, but there are versions; {remedy}")
    try:
        content = files.parse_json(seen.text, file, ModelError)
    except ModelError as error:
        raise ModelError(f"{error}; {remedy}") from None
    return restore(Catalog, content, file, ModelError, remedy), seen


def write_catalog(place: Place, catalog: Catalog, seen: TextFile) -> bool:
    """Replaces champion.json if it is as it was seen, and returns whether it was."""
    text = json.dumps(asdict(catalog), indent=2, allow_nan=False, ensure_ascii=False)
    return place.replace(CHAMPION_FILE, f"{text}\n", seen)
