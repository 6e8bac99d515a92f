"""Champions: versions of blessed models, one of which is the champion, and the way back.

    CHAMPION/champion.json         `Catalog`: the records of all versions, and which is the champion
    CHAMPION/versions/<version>/   a version: a copy of the directory that a validation fills

A version never changes, and is one because champion.json lists it; any other directory is a copy that is
being made, or that a killed publisher has left. champion.json is replaced in one step and only as it was read
(`places`): of two who publish at the same moment one wins, and the other goes on from what it then reads.
What is published replaces the version that its model was judged against, or nothing. A reader sees the old
champion or the new one, whatever happens to the publisher in between.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from shardline.components.model_store import (
    BLESSING_FILE,
    EVALUATION_FILE,
    EXPORT_FILE,
    MODEL_FILE,
    SAVED_MODEL,
    Export,
    Measured,
    Verdict,
    read_part,
)
from shardline.components.model_store.places import Bucket, Disk, TextFile, files_below
from shardline.components.run_record import on_platform
from shardline.components.text import quality as describe_quality
from shardline.components.text import short
from shardline.trainer import files
from shardline.trainer.errors import ModelError, SettingsError
from shardline.trainer.records import restore

CHAMPION_FILE = "champion.json"
VERSIONS = "versions"

PUBLISHED, PROMOTED, ROLLED_BACK = "published", "promoted", "rolled back"
_PROMOTE = "shardline champion promote"

Place = Disk | Bucket

#: How the URI of a place in a bucket begins.
_MOUNTED = ("gs://", "/gcs/")
#: Characters of a source in the name of a directory.
_LONGEST_NAME = 100
_NAME = re.compile(r"\w[\w-]*")
#: What the name of a version begins with, and what one looks like that was begun here.
_TIME, _OURS = "%Y%m%dT%H%M%S%f", re.compile(r"\d{8}T\d{6,}-")
#: A copy that was begun so long ago is no longer at work.
_LONGEST_COPY = timedelta(days=1)
#: What may lie beside the first champion: what was begun, the history of runs, and what a new disk has.
_BESIDE = {VERSIONS, "runs", "datasets", "latest.json", "lost+found"}


@dataclass(frozen=True)
class Commit:
    """Change by which a version became the champion.

    Attributes:
        serial: Its number in the model store, from 1; 0 where there has been none.
        how: "published", "promoted" or "rolled back".
        replaced: The version that was the champion before; "" where there was none.
        by: Who did it: user@host, or the service account.
        at: When, ISO 8601, UTC.
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
        metrics: Metrics of all test examples, by name.
        verdict: Words of the verdict.
        blessed: Whether the gate has blessed it.
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
            if name and not _NAME.fullmatch(name):
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

    Raises:
        SettingsError: When the bucket is not mounted; a directory made in its place would be lost with this
            machine.
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
        return Disk(Path(uri))
    if os.environ.get(files.GCS_ROOT_VARIABLE):
        return Disk(champion_directory(uri), mounted=True)
    return Bucket(uri)


def directory_name(source: str) -> str:
    """Returns the name of the directory for what comes of a source, which no other source has."""
    name = re.sub(r"\W+", "-", source)
    if name == source and len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}-{hashlib.sha256(source.encode()).hexdigest()[:8]}"


def current(champion: str | os.PathLike[str]) -> Version | None:
    """Returns the present champion, or None where nothing has been published yet.

    Raises ModelError when champion.json is damaged, or gone, PlatformError when a bucket cannot be read.
    """
    return _read(open_store(champion))[0].champion


def require_current(champion: str | os.PathLike[str]) -> Version:
    """Returns the present champion; raises ModelError where there is none, or as `current` does."""
    return _require_champion(open_store(champion))[2]


def require_version(champion: str | os.PathLike[str], version: str) -> Version:
    """Returns a version's record; raises ModelError where there is none, with those that there are."""
    place = open_store(champion)
    return _read(place)[0].require(version, place)


def complete_versions(champion: str | os.PathLike[str]) -> list[Version]:
    """Returns the versions, oldest first; raises ModelError and PlatformError as `current` does."""
    return list(_read(open_store(champion))[0].versions)


def published_by(champion: str | os.PathLike[str], run: str) -> Version | None:
    """Returns the version that a run has made the champion, if it has, also where it is so no longer."""
    catalog, _ = _read(open_store(champion))
    known = (item for item in reversed(catalog.versions) if run and item.run == run and item.been_champion)
    return next(known, None)


