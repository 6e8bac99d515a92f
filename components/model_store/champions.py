"""Champions: publishing, promoting and rolling back the versions of a model store.

    CHAMPION/champion.json         `Pointer`: the champion and those before it
    CHAMPION/versions/<version>/   a version: a copy of the directory that a validation fills, which never
                                   changes; version.json, its `Version`, is written last

champion.json is replaced only if it is unchanged since it was read (`store`), and a model replaces only the
champion that it was judged against. Readers see the old champion or the new one, even if the publisher is
killed. A directory without version.json is an unfinished copy.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from shardline.components.model_store import (
    BLESSING_FILE,
    Export,
    T,
    Verdict,
    read_part,
)
from shardline.components.model_store.store import (
    CHAMPION_FILE,
    PROMOTE_COMMAND,
    VERSION_FILE,
    VERSIONS,
    Store,
    TextFile,
    open_store,
    refuse_other_content,
    require_store,
)
from shardline.components.text import quality as describe_quality
from shardline.trainer.base import files
from shardline.trainer.base.deserialize import restore
from shardline.trainer.base.errors import ModelError

#: Form of the name of a version.
_NAME = re.compile(r"\w[\w-]*")


@dataclass(frozen=True)
class Version:
    """Record of a version.

    Attributes:
        version: Name: time of creation, and a digest. Names sort by time.
        quality: Quality on the test split: "accuracy 0.9812", "rmse 53.2".
        fingerprint: Fingerprint of the dataset that it was judged on.
        created: Time of creation, ISO 8601, UTC.
        run: Name of the run that published it; "" for none.
        by: Author: user@host, or the service account.
        source: Directory that it was copied from.
    """

    version: str
    fingerprint: str
    created: str
    quality: str = ""
    run: str = ""
    by: str = ""
    source: str = ""
    metrics: Mapping[str, float | None] = field(default_factory=dict, compare=False)
    verdict: str = ""
    blessed: bool = True

    @property
    def path(self) -> str:
        """Its directory, relative to the champion's."""
        return f"{VERSIONS}/{self.version}"


@dataclass(frozen=True)
class Pointer:
    """Content of champion.json.

    Attributes:
        champions: The champion and those before it, by name, newest first; rolling back removes the first.
        rolled_back: Those that have been rolled back.
        overrides: Reasons for promoting a version that is not blessed, by name.
        by: Author of the last change.
        at: Its time, ISO 8601, UTC.
        path: Directory of the champion, for readers of this field only.
    """

    champions: tuple[str, ...]
    rolled_back: tuple[str, ...] = ()
    overrides: Mapping[str, str] = field(default_factory=dict)
    by: str = ""
    at: str = ""
    path: str = ""

    def __post_init__(self) -> None:
        for name in self.champions:
            if not _NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not the name of a version")
        if self.path != (f"{VERSIONS}/{self.champion}" if self.champion else ""):
            raise ValueError(f"path is {self.path!r}, not that of {self.champion or 'no champion'}")

    @property
    def champion(self) -> str:
        """Name of the present champion; "" where nothing has been published yet."""
        return next(iter(self.champions), "")

    @property
    def known(self) -> tuple[str, ...]:
        """All versions that are the champion or have been."""
        return *self.champions, *self.rolled_back


def current(champion: str | os.PathLike[str]) -> Version | None:
    """Returns the current champion, or None where nothing has been published yet.

    Raises ModelError when the store is damaged, PlatformError when a bucket cannot be read.
    """
    store = open_store(champion)
    present = read_pointer(store)[0].champion
    return _read_version(store, present) if present else None


def require_current(champion: str | os.PathLike[str]) -> tuple[Pointer, Version]:
    """Returns champion.json and the champion; raises ModelError where there is none, or as `current`."""
    store = open_store(champion)
    pointer, _ = read_pointer(store, required=True)
    return pointer, _read_version(store, pointer.champion)


def last_champions(champion: str | os.PathLike[str]) -> tuple[Version, ...]:
    """Returns the champion and those before it that led to it, newest first; () where there is none yet.

    What came before an override was given up by hand, and of old versions the files may have been removed.
    Raises ModelError and PlatformError as `current` does.
    """
    store = open_store(champion)
    pointer, _ = read_pointer(store)
    names = list(dict.fromkeys(pointer.champions))
    end = next((place for place, name in enumerate(names, 1) if name in pointer.overrides), None)
    present = set(store.names(VERSIONS)) | {pointer.champion}
    return tuple(_read_version(store, name) for name in names[:end] if name in present)


def versions(champion: str | os.PathLike[str]) -> list[Version]:
    """Returns the complete versions, oldest first; raises ModelError and PlatformError as `current` does."""
    store = open_store(champion)
    found = (name for name in store.names(VERSIONS) if _NAME.fullmatch(name))
    return [_read_version(store, name) for name in found if store.read(_record(name)).text is not None]


