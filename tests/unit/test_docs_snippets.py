"""What the pages show works for a reader who has installed the package: Python, shell, TOML, JSON, extras."""

from __future__ import annotations

import ast
import configparser
import importlib
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from shardline.components.preprocess.schema import read_schema
from shardline.components.validate.rules import Gate
from shardline.pipelines.parameters import check_parameters, load_study, read_parameters
from shardline.pipelines.remote import load_schedules
from shardline.pipelines.settings import load_settings
from shardline.pipelines.spec import load_pipeline
from tests.helpers.markdown import PAGES, ROOT, blocks

#: The pages but for the generated reference, and that of people with a clone.
OF_USERS = [page for page in PAGES if page.name != "CONTRIBUTING.md"]
#: Names in the Python of a page that are the reader's own, or from the snippet before.
OWN_NAMES = {
    "README.md": "build_model x y",
    "call-your-model.md": "call tf",
    "migrating.md": "args is_chief keras os scale task_id tf tfds",
    "own-model.md": "columns dataset hidden",
}
PIPELINE = ROOT / "compiled" / "retrain.yaml"
#: What a reader types besides our own commands.
PROGRAMS = {
    *("cd", "curl", "docker", "export", "gcloud", "make", "mlflow", "mkdir", "mpirun", "pip", "printf"),
    *("python", "shardline", "srun", "terraform"),
}


@pytest.mark.parametrize("page", OF_USERS, ids=lambda page: page.name)
def test_python_defines_and_imports_what_it_uses(page: Path, tmp_path: Path) -> None:
    for number, text in enumerate(blocks(page, "python")):
        (tmp_path / f"{number}.py").write_text(text)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("shardline"):
                offered = importlib.import_module(str(node.module))
                assert [alias.name for alias in node.names if not hasattr(offered, alias.name)] == []
    ruff = (sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", "--output-format", "json")
    done = subprocess.run([*ruff, str(tmp_path)], capture_output=True, text=True)

    own = {f"Undefined name `{name}`" for name in OWN_NAMES.get(page.name, "").split()}
    assert {item["message"] for item in json.loads(done.stdout)} <= own, "import it in the snippet"


@pytest.mark.parametrize("page", OF_USERS, ids=lambda page: page.name)
def test_shell_parses_and_is_of_known_programs(page: Path) -> None:
    for text in blocks(page, "sh"):
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        bare = re.sub(r"\\\n|'[^']*'| *#.*", "", text)
        first = {line.split()[0] for line in re.split(r"\n|&&|[|;]|\bdo\b", bare) if line.strip()}
        assert {
            word.rpartition("/")[2] for word in first if not re.search("^(for|done)$|=", word)
        } <= PROGRAMS, text


@pytest.mark.parametrize("page", OF_USERS, ids=lambda page: page.name)
def test_toml_and_json_are_read(page: Path, tmp_path: Path) -> None:
    for text in blocks(page, "json"):
        (tmp_path / "schema.json").write_text(text)
        assert read_schema(str(tmp_path / "schema.json")).fields
    readers: dict[str, Callable[[Path], object]] = {
        "metric": load_study,
        "rules": Gate.read,
        "schedules": load_schedules,
        "source": lambda path: check_parameters(load_pipeline(PIPELINE), read_parameters(path)),
    }
    for text in blocks(page, "toml"):
        content = tomllib.loads(text)
        read = next((readers[key] for key in content if key in readers), load_settings)
        path = tmp_path / "shown.toml"
        if read is load_settings:  # a part of the settings
            text = text if "image" in content else f'image = "i"\n{text}'
            text += (
                "" if "train" in content else '[train]\nreplica_count = 1\nmachine_type = "n1-standard-4"\n'
            )
        path.write_text(text)
        read(path)


def extras() -> list[str]:
    setup = configparser.RawConfigParser()
    setup.read(ROOT / "setup.cfg")
    return list(setup["options.extras_require"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_extras_that_a_page_installs_are_there(page: Path) -> None:
    named = re.findall(r"shardline\[([\w,]+)\]", page.read_text())

    assert {extra for some in named for extra in some.split(",")} <= {*extras()}


def test_the_page_about_installing_has_every_extra_of_a_user() -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text()

    assert [extra for extra in extras() if f"`{extra}`" not in page] == ["docs", "dev"]
