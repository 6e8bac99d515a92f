"""Champions: publishing, promoting, rolling back and pruning the versions of a model store.

champion.json is replaced by compare-and-swap (`catalog`): of two concurrent publishers one wins, and the
other reads it again. A model replaces only the champion that it was judged against. Readers see the old
champion or the new one, even if the publisher is killed.
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
    EvaluationSummary,
    Export,
    T,
    Verdict,
    read_part,
)
from shardline.components.model_store.backends import TextFile, files_below
from shardline.components.model_store.catalog import (
    CREATED_HERE,
    PROMOTE_COMMAND,
    VERSION_NAME,
    VERSIONS,
    Catalog,
    Store,
    Version,
    open_store,
    read_catalog,
    refuse_other_content,
    require_store,
    write_catalog,
)
from shardline.components.text import quality as describe_quality
from shardline.trainer.base import files
from shardline.trainer.base.deserialize import restore
from shardline.trainer.base.errors import ModelError

#: Longest source name in the name of a directory, in characters.
_MAX_NAME_LENGTH = 100
#: Time in the name of a version.
_TIME_FORMAT = "%Y%m%dT%H%M%S%f"


def directory_name(source: str) -> str:
    """Returns a directory name for a source, unique to it."""
    name = re.sub(r"\W+", "-", source)
    if name == source and len(name) <= _MAX_NAME_LENGTH:
        return name
    return f"{name[:_MAX_NAME_LENGTH]}-{hashlib.sha256(source.encode()).hexdigest()[:8]}"


def current(champion: str | os.PathLike[str]) -> Version | None:
    """Returns the current champion, or None where nothing has been published yet.

    Raises ModelError when champion.json is damaged or gone, PlatformError when a bucket cannot be read.
    """
    return read_catalog(open_store(champion))[0].champion


def require_current(champion: str | os.PathLike[str]) -> Version:
    """Returns the current champion; raises ModelError where there is none, or as `current` does."""
    return _require_champion(open_store(champion))[2]


def last_champions(champion: str | os.PathLike[str]) -> tuple[Version, ...]:
    """Returns the champion and those before it that led to it, newest first; () where there is none yet.

    Versions that were rolled back did not lead to it, and what came before an override was given up by hand.
    Raises ModelError and PlatformError as `current` does.
    """
    catalog, _ = read_catalog(open_store(champion))
    found, version = dict[str, Version](), catalog.champion
    while version and version.version not in found:
        found[version.version] = version
        version = None if version.override else catalog.find(version.previous)
    return tuple(found.values())


def complete_versions(champion: str | os.PathLike[str]) -> list[Version]:
    """Returns the versions, oldest first; raises ModelError and PlatformError as `current` does."""
    return list(read_catalog(open_store(champion))[0].versions)


def published_by(champion: str | os.PathLike[str], run: str) -> Version | None:
    """Returns the version that a run made the champion, current or former; None if it made none."""
    catalog, _ = read_catalog(open_store(champion))
    known = (item for item in reversed(catalog.versions) if run and item.run == run and item.was_champion)
    return next(known, None)


def version_location(champion: str | os.PathLike[str], version: str) -> str:
    """Returns the path or URI of a version's directory."""
    return open_store(champion).location(f"{VERSIONS}/{version}")


def fetched(champion: str | os.PathLike[str], version: Version) -> AbstractContextManager[Path]:
    """Yields a local path of a version's directory; a temporary copy for a bucket without a mount."""
    return open_store(champion).fetched(version.path)


def read_record(champion: str | os.PathLike[str], version: Version, file: str, kind: type[T]) -> T:
    """Returns a JSON file of a version as a dataclass; raises ModelError when it is missing or damaged."""
    store, name, remedy = open_store(champion), f"{version.path}/{file}", "publish the model again"
    if (text := store.read(name).text) is None:
        raise ModelError(f"no {store.location(name)}: the version is damaged; {remedy}")
    content = files.parse_json(text, store.location(name), ModelError)
    return restore(kind, content, store.location(name), ModelError, remedy)


def check_champion(uri: str) -> None:
    """Checks that a model can be published at a URI, without leaving anything there.

    Raises SettingsError or PlatformError when the store does not exist, cannot be reached or cannot be
    written to, ModelError when its catalog is damaged.
    """
    store = open_store(uri)
    store.check()
    require_store(uri)
    read_catalog(store)


