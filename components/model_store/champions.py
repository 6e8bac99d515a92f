"""Champions: publishing, promoting and rolling back the versions of a model store, on a disk or in a bucket.

    CHAMPION/champion.json         `Pointer`: the champion and those before it
    CHAMPION/versions/<version>/   a version: a copy of the directory that a validation fills, which never
                                   changes; version.json, its `Version`, is written last

champion.json is replaced only if it is unchanged since it was read, on a disk under a lock and by a rename,
in a bucket by its generation; and a model replaces only the champion that it was judged against. Readers see
the old champion or the new one, even if the publisher is killed. A directory without version.json is an
unfinished copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path, PurePosixPath

from shardline.components.model_store import BLESSING_FILE, Export, Verdict, read_part
from shardline.components.runs import on_platform
from shardline.components.storage import Storage, TextFile
from shardline.components.text import quality, truncate
from shardline.trainer.base import crash, files
from shardline.trainer.base.errors import ModelError, SettingsError

CHAMPION_FILE, VERSIONS, VERSION_FILE = "champion.json", "versions", "version.json"
PROMOTE_COMMAND = "shardline champion promote"
_VERSIONS = f"{VERSIONS}/"
_REMEDY = "publish the model again"
#: Form of the name of a version.
_NAME = re.compile(r"\w[\w-]*")


def open_store(champion: str | os.PathLike[str]) -> Storage:
    """Returns the model store at a path or URI, as `open_directory` does."""
    return open_directory(champion, "champion_uri", "the champion is unchanged")


def open_directory(uri: str | os.PathLike[str], parameter: str, kept: str) -> Storage:
    """Returns the storage that a parameter names; `kept` says what a write that fails leaves unchanged.

    Where SHARDLINE_GCS_ROOT replaces all buckets, one is a directory there. Raises SettingsError when that
    directory is missing, or a URI names no bucket.
    """
    root = os.fspath(uri)
    if root.startswith(files.BUCKET_PREFIXES):
        if os.environ.get(files.GCS_ROOT_VARIABLE):
            champion_directory(root)
        name = root.removeprefix("gs://").removeprefix("/gcs/")
        if not name or name.startswith("/"):
            raise SettingsError(f"{root!r} names no bucket; write gs://BUCKET/PATH")
        root = f"gs://{PurePosixPath(name)}"
    return Storage(root, advice=f"choose another {parameter}", kept=kept)


def _names(store: Storage, folder: str) -> list[str]:
    """Returns the names in a folder of a store, sorted; where it is missing, writing says what is wrong."""
    # For the store itself, the first thousand names of a bucket are enough.
    with crash.output_errors(f"list {store.location(folder)}"):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = islice(store.entries(folder), None if folder else 1000)
            return sorted(each.name.rstrip("/") for each in found)
        return []


def champion_directory(uri: str) -> Path:
    """Returns the local path of a URI: a local directory, or gs:// or /gcs/ in the mount.

    Raises SettingsError when the bucket is not mounted: a directory made in its place would be lost.
    """
    path = files.local_path(uri)
    if uri.startswith(files.BUCKET_PREFIXES):
        bucket = files.local_path(f"gs://{uri.removeprefix('gs://').removeprefix('/gcs/').partition('/')[0]}")
        if not bucket.is_dir():
            raise SettingsError(
                f"cannot reach {uri}: {bucket} is not mounted here; on Vertex grant the service account "
                "access to the bucket, elsewhere give a local directory"
            )
    return path


def require_store(uri: str | os.PathLike[str]) -> None:
    """Raises SettingsError for a missing local directory, and as `refuse_other_content` does.

    An unmounted disk, or the directory of one model, would look like a store without a champion. A prefix in
    a bucket needs not exist.
    """
    if not os.fspath(uri).startswith(files.BUCKET_PREFIXES) and not Path(uri).is_dir():
        raise SettingsError(
            f"there is no directory {uri} for champions: mount the disk that it is on, or begin anew "
            f"with mkdir -p {shlex.quote(os.fspath(uri))}"
        )
    refuse_other_content(open_store(uri))


def refuse_other_content(store: Storage) -> None:
    """Raises SettingsError for a directory with anything but a model store, such as that of one model.

    Hidden files, and what a new disk has, are no content. A directory of versions that has lost its
    champion.json is a damaged model store, which readers report.
    """
    names = [name for name in _names(store, "") if not name.startswith(".") and name != "lost+found"]
    if names and CHAMPION_FILE not in names and names != [VERSIONS]:
        raise SettingsError(
            f"{store.location('')} holds no champions (no {CHAMPION_FILE}), but "
            f"{truncate(', '.join(names), 80)}; give the directory of champions, or an empty one, in which "
            f"'{PROMOTE_COMMAND} DIR MODEL/' makes a model the champion"
        )


def refuse_container_path(name: str, uri: str) -> None:
    """Raises SettingsError, on the platform, for a directory of the container, which is lost with the task.

    `name` is the name of the parameter.
    """
    if uri and not uri.startswith(files.BUCKET_PREFIXES) and on_platform():
        raise SettingsError(
            f"{name} is {uri!r}, a directory of this container, which is thrown away with it; give "
            f"{name}=gs://BUCKET/PATH"
        )


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
    present = set(_names(store, _VERSIONS)) | {pointer.champion}
    return tuple(_read_version(store, name) for name in names[:end] if name in present)


def versions(champion: str | os.PathLike[str]) -> list[Version]:
    """Returns the complete versions, oldest first; raises ModelError and PlatformError as `current` does."""
    store = open_store(champion)
    found = (_find_version(store, name) for name in _names(store, _VERSIONS) if _NAME.fullmatch(name))
    return [version for version in found if version]


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


def publish(exported: Path, champion: str | os.PathLike[str], *, run: str = "") -> Version:
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
    version = _add(store, exported, verdict, digest, run=run)
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


def read_pointer(store: Storage, *, required: bool = False) -> tuple[Pointer, TextFile]:
    """Returns the content of champion.json, and the file as it was read.

    Raises ModelError where champion.json is damaged or gone: that is no empty store, in which the first model
    would be blessed; its versions remain, and can be published to another store. Also where there is no
    champion yet and one is `required`.
    """
    file, seen = store.location(CHAMPION_FILE), store.read(CHAMPION_FILE)
    command = f"{PROMOTE_COMMAND} ANOTHER {store.location(VERSIONS)}/VERSION/"
    remedy = f"restore it, or begin anew with one of its versions: {command}"
    pointer = seen.restore(Pointer, remedy)
    # Read again: it may just have been written.
    if pointer is None and _names(store, _VERSIONS) and store.read(CHAMPION_FILE).text is None:
        raise ModelError(f"{file} is gone, but there are versions; {remedy}")
    pointer = pointer or Pointer(())
    if required and not pointer.champions:
        raise ModelError(
            f"nothing has been published in {store.location('')}; give the directory of a champion"
        )
    return pointer, seen


def _point(store: Storage, pointer: Pointer, seen: TextFile, champions: tuple[str, ...]) -> bool:
    """Replaces champion.json unless it has changed since it was read, and returns whether it was."""
    at, path = datetime.now(UTC).isoformat(timespec="seconds"), f"{VERSIONS}/{champions[0]}"
    changed = replace(pointer, champions=champions, by=store.author, at=at, path=path)
    return store.replace(CHAMPION_FILE, files.to_json(asdict(changed), CHAMPION_FILE), seen)


def _point_or_refuse(store: Storage, pointer: Pointer, seen: TextFile, champions: tuple[str, ...]) -> None:
    if not _point(store, pointer, seen, champions):
        raise ModelError(f"{store.location('')} has been changed meanwhile; look at it and try again")


def _outdated(verdict: Verdict, pointer: Pointer, store: Storage, model: str) -> ModelError:
    return ModelError(
        f"the model was judged against {verdict.champion or 'no champion'}, the champion is "
        f"{pointer.champion or 'none'} since; validate it again, or promote it by hand: {PROMOTE_COMMAND} "
        f"{store.location('')} {model}"
    )


def _add(
    store: Storage, exported: Path, verdict: Verdict, digest: str, *, run: str = "", source: str = ""
) -> Version:
    """Copies a validated model, unless an earlier attempt has, and returns the record of the version."""
    export, created = Export.read(exported), datetime.now(UTC)
    empty, seen = read_pointer(store)
    if seen.text is None:  # else a copy that is killed would be a store that has lost it
        store.replace(CHAMPION_FILE, files.to_json(asdict(empty), CHAMPION_FILE), seen)
    for name in _names(store, _VERSIONS) if run or source else ():
        if name.endswith(digest) and (version := _find_version(store, name)):
            return version
    version = Version(
        version=f"{created:%Y%m%dT%H%M%S%f}-{digest}",
        quality=quality(verdict.metrics),
        fingerprint=export.fingerprint,
        created=created.isoformat(timespec="seconds"),
        run=run,
        by=store.author,
        source=(source or str(exported)).encode(errors="backslashreplace").decode(),  # names are bytes
        metrics=verdict.metrics,
        verdict=verdict.summary,
        blessed=verdict.blessed,
    )
    found = (path for path in sorted(exported.rglob("*")) if path.is_file() and path.name != VERSION_FILE)
    store.put(exported, [path.relative_to(exported).as_posix() for path in found], f"{version.path}/")
    store.replace(_record(version.version), files.to_json(asdict(version), VERSION_FILE), TextFile(None))
    return version


def _find_version(store: Storage, name: str) -> Version | None:
    return store.read(_record(name)).restore(Version, _REMEDY)


def _read_version(store: Storage, name: str) -> Version:
    if version := _find_version(store, name):
        return version
    raise ModelError(f"no {store.location(_record(name))}: the version is damaged; {_REMEDY}")


def _record(name: str) -> str:
    return f"{VERSIONS}/{name}/{VERSION_FILE}"


def _with_digest(names: tuple[str, ...], digest: str) -> str:
    return next((name for name in names if name.endswith(digest)), "")


def _digest(exported: Path, publication: str) -> str:
    """Returns a digest of a model's description and of the run or source, for the name of a version."""
    parts = [asdict(Export.read(exported)), asdict(read_part(exported, BLESSING_FILE, Verdict)), publication]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
