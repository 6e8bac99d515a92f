"""Locked requirements: what the image's own files name, and what a user's may name beside them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from shardline.pipelines.image.settings import ImageSettings
from shardline.trainer.errors import SettingsError

#: The image's own requirements, a file for each variant, and build.txt for what builds packages.
LOCKS = Path(__file__).with_name("lock")

_PINNED = re.compile(r"^([A-Za-z0-9][\w.-]*)(?:\[[^]]*\])? ?===? ?([\w.+!-]+)", re.MULTILINE)
_LOCKED = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*)(\[[^]]*\])? ?(===? ?[\w.+!-]+|@ \S+)( ?;[^#]*?)?"
    r"(?P<hashes>( --hash=\w+:\w+)*)"
)
#: A name and its secret in a URL, which would stand in the layers of the image.
_SECRET = re.compile(r"https?://[^/\s@]+@")
_OPTION = re.compile(r"--(extra-)?index-url .*")


def read_requirements(image: ImageSettings) -> str:
    """Returns the locked requirements of a user, without Shardline itself; "" where there are none.

    Raises SettingsError when the file cannot be read, a line is not locked, only some lines have hashes, one
    has another version than the image, or a URL holds a secret.
    """
    if not image.requirements:
        return ""
    path, lock = Path(image.requirements), lock_of(image.variant)
    how = (
        "lock them: uv pip compile --generate-hashes --python-version 3.11 --python-platform "
        f"x86_64-unknown-linux-gnu -c {lock} requirements.in -o {path}"
    )
    kept, hashed = [], set()
    for number, line in _lines(path):
        if _SECRET.search(line):
            raise SettingsError(
                f"{path}, line {number}: a URL with a user or token, which everybody could read in the "
                "image; leave it out of the URL"
            )
        found = _LOCKED.fullmatch(line)
        if not found and not _OPTION.fullmatch(line):
            raise SettingsError(f"{path}, line {number}: {line!r} is not one version (NAME==VERSION); {how}")
        if found and normal(found["name"]) == "shardline":
            continue
        hashed |= {bool(found["hashes"])} if found else set()
        kept.append(line)
    if len(hashed) == 2:
        raise SettingsError(f"{path}: some requirements have hashes, and others have none; {how}")
    there = pinned(lock)
    for name, version in pinned(path).items():
        if there.get(name, version) != version:
            raise SettingsError(f"{path} names {name} {version}, and the image has {there[name]}; {how}")
    return "".join(f"{line}\n" for line in kept)


def lock_of(variant: str) -> Path:
    """Returns the lock file of a variant; SettingsError when it has none."""
    path = LOCKS / f"{variant}.txt"
    if not path.is_file():
        raise SettingsError(
            f"an image of the variant {variant} cannot be built: there is no {path.name} in {LOCKS}, "
            "since tensorflow-tpu has none for this TensorFlow; write a lock there, or use other accelerators"
        )
    return path


def pinned(requirements: Path) -> dict[str, str]:
    """Returns the versions in a file of locked requirements, by name; none of a file that cannot be read."""
    try:
        found = _PINNED.findall(requirements.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return {}  # the build refuses it, and says why
    return {normal(name): version for name, version in found}


def normal(name: str) -> str:
    """Returns a distribution's name as PyPA's specification compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the lines of a requirements file with their numbers: joined at a backslash, without comments."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise SettingsError(f"[image] requirements: {path} cannot be read: {why}") from None
    joined, begun = "", 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        begun = begun or number
        line = re.sub(r"(^|\s)#.*$", "", line).rstrip()
        joined += line.removesuffix("\\")
        if not line.endswith("\\"):
            if words := " ".join(joined.split()):
                yield begun, words
            joined, begun = "", 0
