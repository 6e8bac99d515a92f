"""The public Python interface: small, lazy, and the same for people, editors and type checkers."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import shardline

MAIN = '__name__ == "__main__"'
HEAVY = ("tensorflow", "keras", "kfp", "google.cloud.aiplatform", "numpy")


def test_importing_it_loads_nothing_heavy() -> None:
    program = f"import sys, shardline; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def test_no_program_is_imported_by_its_own_package() -> None:
    """`python -m` would say so, at the top of each log (RuntimeWarning: found in sys.modules)."""
    root = Path(__file__).resolve().parents[2]
    rings = ("trainer", "components", "pipelines")
    texts = {path: path.read_text() for ring in rings for path in (root / ring).rglob("*.py")}
    files = [path for path, text in texts.items() if MAIN in text and "Run by path" not in text]
    names = [".".join(("shardline", *path.relative_to(root).with_suffix("").parts)) for path in files]
    program = (
        "import importlib, sys\n"
        f"for name in {names}: importlib.import_module(name.rpartition('.')[0])\n"
        f"print([name for name in {names} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert len(names) > 8
    assert done.stdout.strip() == "[]"


def test_what_a_type_checker_sees_is_what_there_is() -> None:
    """mypy checks the imports of the block; here, that they are the names which are loaded when used."""
    tree = ast.parse(Path(shardline.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen: dict[str, tuple[str, ...]] = {}
    for node in block.body:
        if isinstance(node, ast.ImportFrom):
            names = tuple(str(alias.asname) for alias in node.names)
            seen[str(node.module)] = (*seen.get(str(node.module), ()), *names)

    assert seen == shardline._MODULES
    assert sorted(name for names in seen.values() for name in names) == shardline.__all__
    assert set(shardline.__all__) <= set(dir(shardline))


def test_a_name_is_loaded_when_it_is_used_and_others_are_attribute_errors() -> None:
    from shardline.components.preprocess.sources.example import Example

    assert shardline.Example is Example
    assert not hasattr(shardline, "no_such_name")
