"""Contents of the image: locked requirements, modules that it holds, and plug-ins of a run that it lacks."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from shardline.components.configure.fingerprint import plugins_of
from shardline.pipelines.image.settings import ImageSettings
from shardline.trainer.base import plugins
from shardline.trainer.base.errors import ModelError, SettingsError

#: The image's own requirements, a file for each variant, and build.txt for what builds packages.
LOCKS = Path(__file__).with_name("lock")
#: Files by which a directory is a project, which is installed, and not a package, which is copied.
PROJECT_FILES = ("pyproject.toml", "setup.cfg", "setup.py")
#: Directories without code of their own, also where git does not say so.
NOT_CODE = {"build", "dist", "node_modules", "runs", "site-packages", "venv", "__pycache__"}

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
        if found and _normalized(found["name"]) == "shardline":
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
    return {_normalized(name): version for name, version in found}


def _normalized(name: str) -> str:
    """Returns a distribution's name as PyPA's specification compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the lines of a requirements file with their numbers: joined at a backslash, without comments."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", "it is no text in UTF-8")
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


def missing_from_image(image: ImageSettings, parameters: Mapping[str, Any]) -> list[str]:
    """Returns what is wrong with the plug-ins of a run, one line each: those that the image does not hold.

    Args:
        image: The image, as the settings have it, with paths that are true from here (`ImageSettings.below`).
        parameters: Parameters of the run, by name; those that name no module are not looked at.
    """
    found = []
    for name, reference in plugins_of(parameters).items():
        module = reference.partition(":")[0]
        top = module.partition(".")[0]
        there = [place for package in image.packages for place in _module_files(Path(package), module)]
        if not there and not _provides(image, top):
            why = (
                f"{top} in packages of [image] has no module {module}; name one that it has"
                if top in {Path(package).resolve().name for package in image.packages}
                else f"the image {image.name} has no module {top}; add its directory to the settings, "
                f'[image] packages = ["../{top}"] (a path from the settings file), or its '
                "distribution to [image] requirements, and build the image again"
            )
            found.append(f"{name}={reference}: {why}")
        elif file := next(filter(Path.is_file, (at for at in there if at.suffix == ".py")), None):
            try:
                plugins.check_defined_in(file, reference, name)
            except ModelError as error:
                found.append(error.line)
    return found


def is_project(directory: Path) -> bool:
    """Whether a directory of [image] packages is a project, which is installed."""
    return any((directory / name).is_file() for name in PROJECT_FILES)


def _module_files(package: Path, module: str) -> Iterator[Path]:
    """Yields where a directory of [image] packages has a module: its own, or anywhere in a project."""
    first, *rest = module.split(".")
    own = package.resolve()
    roots = [own.parent] if own.name == first else []
    if is_project(package):
        roots = []
        for root, directories, _ in os.walk(package):
            directories[:] = [name for name in directories if name[0] != "." and name not in NOT_CODE]
            roots.append(Path(root))
    elif roots and not own.is_dir():
        yield own  # not on this machine: taken at its name
    for path in (root.joinpath(first, *rest) for root in roots):
        if path.is_dir():
            yield from (path / "__init__.py", path)
        # Also a module that was compiled, as in fast.cpython-311-x86_64-linux-gnu.so.
        yield from (file for file in path.parent.glob(f"{path.name}.*") if file.suffix in (".py", ".so"))


def _provides(image: ImageSettings, top: str) -> bool:
    """Whether Python, Shardline or a requirement brings a module, as far as can be told without a build."""
    if top == "shardline" or top in sys.stdlib_module_names:
        return True
    own = set(pinned(Path(image.requirements))) if image.requirements else set()
    locked = own | set(pinned(LOCKS / f"{image.variant or 'cpu'}.txt"))
    # What a distribution calls its modules is known where it is installed.
    installed = metadata.packages_distributions()
    return (
        _normalized(top) in locked
        or any(_normalized(name) in locked for name in installed.get(top, ()))
        or (
            top not in installed
            and not own <= {_normalized(name) for names in installed.values() for name in names}
        )
    )
