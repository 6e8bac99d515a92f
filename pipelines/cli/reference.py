"""Reference of the command line: `python -m shardline.pipelines.cli.reference > docs/cli.md`."""

from __future__ import annotations

import argparse
import copy
import textwrap
from collections.abc import Callable, Iterator, Sequence

import click

from shardline.pipelines.cli.main import main
from shardline.pipelines.cli.options import PLATFORM_OPTIONS

#: Characters of a line.
_WIDTH = 110
_HEAD = """\
# The command line

Every command and its options, as `shardline COMMAND -h` prints them. A command ends with 0 (done), 1 (it
failed, or the answer is no), 2 (a mistake in the input), 3 (the platform refused or failed), 4 (the run was
cancelled), 70 (an unexpected error, with a crash file), 75 (stopped with a checkpoint: start it again), 130
or 143 (Ctrl-C or SIGTERM); [exit codes](troubleshooting.md#exit-codes) say more.

| to | commands |
|---|---|
"""
_FOOT = """
This page is generated: `python -m shardline.pipelines.cli.reference > docs/cli.md`.
"""
_PLATFORM = "Platform options"
_SHARED = "Shared options"
#: Options that mean the same in every command that has them.
_SHARED_OPTIONS = ("--json", "--params", "--param", "--runs-dir", "--proven", "--network", "--inject")


def reference() -> str:
    """Returns the page with the help of all commands, and of the program that every replica runs."""
    from shardline.trainer import task

    contexts = commands()
    parser = task.parser()
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=_WIDTH)
    sections = [_section(context) for context in contexts]
    sections.append(_text(_SHARED, _options(_is_shared)))
    sections.append(_text(_PLATFORM, _options(_is_platform)))
    sections.append(_text("Options of the trainer", parser.format_help()))
    return "\n".join([_HEAD + _index(contexts) + _FOOT, *sections])


def _index(contexts: Sequence[click.Context]) -> str:
    """Returns the rows of the table of commands, with the program of a replica."""
    rows = []
    names = [context.command_path.removeprefix("shardline ") for context in contexts]
    for title, wanted in main.sections.items():
        found = [name for one in wanted for name in names if name.split()[0] == one]
        links = [f"[`{name}`](#{_anchor(f'shardline {name}')})" for name in found]
        rows.append(f"| {title.lower()} | {', '.join(links)} |\n")
    rows.append(
        "| start a replica yourself | [`python -m shardline.trainer.task`](#options-of-the-trainer) |\n"
    )
    return "".join(rows)


def _section(context: click.Context) -> str:
    """Returns the section of a command; shared options and platform options have sections of their own."""
    command = copy.copy(context.command)
    also = [f"[`{param.opts[0]}`](#{_anchor(_SHARED)})" for param in command.params if _is_shared(param)]
    command.params = [param for param in command.params if not _is_shared(param)]
    if _takes_platform(command):
        also.append(f"[{_PLATFORM.lower()}](#{_anchor(_PLATFORM)})")
        command.params = [param for param in command.params if not _is_platform(param)]
    text = _text(context.command_path, command.get_help(context))
    return f"{text}\nAlso takes {', '.join(also)}.\n" if also else text


def _is_shared(param: click.Parameter) -> bool:
    return any(name in _SHARED_OPTIONS for name in param.opts)


def _is_platform(param: click.Parameter) -> bool:
    return param.name in PLATFORM_OPTIONS


def _takes_platform(command: click.Command) -> bool:
    return {param.name for param in command.params}.issuperset(PLATFORM_OPTIONS)


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _text(title: str, text: str) -> str:
    return f"## {title}\n\n{textwrap.indent(text.rstrip(), '    ')}\n"


def _options(wanted: Callable[[click.Parameter], bool]) -> str:
    """Returns the help of the wanted options of all commands, each once."""
    context = next(context for context in commands() if _takes_platform(context.command))
    found = {param.opts[0]: param for each in commands() for param in each.command.params if wanted(param)}
    command = copy.copy(context.command)
    command.params = list(found.values())
    formatter = context.make_formatter()
    command.format_options(context, formatter)
    return formatter.getvalue().strip()


def commands() -> list[click.Context]:
    """Returns a context for every command that does something, sorted by name."""
    # Without --help, which all have; on a page, pages need no address.
    root = click.Context(
        main, info_name="shardline", terminal_width=_WIDTH, help_option_names=[], obj="pages"
    )
    return list(_below(root))


def _below(context: click.Context) -> Iterator[click.Context]:
    command = context.command
    if not isinstance(command, click.Group):
        yield context
        return
    if command.invoke_without_command:
        yield context
    for name in command.list_commands(context):
        if child := command.get_command(context, name):
            yield from _below(click.Context(child, info_name=name, parent=context))


if __name__ == "__main__":
    print(reference(), end="")
