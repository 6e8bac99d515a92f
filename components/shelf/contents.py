"""Contents of a shelf: its versions, and the commits by which one of them becomes the champion."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from shardline.components.model_store import (
    EVALUATION_FILE,
    EXPORT_FILE,
    MODEL_FILE,
    SAVED_MODEL,
    Export,
    Measured,
    Verdict,
    read_part,
)
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
from shardline.components.text import quality as describe_quality
from shardline.components.text import short
from shardline.trainer.errors import ModelError, SettingsError, ShardlineError

ROLLED_BACK = "rolled back"
_PROMOTE = "shardline champion promote"

#: What the name of a version begins with.
_TIME = "%Y%m%dT%H%M%S%f"
#: What may lie beside the first champion: what was begun, the history of runs, and what a new disk has.
_BESIDE = {VERSIONS, "commits", "runs", "datasets", "latest.json", "lost+found"}
#: A copy that was begun so long ago is no longer at work.
_LONGEST_COPY = timedelta(days=1)


def read_head(shelf: Place, *, by_hand: bool = False) -> Head:
    """Returns the present champion.

    Raises ModelError where its record is damaged, or its version is, or its record is gone: that is no empty
    shelf. With all of it may go on who says `by_hand` what the champion is to be.
    """
    head = shelf.head(by_hand=by_hand)
    if by_hand:
        return head
    record, promote = shelf.where(CHAMPION_FILE), f"{_PROMOTE} {shelf.where('')}"
    while head.version and shelf.read(f"{head.version.path}/{VERSION_FILE}") is None:
        before, head = head, shelf.head()
        if head == before:
            raise ModelError(
                f"{record} names {head.name}, which is no complete version; restore it, or name another one: "
                f"{promote} VERSION"
            )
    known = [item for item in complete(shelf, head) if item.been_champion] if head.version is None else []
    last = max(known, key=lambda item: (item.commit.serial, item.version), default=None)
    if last:
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


def require_champions(shelf: Place) -> None:
    """Refuses a place that holds something, but no champions: the directory of one model, or of a dataset.

    It would look like one without a champion yet. Raises SettingsError.
    """
    if shelf.names(VERSIONS):
        return
    found = [name for name in shelf.entries() if not name.startswith(".")]
    others = [name for name in found if name not in _BESIDE]
    if not others or CHAMPION_FILE in found:
        return
    where = shelf.where("")
    remedy = "give the directory of champions, or a new one"
    if {EXPORT_FILE, SAVED_MODEL, MODEL_FILE}.intersection(others):
        remedy = f"that is one model: '{_PROMOTE} DIR {where}/' makes it the champion in DIR, the one to give"
    there = short(", ".join(others), 80)
    raise SettingsError(f"{where} holds no champions ({CHAMPION_FILE}, {VERSIONS}/), but {there}; {remedy}")


def glance(shelf: Place) -> Head:
    """Returns the champion for whoever looks at versions alone: none where its record is damaged."""
    try:
        return shelf.head()
    except ModelError:
        return Head(None, 0)


def complete(shelf: Place, head: Head) -> list[Version]:
    """Returns the complete versions that are not being removed, oldest first.

    Raises ModelError where a record is damaged.
    """
    names = [name for name in shelf.names(VERSIONS) if name not in head.removing]
    return [record for name in names if (record := _record(shelf, name))]


def _record(shelf: Place, name: str) -> Version | None:
    """Returns a version's record, None where it is not complete; ModelError where it is damaged."""
    file = f"{VERSIONS}/{name}/{VERSION_FILE}"
    remedy = f"repair it, or remove {shelf.where(f'{VERSIONS}/{name}')}"
    found = shelf.load(Version, file, remedy)
    if found and found.version != name:
        raise ModelError(f"{shelf.where(file)} is the record of {found.version}; {remedy}")
    return found


def recorded(shelf: Place, name: str, head: Head) -> Version:
    """Returns a version's record; raises ModelError where there is no complete version of that name.

    One that is being removed is none: no commit that follows `head` can make it the champion.
    """
    if is_name(name) and name not in head.removing and (found := _record(shelf, name)):
        return found
    known = ", ".join(item.version for item in complete(shelf, head)) or "none"
    raise ModelError(f"no version {name} in {shelf.where('')}; there are {known}")


def stock(
    shelf: Place,
    exported: Path,
    verdict: Verdict,
    *,
    quality: str = "",
    run: str = "",
    source: str = "",
    override: str = "",
) -> Version:
    """Copies a validated model to the shelf and returns its record, which completes the version.

    What this `run` or `source` has put there already, and completed, is not copied again. Each copy has a
    directory of its own: an attempt that seems to be dead may be at work. The quality is that of the
    evaluation, unless given.
    """
    export, created = Export.read(exported), datetime.now(UTC)
    measured = None
    if not quality or (exported / EVALUATION_FILE).exists():
        measured = read_part(exported, EVALUATION_FILE, Measured)
    mark = _digest(exported, run or source)
    if (run or source) and (found := _of_mark(shelf, mark, shelf.head())):
        return found
    name = f"{created:{_TIME}}-{mark}-{os.urandom(2).hex()}"
    path = f"{VERSIONS}/{name}"
    shelf.put(exported, path)
    version = Version(
        version=name,
        path=path,
        quality=quality or (describe_quality(measured.metrics) if measured else ""),
        fingerprint=export.fingerprint,
        created=created.isoformat(timespec="seconds"),
        run=run,
        by=shelf.who(),
        source=(source or str(exported)).encode(errors="backslashreplace").decode(),  # names are bytes
        metrics={key: value for key, value in measured.metrics.items() if "[" not in key} if measured else {},
        verdict=verdict.words,
        blessed=verdict.blessed,
        override=override,
    )
    shelf.write(f"{path}/{VERSION_FILE}", as_text(version))
    return version


def first_of(shelf: Place, version: Version, head: Head) -> Version:
    """Returns the version that the attempts of a run which were at work at the same moment publish."""
    own = recorded(shelf, version.version, head)
    return (version.run and _of_mark(shelf, version.version.split("-")[1], head)) or own


def _of_mark(shelf: Place, mark: str, head: Head) -> Version | None:
    """Returns the complete version of a publication: the champion, one that has been, or the oldest."""
    names = [name for name in shelf.names(VERSIONS) if f"-{mark}-" in name and name not in head.removing]
    found = [record for name in names if (record := _record(shelf, name))]
    return min(found, key=lambda item: (item.version != head.name, not item.commit.serial), default=None)


def _digest(exported: Path, publication: str) -> str:
    """Returns a digest of the content and the publication, a run or a source: part of a version's name."""
    digest = hashlib.sha256(os.fsencode(publication))
    for path in files_below(exported):
        digest.update(os.fsencode(path.relative_to(exported)))
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:12]


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

    So goes what a publisher has begun a day ago and not completed.

    First a commit says which, and changes no champion: from then on they cannot become it. Then the records
    go, so that a version that is half removed is none. The next call finishes what was killed on the way.
    """
    while True:
        head, present = require_head(shelf)
        whole = [item.version for item in complete(shelf, head)]
        others = [name for name in whole if name not in head.kept]
        abandoned = set(_begun_long_ago(shelf)).difference(whole, head.kept, head.removing)
        going = (*_left(shelf, head), *others[: max(0, len(others) - keep)], *abandoned)
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


def _begun_long_ago(shelf: Place) -> Iterator[str]:
    latest = f"{datetime.now(UTC) - _LONGEST_COPY:{_TIME}}"
    return (name for name in shelf.names(VERSIONS) if re.match(r"\d{8}T\d{6,}-", name) and name < latest)
