"""Every setting with the place where it was written."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardline.pipelines.settings import load
from shardline.pipelines.vertex.environment import DEFAULT, NAMES, TABLE

#: Name, value, and where it came from.
Row = tuple[str, Any, str]


def environment_rows(values: Mapping[str, Any], origins: Mapping[str, str]) -> list[Row]:
    """Returns the values that say where on the platform things are done.

    Args:
        values: As `read_values` gives them.
        origins: The same.
    """
    return [(f"{TABLE}.{name}", values.get(name, ""), origins.get(name, DEFAULT)) for name in NAMES]


def compile_time_rows(path: Path) -> list[Row]:
    """Returns the values that are fixed when a pipeline is compiled; none for a file without an image.

    Raises:
        SettingsError: When the file is no settings file.
    """
    written = tomllib.loads(path.read_text(encoding="utf-8"))
    if "image" not in written:
        return []
    return [
        (".".join(places[0]), _shown(places[0], value), _origin(path, written, places, value))
        for field, value in _leaves(load(path))
        for places in [_places(field)]
    ]


def _shown(name: tuple[str, ...], value: Any) -> Any:
    """Returns a value as it may be printed: of variables only the names, since they may hold secrets."""
    return sorted(value) if name[-1] == "env" else value


def _leaves(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields each value below a dataclass, under the names of its fields."""
    for item in dataclasses.fields(node):
        value, name = getattr(node, item.name), (*path, item.name)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, name)
        elif name[:2] != ("train", "cluster") or value is not None or len(name) > 3:
            yield name, value


def _places(field: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Returns where a settings file may have a field, the place that counts most first."""
    if field[:2] == ("train", "cluster"):
        _, _, pool, key = field
        return [("train", pool, key), ("train", key)]
    if field[0] == "train":
        return [("train", "job", field[1])]
    return [field]


def _origin(path: Path, written: Mapping[str, Any], places: list[tuple[str, ...]], value: Any) -> str:
    for *tables, key in places:
        table: Any = written
        for name in tables:
            table = table.get(name, {})
        # Some pools take over nothing of [train]; replicas and variables are put together from both.
        if key in table and (_same(table[key], value) or key in ("replica_count", "env")):
            return f"{path} [{'.'.join(tables)}]" if tables else str(path)
    return DEFAULT


def _same(written: Any, value: Any) -> bool:
    return bool(written == (list(value) if isinstance(value, tuple) else value)) or isinstance(written, list)
