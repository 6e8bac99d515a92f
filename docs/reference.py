"""What is generated: docs/check.md, by `python -m docs.reference`, and on the site the help in cli.md."""

from __future__ import annotations

import argparse
import copy
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click

from shardline.pipelines.check import RULES
from shardline.pipelines.cli.main import main
from shardline.pipelines.cli.options import PLATFORM_OPTIONS

#: Characters of a line.
_WIDTH = 110
_PLATFORM = "Platform options"
_SHARED = "Shared options"
#: Options that mean the same in every command that has them.
_SHARED_OPTIONS = ("--json", "--params", "--param", "--runs-dir", "--proven", "--network", "--inject")

_RULES_HEAD = """\
# What `shardline check` looks at

`shardline check` finds mistakes before anything runs. [Other checks](testing.md#checks-from-cheap-to-dear)
find what it cannot see.

    shardline check compiled/retrain.yaml
    shardline check settings/vertex.toml settings/schedules.toml settings/tune.toml
    shardline check anybodys.yaml -p epochs=3

It reads compiled pipelines (KFP 2, YAML or JSON, Shardline's or not), settings, schedules and studies.

- An **error** is refused, fails, or does something other than you meant. A **warning** works,
  and may be regretted.
- The exit code is 1 with errors, else 0; 2 for unreadable files.
- `shardline compile`, `run`, `submit`, `upload` and `schedule apply` refuse errors, too.
- A custom job is checked as the API receives it, without values known only at run time.

Sources:

- paths: docs.cloud.google.com; `training/`, `pipelines/` and `general/` below
  gemini-enterprise-agent-platform/machine-learning
- `CustomJobSpec` and other types: google.cloud.aiplatform_v1.types
- SDK: google-cloud-aiplatform; GCPC: google_cloud_pipeline_components

This page is generated: `python -m docs.reference`.
"""
#: Titles of the page's tables, by the first digit of a rule's code.
_TITLES = {
    "1": "Worker pools",
    "2": "Scheduling, restarts and connections",
    "3": "Payload, arguments and variables",
    "4": "Images",
    "5": "Tasks, retries and caching",
    "6": "Parameters and paths of a run",
    "8": "Secrets",
    "9": "Schedules",
}


def reference() -> str:
    """Returns the help of all commands, and of the program that every replica runs, in Markdown."""
    from shardline.trainer import task

    contexts = commands()
    parser = task.parser()
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=_WIDTH)
    sections = [_section(context) for context in contexts]
    sections.append(_text(_SHARED, _options(_is_shared)))
    sections.append(_text(_PLATFORM, _options(_is_platform)))
    sections.append(_text("Options of the trainer", parser.format_help()))
    return "\n".join([_index(contexts), *sections])


def _index(contexts: Sequence[click.Context]) -> str:
    """Returns the rows of the table of commands, with the program of a replica."""
    rows = ["\n| to | commands |\n|---|---|\n"]
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
        # On a page, pages need no address, as `CommandGroup` gives them.
        if child := click.Group.get_command(command, context, name):
            yield from _below(click.Context(child, info_name=name, parent=context))


def rules_page() -> str:
    """Returns the page with all rules in Markdown."""
    parts = [_RULES_HEAD]
    for digit, title in _TITLES.items():
        parts.append(f"\n## {title}\n\n| code | rule | source |\n|---|---|---|\n")
        for code, rule in sorted(RULES.items()):
            if code[2] == digit:
                mark = " warning" if rule.severity == "warning" else ""
                parts.append(f"| {code}{mark} | {_cell(rule.demand)} | {_cell(rule.source)} |\n")
    return "".join(parts)


def _cell(text: str) -> str:
    """Returns a text for a cell of the table; {{ would be a template to some renderers."""
    return text.removesuffix(".").replace("|", "\\|").replace("{{", "`{{").replace("}}", "}}`")


if __name__ == "__main__":
    Path(__file__).with_name("check.md").write_text(rules_page())