def check_judged(exported: Path, champion: str, run: str = "") -> None:
    """Raises ModelError, as `publish` does, for a model that was judged against a former champion.

    This is checked before the model is served. Where `champion` is "" nothing is published or refused.
    """
    if not champion:
        return
    verdict = read_part(exported, BLESSING_FILE, Verdict)
    store = open_store(champion)
    catalog, _ = read_catalog(store)
    if catalog.version != (verdict.champion or "") and not published_by(champion, run):
        raise _outdated(verdict, catalog, store, str(exported))


def publish(exported: Path, champion: str | os.PathLike[str], *, quality: str, run: str = "") -> Version:
    """Makes an exported model the champion, if the champion is still the one that it was judged against.

    Publishing again makes a new version, unless `run`, the name of a run, has published this model already.

    Raises:
        ModelError: When `exported` is not a complete validation or its model is not blessed, the catalog is
            damaged, or the champion has changed since the validation: then the new version is listed, and
            can be promoted.
        SettingsError: When `champion` cannot be written to.
        RunError: When writing fails.
        PlatformError: When the bucket cannot be reached, or refuses access.
    """
    verdict = read_part(exported, BLESSING_FILE, Verdict)
    if not verdict.blessed:
        raise ModelError(f"the model in {exported} is not blessed ({verdict.reason}); it is not published")
    store = open_store(champion)
    refuse_other_content(store)
    digest, copied = _digest(exported, run), None
    while True:
        catalog, seen = read_catalog(store)
        listed = catalog.find_by_digest(digest) if run else None
        if listed and copied and listed != copied:
            store.remove(copied.path)  # another attempt of this run was faster
        if listed and listed.was_champion:  # published by an earlier attempt, and perhaps replaced since
            return listed
        version = listed or copied
        if version is None:
            copied = _copy_version(store, seen, exported, verdict, digest, quality=quality, run=run)
            continue
        if catalog.version == (verdict.champion or ""):
            version = replace(version, previous=catalog.version)
            after = catalog.with_champion(version, "published", store.author())
            if write_catalog(store, after, seen):
                return after.require(version.version, store)
        elif listed or write_catalog(store, catalog.with_version(version), seen):
            raise _outdated(verdict, catalog, store, version.version)


def _outdated(verdict: Verdict, catalog: Catalog, store: Store, model: str) -> ModelError:
    return ModelError(
        f"the model was judged against {verdict.champion or 'no champion'}, the champion is "
        f"{catalog.version or 'none'} since; validate it again, or promote it by hand: {PROMOTE_COMMAND} "
        f"{store.location('')} {model}"
    )


def promote(champion: str | os.PathLike[str], wanted: str, *, override: str = "") -> Version:
    """Makes a version, or the model of a validated directory (gs:// too), the champion by hand.

    Args:
        champion: Directory or URI of the model store.
        wanted: Name of a version, or "latest"; anything else, such as a path with a slash, is a directory.
        override: Reason for promoting a model that is not blessed; kept in its record.

    Raises:
        ModelError: When there is no such version or validation, it is not blessed and there is no override,
            it is the champion already, or the champion has changed meanwhile.
        SettingsError: When there is no such directory, or it cannot be written to.
        RunError, PlatformError: As `publish`.
    """
    require_store(champion)
    store = open_store(champion)
    catalog, seen = read_catalog(store)
    if VERSION_NAME.fullmatch(wanted):
        version = catalog.require(wanted, store)
        wanted, blessed, reason = version.version, version.blessed, version.verdict
    else:
        with open_store(wanted).fetched("") as exported:
            verdict = read_part(exported, BLESSING_FILE, Verdict)
            blessed, reason = verdict.blessed, verdict.reason
            if blessed or override.strip():
                digest = _digest(exported, wanted)
                version = catalog.find_by_digest(digest) or _copy_version(
                    store, seen, exported, verdict, digest, source=wanted
                )
    if not blessed and not override.strip():
        raise ModelError(
            f"{wanted} is not blessed ({reason}); to make it the champion anyway, give --override REASON"
        )
    version, before = replace(version, override="" if version.blessed else override), catalog.version
    catalog, seen = read_catalog(store)  # copying took time
    if catalog.version != before:
        raise ModelError(f"{store.location('')} has been changed meanwhile; look at it and try again")
    return _commit_manually(store, catalog, seen, version, "promoted", previous=catalog.version)


