"""Creation of a project: a package with model and source, settings, parameters, tests, Makefile and CI."""

from __future__ import annotations

import importlib.metadata
import json
import keyword
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardline.trainer.base.errors import SettingsError, page, printable
from shardline.trainer.base.files import write_bytes

if TYPE_CHECKING:
    from shardline.pipelines.project.data import Data

_TEMPLATE = Path(__file__).with_name("template")
#: Placeholder for the package's name in the names and the content of the template's files.
_PACKAGE = "my_package"
#: Prefix of a file or folder whose name begins with a dot: package data has no hidden files.
_DOT = "dot_"
#: Directories of the project itself, and import names of Shardline and its dependencies.
_RESERVED = (
    *("compiled", "params", "runs", "test", "tests", "wheels"),
    *("keras", "kfp", "numpy", "shardline", "tensorflow", "trainer"),
)
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


#: Kinds of projects, and their sample data.
KINDS: Mapping[str, str] = {
    "images": "600 drawn circles, squares and triangles",
    "table": "333 penguins, a row of text and numbers for each",
    "text": "321 sentences in five languages",
}


def package_name(directory: Path) -> str:
    """Returns the package's name for a project in a directory: leaf_net for leaf-net."""
    return re.sub(r"[^a-z0-9]+", "_", Path(os.path.abspath(directory)).name.lower()).strip("_")


def check_name(name: str) -> None:
    """Checks the name of a package; SettingsError when it is invalid or in use."""
    if not _NAME.fullmatch(name) or len(name) > 40 or keyword.iskeyword(name):
        raise SettingsError(
            f"{name!r} is not a name of a package: up to 40 lower-case letters, digits and single "
            "underscores, a letter first; choose another with --name"
        )
    elsewhere = [entry for entry in sys.path if entry and Path(entry) != Path.cwd()]
    if name in (*sys.stdlib_module_names, *_RESERVED) or PathFinder.find_spec(name, elsewhere):
        raise SettingsError(
            f"{name} is the name of another module or directory of a project; choose another with --name"
        )


def write_project(
    directory: Path, kind: str, name: str, requirement: str, data: Data | None = None
) -> list[Path]:
    """Writes a project of one of `KINDS` and returns its files, relative to the directory.

    `requirement` is Shardline's requirement for pip. Without `data` of the user the project has sample data.
    Raises SettingsError when the name cannot be used, or the directory has other files than a .git.
    """
    check_name(name)
    if directory.exists() and (
        not directory.is_dir() or {path.name for path in directory.iterdir()} - {".git"}
    ):
        raise SettingsError(f"{directory} is not an empty directory; name a new one")
    values = {
        _PACKAGE: name,
        **(_of_data(data) if data else _of_sample(kind, name)),
        "@SHARDLINE@": requirement.replace("$", "$$").replace("#", r"\#"),
        "@HOME@": page("index"),
        "@VERTEX@": page("vertex"),
        "@OPERATING@": page("operating"),
    }
    written = []
    for root in (_TEMPLATE / "common", _TEMPLATE / kind):
        for file in sorted(path for path in root.rglob("*") if path.is_file()):
            if re.search(r"/(\.|__pycache__)", str(file.relative_to(root.parent))):
                continue  # left by tools
            if data and (file.name == "source.py" or file.suffix == ".csv"):
                continue
            parts = [_replaced(part, values) for part in file.relative_to(root).parts]
            path = Path(*(f".{part.removeprefix(_DOT)}" if part.startswith(_DOT) else part for part in parts))
            target = directory / path
            written.append(path)
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                write_bytes(target, _replaced(file.read_text(encoding="utf-8"), values).encode())
            except OSError:  # part of a project would be in the way of the next try; a .git stays
                for made in {directory / each.parts[0] for each in written}:
                    shutil.rmtree(made) if made.is_dir() else made.unlink(missing_ok=True)
                raise
    return sorted(written)


def _of_sample(kind: str, name: str) -> dict[str, str]:
    source = (
        f"| `{name}/source.py` | the data: here {KINDS[kind]}. Yours: yield your own examples, or name a "
        "known form such as `images:gs://BUCKET/photos` or `table:PATH` as `source` in `params.toml` |"
    )
    # As there are few examples, more of them judge the model than the usual tenth.
    split = {"train": 0.7, "validation": 0.1, "test": 0.2}
    given = {"source": f"{name}.source:Source", "epochs": 30, "rules": ["accuracy >= 0.8"], "split": split}
    return {"@SOURCE@": source, "@RUN@": _toml(given), "\n@RUN_VERTEX@": ""}


def _of_data(data: Data) -> dict[str, str]:
    form, _, path = data.parameters["source"].partition(":")
    uri, recursive = f"gs://my-bucket/data/{Path(path).name}", " --recursive" * (form != "table")
    copied = printable(shlex.quote(path))
    upload = f"# Upload the data first: gcloud storage cp{recursive} {copied} gs://my-bucket/data/\n"
    return {
        "@SOURCE@": f"| `{printable(path)}` | the data, which `params.toml` names as `source` |",
        "@RUN@": _toml(data.parameters),
        "@RUN_VERTEX@": upload + _toml({"source": f"{form}:{uri}"}),
        '("text",)': f"({''.join(f'{_quoted(name)}, ' for name in data.texts).rstrip(' ')})",
        "      - run: make run\n": "      # make run needs the data, which are not in the repository.\n",
    }


def _toml(parameters: Mapping[str, Any]) -> str:
    """Returns parameters in TOML, whose texts, numbers and booleans are JSON's; objects come last."""
    lines, tables = list[str](), list[str]()
    for name, value in parameters.items():
        if not isinstance(value, dict):
            lines.append(f"{name} = {_quoted(value)}")
            continue
        tables += ["", f"[{name}]"] if value else []
        for key, item in value.items():
            bare = re.fullmatch(r"[A-Za-z0-9_-]+", key)
            tables.append(f"{key if bare else _quoted(key)} = {_quoted(item)}")
    return "\n".join([*lines, *tables])


def _replaced(text: str, values: Mapping[str, str]) -> str:
    """Replaces all tokens at once: a value may look like one."""
    tokens = "|".join(map(re.escape, sorted(values, key=len, reverse=True)))
    return re.sub(tokens, lambda match: values[match[0]], text)


def _quoted(value: Any) -> str:
    """Returns a value as TOML and as Python write it: as JSON, but with no code for half of an emoji."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def own_requirement() -> str:
    """Returns the requirement from which pip installs this same Shardline, with the extra for local runs.

    It is a wheel, a git URL or a clone where it was installed from one (PEP 610), else its release.
    """
    distribution = importlib.metadata.distribution("shardline")
    recorded = json.loads(distribution.read_text("direct_url.json") or "{}")
    if not recorded.get("url"):
        return f"shardline[local]=={distribution.version}"
    url, vcs = recorded["url"], recorded.get("vcs_info")
    if vcs:
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return f"shardline[local] @ {url}"
