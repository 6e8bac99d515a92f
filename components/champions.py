"""Champions: where blessed models are published, version by version, and the way back.

A version is a copy of the directory that a validation fills (`model_store`):

    CHAMPION/versions/<version>/               one version
    CHAMPION/versions/<version>/version.json   its record (`Version`), written last: completes the version
    CHAMPION/champion.json                     the record of the champion, and of the commit that made it so

The champion changes by commits, each of which follows the one that was read (`shelf`): what is published
replaces the version that its model was judged against, or nothing. A reader sees the old champion or the
new one, whatever happens to the publisher in between. Nothing here renames a directory: on a Cloud Storage
mount that is not atomic and, by default, not even possible.
"""

from __future__ import annotations

import hashlib
import os
import re
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from shardline.components.model_store import BLESSING_FILE, EXPORT_FILE, Export, Verdict, read_part
from shardline.components.run_record import on_platform
from shardline.components.shelf import contents
from shardline.components.shelf.disk import Disk
from shardline.components.shelf.place import Place
from shardline.components.shelf.version import CHAMPION_FILE, VERSIONS, Head, Version, is_name
from shardline.trainer import files
from shardline.trainer.errors import ModelError, SettingsError

#: How the URI of a place in a bucket begins.
_MOUNTED = ("gs://", "/gcs/")
#: Characters of a source in the name of a directory.
_LONGEST_NAME = 100


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


def open_shelf(champion: str | os.PathLike[str]) -> Place:
    """Returns the shelf at a path or URI: a bucket goes through the storage client.

    Where SHARDLINE_GCS_ROOT stands in for the mount, a bucket is a directory there. Raises SettingsError when
    it lacks the bucket, or a URI names none.
    """
    uri = os.fspath(champion)
    if not uri.startswith(_MOUNTED):
        return Disk(Path(uri))
    if os.environ.get(files.GCS_ROOT_VARIABLE):
        return Disk(champion_directory(uri), mounted=True)
    from shardline.components.shelf.bucket import Bucket

    return Bucket(uri)


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


def current(champion: str | os.PathLike[str]) -> Version | None:
    """Returns the present champion, or None where nothing has been published yet.

    Raises ModelError when champion.json is damaged or names a version that is not there, PlatformError when a
    bucket cannot be read.
    """
    return contents.read_head(open_shelf(champion)).version


def require_current(champion: str | os.PathLike[str]) -> Version:
    """Returns the present champion; raises ModelError where there is none, or as `current` does."""
    return contents.require_head(open_shelf(champion))[1]


def require_version(champion: str | os.PathLike[str], version: str) -> Version:
    """Returns a version's record; raises ModelError where there is none, with those that there are."""
    shelf = open_shelf(champion)
    return contents.recorded(shelf, version, contents.glance(shelf))


def complete_versions(champion: str | os.PathLike[str]) -> list[Version]:
    """Returns the complete versions on a shelf, oldest first, also where the champion's record is damaged.

    Raises ModelError when one of theirs is damaged, PlatformError when a bucket cannot be read.
    """
    shelf = open_shelf(champion)
    return contents.complete(shelf, contents.glance(shelf))


def published_by(champion: str | os.PathLike[str], run: str) -> Version | None:
    """Returns the version that a run has made the champion, if it has, also where it is so no longer."""
    shelf = open_shelf(champion)
    head = contents.read_head(shelf)
    present = head.version
    known = [present] if present and present.run == run else reversed(contents.complete(shelf, head))
    return next((item for item in known if run and item.run == run and item.commit.serial), None)


def where(champion: str | os.PathLike[str], version: str) -> str:
    """Returns the path or URI of a version's directory."""
    return open_shelf(champion).where(f"{VERSIONS}/{version}")


def fetched(champion: str | os.PathLike[str], version: Version) -> AbstractContextManager[Path]:
    """Yields a local path of a version's directory; of a bucket without a mount a temporary copy."""
    return open_shelf(champion).fetched(version.path)


def read_export(champion: str | os.PathLike[str], version: Version) -> Export:
    """Returns what export.json says of a version; raises ModelError when it is missing or damaged."""
    shelf, name = open_shelf(champion), f"{version.path}/{EXPORT_FILE}"
    export = shelf.load(Export, name, "publish the model again")
    if export is None:
        raise ModelError(f"no {shelf.where(name)}: the version is damaged; publish the model again")
    return export


def require_shelf(uri: str | os.PathLike[str]) -> None:
    """Refuses a local directory that is not there, and any that holds something other than champions.

    A disk that is not mounted, and the directory of one model, would look like a shelf without a champion. A
    prefix in a bucket is there as soon as the bucket is. Raises SettingsError.
    """
    shelf = open_shelf(uri)
    if isinstance(shelf, Disk) and not shelf.mounted and not shelf.path.is_dir():
        raise SettingsError(
            f"there is no directory {shelf.path} for champions: mount the disk that it is on, or begin anew "
            f"with mkdir -p {shelf.path}"
        )
    contents.require_champions(shelf)


