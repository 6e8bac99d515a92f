"""Contents of the image: locked requirements, its modules, and plug-ins of a run that it lacks."""

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
#: Directories without source code, whether git ignores them or not.
NOT_CODE = {"build", "dist", "node_modules", "runs", "site-packages", "venv", "__pycache__"}

_PINNED = re.compile(r"^([A-Za-z0-9][\w.-]*)(?:\[[^]]*\])? ?===? ?([\w.+!-]+)", re.MULTILINE)
_LOCKED = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*)(\[[^]]*\])? ?(===? ?[\w.+!-]+|@ \S+)( ?;[^#]*?)?"
    r"(?P<hashes>( --hash=\w+:\w+)*)"
)
#: A user and secret in a URL, which would be in the layers of the image.
_SECRET = re.compile(r"https?://[^/\s@]+@")


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
                f"{path}, line {number}: a URL with a user or token, which can be read in the image; "
                "leave it out of the URL"
            )
        match = _LOCKED.fullmatch(line)
        if not match and not re.fullmatch(r"--(extra-)?index-url .*", line):
            raise SettingsError(
                f"{path}, line {number}: {line!r} is not a locked version (NAME==VERSION); {how}"
            )
        if match and _normalized(match["name"]) == "shardline":
            continue
        hashed |= {bool(match["hashes"])} if match else set()
        kept.append(line)
    if len(hashed) == 2:
        raise SettingsError(f"{path}: some requirements have hashes, and others have none; {how}")
    locked = pinned(lock)
    for name, version in pinned(path).items():
        if locked.get(name, version) != version:
            raise SettingsError(f"{path} names {name} {version}, and the image has {locked[name]}; {how}")
    return "".join(f"{line}\n" for line in kept)


def lock_of(variant: str) -> Path:
    """Returns the lock file of a variant."""
    return LOCKS / f"{variant}.txt"


def pinned(requirements: Path) -> dict[str, str]:
    """Returns the versions in a file of locked requirements, by name; empty where it cannot be read."""
    try:
        versions = _PINNED.findall(requirements.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return {}  # the build reports it
    return {_normalized(name): version for name, version in versions}


def _normalized(name: str) -> str:
    """Returns the normalized name of a distribution, by PyPA's specification."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the lines of a requirements file with their numbers: joined at a backslash, without comments."""
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", "it is not UTF-8")
        raise SettingsError(f"[image] requirements: {path} cannot be read: {why}") from None
    joined, first = "", 0
    for number, line in enumerate([*content.splitlines(), ""], 1):
        first = first or number
        line = re.sub(r"(^|\s)#.*$", "", line).rstrip()
        joined += line.removesuffix("\\")
        if not line.endswith("\\"):
            if requirement := " ".join(joined.split()):
                yield first, requirement
            joined, first = "", 0


def missing_from_image(image: ImageSettings, parameters: Mapping[str, Any]) -> list[str]:
    """Returns an error line for each plug-in of a run that the image lacks.

    The image's paths are relative to here (`ImageSettings.below`). Of the parameters of the run, only those
    that name a module are checked.
    """
    errors = []
    for name, reference in plugins_of(parameters).items():
        module = reference.partition(":")[0]
        top = module.partition(".")[0]
        paths = [path for package in image.packages for path in _module_files(Path(package), module)]
        if not paths and not _provides(image, top):
            why = (
                f"{top} in packages of [image] has no module {module}; name one of its modules"
                if top in {Path(package).resolve().name for package in image.packages}
                else f"the image {image.name} has no module {top}; add its directory to the settings, "
                f'[image] packages = ["../{top}"] (a path from the settings file), or its '
                "distribution to [image] requirements, and build the image again"
            )
            errors.append(f"{name}={reference}: {why}")
        elif file := next(filter(Path.is_file, (path for path in paths if path.suffix == ".py")), None):
            try:
                plugins.check_defined_in(file, reference, name)
            except ModelError as error:
                errors.append(error.line)
    return errors


def is_project(directory: Path) -> bool:
    """Whether a directory of [image] packages is a project, which is installed rather than copied."""
    return any((directory / name).is_file() for name in PROJECT_FILES)


def _module_files(package: Path, module: str) -> Iterator[Path]:
    """Yields the paths of a module in a directory of [image] packages; in a project, of all its folders."""
    first, *rest = module.split(".")
    own = package.resolve()
    roots = [own.parent] if own.name == first else []
    if is_project(package):
        roots = []
        for root, directories, _ in os.walk(package):
            directories[:] = [name for name in directories if name[0] != "." and name not in NOT_CODE]
            roots.append(Path(root))
    elif roots and not own.is_dir():
        yield own  # not on this machine: only the name is known
    for path in (root.joinpath(first, *rest) for root in roots):
        if path.is_dir():
            yield from (path / "__init__.py", path)
        # Also a compiled module, as in fast.cpython-311-x86_64-linux-gnu.so.
        yield from (file for file in path.parent.glob(f"{path.name}.*") if file.suffix in (".py", ".so"))


def _provides(image: ImageSettings, top: str) -> bool:
    """Whether Python, Shardline or a requirement provides a module, as far as is known without a build."""
    if top == "shardline" or top in sys.stdlib_module_names:
        return True
    own = set(pinned(Path(image.requirements))) if image.requirements else set()
    locked = own | set(pinned(LOCKS / f"{image.variant or 'cpu'}.txt"))
    # The modules of a distribution are known where it is installed.
    installed = metadata.packages_distributions()
    return (
        _normalized(top) in locked
        or any(_normalized(name) in locked for name in installed.get(top, ()))
        or (
            top not in installed
            and not own <= {_normalized(name) for names in installed.values() for name in names}
        )
    )
