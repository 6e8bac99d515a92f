"""The catalog of a model store, champion.json: its versions, and which of them is the champion.

    CHAMPION/champion.json         `Catalog`: the records of all versions, and which is the champion
    CHAMPION/versions/<version>/   a version: a copy of the directory that a validation fills

A version never changes, and exists once champion.json lists it; any other directory is an unfinished copy.
champion.json is replaced atomically, and only if it is unchanged since it was read (`backends`).
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

PROMOTE_COMMAND = "shardline champion promote"

Store = DiskBackend | BucketBackend

#: Beginnings of the URI of a model store in a bucket.
_BUCKET_PREFIXES = ("gs://", "/gcs/")
#: Form of the name of a version.
VERSION_NAME = re.compile(r"\w[\w-]*")
#: Beginning of the names of versions that are made here.
CREATED_HERE = re.compile(r"\d{8}T\d{6,}-")


@dataclass(frozen=True)
class Commit:
    """Change by which a version became the champion.

    Attributes:
        serial: Its number in the model store, from 1; 0 where there has been none.
        how: "published", "promoted" or "rolled back".
        replaced: The version that was the champion before; "" where there was none.
        by: Author: user@host, or the service account.
        at: Time, ISO 8601, UTC.
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
        version: Name: time of creation, a short digest and a random suffix. Names sort by time.
        quality: Quality on the test split: "accuracy 0.9812", "rmse 53.2".
        fingerprint: Fingerprint of the dataset that it was judged on.
        created: Time of creation, ISO 8601, UTC.
        previous: The version that it replaced as champion; "" where there was none, or it was never champion.
        run: Name of the run that published it; "" for none.
        by: Author: user@host, or the service account.
        source: Directory that it was copied from.
        override: Reason for promoting a model that is not blessed; "" for a blessed one.
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
            if name and not VERSION_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not the name of a version")

    @property
    def path(self) -> str:
        """Its directory, relative to the champion's."""
        return f"{VERSIONS}/{self.version}"

    @property
    def was_champion(self) -> bool:
        """Whether it is the champion or has been."""
        return bool(self.commit.serial)


