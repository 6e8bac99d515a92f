"""The reference of the command line: `python -m shardline.pipelines.cli.reference > docs/cli.md`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator

import click

from shardline.pipelines.cli.main import main

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
#: click does not wrap a paragraph that begins with this.
_AS_IT_IS = "\b\n"


def reference() -> str:
    """Returns the page with all commands and their options in Markdown."""
    contexts = commands()
    links = [
        (f"[`{path}`](#{path.replace(' ', '-')})", context.command.get_short_help_str(200))
        for context in contexts
        for path in [context.command_path]
    ]
    trainer = "[`python -m shardline.trainer.task`](#options-of-the-trainer)"
    index = [*links, (trainer, "The program that every replica runs.")]
    sections = "\n".join(_section(context) for context in contexts)
    return f"{_HEAD}{_table(('command', ''), index)}\n{sections}\n{_trainer()}"


def commands() -> list[click.Context]:
    """Returns a context for every command that does something, in the order of their names."""
    return list(_below(click.Context(main, info_name="shardline")))


def _below(context: click.Context) -> Iterator[click.Context]:
    command = context.command
    if not isinstance(command, click.Group):
        yield context
        return
    if command.invoke_without_command:
        yield context
    for name in command.list_commands(context):
        child = command.get_command(context, name)
        if child is not None and not child.hidden:
            yield from _below(click.Context(child, info_name=name, parent=context))


def _section(context: click.Context) -> str:
    usage = " ".join([context.command_path, *context.command.collect_usage_pieces(context)])
    options = [
        (f"`{record[0]}`", record[1])
        for param in context.command.params
        if isinstance(param, click.Option) and (record := param.get_help_record(context))
    ]
    parts = [f"## {context.command_path}", f"    {usage}", *_paragraphs(context.command.help or "")]
    return "\n\n".join(parts) + "\n" + (f"\n{_table(('option', ''), options)}" if options else "")


def _paragraphs(text: str) -> Iterator[str]:
    for part in inspect.cleandoc(text).split("\n\n"):
        if part.startswith(_AS_IT_IS):
            lines = inspect.cleandoc(part.removeprefix(_AS_IT_IS)).splitlines()
            yield "\n".join(f"    {line}" for line in lines)
        else:
            yield part


def _trainer() -> str:
    """Returns the options of the program that every replica runs, by the groups of its own help."""
    from shardline.trainer import task

    parser = task.parser()
    parts = ["## Options of the trainer", f"    {parser.prog} [OPTIONS]", str(parser.description)]
    for group in parser._action_groups:  # argparse shows its groups in no other way
        actions = [action for action in group._group_actions if action.dest != "help"]
        rows = []
        for action in actions:
            values = action.metavar or "|".join(map(str, action.choices or ()))
            rows.append((f"`{' '.join([*action.option_strings, str(values)]).strip()}`", action.help or ""))
        title = str(group.title)
        if rows:
            parts.append(f"### {title[0].upper() + title[1:]}\n\n{_table(('option', ''), rows)}".rstrip())
    return "\n\n".join(parts) + "\n"


def _table(head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    cells = [head, ("---", "---"), *rows]
    return "".join(f"| {_cell(left)} | {_cell(right)} |\n" for left, right in cells)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("%%", "%").split())


if __name__ == "__main__":
    print(reference(), end="")