def where(champion: str | os.PathLike[str], version: str) -> str:
    """Returns the path or URI of a version's directory."""
    return open_store(champion).where(f"{VERSIONS}/{version}")


def fetched(champion: str | os.PathLike[str], version: Version) -> AbstractContextManager[Path]:
    """Yields a local path of a version's directory; of a bucket without a mount a temporary copy."""
    return open_store(champion).fetched(version.path)


def read_export(champion: str | os.PathLike[str], version: Version) -> Export:
    """Returns what export.json says of a version; raises ModelError when it is missing or damaged."""
    place, name, remedy = open_store(champion), f"{version.path}/{EXPORT_FILE}", "publish the model again"
    if (text := place.read(name).text) is None:
        raise ModelError(f"no {place.where(name)}: the version is damaged; {remedy}")
    content = files.parse_json(text, place.where(name), ModelError)
    return restore(Export, content, place.where(name), ModelError, remedy)


def require_store(uri: str | os.PathLike[str]) -> None:
    """Refuses a local directory that is not there, and any that holds something other than champions.

    A disk that is not mounted, and the directory of one model, would look like a place without a champion. A
    prefix in a bucket is there as soon as the bucket is. Raises SettingsError.
    """
    place = open_store(uri)
    if isinstance(place, Disk) and not place.mounted and not place.path.is_dir():
        raise SettingsError(
            f"there is no directory {place.path} for champions: mount the disk that it is on, or begin anew "
            f"with mkdir -p {place.path}"
        )
    _refuse_others(place)


def _refuse_others(place: Place) -> None:
    """Refuses a place that holds something, but no champions: the directory of one model, or of a dataset."""
    found = [name for name in place.names("") if not name.startswith(".")]
    others = [name for name in found if name not in _BESIDE]
    if not others or VERSIONS in found or place.read(CHAMPION_FILE).text is not None:
        return
    remedy = "give the directory of champions, or a new one"
    if {EXPORT_FILE, SAVED_MODEL, MODEL_FILE}.intersection(others):
        command = f"{_PROMOTE} DIR {place.where('')}/"
        remedy = f"that is one model: '{command}' makes it the champion in DIR, the one to give"
    there = f"{CHAMPION_FILE}, {VERSIONS}/), but {short(', '.join(others), 80)}"
    raise SettingsError(f"{place.where('')} holds no champions ({there}; {remedy}")


def check_champion(uri: str) -> None:
    """Checks that a model can be published at a URI, and makes nothing there.

    Raises SettingsError or PlatformError when the place is not there, cannot be reached or cannot be written
    to, ModelError when the present champion is damaged.
    """
    place = open_store(uri)
    place.check()
    require_store(uri)
    _read(place)


def check_judged(exported: Path, champion: str, run: str = "") -> None:
    """Refuses a model that cannot be published, before it is served: its judgement is out of date.

    Raises ModelError as `publish` does; where `champion` is "" nothing is published, and nothing refused.
    """
    if not champion:
        return
    verdict = read_part(exported, BLESSING_FILE, Verdict)
    place = open_store(champion)
    catalog, _ = _read(place)
    if catalog.version != (verdict.champion or "") and not published_by(champion, run):
        raise _outdated(verdict, catalog, place, str(exported))


def publish(exported: Path, champion: str | os.PathLike[str], *, quality: str, run: str = "") -> Version:
    """Makes an exported model the champion, if the champion is still the one that it was judged against.

    Each file is copied into a new directory and forced to disk. After a crash or an error before the commit
    the previous champion is untouched. Publishing again makes a new version, unless `run`, the name of a run,
    is given and has published this model already.

    Raises:
        ModelError: When `exported` is not a complete validation or its model is not blessed, the present
            champion is damaged, or another one has come since the judgement: the new version is listed then,
            and can be promoted.
        SettingsError: When `champion` cannot be written to.
        RunError: When writing fails on the way.
        PlatformError: When the bucket cannot be reached, or refuses.
    """
    verdict = read_part(exported, BLESSING_FILE, Verdict)
    if not verdict.blessed:
        raise ModelError(f"the model in {exported} is not blessed ({verdict.reason}); it is not published")
    place = open_store(champion)
    _refuse_others(place)
    mark, copied = _digest(exported, run), None
    while True:
        catalog, seen = _read(place)
        found = catalog.published(mark) if run else None
        if found and copied and found != copied:
            place.remove(copied.path)  # another attempt of this run was faster
        if found and found.been_champion:  # by an earlier attempt, and perhaps replaced since
            return found
        if not (found or copied):
            copied = _put(place, seen, exported, verdict, mark, quality=quality, run=run)
            continue
        version = found or copied
        assert version is not None
        if catalog.version == (verdict.champion or ""):
            after = catalog.committed(replace(version, previous=catalog.version), PUBLISHED, place.who())
            if _write(place, after, seen):
                return after.require(version.version, place)
        elif found or _write(place, catalog.having(version), seen):
            raise _outdated(verdict, catalog, place, version.version)


