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
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from shardline.components.model_store import BLESSING_FILE, Export, Verdict, read_part
from shardline.components.runs import on_platform
from shardline.components.storage.bucket import Folder, parse_uri
from shardline.components.text import quality, truncate
from shardline.trainer.base import crash, files
from shardline.trainer.base.deserialize import restore
from shardline.trainer.base.errors import ModelError, RunError, SettingsError

CHAMPION_FILE, VERSIONS, VERSION_FILE = "champion.json", "versions", "version.json"
PROMOTE_COMMAND = "shardline champion promote"
_LOCK_FILE = ".lock"
#: Seconds to wait for the lock, which is held for one write.
_LOCK_TIMEOUT_S = 60.0
_CHECK_FILE = f"{files.TEMPORARY}check"
#: Beginnings of the URI of a directory in a bucket.
_BUCKET_PREFIXES = ("gs://", "/gcs/")
_ADVICE = "choose another champion_uri"
#: Form of the name of a version.
_NAME = re.compile(r"\w[\w-]*")


class TextFile(NamedTuple):
    """A text file as it was read, None where there was none; in a bucket with its generation."""

    text: str | None
    generation: int = 0


class DiskStore:
    """A model store in a local directory, which need not be there.

    As those of `BucketStore`, its methods raise SettingsError, RunError or PlatformError where the place
    cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.author = f"{os.environ.get('USER') or os.getuid()}@{socket.gethostname()}"

    def location(self, name: str) -> str:
        """Returns the path of a file or directory."""
        return str(self.path / name)

    def read(self, name: str) -> TextFile:
        """Returns a text file; a broken link is unreadable, not missing."""
        path = self.path / name
        with crash.output_errors(f"read {path}"), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(path)
            return TextFile(files.read_text(path, ModelError))
        return TextFile(None)

    def replace(self, name: str, text: str, seen: TextFile) -> bool:
        """Writes a text file if it is unchanged since it was read, and returns whether it was."""
        path = self.path / name
        with crash.output_errors(f"write to {self.path}", _ADVICE):
            self.path.mkdir(parents=True, exist_ok=True)
            with (self.path / _LOCK_FILE).open("a") as lock:
                with contextlib.suppress(OSError):  # other users may publish, too
                    os.fchmod(lock.fileno(), 0o666)
                end = time.monotonic() + _LOCK_TIMEOUT_S
                while not files.lock(lock.fileno()):
                    if time.monotonic() > end:
                        raise RunError(f"{lock.name} has been locked for {_LOCK_TIMEOUT_S:.0f} s; try again")
                    time.sleep(0.01)
                if self.read(name).text != seen.text:
                    return False
                try:
                    files.write_text(path, text)
                except OSError as error:
                    reason = f"{error.strerror}; the champion is unchanged"
                    raise RunError(f"cannot write {path}: {reason}") from error
        return True

    def names(self, directory: str) -> list[str]:
        """Returns the names of files and directories in a directory, sorted."""
        path = self.path / directory
        with crash.output_errors(f"list {path}"), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return sorted(os.listdir(path))
        return []  # writing reports what is wrong

    def put(self, source: Path, directory: str) -> None:
        """Copies the files of a directory into a new one, all on disk; a copy that fails is removed."""
        target = self.path / directory
        with crash.output_errors(f"write to {self.path}", _ADVICE):
            target.mkdir(parents=True)
        try:
            for path in _files_below(source):
                copy = target / path.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
                files.sync(copy)
            for made in (target.parent, target, *(path for path in target.rglob("*") if path.is_dir())):
                files.sync(made)
        except OSError as error:
            shutil.rmtree(target, ignore_errors=True)
            reason = files.with_space(error.strerror or str(error), target)
            raise RunError(f"cannot copy to {target}: {reason}; the champion is unchanged") from error

    @contextlib.contextmanager
    def fetched(self, directory: str) -> Iterator[Path]:
        """Yields the directory itself."""
        yield self.path / directory

    def check(self) -> None:
        """Makes a file, locks it and removes it."""
        existing = next(path for path in (self.path, *self.path.parents) if path.exists())
        with (
            crash.output_errors(f"write to {self.path}", _ADVICE),
            tempfile.NamedTemporaryFile(dir=existing, prefix=files.TEMPORARY) as file,
        ):
            files.lock(file.fileno())


class BucketStore:
    """A model store below a prefix of a bucket, gs://BUCKET/PREFIX."""

    def __init__(self, uri: str) -> None:
        files.local_path(uri)  # refuses '..'
        self._bucket, path = parse_uri(f"gs://{uri.removeprefix('gs://').removeprefix('/gcs/')}")
        self._prefix = "/".join(part for part in path.split("/") if part not in ("", "."))
        if not self._bucket.name:
            raise SettingsError(f"{uri!r} names no bucket; write gs://BUCKET/PATH")

    @property
    def author(self) -> str:
        """The service account of the credentials, or user@host where they have none."""
        return self._bucket.account or DiskStore(Path()).author

    def location(self, name: str) -> str:
        """Returns the URI of an object or directory, gs://."""
        return f"gs://{PurePosixPath(self._bucket.name, self._prefix, name)}"

    def read(self, name: str) -> TextFile:
        """Returns an object as text with its generation; a bucket that does not exist is an error."""
        content = self._bucket.content(self._key(name))
        if content is None:
            next(self._bucket.objects(self._key(""), page_size=1), None)
            return TextFile(None)
        # Text that is not UTF-8 is not JSON either, and is reported as damaged.
        return TextFile(content[0].decode("utf-8-sig", "replace"), content[1])

    def replace(self, name: str, text: str, seen: TextFile) -> bool:
        """Writes an object if it has the generation that was read, and returns whether it had."""
        # A retry after a lost answer finds the text that was written.
        written = self._bucket.write(self._key(name), text, seen.generation)
        return written or self.read(name).text == text

    def names(self, directory: str) -> list[str]:
        """Returns the names of objects and directories below a prefix, sorted."""
        prefix, names = self._key(f"{directory}/") if directory else self._key(""), set[str]()
        # For the store itself, the first thousand names are enough.
        for objects, folders in islice(self._bucket.pages(prefix, delimiter="/"), None if directory else 1):
            names.update(folders, (item.name for item in objects))
        return sorted(PurePosixPath(item).name for item in names - {prefix})  # but for the directory's own

    def put(self, source: Path, directory: str) -> None:
        """Uploads the files of a local directory."""
        names = [path.relative_to(source).as_posix() for path in _files_below(source)]
        Folder(self.location(directory)).upload(source, names)

    @contextlib.contextmanager
    def fetched(self, directory: str) -> Iterator[Path]:
        """Yields a temporary copy."""
        prefix = self._key(f"{directory}/".lstrip("/"))
        with tempfile.TemporaryDirectory(prefix="shardline-") as temporary:
            target = Path(temporary).resolve()
            for item in self._bucket.objects(prefix):
                path = target / item.name.removeprefix(prefix)
                if path.resolve().is_relative_to(target) and not item.name.endswith("/"):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    self._bucket.download(item.name, path)
            yield target

    def check(self) -> None:
        """Writes an object and removes it, which requires the same permissions as publishing."""
        self._bucket.write(self._key(_CHECK_FILE), "")
        self._bucket.remove(self._key(_CHECK_FILE))

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name