def check_champion(uri: str) -> None:
    """Checks that a model can be published at a URI, and makes nothing there.

    Raises SettingsError or PlatformError when the place is not there, cannot be reached or cannot be written
    to, ModelError when the present champion is damaged.
    """
    shelf = open_shelf(uri)
    shelf.check()
    require_shelf(uri)
    contents.read_head(shelf)


def check_judged(exported: Path, champion: str, run: str = "") -> None:
    """Refuses a model that cannot be published, before it is served: its judgement is out of date.

    Raises ModelError as `publish` does; where `champion` is "" nothing is published, and nothing refused.
    """
    if not champion:
        return
    verdict = read_part(exported, BLESSING_FILE, Verdict)
    shelf = open_shelf(champion)
    head = contents.read_head(shelf)
    if head.name != (verdict.champion or "") and not published_by(champion, run):
        raise _outdated(verdict, head, shelf, str(exported))


def publish(exported: Path, champion: str | os.PathLike[str], *, quality: str, run: str = "") -> Version:
    """Makes an exported model the champion, if the champion is still the one that it was judged against.

    Each file is copied into a new directory and forced to disk. After a crash or an error before the commit
    the previous champion is untouched. Publishing again makes a new version, unless `run`, the name of a run,
    is given and has published this model already, or begun to.

    Raises:
        ModelError: When `exported` is not a complete validation or its model is not blessed, the present
            champion is damaged, or another one has come since the judgement: the new version stays on the
            shelf then, and can be promoted.
        SettingsError: When `champion` cannot be written to.
        RunError: When writing fails on the way.
        PlatformError: When the bucket cannot be reached, or refuses.
    """
    verdict = read_part(exported, BLESSING_FILE, Verdict)
    if not verdict.blessed:
        raise ModelError(f"the model in {exported} is not blessed ({verdict.reason}); it is not published")
    shelf = open_shelf(champion)
    contents.require_champions(shelf)
    stocked = contents.stock(shelf, exported, verdict, quality=quality, run=run)
    while True:
        head = contents.read_head(shelf)  # before the record, which whoever replaces a champion completes
        found = contents.first_of(shelf, stocked, head)
        if head.version and head.name == found.version:
            contents.settle(shelf, head.version)
            return head.version
        if found.commit.serial:  # by an earlier attempt, and replaced since
            return found
        if head.name != (verdict.champion or ""):
            raise _outdated(verdict, head, shelf, found.version)
        if done := contents.commit(shelf, head, replace(found, previous=head.name), "published"):
            return done


def _outdated(verdict: Verdict, head: Head, shelf: Place, model: str) -> ModelError:
    return ModelError(
        f"the model was judged against {verdict.champion or 'no champion'}, the champion is "
        f"{head.name or 'none'} since; validate it again, or promote it by hand: shardline champion promote "
        f"{shelf.where('')} {model}"
    )


def promote(champion: str | os.PathLike[str], wanted: str, *, override: str = "") -> Version:
    """Makes a version of the shelf, or the model of a validated directory (gs:// too), the champion by hand.

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
    require_shelf(champion)
    shelf = open_shelf(champion)
    head = contents.read_head(shelf, by_hand=True)
    if is_name(wanted):
        found = contents.recorded(shelf, wanted, head)
        _check_blessed(found.blessed, found.verdict, wanted, override)
    else:
        with open_shelf(wanted).fetched("") as exported:
            verdict = read_part(exported, BLESSING_FILE, Verdict)
            _check_blessed(verdict.blessed, verdict.reason, wanted, override)
            found = contents.stock(shelf, exported, verdict, source=wanted, override=override)
    found = replace(found, override="" if found.blessed else override)
    return contents.commit_by_hand(shelf, head, found, "promoted")


def _check_blessed(blessed: bool, reason: str, what: str, override: str) -> None:
    if not blessed and not override.strip():
        raise ModelError(
            f"{what} is not blessed ({reason}); give --override REASON to make it the champion all the same"
        )


def rollback(champion: str | os.PathLike[str], version: str = "") -> Version:
    """Makes an earlier version, "" for the one before, the champion again; nothing is removed or copied.

    Raises:
        ModelError: When there is no champion or no such version, it never was the champion, a record is
            damaged, or the champion has changed meanwhile.
        RunError, PlatformError: When writing fails; the champion is unchanged then.
    """
    shelf = open_shelf(champion)
    head, present = contents.require_head(shelf)
    wanted = version or present.previous
    if not wanted:
        raise ModelError(
            f"{present.version} replaced no version; name the one to go to, 'shardline champion list "
            f"{shelf.where('')}' lists them"
        )
    found = contents.recorded(shelf, wanted, head)
    if not found.been_champion:
        raise ModelError(
            f"{wanted} never was the champion; look at it, then: shardline champion promote "
            f"{shelf.where('')} {wanted}"
        )
    return contents.commit_by_hand(shelf, head, found, contents.ROLLED_BACK)


def prune(champion: str | os.PathLike[str], keep: int) -> list[str]:
    """Removes all versions but the champion, what it replaced, and the `keep` newest others.

    What a call that was killed has begun to remove is removed by the next one, too. Returns the names of what
    it has removed. Raises ModelError when there is no champion or a record is damaged: nothing is removed
    then.
    """
    return contents.remove_versions(open_shelf(champion), keep)
