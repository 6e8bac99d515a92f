"""Inputs of the battery: files that are missing, damaged or hostile, and good ones with one thing changed.

A row of the table names an input with @. `place` makes it in the directory of the row:

    @empty.toml, @missing.yaml ...   one of `DAMAGED`, whatever its ending
    @s.toml{image = 1}               a file with this content
    @pipeline, @dataset ...          one of `GOOD`
    @dataset{splits.train=-1}        the same, with this JSON in its main file; several are parted by ;
    @dataset{<empty}                 the same, with a damaged main file
    @zipbomb.keras ...               one of `HOSTILE`
    @deep-text                       no file, but a JSON text that is nested very deep
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import shutil
import stat
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from shardline.trainer import manifest as manifests
from tests.helpers import checks

ROOT = Path(__file__).resolve().parents[2]

_WORD = re.compile(r"(?<!\w)@([\w.-]+)(?:\{(.*)\})?", re.DOTALL)
_DEEP = 100_000
#: Stands for a text, not for a file.
DEEP_TEXT = "deep-text"


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(8 * 2**30)  # sparse


def _deep(path: Path) -> None:
    start = "a = " if path.suffix == ".toml" else ""
    path.write_text(start + "[" * _DEEP + "]" * _DEEP)


def _binary(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 8)


#: What may stand where a file is expected, by name.
DAMAGED: dict[str, Callable[[Path], Any]] = {
    "missing": lambda path: None,
    "empty": lambda path: path.write_bytes(b""),
    "folder": lambda path: path.mkdir(),
    "binary": _binary,
    "huge": _huge,
    "pipe": os.mkfifo,
    "zero": lambda path: path.symlink_to("/dev/zero"),
    "loop": _loop,
    "latin1": lambda path: path.write_bytes(b'name = "caf\xe9"\n'),
    "nul": lambda path: path.write_bytes(b'image = "a\0b"\n'),
    "deep": _deep,
    "scalar": lambda path: path.write_text("12"),
}


def device(path: Path) -> None:
    """Makes a device like /dev/null that nobody else needs, where that is allowed; else a link to it."""
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        path.symlink_to("/dev/null")


def _aliases(path: Path) -> None:
    lines = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join(9 * [f'*a{n - 1}'])}]" for n in range(1, 12))]
    path.write_text("\n".join(lines))


def _zipped(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name.replace("__", "."), content)
    return buffer.getvalue()


def _lambda_layer(path: Path) -> None:
    """Writes a model whose config names code that Keras would unmarshal and run."""
    code = {"class_name": "__lambda__", "config": {"code": "4wEAAAA=", "defaults": None, "closure": None}}
    layer = {"module": "keras.layers", "class_name": "Lambda", "config": {"name": "l", "function": code}}
    config = {"module": "keras", "class_name": "Sequential", "config": {"name": "s", "layers": [layer]}}
    path.write_bytes(_model(config))


def _foreign_class(path: Path) -> None:
    """Writes a model whose config names a function of the standard library."""
    path.write_bytes(_model({"module": "os", "class_name": "system", "config": {"command": "touch ran"}}))


def _model(config: Any) -> bytes:
    metadata = json.dumps({"keras_version": "3.15.1", "date_saved": "2026-01-01@00:00:00"}).encode()
    return _zipped(config__json=json.dumps(config).encode(), metadata__json=metadata)


@functools.cache  # a gigabyte takes seconds
def _bomb() -> bytes:
    return _zipped(config__json=b"[" + b" " * 2**30, metadata__json=b"{}")


def _zip_bomb(path: Path) -> None:
    path.write_bytes(_bomb())


def _escaping_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("../../escaped.txt", "x")
        file.writestr("config.json", "{}")


#: Files that mean harm, by whole name.
HOSTILE: dict[str, Callable[[Path], Any]] = {
    "aliases.yaml": _aliases,
    "itself.yaml": lambda path: path.write_text(
        "root: &a [*a]\npipelineInfo: {name: x}\ndeploymentSpec: *a\n"
    ),
    "tag.yaml": lambda path: path.write_text('!!python/object/apply:os.system ["touch ran"]\n'),
    "dotted.toml": lambda path: path.write_text("image" + ".a" * 5000 + " = 1"),
    "quoted.json": lambda path: path.write_text('{"a": "' + "\\" * 200_000),
    "lambda.keras": _lambda_layer,
    "foreign.keras": _foreign_class,
    "zipbomb.keras": _zip_bomb,
    "escaping.keras": _escaping_zip,
    "cut.keras": lambda path: path.write_bytes(_model({})[:-30]),
    "listed.keras": lambda path: path.write_bytes(_model([])),
    "device": device,
}


def _pipeline(path: Path, made: Path) -> Path:
    file = path.with_suffix(".yaml")
    file.write_text(json.dumps(checks.pipeline()))
    return file


def _retrain(path: Path, made: Path) -> Path:
    file = path.with_suffix(".yaml")
    shutil.copy(made / "retrain.json", file)
    return file


def _directory(path: Path, made: Path) -> Path:
    shutil.copytree(made / path.name, path)
    return path


#: Good inputs by name: how each is made, and the file that says what it is.
GOOD: dict[str, tuple[Callable[[Path, Path], Path], str]] = {
    "pipeline": (_pipeline, ""),
    "retrain": (_retrain, ""),
    "dataset": (_directory, "manifest.json"),
    "champion": (_directory, "champion.json"),
    "run": (_directory, "run.json"),
    "images": (_directory, ""),
}

_VERSION = "20260101T000000Z-abcdef12"


def make_good(made: Path) -> None:
    """Makes what the good inputs are copies of; the dataset is written by `write_dataset` beforehand."""
    manifests.save(replace(manifests.load(made / "dataset"), records_in=42), made / "dataset")
    spec = yaml.load((ROOT / "compiled" / "retrain.yaml").read_bytes(), yaml.CSafeLoader)
    (made / "retrain.json").write_text(json.dumps(spec))
    version = made / "champion" / "versions" / _VERSION
    version.mkdir(parents=True)
    record = {"version": _VERSION, "quality": "accuracy 0.9700", "fingerprint": "sha256:00"}
    (version / "version.json").write_text(json.dumps(record | {"created": "2026-01-01T00:00:00+00:00"}))
    pointer = {"champions": [_VERSION], "path": f"versions/{_VERSION}"}
    (made / "champion" / "champion.json").write_text(json.dumps(pointer))
    (version / "export.json").write_text(json.dumps({"format": "shardline.export", "format_version": 1}))
    (version / "blessing.json").write_text(json.dumps({"blessed": True}))
    run = made / "run"
    run.mkdir()
    (run / "run.log").write_text("10:00:00.000 - INFO - Executing task 'train'\n    train: hello\n")
    (run / "run.json").write_text(
        json.dumps(
            {"name": "run", "pipeline": "retrain", "state": "succeeded", "created": "2026-01-01T00:00:00Z"}
        )
    )
    for name in ("cat", "dog"):
        (made / "images" / name).mkdir(parents=True)
        (made / "images" / name / "1.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(40)))


def place(word: str, directory: Path, made: Path) -> str:
    """Returns a word of a command with each input that it names made in `directory`."""
    return _WORD.sub(lambda match: _place(match[1], match[2], directory, made), word)


def _place(name: str, content: str | None, directory: Path, made: Path) -> str:
    path = directory / name
    if name == DEEP_TEXT:
        return '{"a":' * _DEEP
    if name in GOOD:
        make, main = GOOD[name]
        path = path if path.is_dir() else make(path, made)
        if content is not None:
            _change(path / main if main else path, content)
        return path.name
    if content is not None:
        path.write_bytes(content.encode("utf-8", "surrogateescape"))
    elif not path.is_symlink() and not path.exists():
        (HOSTILE.get(name) or DAMAGED[name.partition(".")[0]])(path)
    return name


def _change(file: Path, changes: str) -> None:
    if changes.startswith("<"):
        file.unlink()
        DAMAGED[changes[1:]](file)
        return
    content = json.loads(file.read_text())
    for change in changes.split(";"):
        where, _, value = change.partition("=")
        node = content
        *parents, last = where.split(".")
        for key in parents:
            node = node[int(key) if isinstance(node, list) else key]
        with contextlib.suppress(ValueError):
            value = json.loads(value)
        if value == "-":
            del node[last]
        else:
            node[int(last) if isinstance(node, list) else last] = value
    file.write_text(json.dumps(content))
