"""Reference of the command line: `python -m shardline.pipelines.cli.reference > docs/cli.md`."""

from __future__ import annotations

import argparse
import copy
import textwrap
from collections.abc import Iterator

import click

from shardline.pipelines.cli.main import main
from shardline.pipelines.cli.options import PLATFORM_OPTIONS

#: Characters of a line.
_WIDTH = 110
_HEAD = """\
# The command line

All commands with their options; `shardline COMMAND -h` prints the same.

## Exit codes

| code | meaning |
|---|---|
| 0 | success |
| 1 | the run failed, or the answer is negative: not blessed, damaged, errors found, differs |
| 2 | the input is wrong; another try does not help |
| 3 | the platform refused, failed or was not reached |
| 4 | the run was cancelled |
| 75 | interrupted; the same command continues |

This page is generated: `python -m shardline.pipelines.cli.reference > docs/cli.md`.

## Commands

"""
_PLATFORM = "Platform options"
_SHARED = f"Also takes [{_PLATFORM.lower()}](#{_PLATFORM.lower().replace(' ', '-')})."


def reference() -> str:
    """Returns the page with the help of all commands, and of the program that every replica runs."""
    from shardline.trainer import task

    contexts = commands()
    index = [_entry(context) for context in contexts]
    index.append(
        "- [`python -m shardline.trainer.task`](#options-of-the-trainer): The program of every replica."
    )
    parser = task.parser()
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=_WIDTH)
    sections = [_section(context) for context in contexts]
    sections.append(_text(_PLATFORM, _platform_options()))
    sections.append(_text("Options of the trainer", parser.format_help()))
    return "\n".join([_HEAD + "\n".join(index) + "\n", *sections])


def _entry(context: click.Context) -> str:
    path = context.command_path
    text = context.command.get_short_help_str(200)
    return f"- [`{path.removeprefix('shardline ')}`](#{path.replace(' ', '-')}): {text}"


def _section(context: click.Context) -> str:
    """Returns the section of a command; the platform options have a section of their own."""
    command = copy.copy(context.command)
    if not _takes_platform(command):
        return _text(context.command_path, command.get_help(context))
    command.params = [param for param in command.params if param.name not in PLATFORM_OPTIONS]
    return f"{_text(context.command_path, command.get_help(context))}\n{_SHARED}\n"


def _takes_platform(command: click.Command) -> bool:
    return {param.name for param in command.params}.issuperset(PLATFORM_OPTIONS)


def _text(title: str, text: str) -> str:
    return f"## {title}\n\n{textwrap.indent(text.rstrip(), '    ')}\n"


def _platform_options() -> str:
    """Returns the help of the options that name settings, project and region."""
    context = next(context for context in commands() if _takes_platform(context.command))
    command = copy.copy(context.command)
    command.params = [param for param in command.params if param.name in PLATFORM_OPTIONS]
    formatter = context.make_formatter()
    command.format_options(context, formatter)
    return formatter.getvalue().strip()


def commands() -> list[click.Context]:
    """Returns a context for every command that does something, sorted by name."""
    # Without --help, which all have.
    root = click.Context(main, info_name="shardline", terminal_width=_WIDTH, help_option_names=[])
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