def rollback(champion: str | os.PathLike[str], version: str = "") -> Version:
    """Makes a former champion the champion again, "" for the previous one; nothing is removed or copied.

    Raises:
        ModelError: When there is no champion or no such version, it never was the champion, champion.json is
            damaged, or the champion has changed meanwhile.
        RunError, PlatformError: When writing fails; the champion is unchanged then.
    """
    store = open_store(champion)
    catalog, seen, present = _require_champion(store)
    wanted = version or present.previous
    if not wanted:
        raise ModelError(
            f"{present.version} replaced no version; name the one to go to, 'shardline champion list "
            f"{store.location('')}' lists them"
        )
    target = catalog.require(wanted, store)
    if not target.was_champion:
        raise ModelError(
            f"{target.version} never was the champion; look at it, then: {PROMOTE_COMMAND} "
            f"{store.location('')} {target.version}"
        )
    return _commit_manually(store, catalog, seen, target, "rolled back", previous=target.previous)


def _commit_manually(
    store: Store, catalog: Catalog, seen: TextFile, version: Version, how: str, *, previous: str
) -> Version:
    """Makes a version the champion by command of a user who has seen the catalog; ModelError if it cannot."""
    if version.version == catalog.version:
        raise ModelError(f"{version.version} is the champion already; name another version")
    if not store.names(version.path):
        raise ModelError(
            f"the files of {version.version} are gone from {store.location('')}; name another one"
        )
    after = catalog.with_champion(replace(version, previous=previous), how, store.author())
    if not write_catalog(store, after, seen):
        raise ModelError(f"{store.location('')} has been changed meanwhile; look at it and try again")
    return after.require(version.version, store)


def prune(champion: str | os.PathLike[str], keep: int) -> list[str]:
    """Removes all versions but the champion, those it replaced, and the `keep` newest others.

    Unfinished copies older than a day are removed, too. Versions are removed from champion.json first, then
    their files: no listed version is incomplete. Returns the removed names. Raises ModelError, and removes
    nothing, when there is no champion or champion.json is damaged.
    """
    store = open_store(champion)
    while True:
        catalog, seen, present = _require_champion(store)
        kept = {present.version, present.previous, present.commit.replaced}
        others = [item.version for item in catalog.versions if item.version not in kept]
        dropped = set(others[: max(0, len(others) - keep)])
        remaining = tuple(item for item in catalog.versions if item.version not in dropped)
        if not dropped or write_catalog(store, replace(catalog, versions=remaining), seen):
            break
    latest = f"{datetime.now(UTC) - timedelta(days=1):{_TIME_FORMAT}}"
    listed = {item.version for item in catalog.versions}
    copies = {name for name in store.names(VERSIONS) if CREATED_HERE.match(name) and name < latest}
    removed = sorted(dropped | (copies - listed))
    for name in removed:
        store.remove(f"{VERSIONS}/{name}")
    return removed


def _require_champion(store: Store) -> tuple[Catalog, TextFile, Version]:
    """Returns the catalog with its champion; raises ModelError where there is none."""
    catalog, seen = read_catalog(store)
    if catalog.champion is None:
        raise ModelError(
            f"nothing has been published in {store.location('')}; give the directory of a champion"
        )
    return catalog, seen, catalog.champion


def _copy_version(
    store: Store,
    seen: TextFile,
    exported: Path,
    verdict: Verdict,
    digest: str,
    *,
    quality: str = "",
    run: str = "",
    source: str = "",
) -> Version:
    """Copies a validated model and returns its record, which is not in the catalog yet.

    Each copy has its own directory: an attempt that seems dead may still be running. `quality` "" takes that
    of the evaluation.
    """
    export, created = Export.read(exported), datetime.now(UTC)
    metrics: Mapping[str, float | None] = {}
    if not quality or (exported / EVALUATION_FILE).exists():
        metrics = read_part(exported, EVALUATION_FILE, EvaluationSummary).metrics
    version = Version(
        version=f"{created:{_TIME_FORMAT}}-{digest}-{os.urandom(2).hex()}",
        quality=quality or describe_quality(metrics),
        fingerprint=export.fingerprint,
        created=created.isoformat(timespec="seconds"),
        run=run,
        by=store.author(),
        source=(source or str(exported)).encode(errors="backslashreplace").decode(),  # names are bytes
        metrics={key: value for key, value in metrics.items() if "[" not in key},
        verdict=verdict.summary,
        blessed=verdict.blessed,
    )
    if seen.text is None:  # so that a deleted file is not taken for a first run
        write_catalog(store, Catalog(versions=()), seen)
    store.put(exported, version.path)
    return version


def _digest(exported: Path, publication: str) -> str:
    """Returns a digest of the content and of the run or source, for the name of a version."""
    digest = hashlib.sha256(os.fsencode(publication))
    for path in files_below(exported):
        digest.update(os.fsencode(path.relative_to(exported)))
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:12]
