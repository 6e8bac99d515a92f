"""Champions: where blessed models are published, version by version, and the way back.

A published model is a copy of the directory that a validation fills (`model_store`):

    CHAMPION/versions/<version>/               one version
    CHAMPION/versions/<version>/version.json   its record (`Version`), written last: completes the version
    CHAMPION/champion.json                     the record of the champion; replacing it is the commit point

A reader opens champion.json and then the version that it names, and never lists versions/. So it sees the old
champion or the new one, whatever happens to the publisher in between. Nothing here renames a directory: on a
Cloud Storage mount that is not atomic and, by default, not even possible.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from shardline.components.model_store import BLESSING_FILE, Export, Verdict, read_part
from shardline.trainer import crash, files
from shardline.trainer.errors import ModelError, RunError, SettingsError
from shardline.trainer.progress import say
from shardline.trainer.records import load

VERSIONS = "versions"
VERSION_FILE = "version.json"
CHAMPION_FILE = "champion.json"

#: How the URI of a place in a bucket begins.
_MOUNTED = ("gs://", "/gcs/")
#: Characters of a source in the name of a directory.
_LONGEST_NAME = 100
_NAME = re.compile(r"\w[\w-]*")
_REMEDY = "repair it, or remove it to start anew"


@dataclass(frozen=True)
class Version:
    """Record of a published version, the content of version.json and champion.json.

    Attributes:
        version: Time of publication and a short digest, unique; versions sort by time.
        path: Directory of the version, relative to the champion's.
        accuracy: Accuracy on the test split, 0..1.
        fingerprint: Fingerprint of the dataset that it was judged on.
        created: Time of publication, ISO 8601, UTC.
        previous: The version that it replaced as champion; "" where there was none.
        run: Name of the run that has published it; "" where none has.
    """

    version: str
    path: str
    accuracy: float
    fingerprint: str
    created: str
    previous: str = ""
    run: str = ""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.version) or self.path != f"{VERSIONS}/{self.version}":
            raise ValueError(f"{self.path!r} is not the path of a version {self.version!r}")
        if self.previous and not _NAME.fullmatch(self.previous):
            raise ValueError(f"previous is {self.previous!r}, not the name of a version")


def champion_directory(uri: str) -> Path:
    """Returns the local path of a champion's URI: a local directory, or gs:// or /gcs/ through the mount.

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


def directory_name(source: str) -> str:
    """Returns the name of the directory for what comes of a source, which no other source has."""
    name = re.sub(r"\W+", "-", source)
    if name == source and len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}-{hashlib.sha256(source.encode()).hexdigest()[:8]}"


def of_source(champions: Path, source: str) -> Path:
    """Returns the directory of a source's champion, in the directory of all champions.

    Raises SettingsError when there is only the one that it shared with sources of like names in earlier
    releases: whose champion that is nobody knows, and a gate without a champion would pass a worse model.
    """
    own, earlier = champions / directory_name(source), champions / re.sub(r"\W+", "-", source)
    if os.path.exists(earlier / CHAMPION_FILE) and not own.exists():  # also where the name is too long
        raise SettingsError(
            f"an earlier champion is in {earlier}, which sources of like names shared: move it to {own} if "
            f"it is that of {source}, make {own} to start anew, or give champion_uri"
        )
    return own


def current(champion: Path) -> Version | None:
    """Returns the present champion, or None where nothing has been published yet.

    Raises ModelError when champion.json is damaged or names a version that is not there.
    """
    path = champion / CHAMPION_FILE
    if not path.exists():
        return None
    found = _read(path, _REMEDY)
    if not (champion / found.path / VERSION_FILE).is_file():
        raise ModelError(f"{path} names {found.path!r}, which is no complete version; {_REMEDY}")
    return found


def require_current(champion: Path) -> Version:
    """Returns the present champion; raises ModelError where there is none, or as `current` does."""
    if (present := current(champion)) is None:
        raise ModelError(f"nothing has been published in {champion}; give the directory of a champion")
    return present


def complete_versions(champion: Path) -> list[Version]:
    """Returns the complete versions in a champion's directory, oldest first; raises as `current` does."""
    records = sorted((champion / VERSIONS).glob(f"*/{VERSION_FILE}"))
    return [_read(path, f"repair it, or remove {path.parent}") for path in records]