def find_version(champion: str | os.PathLike[str], wanted: str) -> Version:
    """Returns a version by its name, "latest" for the newest; ModelError, with all names, without one."""
    store, known = open_store(champion), versions(champion)
    found = [item for item in known if wanted in ("latest", item.version)]
    if not found:
        names = ", ".join(item.version for item in known) or "none"
        raise ModelError(f"no version {wanted} in {store.location('')}; there are {names}")
    return found[-1]


def published_by(exported: Path, champion: str, run: str) -> str:
    """Returns the version that a run has made of a model, and that is or was the champion; "" for none."""
    return _with_digest(read_pointer(open_store(champion))[0].known, _digest(exported, run)) if run else ""


def read_record(champion: str | os.PathLike[str], version: Version, file: str, kind: type[T]) -> T:
    """Returns a JSON file of a version as a dataclass; raises ModelError when it is missing or damaged."""
    return _read_file(open_store(champion), f"{version.path}/{file}", kind)


def check_champion(uri: str) -> None:
    """Checks that a model can be published at a URI, without leaving anything there.

    Raises SettingsError or PlatformError when there is none or it cannot be written to, ModelError when it is
    damaged.
    """
    store = open_store(uri)
    store.check()
    require_store(uri)
    read_pointer(store)


def check_judged(exported: Path, champion: str, run: str = "") -> None:
    """Raises ModelError, as `publish` does, for a model that was judged against a former champion.

    This is checked before the model is served. Where `champion` is "" nothing is published or refused.
    """
    if not champion:
        return
    verdict = read_part(exported, BLESSING_FILE, Verdict)
    store = open_store(champion)
    pointer, _ = read_pointer(store)
    if pointer.champion != (verdict.champion or "") and not published_by(exported, champion, run):
        raise _outdated(verdict, pointer, store, str(exported))


def publish(exported: Path, champion: str | os.PathLike[str], *, quality: str, run: str = "") -> Version:
    """Makes an exported model the champion, if the champion is still the one that it was judged against.

    Publishing again makes a new version, unless `run`, the name of a run, has published this model already.
    Raises ModelError when `exported` is not a complete validation or its model is not blessed, the store is
    damaged, or the champion has changed since the validation: then the new version can be promoted.
    """
    verdict = read_part(exported, BLESSING_FILE, Verdict)
    if not verdict.blessed:
        raise ModelError(f"the model in {exported} is not blessed ({verdict.reason}); it is not published")
    store = open_store(champion)
    refuse_other_content(store)
    digest = _digest(exported, run)
    version = _add(store, exported, verdict, digest, quality=quality, run=run)
    while True:
        pointer, seen = read_pointer(store)
        if run and (name := _with_digest(pointer.known, digest)):
            return _read_version(store, name)  # by an earlier attempt, and perhaps replaced since
        if pointer.champion != (verdict.champion or ""):
            raise _outdated(verdict, pointer, store, version.version)
        if _point(store, pointer, seen, (version.version, *pointer.champions)):
            return version


def promote(champion: str | os.PathLike[str], wanted: str, *, override: str = "") -> Version:
    """Makes a version, or the model of a validated directory (gs:// too), the champion by hand.

    `wanted` is the name of a version or "latest", else, such as a path with a slash, a directory; `override`
    the reason for promoting a model that is not blessed, and is kept. Raises ModelError when there is no such
    version or validation, it is not blessed and there is no override, it is the champion already, or the
    champion has changed meanwhile.
    """
    require_store(champion)
    store = open_store(champion)
    pointer, seen = read_pointer(store)

    def check(name: str, blessed: bool, reason: str) -> None:
        if not blessed and not override.strip():
            raise ModelError(
                f"{name} is not blessed ({reason}); to make it the champion anyway, give --override REASON"
            )

    if _NAME.fullmatch(wanted):
        version = find_version(champion, wanted)
        check(version.version, version.blessed, version.verdict)
    else:
        with open_store(wanted).fetched("") as exported:
            verdict = read_part(exported, BLESSING_FILE, Verdict)
            check(wanted, verdict.blessed, verdict.reason)
            version = _add(store, exported, verdict, _digest(exported, wanted), source=wanted)
            if not seen.text:
                pointer, seen = read_pointer(store)
    if version.version == pointer.champion:
        raise ModelError(f"{version.version} is the champion already; name another version")
    reasons = {} if version.blessed else {version.version: override}
    pointer = replace(pointer, overrides={**pointer.overrides, **reasons})
    _point_or_refuse(store, pointer, seen, (version.version, *pointer.champions))
    return version


def rollback(champion: str | os.PathLike[str]) -> Version:
    """Makes the version that the champion replaced the champion again; nothing is removed or copied.

    Raises ModelError when there is no such version, its files are gone, or the store is damaged or changed.
    """
    store = open_store(champion)
    pointer, seen = read_pointer(store, required=True)
    present, *before = pointer.champions
    if not before:
        raise ModelError(
            f"{present} replaced no version; promote another one that 'shardline champion list "
            f"{store.location('')}' lists"
        )
    target = _read_version(store, before[0])
    pointer = replace(pointer, rolled_back=tuple(dict.fromkeys((present, *pointer.rolled_back))))
    _point_or_refuse(store, pointer, seen, tuple(before))
    return target


