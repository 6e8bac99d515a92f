"""The tree in docs/architecture.md, from the first line of each module: `python -m tests.helpers.tree`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RINGS = ("trainer", "components", "pipelines")


def tree() -> str:
    """Returns a line for each folder and module of the three rings."""
    return "\n".join(line for ring in RINGS for line in _lines(ROOT / ring, 0))


def _lines(folder: Path, depth: int) -> Iterator[str]:
    yield _line(f"{folder.name}/", folder / "__init__.py", depth)
    for module in sorted(folder.glob("*.py")):
        if module.name != "__init__.py":
            yield _line(module.name, module, depth + 1)
    for package in sorted(path.parent for path in folder.glob("*/__init__.py")):
        yield from _lines(package, depth + 1)


def _line(name: str, module: Path, depth: int) -> str:
    words = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
    return f"{'  ' * depth + name:<28}{words.partition(chr(10))[0].rstrip('.')}"


if __name__ == "__main__":
    print(tree())