@dataclass(frozen=True)
class Catalog:
    """Content of champion.json.

    Attributes:
        version: The champion; "" where there is none yet.
        path: Its directory, for readers of this field only.
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

    def require(self, name: str, store: Store) -> Version:
        """Returns a version by its name, "latest" for the newest; ModelError, with all names, without one."""
        if version := self.versions[-1] if name == "latest" and self.versions else self.find(name):
            return version
        known = ", ".join(item.version for item in self.versions) or "none"
        raise ModelError(f"no version {name} in {store.location('')}; there are {known}")

    def find_by_digest(self, digest: str) -> Version | None:
        """Returns the version whose name has this digest of content and run or source."""
        return next((item for item in self.versions if f"-{digest}-" in item.version), None)

    def with_version(self, version: Version) -> Catalog:
        """Returns the catalog with a version added, or its record replaced."""
        others = [item for item in self.versions if item.version != version.version]
        return replace(self, versions=tuple(sorted([*others, version], key=lambda item: item.version)))

    def with_champion(self, version: Version, how: str, by: str) -> Catalog:
        """Returns the catalog with a version as champion."""
        serial = max((item.commit.serial for item in self.versions), default=0) + 1
        at = datetime.now(UTC).isoformat(timespec="microseconds")
        done = replace(version, commit=Commit(serial, how, self.version, by, at))
        return replace(self.with_version(done), version=done.version, path=done.path)


def champion_directory(uri: str) -> Path:
    """Returns the local path of a URI: a local directory, or gs:// or /gcs/ in the mount.

    Raises SettingsError when the bucket is not mounted: a directory made in its place would be lost.
    """
    path = files.local_path(uri)
    if uri.startswith(_BUCKET_PREFIXES):
        bucket = files.local_path(f"gs://{uri.removeprefix('gs://').removeprefix('/gcs/').partition('/')[0]}")
        if not bucket.is_dir():
            raise SettingsError(
                f"cannot reach {uri}: {bucket} is not mounted here; on Vertex grant the service account "
                "access to the bucket, elsewhere give a local directory"
            )
    return path


def refuse_container_path(name: str, uri: str) -> None:
    """Raises SettingsError, on the platform, for a directory of the container, which is lost with the task.

    `name` is the name of the parameter.
    """
    if uri and not uri.startswith(_BUCKET_PREFIXES) and on_platform():
        raise SettingsError(
            f"{name} is {uri!r}, a directory of this container, which is thrown away with it; give "
            f"{name}=gs://BUCKET/PATH"
        )


def open_store(champion: str | os.PathLike[str]) -> Store:
    """Returns the model store at a path or URI; a bucket is used through the storage client.

    Where SHARDLINE_GCS_ROOT replaces the mount, a bucket is a directory there. Raises SettingsError when that
    directory is missing, or a URI names no bucket.
    """
    uri = os.fspath(champion)
    if not uri.startswith(_BUCKET_PREFIXES):
        return DiskBackend(Path(uri))
    if os.environ.get(files.GCS_ROOT_VARIABLE):
        return DiskBackend(champion_directory(uri), mounted=True)
    return BucketBackend(uri)


def require_store(uri: str | os.PathLike[str]) -> None:
    """Raises SettingsError for a missing local directory, and as `refuse_other_content` does.

    An unmounted disk, or the directory of one model, would look like a store without a champion. A prefix in
    a bucket needs not exist.
    """
    store = open_store(uri)
    if isinstance(store, DiskBackend) and not store.mounted and not store.path.exists():
        raise SettingsError(
            f"there is no directory {store.path} for champions: mount the disk that it is on, or begin anew "
            f"with mkdir -p {store.path}"
        )
    refuse_other_content(store)


def refuse_other_content(store: Store) -> None:
    """Raises SettingsError for a file, and for a directory with anything but a model store, such as a model.

    Hidden files, and what a new disk has, are no content. A directory of versions that has lost its
    champion.json is a damaged model store, which `read_catalog` reports.
    """
    found = f"{store.location('')} is a file"
    if not store.is_file():
        names = [name for name in store.names("") if not name.startswith(".") and name != "lost+found"]
        if not names or store.read(CHAMPION_FILE).text is not None:
            return
        if VERSIONS in names and any(map(CREATED_HERE.match, store.names(VERSIONS))):
            return
        others = truncate(", ".join(names), 80)
        found = f"{store.location('')} holds no champions (no {CHAMPION_FILE}), but {others}"
    raise SettingsError(
        f"{found}; give the directory of champions, or an empty one, in which '{PROMOTE_COMMAND} DIR MODEL/' "
        "makes a model the champion"
    )


def read_catalog(store: Store) -> tuple[Catalog, TextFile]:
    """Returns the catalog, and champion.json as it was read.

    Raises ModelError where champion.json is damaged or gone: that is no empty store, in which the first model
    would be blessed. Its versions remain, and can be published to another store.
    """
    file, seen = store.location(CHAMPION_FILE), store.read(CHAMPION_FILE)
    command = f"{PROMOTE_COMMAND} ANOTHER {store.location(VERSIONS)}/VERSION/"
    remedy = f"restore it, or begin anew with one of its versions: {command}"
    if seen.text is None:
        if not store.names(VERSIONS):
            return Catalog(versions=()), seen
        seen = store.read(CHAMPION_FILE)  # the first one may have been written meanwhile
        if seen.text is None:
            raise ModelError(f"{file} is gone, but there are versions; {remedy}")
    try:
        content = files.parse_json(seen.text, file, ModelError)
    except ModelError as error:
        raise ModelError(f"{error}; {remedy}") from None
    return restore(Catalog, content, file, ModelError, remedy), seen


def write_catalog(store: Store, catalog: Catalog, seen: TextFile) -> bool:
    """Replaces champion.json if it is unchanged since it was read, and returns whether it was."""
    text = json.dumps(asdict(catalog), indent=2, allow_nan=False, ensure_ascii=False)
    return store.replace(CHAMPION_FILE, f"{text}\n", seen)