def read_pointer(store: Store, *, required: bool = False) -> tuple[Pointer, TextFile]:
    """Returns the content of champion.json, and the file as it was read.

    Raises ModelError where champion.json is damaged or gone: that is no empty store, in which the first model
    would be blessed; its versions remain, and can be published to another store. Also where there is no
    champion yet and one is `required`.
    """
    file, seen, pointer = store.location(CHAMPION_FILE), store.read(CHAMPION_FILE), Pointer(())
    command = f"{PROMOTE_COMMAND} ANOTHER {store.location(VERSIONS)}/VERSION/"
    remedy = f"restore it, or begin anew with one of its versions: {command}"
    if seen.text is not None:
        try:
            content = files.parse_json(seen.text, file, ModelError)
        except ModelError as error:
            raise ModelError(f"{error}; {remedy}") from None
        pointer = restore(Pointer, content, file, ModelError, remedy)
    elif store.names(VERSIONS) and store.read(CHAMPION_FILE).text is None:  # it may just have been written
        raise ModelError(f"{file} is gone, but there are versions; {remedy}")
    if required and not pointer.champions:
        raise ModelError(
            f"nothing has been published in {store.location('')}; give the directory of a champion"
        )
    return pointer, seen


def _point(store: Store, pointer: Pointer, seen: TextFile, champions: tuple[str, ...]) -> bool:
    """Replaces champion.json unless it has changed since it was read, and returns whether it was."""
    at, path = datetime.now(UTC).isoformat(timespec="seconds"), f"{VERSIONS}/{champions[0]}"
    changed = replace(pointer, champions=champions, by=store.author, at=at, path=path)
    return store.replace(CHAMPION_FILE, files.to_json(asdict(changed), CHAMPION_FILE), seen)


def _point_or_refuse(store: Store, pointer: Pointer, seen: TextFile, champions: tuple[str, ...]) -> None:
    if not _point(store, pointer, seen, champions):
        raise ModelError(f"{store.location('')} has been changed meanwhile; look at it and try again")


def _outdated(verdict: Verdict, pointer: Pointer, store: Store, model: str) -> ModelError:
    return ModelError(
        f"the model was judged against {verdict.champion or 'no champion'}, the champion is "
        f"{pointer.champion or 'none'} since; validate it again, or promote it by hand: {PROMOTE_COMMAND} "
        f"{store.location('')} {model}"
    )


def _add(
    store: Store,
    exported: Path,
    verdict: Verdict,
    digest: str,
    *,
    quality: str = "",
    run: str = "",
    source: str = "",
) -> Version:
    """Copies a validated model, unless an earlier attempt has, and returns the record of the version.

    `quality` "" takes that of the evaluation.
    """
    export, created = Export.read(exported), datetime.now(UTC)
    empty, seen = read_pointer(store)
    if seen.text is None:  # else a copy that is killed would be a store that has lost it
        store.replace(CHAMPION_FILE, files.to_json(asdict(empty), CHAMPION_FILE), seen)
    for name in store.names(VERSIONS) if run or source else ():
        if name.endswith(digest) and store.read(_record(name)).text is not None:
            return _read_version(store, name)
    version = Version(
        version=f"{created:%Y%m%dT%H%M%S%f}-{digest}",
        quality=quality or describe_quality(verdict.metrics),
        fingerprint=export.fingerprint,
        created=created.isoformat(timespec="seconds"),
        run=run,
        by=store.author,
        source=(source or str(exported)).encode(errors="backslashreplace").decode(),  # names are bytes
        metrics=verdict.metrics,
        verdict=verdict.summary,
        blessed=verdict.blessed,
    )
    store.put(exported, version.path)
    store.replace(_record(version.version), files.to_json(asdict(version), VERSION_FILE), TextFile(None))
    return version


def _read_version(store: Store, name: str) -> Version:
    return _read_file(store, _record(name), Version)


def _read_file(store: Store, name: str, kind: type[T]) -> T:
    location, remedy = store.location(name), "publish the model again"
    if (text := store.read(name).text) is None:
        raise ModelError(f"no {location}: the version is damaged; {remedy}")
    return restore(kind, files.parse_json(text, location, ModelError), location, ModelError, remedy)


def _record(name: str) -> str:
    return f"{VERSIONS}/{name}/{VERSION_FILE}"


def _with_digest(names: tuple[str, ...], digest: str) -> str:
    return next((name for name in names if name.endswith(digest)), "")


def _digest(exported: Path, publication: str) -> str:
    """Returns a digest of a model's description and of the run or source, for the name of a version."""
    parts = [asdict(Export.read(exported)), asdict(read_part(exported, BLESSING_FILE, Verdict)), publication]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
