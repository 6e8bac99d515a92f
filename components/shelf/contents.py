"""Contents of a shelf: its versions, and the commits by which one of them becomes the champion."""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from shardline.components.model_store import EVALUATION_FILE, Export, Measured, Verdict, read_part
from shardline.components.shelf.place import Place, as_text, files_below
from shardline.components.shelf.version import (
    CHAMPION_FILE,
    VERSION_FILE,
    VERSIONS,
    Commit,
    Head,
    Version,
    is_name,
)
from shardline.trainer.errors import ModelError, ShardlineError

#: Where prune keeps the record of a version while its files are being removed.
REMOVED = "removed"
ROLLED_BACK = "rolled back"


def read_head(shelf: Place, *, by_hand: bool = False) -> Head:
    """Returns the present champion.

    Raises ModelError where its record is damaged, or its version is, or its record is gone: that is no empty
    shelf. Of the last two may go on who says `by_hand` what the champion is to be.
    """
    head = shelf.head()
    if by_hand:
        return head
    record, promote = shelf.where(CHAMPION_FILE), f"shardline champion promote {shelf.where('')}"
    while head.version and not _is_whole(shelf, head.name):
        before, head = head, shelf.head()
        if head == before:
            raise ModelError(
                f"{record} names {head.name}, which is no complete version; restore it, or name another one: "
                f"{promote} VERSION"
            )
    known = complete(shelf) if head.version is None else []
    last = max(known, key=lambda item: item.commit.serial, default=None)
    if last and last.commit.serial:
        head, name = shelf.head(), last.version  # the first one may have come meanwhile
        if head.version is None:
            raise ModelError(
                f"{record} is gone, but {name} has been the champion; say which is: {promote} {name}"
            )
    return head


def _is_whole(shelf: Place, champion: str) -> bool:
    """Whether the champion has a record, if only in what prune has begun and will take back."""
    places = (VERSIONS, REMOVED)
    return any(shelf.read(f"{place}/{champion}/{VERSION_FILE}") is not None for place in places)


def require_head(shelf: Place) -> tuple[Head, Version]:
    """Returns the present champion, once more as a version; raises ModelError where there is none."""
    head = read_head(shelf)
    if head.version is None:
        raise ModelError(f"nothing has been published in {shelf.where('')}; give the directory of a champion")
    return head, head.version


def complete(shelf: Place) -> list[Version]:
    """Returns the complete versions, oldest first; raises ModelError where a record is damaged."""
    found = []
    for name in shelf.names(VERSIONS):
        remedy = f"repair it, or remove {shelf.where(f'{VERSIONS}/{name}')}"
        if record := shelf.load(Version, f"{VERSIONS}/{name}/{VERSION_FILE}", remedy):
            found.append(record)
    return found


def recorded(shelf: Place, name: str) -> Version:
    """Returns a version's record; raises ModelError where there is no complete version of that name."""
    if is_name(name) and (found := shelf.load(Version, f"{VERSIONS}/{name}/{VERSION_FILE}", "repair it")):
        return found
    known = ", ".join(item.version for item in complete(shelf)) or "none"
    raise ModelError(f"no version {name} in {shelf.where('')}; there are {known}")


def stock(
    shelf: Place,
    exported: Path,
    verdict: Verdict,
    *,
    accuracy: float | None = None,
    run: str = "",
    source: str = "",
    override: str = "",
) -> Version:
    """Copies a validated model to the shelf and returns its record, which completes the version.

    What this `run` or `source` has put there already is not copied again. The accuracy is that of the
    evaluation, unless given.
    """
    export, created = Export.read(exported), datetime.now(UTC)
    measured = None
    if accuracy is None or (exported / EVALUATION_FILE).exists():
        measured = read_part(exported, EVALUATION_FILE, Measured)
    name, is_there = _name(shelf, exported, created, run or source)
    path = f"{VERSIONS}/{name}"
    if is_there:
        return recorded(shelf, name)
    shelf.put(exported, path)
    version = Version(
        version=name,
        path=path,
        accuracy=measured.accuracy if measured and accuracy is None else accuracy or 0.0,
        fingerprint=export.fingerprint,
        created=created.isoformat(timespec="seconds"),
        run=run,
        by=shelf.who(),
        source=source or str(exported),
        metrics={key: value for key, value in measured.metrics.items() if "[" not in key} if measured else {},
        verdict=verdict.reason,
        blessed=verdict.blessed,
        override=override,
    )
    shelf.write(f"{path}/{VERSION_FILE}", as_text(version))
    return version


