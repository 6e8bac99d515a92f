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
    while head.version and shelf.read(f"{head.version.path}/{VERSION_FILE}") is None:
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


def recorded(shelf: Place, name: str, head: Head) -> Version:
    """Returns a version's record; raises ModelError where there is no complete version of that name.

    One that is being removed is none: no commit that follows `head` can make it the champion.
    """
    record = f"{VERSIONS}/{name}/{VERSION_FILE}"
    is_there = is_name(name) and name not in head.removing
    if is_there and (found := shelf.load(Version, record, "repair it")):
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
        return recorded(shelf, name, shelf.head())
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
        verdict=verdict.words,
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
        removed = shelf.head().removing
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
    stamp = Commit(serial + 1, how, replaced=head.name, by=shelf.who(), at=at, removing=_left(shelf, head))
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
        shelf.replace(name, as_text(version))


def _left(shelf: Place, head: Head) -> tuple[str, ...]:
    """Returns the versions that are being removed and are there still, if only in part."""
    return tuple(set(head.removing).intersection(shelf.names(VERSIONS))) if head.removing else ()


def commit_by_hand(shelf: Place, head: Head, version: Version, how: str) -> Version:
    """Makes a version the champion as somebody says who has looked at `head`.

    Raises ModelError when it is the champion already, or the champion has changed meanwhile.
    """
    seen = head.name
    if version.version == seen:
        raise ModelError(f"{seen} is the champion already; name another version")
    while head.name == seen:
        recorded(shelf, version.version, head)  # it may have been pruned
        previous = version.previous if how == ROLLED_BACK else seen or version.previous
        if done := commit(shelf, head, replace(version, previous=previous), how):
            return done
        head = read_head(shelf, by_hand=True)
    raise ModelError(f"the champion was {seen or 'none'} and is {head.name} since; look at it and try again")


def remove_versions(shelf: Place, keep: int) -> list[str]:
    """Removes all versions but those that are in use and the `keep` newest others; returns their names.

    First a commit says which, and changes no champion: from then on they cannot become it. Then the records
    go, so that a version that is half removed is none. The next call finishes what was killed on the way.
    """
    while True:
        head, present = require_head(shelf)
        others = [
            item.version for item in complete(shelf) if item.version not in {*head.kept, *head.removing}
        ]
        going = (*_left(shelf, head), *others[: max(0, len(others) - keep)])
        if not going:
            return []
        settle(shelf, present)
        stamp = replace(present.commit, serial=present.commit.serial + 1, removing=going)
        if shelf.commit(replace(present, commit=stamp), head):
            break
    for name in going:
        shelf.remove(f"{VERSIONS}/{name}/{VERSION_FILE}")
    for name in going:
        shelf.remove(f"{VERSIONS}/{name}")
    return sorted(going)
