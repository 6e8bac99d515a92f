"""A new project: a package with model and source, settings, parameters, tests, Makefile and CI."""

from __future__ import annotations

import importlib.metadata
import json
import keyword
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from shardline.trainer.base.errors import SettingsError
from shardline.trainer.base.files import write_bytes

_TEMPLATE = Path(__file__).with_name("template")
_COMMON = "common"
#: Stands in the names and the content of the template's files for the package's name.
_PACKAGE = "my_package"
#: Begins the name of a file or folder that begins with a dot: package data has no hidden files.
_DOT = "dot_"
#: Directories of the project itself, and names under which Shardline and what it brings are imported.
_TAKEN = (
    "compiled",
    "keras",
    "kfp",
    "numpy",
    "params",
    "runs",
    "shardline",
    "tensorflow",
    "tests",
    "trainer",
)
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_HOME = "https://github.com/shardline/shardline"


@dataclass(frozen=True)
class ProjectKind:
    """A kind of data: the template's, in words, the epochs that it needs, and an accuracy reached easily."""

    data: str
    epochs: int
    min_accuracy: float


KINDS: Mapping[str, ProjectKind] = {
    "images": ProjectKind("600 drawn circles, squares and triangles", 20, 0.8),
    "table": ProjectKind("333 penguins, a row of text and numbers for each", 30, 0.9),
    "text": ProjectKind("321 sentences in five languages", 20, 0.8),
}


def package_name(directory: Path) -> str:
    """Returns the name of the package that a project in a directory gets: leaf-net becomes leaf_net."""
    return re.sub(r"[^a-z0-9]+", "_", Path(os.path.abspath(directory)).name.lower()).strip("_")


def check_name(name: str) -> None:
    """Checks that a package can be called so; SettingsError when it cannot, or another has the name."""
    if not _NAME.fullmatch(name) or len(name) > 40 or keyword.iskeyword(name):
        raise SettingsError(
            f"{name!r} is no name of a package: up to 40 small letters, digits and single underscores, a "
            "letter first; choose another with --name"
        )
    elsewhere = [entry for entry in sys.path if entry and Path(entry) != Path.cwd()]
    if name in (*sys.stdlib_module_names, "test", *_TAKEN) or PathFinder.find_spec(name, elsewhere):
        raise SettingsError(
            f"{name} is the name of something else that a project imports or holds; choose another with "
            "--name"
        )


def write(directory: Path, kind: str, name: str, requirement: str) -> list[Path]:
    """Writes a project of one of `KINDS` and returns its files, relative to the directory.

    `requirement` is what pip installs Shardline from. Raises SettingsError when the name cannot be used, or
    the directory holds something besides a .git.
    """
    check_name(name)
    _check_directory(directory)
    chosen = KINDS[kind]
    values = {
        _PACKAGE: name,
        "@SHARDLINE@": requirement.replace("$", "$$").replace("#", r"\#"),
        "@HOME@": _HOME,
        "@DATA@": chosen.data,
        "@EPOCHS@": str(chosen.epochs),
        "@MIN_ACCURACY@": str(chosen.min_accuracy),
    }
    written = []
    for root in (_TEMPLATE / _COMMON, _TEMPLATE / kind):
        for file in sorted(path for path in root.rglob("*") if path.is_file()):
            if re.search(r"/(\.|__pycache__)", str(file.relative_to(root.parent))):
                continue  # which tools have left there
            parts = [_replaced(part, values) for part in file.relative_to(root).parts]
            path = Path(*(f".{part.removeprefix(_DOT)}" if part.startswith(_DOT) else part for part in parts))
            target = directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(target, _replaced(file.read_text(encoding="utf-8"), values).encode())
            written.append(path)
    return sorted(written)


def _replaced(text: str, values: Mapping[str, str]) -> str:
    for token, value in values.items():
        text = text.replace(token, value)
    return text


def _check_directory(directory: Path) -> None:
    try:
        there = sorted({entry.name for entry in directory.iterdir()} - {".git"})
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise SettingsError(f"{directory} is a file; name a new directory") from None
    if there:
        more = f" and {len(there) - 1} more" if len(there) > 1 else ""
        raise SettingsError(f"{directory} is not empty: it holds {there[0]}{more}; name a new directory")


def origin() -> str:
    """Returns what pip installs this very Shardline from, with all that runs a pipeline here.

    Wherever it was installed from: a wheel, a git URL, a clone (PEP 610 says which); else its release.
    """
    try:
        distribution = importlib.metadata.distribution("shardline")
    except importlib.metadata.PackageNotFoundError:
        return "shardline[local]"
    recorded = json.loads(distribution.read_text("direct_url.json") or "{}")
    if not recorded.get("url"):
        return f"shardline[local]=={distribution.version}"
    url, vcs = recorded["url"], recorded.get("vcs_info")
    if vcs:
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    if subdirectory := recorded.get("subdirectory"):
        url = f"{url}#subdirectory={subdirectory}"
    return f"shardline[local] @ {url}"
