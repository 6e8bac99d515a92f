"""The templates for CI: of the form that their platforms want, with commands that there are."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml

from shardline.pipelines.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yaml"))
CLOUD_BUILD = ROOT / "cloudbuild.yaml"
#: What the platforms replace before a shell sees it.
REPLACED = re.compile(r"\$\{\{.*?\}\}|\$\{\w+\}|\"\$\$?\(.*?\)\"|\"\$\$\w+\"")


def scripts(path: Path) -> Iterator[str]:
    """Yields the shell scripts of a template."""
    content = yaml.safe_load(path.read_text())
    steps = content.get("steps") or [step for job in content["jobs"].values() for step in job["steps"]]
    for step in steps:
        if "run" in step:
            yield step["run"]
        elif step.get("entrypoint") == "bash":
            yield step["args"][-1]


def commands(path: Path, program: str) -> list[list[str]]:
    """Returns the arguments with which a template calls a program."""
    lines = [
        line.strip()
        for script in scripts(path)
        for line in REPLACED.sub("VALUE", script).replace("\\\n", " ").splitlines()
    ]
    words = [
        shlex.split(line.partition(" > ")[0], comments=True)
        for line in lines
        if re.match(rf"(\.venv/bin/|docker run .* )?{program} ", line)
    ]
    return [line[[Path(word).name for word in line].index(program) + 1 :] for line in words]


def resolved(arguments: list[str]) -> tuple[click.Command, list[str]]:
    """Returns the command that arguments name, and what it is given."""
    command: click.Command = main
    context = click.Context(main)
    while isinstance(command, click.Group):
        name, *arguments = arguments
        found = command.get_command(context, name)
        assert found is not None, f"shardline has no {name}"
        command = found
    return command, arguments


ALL = [*WORKFLOWS, CLOUD_BUILD]


@pytest.mark.parametrize(
    ("schema", "paths"), [("vendor.github-workflows", WORKFLOWS), ("vendor.cloudbuild", [CLOUD_BUILD])]
)
def test_a_template_is_as_its_platform_wants_it(schema: str, paths: list[Path]) -> None:
    checker = Path(sys.executable).with_name("check-jsonschema")
    done = subprocess.run([checker, "--builtin-schema", schema, *paths], capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_every_command_is_there_with_its_options(path: Path) -> None:
    found = commands(path, "shardline")

    assert found
    for arguments in found:
        if arguments == ["--help"]:
            continue
        command, given = resolved(arguments)
        command.make_parser(click.Context(command)).parse_args(given)


def test_every_target_of_make_is_there() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = {word for path in WORKFLOWS for arguments in commands(path, "make") for word in arguments}

    assert {"lint", "test-all"} <= called <= targets


def test_the_release_compiles_with_what_was_pushed_and_uploads_what_was_compiled() -> None:
    for path in (ROOT / ".github" / "workflows" / "release.yaml", CLOUD_BUILD):
        by_name = {arguments[0]: arguments for arguments in commands(path, "shardline")}
        output = by_name["compile"][by_name["compile"].index("--output") + 1]

        assert "--image" in by_name["compile"]
        assert output == by_name["check"][1] == by_name["upload"][1]


def test_files_that_templates_name_are_there() -> None:
    """But for settings/vertex.toml, which everybody writes."""
    named = {
        name
        for path in ALL
        for script in scripts(path)
        for name in re.findall(r"(?:compiled|pipelines|settings)/[\w./-]+", script)
    }

    assert {"pipelines/image/lock/control.txt", "compiled/retrain.yaml"} <= named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_what_is_run_of_others_is_named_by_what_it_is() -> None:
    """A tag can be made to mean something else; a commit and a digest cannot."""
    used = [
        step["uses"]
        for path in WORKFLOWS
        for job in yaml.safe_load(path.read_text())["jobs"].values()
        for step in job["steps"]
        if "uses" in step
    ]

    assert used
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", name) for name in used), used
    images = re.findall(
        r"python:\S+", CLOUD_BUILD.read_text() + (ROOT / "pipelines" / "image" / "Dockerfile").read_text()
    )
    assert len(set(images)) == 1
    assert re.fullmatch(r"python:[\w.-]+@sha256:[0-9a-f]{64}", images[0])


def test_no_script_has_a_value_from_outside_pasted_into_its_text() -> None:
    """A value such as `'; curl ...` would be run; as a variable, in quotes, it is a value."""
    for path in ALL:
        for script in scripts(path):
            assert "${{" not in script
            assert not re.search(r"(?<!\$)\$\{?_", script)
            assert "$" not in re.sub(r"\"\$\$?(\w+|\(.*?\))\"|\$\(", "", script, flags=re.DOTALL), script


def test_every_extra_has_its_versions_fixed() -> None:
    text = (ROOT / "setup.cfg").read_text().partition("[options.extras_require]")[2].partition("\n[")[0]
    named = {name.lower() for name in re.findall(r"(?m)^    ([\w.-]+)(?:\[[\w-]+\])?[<>=]", text)}
    lines = (ROOT / "constraints.txt").read_text().splitlines()[1:]
    fixed = {re.sub(r"[._]", "-", line.partition("==")[0].lower()) for line in lines}

    assert {"onnx", "ai-edge-litert", "tensorflow"} <= named
    assert {re.sub(r"[._]", "-", name) for name in named} <= fixed


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_scripts_are_shell(path: Path) -> None:
    for script in scripts(path):
        shell = REPLACED.sub("VALUE", script)
        done = subprocess.run(["bash", "-n"], input=shell, capture_output=True, text=True)
        assert done.returncode == 0, script + done.stderr