def _outdated(verdict: Verdict, catalog: Catalog, place: Place, model: str) -> ModelError:
    return ModelError(
        f"the model was judged against {verdict.champion or 'no champion'}, the champion is "
        f"{catalog.version or 'none'} since; validate it again, or promote it by hand: {_PROMOTE} "
        f"{place.where('')} {model}"
    )


def promote(champion: str | os.PathLike[str], wanted: str, *, override: str = "") -> Version:
    """Makes a version, or the model of a validated directory (gs:// too), the champion by hand.

    Args:
        champion: Directory or URI of the champion.
        wanted: Name of a version; what has another form, such as a path with a slash, is a directory.
        override: Reason for which a model is promoted that the gate has blocked; kept in its record.

    Raises:
        ModelError: When there is no such version or validation, it is blocked and no reason is given, it is
            the champion already, or the champion has changed meanwhile.
        SettingsError: When there is no such directory, or it cannot be written to.
        RunError, PlatformError: As `publish`.
    """
    require_store(champion)
    place = open_store(champion)
    catalog, seen = _read(place)
    if _NAME.fullmatch(wanted):
        found = catalog.require(wanted, place)
        _check_blessed(found.blessed, found.verdict, wanted, override)
    else:
        with open_store(wanted).fetched("") as exported:
            verdict = read_part(exported, BLESSING_FILE, Verdict)
            _check_blessed(verdict.blessed, verdict.reason, wanted, override)
            mark = _digest(exported, wanted)
            found = catalog.published(mark) or _put(place, seen, exported, verdict, mark, source=wanted)
    found = replace(found, override="" if found.blessed else override)
    return _commit_by_hand(place, catalog, seen, found, PROMOTED)


def _check_blessed(blessed: bool, reason: str, what: str, override: str) -> None:
    if not blessed and not override.strip():
        raise ModelError(
            f"{what} is not blessed ({reason}); give --override REASON to make it the champion all the same"
        )


def rollback(champion: str | os.PathLike[str], version: str = "") -> Version:
    """Makes an earlier version, "" for the one before, the champion again; nothing is removed or copied.

    Raises:
        ModelError: When there is no champion or no such version, it never was the champion, champion.json is
            damaged, or the champion has changed meanwhile.
        RunError, PlatformError: When writing fails; the champion is unchanged then.
    """
    place = open_store(champion)
    catalog, seen, present = _require_champion(place)
    wanted = version or present.previous
    if not wanted:
        raise ModelError(
            f"{present.version} replaced no version; name the one to go to, 'shardline champion list "
            f"{place.where('')}' lists them"
        )
    found = catalog.require(wanted, place)
    if not found.been_champion:
        raise ModelError(
            f"{wanted} never was the champion; look at it, then: {_PROMOTE} {place.where('')} {wanted}"
        )
    return _commit_by_hand(place, catalog, seen, found, ROLLED_BACK)


def _commit_by_hand(place: Place, catalog: Catalog, seen: TextFile, version: Version, how: str) -> Version:
    """Makes a version the champion as somebody says who has looked at the catalog.

    Raises ModelError when it is the champion already, its files are gone, or the champion has changed
    meanwhile.
    """
    before, is_listed = catalog.version, catalog.find(version.version)
    if version.version == before:
        raise ModelError(f"{before} is the champion already; name another version")
    while catalog.version == before:
        if is_listed:
            catalog.require(version.version, place)  # it may have been pruned
        if not place.names(version.path):
            raise ModelError(
                f"the files of {version.version} are gone from {place.where('')}; name another one"
            )
        previous = version.previous if how == ROLLED_BACK else before
        after = catalog.committed(replace(version, previous=previous), how, place.who())
        if _write(place, after, seen):
            return after.require(version.version, place)
        catalog, seen = _read(place)
    raise ModelError(
        f"the champion was {before or 'none'} and is {catalog.version} since; look at it and try again"
    )


