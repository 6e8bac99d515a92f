"""Champions: versions of blessed models, one of which is the champion, and the way back.

champion.json is replaced only as it was read (`catalog`): of two who publish at the same moment one wins, and
the other goes on from what it then reads. What is published replaces the version that its model was judged
against, or nothing. A reader sees the old champion or the new one, whatever happens to the publisher in
between.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from shardline.components.model_store import (
    BLESSING_FILE,
    EVALUATION_FILE,
    EXPORT_FILE,
    Export,
    Measured,
    Verdict,
    read_part,
)
from shardline.components.model_store.backends import TextFile, files_below
from shardline.components.model_store.catalog import (
    NAME,
    PROMOTE,
    VERSIONS,
    Catalog,
    Place,
    Version,
    open_store,
    read_catalog,
    refuse_others,
    require_store,
    write_catalog,
)
from shardline.components.text import quality as describe_quality
from shardline.trainer.base import files
from shardline.trainer.base.deserialize import restore
from shardline.trainer.base.errors import ModelError

#: Characters of a source in the name of a directory.
_LONGEST_NAME = 100
#: What the name of a version begins with, and what one looks like that was begun here.
_TIME, _OURS = "%Y%m%dT%H%M%S%f", re.compile(r"\d{8}T\d{6,}-")
#: A copy that was begun so long ago is no longer at work.
_LONGEST_COPY = timedelta(days=1)


def directory_name(source: str) -> str:
    """Returns the name of the directory for what comes of a source, which no other source has."""
    name = re.sub(r"\W+", "-", source)
    if name == source and len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}-{hashlib.sha256(source.encode()).hexdigest()[:8]}"


def current(champion: str | os.PathLike[str]) -> Version | None:
    """Returns the present champion, or None where nothing has been published yet.

    Raises ModelError when champion.json is damaged or gone, PlatformError when a bucket cannot be read.
    """
    return read_catalog(open_store(champion))[0].champion


def require_current(champion: str | os.PathLike[str]) -> Version:
    """Returns the present champion; raises ModelError where there is none, or as `current` does."""
    return _require_champion(open_store(champion))[2]


def complete_versions(champion: str | os.PathLike[str]) -> list[Version]:
    """Returns the versions, oldest first; raises ModelError and PlatformError as `current` does."""
    return list(read_catalog(open_store(champion))[0].versions)


def published_by(champion: str | os.PathLike[str], run: str) -> Version | None:
    """Returns the version that a run has made the champion, if it has, also where it is so no longer."""
    catalog, _ = read_catalog(open_store(champion))
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


def check_champion(uri: str) -> None:
    """Checks that a model can be published at a URI, and makes nothing there.

    Raises SettingsError or PlatformError when the place is not there, cannot be reached or cannot be written
    to, ModelError when the present champion is damaged.
    """
    place = open_store(uri)
    place.check()
    require_store(uri)
    read_catalog(place)


def check_judged(exported: Path, champion: str, run: str = "") -> None:
    """Refuses a model that cannot be published, before it is served: its judgement is out of date.

    Raises ModelError as `publish` does; where `champion` is "" nothing is published, and nothing refused.
    """
    if not champion:
        return
    verdict = read_part(exported, BLESSING_FILE, Verdict)
    place = open_store(champion)
    catalog, _ = read_catalog(place)
    if catalog.version != (verdict.champion or "") and not published_by(champion, run):
        raise _outdated(verdict, catalog, place, str(exported))


def publish(exported: Path, champion: str | os.PathLike[str], *, quality: str, run: str = "") -> Version:
    """Makes an exported model the champion, if the champion is still the one that it was judged against.

    Until the commit the previous champion is untouched. Publishing again makes a new version, unless `run`,
    the name of a run, is given and has published this model already.

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
    refuse_others(place)
    mark, copied = _digest(exported, run), None
    while True:
        catalog, seen = read_catalog(place)
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
            after = catalog.committed(replace(version, previous=catalog.version), "published", place.who())
            if write_catalog(place, after, seen):
                return after.require(version.version, place)
        elif found or write_catalog(place, catalog.having(version), seen):
            raise _outdated(verdict, catalog, place, version.version)


def _outdated(verdict: Verdict, catalog: Catalog, place: Place, model: str) -> ModelError:
    return ModelError(
        f"the model was judged against {verdict.champion or 'no champion'}, the champion is "
        f"{catalog.version or 'none'} since; validate it again, or promote it by hand: {PROMOTE} "
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
    catalog, seen = read_catalog(place)
    if NAME.fullmatch(wanted):
        found = catalog.require(wanted, place)
        blessed, reason = found.blessed, found.verdict
    else:
        with open_store(wanted).fetched("") as exported:
            verdict = read_part(exported, BLESSING_FILE, Verdict)
            blessed, reason = verdict.blessed, verdict.reason
            if blessed or override.strip():
                mark = _digest(exported, wanted)
                found = catalog.published(mark) or _put(place, seen, exported, verdict, mark, source=wanted)
    if not blessed and not override.strip():
        raise ModelError(
            f"{wanted} is not blessed ({reason}); give --override REASON to make it the champion all the same"
        )
    found, before = replace(found, override="" if found.blessed else override), catalog.version
    catalog, seen = read_catalog(place)  # the copy has taken its time
    if catalog.version != before:
        raise ModelError(f"{place.where('')} has been changed meanwhile; look at it and try again")
    return _commit_by_hand(place, catalog, seen, found, "promoted", previous=catalog.version)


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
            f"{wanted} never was the champion; look at it, then: {PROMOTE} {place.where('')} {wanted}"
        )
    return _commit_by_hand(place, catalog, seen, found, "rolled back", previous=found.previous)


def _commit_by_hand(
    place: Place, catalog: Catalog, seen: TextFile, version: Version, how: str, *, previous: str
) -> Version:
    """Makes a version the champion as somebody says who has looked at the catalog.

    Raises ModelError when it is the champion already, its files are gone, or something has changed meanwhile.
    """
    if version.version == catalog.version:
        raise ModelError(f"{version.version} is the champion already; name another version")
    if not place.names(version.path):
        raise ModelError(f"the files of {version.version} are gone from {place.where('')}; name another one")
    after = catalog.committed(replace(version, previous=previous), how, place.who())
    if not write_catalog(place, after, seen):
        raise ModelError(f"{place.where('')} has been changed meanwhile; look at it and try again")
    return after.require(version.version, place)


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
        if not going or write_catalog(place, replace(catalog, versions=left), seen):
            break
    latest = f"{datetime.now(UTC) - _LONGEST_COPY:{_TIME}}"
    listed = {item.version for item in catalog.versions}
    begun = {name for name in place.names(VERSIONS) if _OURS.match(name) and name < latest} - listed
    removed = sorted(going | begun)
    for name in removed:
        place.remove(f"{VERSIONS}/{name}")
    return removed


def _require_champion(place: Place) -> tuple[Catalog, TextFile, Version]:
    """Returns the catalog with its champion; raises ModelError where there is none."""
    catalog, seen = read_catalog(place)
    if catalog.champion is None:
        raise ModelError(f"nothing has been published in {place.where('')}; give the directory of a champion")
    return catalog, seen, catalog.champion


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
        verdict=verdict.summary,
        blessed=verdict.blessed,
    )
    if seen.text is None:
        write_catalog(place, Catalog(versions=()), seen)  # from now on, that it is gone is no first run
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