def _name(shelf: Place, exported: Path, created: datetime, publication: str) -> tuple[str, bool]:
    """Returns a version's name, which is the same again in a publication, and whether it is complete."""
    mark = _digest(exported, publication or created.isoformat(timespec="microseconds"))
    mark = mark[: 16 if publication else 8]
    if publication:
        removed = shelf.names(REMOVED)
        for name in shelf.names(VERSIONS):
            if name.endswith(f"-{mark}") and name not in removed:
                return name, shelf.read(f"{VERSIONS}/{name}/{VERSION_FILE}") is not None
    return f"{created:%Y%m%dT%H%M%S}-{mark}", False


def _digest(exported: Path, publication: str) -> str:
    """Returns a digest of the content and the publication, a run or an instant: two never share it."""
    digest = hashlib.sha256(publication.encode())
    for path in files_below(exported):
        digest.update(str(path.relative_to(exported)).encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def commit(shelf: Place, head: Head, version: Version, how: str) -> Version | None:
    """Makes a version the champion in the place of the present one; None where that is no longer `head`."""
    if head.version:
        settle(shelf, head.version)
    serial = head.version.commit.serial if head.version else head.token
    at = datetime.now(UTC).isoformat(timespec="microseconds")
    stamp = Commit(serial=serial + 1, how=how, replaced=head.name, by=shelf.who(), at=at)
    done = replace(version, commit=stamp)
    if not shelf.commit(done, head):
        return None
    with contextlib.suppress(ShardlineError):  # it is done, and the next commit makes up for it
        settle(shelf, done)
    return done


def settle(shelf: Place, version: Version) -> None:
    """Writes into a version's own record that it has been the champion, before another one is."""
    name = f"{version.path}/{VERSION_FILE}"
    if not version.commit.serial:  # of an earlier release
        return
    found = shelf.load(Version, name, "repair it")
    if found and not found.commit.serial:
        shelf.write(name, as_text(version))


def commit_by_hand(shelf: Place, head: Head, version: Version, how: str) -> Version:
    """Makes a version the champion as somebody says who has looked at `head`.

    Raises ModelError when it is the champion already, or the champion has changed meanwhile.
    """
    seen = head.name
    if version.version == seen:
        raise ModelError(f"{seen} is the champion already; name another version")
    while head.name == seen:
        recorded(shelf, version.version)  # it may have been pruned
        previous = version.previous if how == ROLLED_BACK else seen or version.previous
        if done := commit(shelf, head, replace(version, previous=previous), how):
            return done
        head = read_head(shelf, by_hand=True)
    raise ModelError(f"the champion was {seen or 'none'} and is {head.name} since; look at it and try again")


def remove_versions(shelf: Place, versions: list[Version]) -> list[str]:
    """Removes versions and what an earlier call has begun to remove; returns their names.

    The records go first: a version that is half removed is none. Then a commit that changes nothing makes
    void what others have read before, so that none of the removed can become the champion any more.
    """
    for item in versions:
        shelf.write(f"{REMOVED}/{item.version}/{VERSION_FILE}", as_text(item))
    while going := shelf.names(REMOVED):
        head, present = require_head(shelf)
        for name in going:
            if name in head.kept:  # it was made the champion meanwhile
                _put_back(shelf, name)
            else:
                shelf.remove(f"{VERSIONS}/{name}/{VERSION_FILE}")
        settle(shelf, present)
        stamp = replace(present.commit, serial=present.commit.serial + 1)
        if shelf.commit(replace(present, commit=stamp), head):
            break
    gone = shelf.names(REMOVED)
    for name in gone:
        shelf.remove(f"{VERSIONS}/{name}")
        shelf.remove(f"{REMOVED}/{name}")
    return gone


def _put_back(shelf: Place, name: str) -> None:
    record = shelf.read(f"{REMOVED}/{name}/{VERSION_FILE}")
    if record and shelf.read(f"{VERSIONS}/{name}/{VERSION_FILE}") is None:
        shelf.write(f"{VERSIONS}/{name}/{VERSION_FILE}", record)
    shelf.remove(f"{REMOVED}/{name}")