def _files_below(directory: Path) -> Iterator[Path]:
    """Yields the files of a validation; it may be a version, whose record is not copied."""
    return (path for path in sorted(directory.rglob("*")) if path.is_file() and path.name != VERSION_FILE)


Store = DiskStore | BucketStore


def open_store(champion: str | os.PathLike[str]) -> Store:
    """Returns the model store at a path or URI.

    Where SHARDLINE_GCS_ROOT replaces all buckets, one is a directory there. Raises SettingsError when that
    directory is missing, or a URI names no bucket.
    """
    uri = os.fspath(champion)
    if not uri.startswith(_BUCKET_PREFIXES) or os.environ.get(files.GCS_ROOT_VARIABLE):
        return DiskStore(champion_directory(uri))
    return BucketStore(uri)


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


def require_store(uri: str | os.PathLike[str]) -> None:
    """Raises SettingsError for a missing local directory, and as `refuse_other_content` does.

    An unmounted disk, or the directory of one model, would look like a store without a champion. A prefix in
    a bucket needs not exist.
    """
    if not os.fspath(uri).startswith(_BUCKET_PREFIXES) and not Path(uri).is_dir():
        raise SettingsError(
            f"there is no directory {uri} for champions: mount the disk that it is on, or begin anew "
            f"with mkdir -p {shlex.quote(os.fspath(uri))}"
        )
    refuse_other_content(open_store(uri))


def refuse_other_content(store: Store) -> None:
    """Raises SettingsError for a directory with anything but a model store, such as that of one model.

    Hidden files, and what a new disk has, are no content. A directory of versions that has lost its
    champion.json is a damaged model store, which readers report.
    """
    names = [name for name in store.names("") if not name.startswith(".") and name != "lost+found"]
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
    if uri and not uri.startswith(_BUCKET_PREFIXES) and on_platform():
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
    store: Store, exported: Path, verdict: Verdict, digest: str, *, run: str = "", source: str = ""
) -> Version:
    """Copies a validated model, unless an earlier attempt has, and returns the record of the version."""
    export, created = Export.read(exported), datetime.now(UTC)
    empty, seen = read_pointer(store)
    if seen.text is None:  # else a copy that is killed would be a store that has lost it
        store.replace(CHAMPION_FILE, files.to_json(asdict(empty), CHAMPION_FILE), seen)
    for name in store.names(VERSIONS) if run or source else ():
        if name.endswith(digest) and store.read(_record(name)).text is not None:
            return _read_version(store, name)
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
    store.put(exported, version.path)
    store.replace(_record(version.version), files.to_json(asdict(version), VERSION_FILE), TextFile(None))
    return version


def _read_version(store: Store, name: str) -> Version:
    location, remedy = store.location(_record(name)), "publish the model again"
    if (text := store.read(_record(name)).text) is None:
        raise ModelError(f"no {location}: the version is damaged; {remedy}")
    return restore(Version, files.parse_json(text, location, ModelError), location, ModelError, remedy)


def _record(name: str) -> str:
    return f"{VERSIONS}/{name}/{VERSION_FILE}"


def _with_digest(names: tuple[str, ...], digest: str) -> str:
    return next((name for name in names if name.endswith(digest)), "")


def _digest(exported: Path, publication: str) -> str:
    """Returns a digest of a model's description and of the run or source, for the name of a version."""
    parts = [asdict(Export.read(exported)), asdict(read_part(exported, BLESSING_FILE, Verdict)), publication]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
