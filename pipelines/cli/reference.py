"""The reference of the command line: `python -m shardline.pipelines.cli.reference > docs/cli.md`."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator

import click

from shardline.pipelines.cli.main import main

#: Characters of a line.
_WIDTH = 110
_HEAD = """\
# The command line

`-h` shows the same.

## Exit codes

| code | meaning |
|---|---|
| 0 | done |
| 1 | a run that failed, or a negative answer: not blessed, damaged, errors found, differs |
| 2 | a mistake in what was given; trying again cannot help |
| 3 | the platform refused, failed or was not reached |
| 4 | the run was cancelled |
| 75 | stopped before it was done; started again, it goes on |

This page is generated: `python -m shardline.pipelines.cli.reference > docs/cli.md`.

## Commands

"""


def reference() -> str:
    """Returns the page with the help of all commands, and of the program that every replica runs."""
    from shardline.trainer import task

    contexts = commands()
    index = [
        f"- [`{context.command_path}`](#{context.command_path.replace(' ', '-')}): "
        f"{context.command.get_short_help_str(200)}"
        for context in contexts
    ]
    index.append("- [`python -m shardline.trainer.task`](#options-of-the-trainer): what every replica runs.")
    parser = task.parser()
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=_WIDTH)
    sections = [(context.command_path, context.command.get_help(context)) for context in contexts]
    sections.append(("Options of the trainer", parser.format_help()))
    texts = [f"## {title}\n\n{textwrap.indent(text.rstrip(), '    ')}\n" for title, text in sections]
    return "\n".join([_HEAD + "\n".join(index) + "\n", *texts])


def commands() -> list[click.Context]:
    """Returns a context for every command that does something, in the order of their names."""
    # Without --help, which every one has.
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
