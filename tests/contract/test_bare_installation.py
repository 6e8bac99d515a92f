"""The wheel without extras in an empty environment: the commands of the control plane work there.

The environment has the distributions that the wheel requires, and theirs, and no other: linked from that of
the tests, or installed from pip's index as a user does it.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path, PurePath

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import conftest
from tests.contract.fake.services import PROJECT
from tests.contract.fake.vertex import BUCKET, LOCATION, FakeVertex
from tests.helpers.wheel import build_wheel

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).resolve().parents[2]
#: Runs each line of standard input as a command, and `*` as the --help of every verb; ends at the first that
#: fails, and prints how many there were.
PROGRAM = """
import shlex, sys
import click
from click.testing import CliRunner
from shardline.pipelines.cli.main import main

def helps(command, *words):
    yield [*words, "--help"]
    for name, inner in getattr(command, "commands", {}).items():
        yield from helps(inner, *words, name)

given = [shlex.split(line) for line in sys.stdin]
commands = [words for line in given for words in (helps(main) if line == ["*"] else [line])]
for words in commands:
    result = CliRunner().invoke(main, words)
    if result.exit_code:
        sys.exit(f"shardline {shlex.join(words)}: {result.exit_code} {result.output} {result.exception!r}")
print(len(commands))
"""
IMAGE = "europe-docker.pkg.dev/p/r/shardline:1"


@pytest.fixture(scope="module", params=["linked", pytest.param("installed", marks=pytest.mark.matrix)])
def bare(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The command of a Python that has the wheel and what it requires."""
    directory = tmp_path_factory.mktemp("bare")
    wheel = build_wheel(directory)
    if request.param == "installed":
        environment = directory / "venv"
        venv.create(environment)
        python = str(environment / "bin" / "python")
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile"]
        # The one child process of the tests that may reach an index.
        environ = {name: value for name, value in os.environ.items() if value != conftest.NOWHERE}
        subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), str(wheel)], env=environ, check=True)
        return (python,)
    target = directory / "packages"
    with zipfile.ZipFile(wheel) as content:
        content.extractall(target)
    required = metadata.Distribution.at(next(target.glob("*.dist-info"))).requires or []
    for unit, place in units(required).items():
        link = target / unit
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(place / unit)
    return ("env", f"PYTHONPATH={target}", sys.executable, "-S")  # without a directory for packages


def units(required: list[str]) -> dict[PurePath, Path]:
    """Returns the packages and other files of what is required, by name, and the directory that each is in.

    Of a directory that is no package itself, such as `google`, others have a part as well.
    """

    @functools.cache
    def is_package(directory: str) -> bool:
        return os.path.isfile(f"{directory}/__init__.py")

    found: dict[PurePath, Path] = {}
    for distribution in closure(required):
        place = Path(str(distribution.locate_file("")))
        for file in distribution.files or ():
            if ".." not in file.parts:
                above = [*file.parents][-2::-1]
                found[next((up for up in above if is_package(f"{place}/{up}")), file)] = place
    return found


def closure(required: list[str]) -> Iterable[metadata.Distribution]:
    """Returns the distributions that requirements name, and those that these require, as they are here."""
    found: dict[str, metadata.Distribution] = {}
    wanted = [(Requirement(text), "") for text in required]
    seen = set()
    while wanted:
        requirement, extra = wanted.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        distribution = found.setdefault(name, metadata.distribution(name))
        for own in ("", *requirement.extras):
            if (name, own) not in seen:
                seen.add((name, own))
                wanted += [(Requirement(text), own) for text in distribution.requires or ()]
    return found.values()


def commands(bare: tuple[str, ...], lines: list[str], directory: Path, environ: dict[str, str]) -> int:
    """Runs commands, all of which succeed, and returns their number."""
    done = subprocess.run(
        [*bare, "-c", PROGRAM],
        input="\n".join(lines),
        cwd=directory,
        env=environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_it_has_no_package_of_an_extra(bare: tuple[str, ...], tmp_path: Path) -> None:
    program = (
        "import importlib.util as known, kfp, shardline\n"
        "print([name for name in ('numpy', 'keras', 'psutil', 'rich', 'PIL') if known.find_spec(name)])\n"
        "print(shardline.__file__)"
    )
    done = subprocess.run([*bare, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)

    absent, where = done.stdout.splitlines()
    assert absent == "[]"
    assert not Path(where).resolve().is_relative_to(ROOT)


def test_every_verb_has_its_help(bare: tuple[str, ...], tmp_path: Path) -> None:
    assert commands(bare, ["*"], tmp_path, dict(os.environ)) > 20


def test_a_project_is_made_compiled_checked_and_planned(
    bare: tuple[str, ...], vertex: FakeVertex, tmp_path: Path
) -> None:
    place = f"--project {PROJECT} --location {LOCATION}"
    (tmp_path / "schedules.toml").write_text(
        '[schedules.nightly]\ncron = "TZ=UTC 0 6 * * *"\npipeline = "retrain.yaml"\n'
        '[schedules.nightly.parameters]\nsource = "digits"\nchampion_uri = "gs://b/champions"\n'
    )
    environ = {**os.environ, **vertex.environment, "VERTEX_PIPELINE_ROOT": f"gs://{BUCKET}/root"}
    lines = [
        "new leafnet",
        f"compile --settings leafnet/settings.toml --image {IMAGE} --output retrain.yaml",
        "check retrain.yaml",
        f"submit retrain.yaml --dry-run -p source=digits -p champion_uri=gs://b/champions {place}",
        f"schedule apply --dry-run --file schedules.toml {place}",
    ]
    assert commands(bare, lines, tmp_path, environ) == len(lines)