def prune(champion: str | os.PathLike[str], keep: int) -> list[str]:
    """Removes all versions but the champion, what it replaced, and the `keep` newest others.

    So goes what a publisher has begun a day ago and not completed. First champion.json lists them no longer,
    then their files go: a version that is half removed is none. Returns the names of what it has removed.
    Raises ModelError when there is no champion or champion.json is damaged: nothing is removed then.
    """
    place = open_store(champion)
    while True:
        catalog, seen, present = _require_champion(place)
        kept = {present.version, present.previous, present.commit.replaced}
        others = [item.version for item in catalog.versions if item.version not in kept]
        going = set(others[: max(0, len(others) - keep)])
        left = tuple(item for item in catalog.versions if item.version not in going)
        if not going or _write(place, replace(catalog, versions=left), seen):
            break
    latest = f"{datetime.now(UTC) - _LONGEST_COPY:{_TIME}}"
    listed = {item.version for item in catalog.versions}
    begun = {name for name in place.names(VERSIONS) if _OURS.match(name) and name < latest} - listed
    removed = sorted(going | begun)
    for name in removed:
        place.remove(f"{VERSIONS}/{name}")
    return removed


def _read(place: Place) -> tuple[Catalog, TextFile]:
    """Returns the catalog, and champion.json as it was seen.

    Raises ModelError where champion.json is damaged or gone: that is no empty place, in which the first model
    would be blessed. Its versions are there still, and can be published anew elsewhere.
    """
    file, seen = place.where(CHAMPION_FILE), place.read(CHAMPION_FILE)
    command = f"{_PROMOTE} ANOTHER {place.where(VERSIONS)}/VERSION/"
    remedy = f"restore it, or begin anew with one of its versions: {command}"
    if seen.text is None and place.names(VERSIONS):
        seen = place.read(CHAMPION_FILE)  # the first one may have come meanwhile
        if seen.text is None:
            raise ModelError(f"{file} is gone, but there are versions; {remedy}")
    if seen.text is None:
        return Catalog(versions=()), seen
    try:
        content = files.parse_json(seen.text, file, ModelError)
    except ModelError as error:
        raise ModelError(f"{error}; {remedy}") from None
    if isinstance(content, dict) and "path" in content and "versions" not in content:
        raise ModelError(f"{file} is of an earlier release, its champion is {content['path']}; {remedy}")
    return restore(Catalog, content, file, ModelError, remedy), seen


def _require_champion(place: Place) -> tuple[Catalog, TextFile, Version]:
    """Returns the catalog with its champion; raises ModelError where there is none."""
    catalog, seen = _read(place)
    if catalog.champion is None:
        raise ModelError(f"nothing has been published in {place.where('')}; give the directory of a champion")
    return catalog, seen, catalog.champion


def _write(place: Place, catalog: Catalog, seen: TextFile) -> bool:
    text = json.dumps(asdict(catalog), indent=2, allow_nan=False, ensure_ascii=False)
    return place.replace(CHAMPION_FILE, f"{text}\n", seen)


def _put(
    place: Place,
    seen: TextFile,
    exported: Path,
    verdict: Verdict,
    mark: str,
    *,
    quality: str = "",
    run: str = "",
    source: str = "",
) -> Version:
    """Copies a validated model and returns its record, which no catalog has yet.

    Each copy has a directory of its own: an attempt that seems to be dead may be at work. The quality is that
    of the evaluation, unless given.
    """
    export, created = Export.read(exported), datetime.now(UTC)
    metrics: Mapping[str, float | None] = {}
    if not quality or (exported / EVALUATION_FILE).exists():
        metrics = read_part(exported, EVALUATION_FILE, Measured).metrics
    version = Version(
        version=f"{created:{_TIME}}-{mark}-{os.urandom(2).hex()}",
        quality=quality or describe_quality(metrics),
        fingerprint=export.fingerprint,
        created=created.isoformat(timespec="seconds"),
        run=run,
        by=place.who(),
        source=(source or str(exported)).encode(errors="backslashreplace").decode(),  # names are bytes
        metrics={key: value for key, value in metrics.items() if "[" not in key},
        verdict=verdict.words,
        blessed=verdict.blessed,
    )
    if seen.text is None:
        _write(place, Catalog(versions=()), seen)  # from now on, that it is gone is no first run
    place.put(exported, version.path)
    return version


def _digest(exported: Path, publication: str) -> str:
    """Returns a digest of the content and the publication, a run or a source: part of a version's name."""
    digest = hashlib.sha256(os.fsencode(publication))
    for path in files_below(exported):
        digest.update(os.fsencode(path.relative_to(exported)))
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:12]
