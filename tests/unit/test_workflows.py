"""Workflows and the files of images: of the form that their platforms want, with commands that there are."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml

from shardline.pipelines.cli.main import main
from tests.helpers.markdown import ROOT

TEMPLATE = ROOT / "pipelines" / "project" / "template" / "common"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yaml"))
STEPS = [
    step
    for path in WORKFLOWS
    for job in yaml.safe_load(path.read_text())["jobs"].values()
    for step in job["steps"]
]
SCRIPTS = [step["run"] for step in STEPS if "run" in step]


def commands(program: str) -> list[list[str]]:
    """Returns the arguments with which workflows call a program."""
    lines = [line.strip() for script in SCRIPTS for line in script.replace("\\\n", " ").splitlines()]
    return [shlex.split(line)[1:] for line in lines if re.match(rf"(\.venv/bin/)?{program} ", line)]


@pytest.mark.parametrize(
    ("schema", "paths"),
    [
        ("vendor.github-workflows", [*WORKFLOWS, TEMPLATE / "dot_github" / "workflows" / "ci.yaml"]),
        ("vendor.cloudbuild", [ROOT / "cloudbuild.yaml"]),
        ("vendor.github-issue-forms", [*(ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yaml")]),
    ],
)
def test_a_file_is_as_its_platform_wants_it(schema: str, paths: list[Path]) -> None:
    checker = Path(sys.executable).with_name("check-jsonschema")
    done = subprocess.run([checker, "--builtin-schema", schema, *paths], capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr


def test_every_command_is_there_with_its_options() -> None:
    found = commands("shardline")

    assert {name for name, *_ in found} == {"check", "compile", "upload"}
    for name, *given in found:
        command = main.commands[name]
        command.make_parser(click.Context(command)).parse_args(given)


def test_every_target_of_make_is_there() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = {word for arguments in commands("make") for word in arguments if "=" not in word}

    assert {"lint", "test-all", "image", "push"} <= called <= targets


def test_what_is_run_of_others_is_named_by_what_it_is() -> None:
    """A tag can be made to mean something else; a commit and a digest cannot."""
    used = [step["uses"] for step in STEPS if "uses" in step]

    assert used
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", name) for name in used), used
    bases = [re.findall(r"^FROM (.*)", (at / "Dockerfile").read_text(), re.M) for at in (ROOT, TEMPLATE)]
    assert bases[0] == bases[1]
    assert re.fullmatch(r"python:[\w.-]+@sha256:[0-9a-f]{64}", bases[0][0])


def test_no_script_has_a_value_from_outside_pasted_into_its_text() -> None:
    """A value such as `'; curl ...` would be run; as a variable, in quotes, it is a value."""
    for script in SCRIPTS:
        assert "${{" not in script


def test_the_image_of_a_project_differs_from_ours_in_what_is_copied() -> None:
    """And in what says so: the rest is one text."""
    ours, theirs = ((at / "Dockerfile").read_text().partition("WORKDIR /app\n") for at in (ROOT, TEMPLATE))

    assert theirs[2] == ours[2]
    assert theirs[0].partition("COPY")[0].splitlines()[1:] == ours[0].partition("WORKDIR")[0].splitlines()[1:]
    assert (ROOT / "cloudbuild.yaml").read_text() == (TEMPLATE / "cloudbuild.yaml").read_text()


def test_every_extra_has_its_versions_fixed() -> None:
    text = (ROOT / "setup.cfg").read_text().partition("[options.extras_require]")[2].partition("\n[")[0]
    named = {name.lower() for name in re.findall(r"(?m)^    ([\w.-]+)(?:\[[\w-]+\])?[<>=]", text)}
    lines = (ROOT / "constraints.txt").read_text().splitlines()[1:]
    fixed = {re.sub(r"[._]", "-", line.partition("==")[0].lower()) for line in lines}

    assert "tensorflow" in named
    assert {re.sub(r"[._]", "-", name) for name in named} <= fixed
