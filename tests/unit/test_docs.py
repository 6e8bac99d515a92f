"""The documentation is right: its commands parse, its links lead somewhere, its reference is the code's."""

from __future__ import annotations

import configparser
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

import click
import pytest
from click.testing import CliRunner

from docs.reference import commands as all_commands
from docs.reference import reference
from shardline.pipelines.cli.main import main
from shardline.pipelines.cli.options import CommandGroup
from shardline.pipelines.parameters import check_parameters, option_declarations
from shardline.pipelines.settings import split_pairs
from shardline.pipelines.spec import all_tasks, declared_parameters, load_pipeline
from shardline.trainer import task
from shardline.trainer.base import errors
from shardline.trainer.base.errors import PipelineError
from tests.helpers.markdown import (
    NEEDS_PLATFORM,
    OUTPUT,
    PAGES,
    ROOT,
    Command,
    anchors,
    commands,
    links,
    message_commands,
    output_commands,
)

#: What speaks to the platform, whatever it is asked.
PLATFORM = {"submit", "upload", "schedule", "status", "cancel", "logs", "explain", "doctor"}

COMMANDS = commands()
#: The pages of which a part is for readers with a clone only.
OF_CLONES = ("README.md", "CONTRIBUTING.md", "AGENTS.md", "security.md")
#: The pages that name files of the repository.
OF_FILES = (ROOT / "CONTRIBUTING.md").read_text()


def context_of(command: Command) -> click.Context:
    """Returns the context of a shardline command, which parses all that it was given."""
    words = list(command.words[1:])
    context = click.Context(main, info_name="shardline")
    while isinstance(context.command, click.Group):
        if not words and context.command.invoke_without_command:
            return context
        assert words, f"{command}: a group of commands does nothing by itself"
        child = context.command.get_command(context, words[0])
        assert child is not None, f"{command}: there is no such command"
        if not isinstance(child, click.Group):
            return child.make_context(words[0], words[1:], parent=context)
        context = click.Context(child, info_name=words.pop(0), parent=context)
    return context


def shardline(command: Command) -> None:
    """Checks a command of ours; one within a sentence may leave arguments out."""
    if not command.whole and not any(word.startswith("-") for word in command.words):
        verbs = [context.command_path.split()[1:] for context in all_commands()]
        words = list(command.words[1:])
        assert any(words[: len(verb)] == verb or verb[: len(words)] == words for verb in verbs), str(command)
        return
    try:
        context = context_of(command)
    except click.UsageError as error:
        if command.whole or not isinstance(error, click.MissingParameter):
            pytest.fail(f"{command}: {error.format_message()}")
    else:
        if options := context.params.get("trainer_options"):
            task.parse(["--dataset", "d", "--model", "m", *options])
        if context.params.get("pipeline") and context.command.name in ("run", "submit"):
            compiled = ROOT / context.params["pipeline"]
            if command.whole and compiled.is_file():
                given = split_pairs(context.params["texts"], "--param", PipelineError)
                check_parameters(load_pipeline(compiled), given)


def make(command: Command) -> None:
    of_clone, of_project = (
        set(re.findall(r"^([a-z-]+):", (ROOT / folder / "Makefile").read_text(), re.MULTILINE))
        for folder in ("", "pipelines/project/template/common")
    )
    # All others are for readers with a clone, and for those with a project.
    page = {"new-project.md": of_project, **dict.fromkeys(OF_CLONES, of_clone)}
    assert command.words[1] in page.get(command.page.name, of_clone & of_project), str(command)
    given = dict(word.split("=", 1) for word in command.words[2:] if "=" in word)
    if command.words[1] == "run":
        check_parameters(load_pipeline(ROOT / "compiled" / "retrain.yaml"), given)
    else:
        assert given.keys() <= {"JOBS", "PYTEST_ARGS", "IMAGE"}, str(command)


def module(command: Command) -> None:
    name, *arguments = command.words[2:]
    assert importlib.util.find_spec(name), str(command)
    if name == "shardline.trainer.task" and command.whole:
        task.parse(arguments)


@pytest.mark.parametrize("command", [*COMMANDS, *output_commands(), *message_commands()], ids=str)
def test_a_command_of_the_documentation_and_of_messages_parses(command: Command) -> None:
    {"shardline": shardline, "make": make, "python": module}[command.words[0]](command)


def test_what_speaks_to_the_platform_is_marked() -> None:
    unmarked = [
        str(command)
        for command in COMMANDS
        if command.whole
        and command.words[0] == "shardline"
        and command.words[1] in PLATFORM
        and not {"--dry-run", "latest"} & set(command.words)  # latest is a run on this machine
        and command.words[1:] != ("status",)  # which lists the runs on this machine
        and not command.marked
    ]

    assert not unmarked, f"write {NEEDS_PLATFORM} before the block"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sample_output_follows_its_command(page: Path) -> None:
    text = page.read_text(encoding="utf-8")

    for found in OUTPUT.finditer(text):
        assert re.match(r" *```", text[found.end() :]), f"{page.name}: a block follows {found[0].strip()}"