def publish(exported: Path, champion: Path, *, accuracy: float, run: str = "") -> Version:
    """Makes an exported model the champion; the previous version is kept.

    Each file is copied into a new directory and forced to disk. After a crash or an error before
    champion.json is replaced the previous champion is untouched. Publishing again makes a new version, unless
    `run`, the name of a run, is given and has published this model already, or begun to.

    Raises:
        ModelError: When `exported` is not a complete validation, its model is not blessed, or the
            present champion is damaged.
        SettingsError: When `champion` cannot be written to.
        RunError: When writing fails on the way.
    """
    verdict = read_part(exported, BLESSING_FILE, Verdict)
    if not verdict.blessed:
        raise ModelError(f"the model in {exported} is not blessed ({verdict.reason}); it is not published")
    fingerprint = Export.read(exported).fingerprint
    with _writing_to(champion):
        (champion / VERSIONS).mkdir(parents=True, exist_ok=True)
    created = datetime.now(UTC)
    mark = _digest(exported, run or created.isoformat(timespec="microseconds"))[: 16 if run else 8]
    earlier = sorted((champion / VERSIONS).glob(f"*-{mark}")) if run else []
    name = earlier[0].name if earlier else f"{created:%Y%m%dT%H%M%S}-{mark}"
    path = f"{VERSIONS}/{name}"
    if not (champion / path / VERSION_FILE).exists():
        _copy(exported, champion / path)
    with _one_at_a_time(champion):
        replaced = current(champion)
        if replaced and name in _chain(champion, replaced):
            return _read(champion / path / VERSION_FILE, _REMEDY)
        published = Version(
            version=name,
            path=path,
            accuracy=accuracy,
            fingerprint=fingerprint,
            created=created.isoformat(timespec="seconds"),
            previous=replaced.version if replaced else "",
            run=run,
        )
        _write(champion / path / VERSION_FILE, published)
        _write(champion / CHAMPION_FILE, published)
    return published


def check_champion(uri: str) -> None:
    """Checks that a model can be published at a URI, and makes nothing there.

    Raises SettingsError when the place is not mounted or, as far as it is there, cannot be written to,
    ModelError when the present champion is damaged.
    """
    champion = champion_directory(uri)
    place = next(path for path in (champion, *champion.parents) if path.exists())
    # In a bucket an account may be allowed to write below a prefix only, and what is above it says nothing.
    if place == champion or not place.is_dir() or not uri.startswith(_MOUNTED):
        with _writing_to(champion), tempfile.TemporaryFile(dir=place):
            pass
    current(champion)


@contextlib.contextmanager
def _writing_to(champion: Path) -> Iterator[None]:
    """Says in one line that a champion's directory cannot be written to."""
    try:
        yield
    except OSError as error:
        text = f"cannot write to {champion / VERSIONS}: {error.strerror}; choose another champion_uri"
        raise crash.of_place(error, text) from None


def _chain(champion: Path, newest: Version) -> Iterator[str]:
    """Yields the names of a champion and of those before it, the newest first."""
    seen: set[str] = set()
    while newest.version not in seen:
        seen.add(newest.version)
        yield newest.version
        record = champion / VERSIONS / newest.previous / VERSION_FILE
        if newest.previous and record.is_file():
            try:
                newest = _read(record, "repair it")
            except ModelError as error:
                say("register", f"warning: {error}; versions before it are not searched")


@contextlib.contextmanager
def _one_at_a_time(champion: Path) -> Iterator[None]:
    """Keeps other publishers of this machine waiting, so that each replaces the one before it."""
    directory = os.open(champion, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # a mount that has no locks
            fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def rollback(champion: Path, version: str = "") -> Version:
    """Makes an earlier version, "" for the one before, the champion again; nothing is removed or copied.

    Raises:
        ModelError: When there is no champion or no such version, or a record is damaged.
        RunError: When writing fails; the champion is unchanged then.
    """
    require_current(champion)
    with _one_at_a_time(champion):
        return _roll_back(champion, require_current(champion), version)


def _roll_back(champion: Path, present: Version, version: str) -> Version:
    wanted = version or present.previous
    if not wanted:
        raise ModelError(
            f"{present.version} replaced no version; name the one to go to, 'shardline champion show "
            f"{champion}' lists them"
        )
    if wanted == present.version:
        raise ModelError(f"{wanted} is the champion already; name another version")
    known = {item.version: item for item in complete_versions(champion)}
    if wanted not in known:
        raise ModelError(f"no version {wanted} in {champion}; there are {', '.join(known)}")
    _write(champion / CHAMPION_FILE, known[wanted])
    return known[wanted]


def _read(path: Path, remedy: str) -> Version:
    return load(Version, path, ModelError, remedy)


def _write(path: Path, record: Version) -> None:
    try:
        files.write_json(path, asdict(record))
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}; the champion is unchanged") from error


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in sorted(directory.rglob("*")) if path.is_file())


def _digest(exported: Path, publication: str) -> str:
    """Returns a digest of the content and the publication, a run or an instant: two never share it."""
    digest = hashlib.sha256(publication.encode())
    for path in _files(exported):
        digest.update(str(path.relative_to(exported)).encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _copy(source: Path, target: Path) -> None:
    """Copies all files of a directory into a new one, on disk; a failed or begun copy is removed."""
    try:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        for path in _files(source):
            _copy_file(path, target / path.relative_to(source))
        for directory in (target.parent, target, *(path for path in target.rglob("*") if path.is_dir())):
            files.sync(directory)
    except OSError as error:
        shutil.rmtree(target, ignore_errors=True)
        raise RunError(f"cannot copy to {target}: {error.strerror}; the champion is unchanged") from error


def _copy_file(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    files.sync(target)