def test_there_is_something_to_check() -> None:
    assert len(COMMANDS) > 50
    assert {command.words[0] for command in COMMANDS} == {"shardline", "make", "python"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        parts = urlsplit(link)
        if parts.scheme in ("http", "https", "mailto"):
            continue
        target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
        assert target.exists(), f"{page.name}: {link} is not there"
        assert target.is_relative_to(ROOT), f"{page.name}: {link} leaves the repository"
        if parts.fragment and target.suffix == ".md":
            assert parts.fragment in anchors(target), f"{page.name}: {link}: no such heading"


def test_every_page_is_reached_from_the_first() -> None:
    reached, waiting = set(), [ROOT / "docs" / "index.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            paths = [urlsplit(link).path for link in links(page)]
            waiting += [(page.parent / path).resolve() for path in paths if path.endswith(".md")]

    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= {page.name for page in reached}


def test_the_picture_of_the_pipeline_has_every_task() -> None:
    spec = load_pipeline(ROOT / "compiled" / "retrain.yaml")
    groups = {name for name, component in spec["components"].items() if "dag" in component}
    tasks = {name for name, task in all_tasks(spec) if task["componentRef"]["name"] not in groups}

    picture = ElementTree.parse(ROOT / "docs" / "_static" / "retrain.svg")
    # A name in two lines is two texts of one group.
    texts = {"".join("".join(group.itertext()).split()) for group in picture.iterfind(".//{*}text/..")}
    described = re.findall(r"!\[(.*)\]\(docs/_static/retrain.svg\)", (ROOT / "README.md").read_text())

    assert texts == {*tasks, "run", "ifchanged", "ifblessed"}, "python -m docs.pictures"
    assert all(task in described[0] for task in tasks)


def test_the_page_of_the_command_line_has_every_exit_code() -> None:
    codes = {0, *(code for name, code in vars(errors).items() if name.startswith("EXIT_"))}
    head = (ROOT / "docs" / "cli.md").read_text()
    assert codes <= set(map(int, re.findall(r"\b\d+\b", head)))
    assert all(f"| {code}" in (ROOT / "docs" / "troubleshooting.md").read_text() for code in codes)


def groups(context: click.Context) -> Iterator[click.Context]:
    """Yields a context for each group of commands, as wide as a terminal of 80 columns."""
    assert isinstance(context.command, click.Group)
    yield context
    for name in context.command.list_commands(context):
        if isinstance(child := context.command.get_command(context, name), click.Group):
            yield from groups(click.Context(child, info_name=name, parent=context))


@pytest.mark.parametrize(
    "context",
    list(groups(click.Context(main, info_name="shardline", terminal_width=80))),
    ids=lambda context: context.command_path,
)
def test_the_help_has_each_command_in_one_whole_line(context: click.Context) -> None:
    group = context.command
    assert isinstance(group, CommandGroup)
    help_lines = context.get_help().splitlines()
    lines = help_lines[help_lines.index("Options:") :]
    found = [line.split()[0] for line in lines if re.match(r"  [a-z]", line)]
    texts = [command.get_short_help_str(10**4) for command in group.commands.values()]

    assert sorted(found) == sorted(group.commands), "each is in one section"
    assert all(any(line.endswith(text) for line in lines) for text in texts), "no sentence is cut or wrapped"
    assert not [line for line in lines if len(line) > 80 or line.endswith("...")]


def test_the_help_names_pages_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    built = Message()
    built["Project-URL"] = "Documentation, https://docs.example/shardline"
    monkeypatch.setattr("importlib.metadata.metadata", lambda name: built)
    helps = [context.command.help or "" for context in all_commands()]

    shown = CliRunner().invoke(main, ["check", "--help"]).output

    assert "https://docs.example/shardline/check.md" in shown
    assert {name for text in helps for name in re.findall(r"docs/[\w-]+\.md", text)} <= {
        f"docs/{page.name}" for page in PAGES
    }


def test_an_installation_has_the_address_of_the_documentation() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")

    urls = setup["metadata"]["project_urls"]
    address = re.search(r"^Documentation = (https://\S+/docs)$", urls, re.MULTILINE)
    assert address
    for path in (ROOT / "settings" / "vertex.toml.example", ROOT / "examples" / "own_pipeline.ipynb"):
        text = path.read_text()
        assert text.count(".md") == text.count(f"{address[1]}/") > 0, path


def test_every_command_and_option_has_help() -> None:
    for context in all_commands():
        assert context.command.help, context.command_path
        options = [param for param in context.command.params if isinstance(param, click.Option)]
        assert [option.opts[0] for option in options if not option.help] == [], context.command_path


def test_the_quickstart_has_every_parameter_of_the_pipeline_and_every_option() -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text()

    spec = load_pipeline(ROOT / "compiled" / "retrain.yaml")
    options = {name: parameter for name, (parameter, _) in option_declarations(spec).items()}
    of_trainer = [name for name in options if options[name] == "train_options"]

    names = {*declared_parameters(spec), *options} - {*of_trainer}
    assert [name for name in names if f"`{name}`" not in page] == []
    flags = [f"--{name.removesuffix('s').replace('_', '-')}" for name in of_trainer]
    assert [flag for flag in flags if flag not in reference()] == []


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"`((?:trainer|components|pipelines|tests)/[\w/.]*)`", OF_FILES)))
)
def test_a_file_that_a_page_names_is_there(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.matrix
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("myst_parser")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", str(tmp_path / "cache")]
    done = subprocess.run(
        [*command, str(ROOT / "docs"), str(tmp_path / "site")], capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    assert 'href="quickstart.html"' in (tmp_path / "site" / "index.html").read_text()
    assert "docs/quickstart.md)" in (tmp_path / "site" / "llms.txt").read_text()
    assert "shardline champion promote" in (tmp_path / "site" / "cli.html").read_text()
