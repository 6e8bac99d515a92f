"""Options and output that several commands share."""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click

from shardline.components.text import table
from shardline.pipelines.settings import load_environment, project_settings, split_pairs
from shardline.trainer.base import progress
from shardline.trainer.base.deserialize import field_types
from shardline.trainer.base.errors import PipelineError, page, printable

_HELP = {"project": "Google Cloud project.", "location": "Region, such as europe-west4."}
#: Names of the platform options, which `environment_flags` adds.
PLATFORM_OPTIONS = ("settings", *_HELP)


class CommandGroup(click.Group):
    """Group of commands in sections; its help shows their first sentences whole, and addresses of pages."""

    #: Names of commands by section.
    sections: Mapping[str, Sequence[str]] = {}

    def add_section(self, title: str, *commands: click.Command) -> None:
        """Adds commands in a section of their own."""
        for command in commands:
            self.add_command(command)
        self.sections = {**self.sections, title: [str(command.name) for command in commands]}

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns a command whose help has addresses in place of docs/NAME.md."""
        found = super().get_command(ctx, cmd_name)
        if found and "docs/" in (found.help or ""):
            found = copy.copy(found)
            found.help = re.sub(r"docs/([\w-]+)\.md", lambda match: page(match[1]), found.help or "")
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the sections; click would cut sentences that do not fit into a line."""
        width = max(map(len, self.commands))
        for title, names in (self.sections or {"Commands": self.list_commands(ctx)}).items():
            with formatter.section(title):
                formatter.write_dl(
                    [(f"{name:<{width}}", self.commands[name].get_short_help_str(10**4)) for name in names]
                )


#: Type of an argument or option that is a path.
PATH = click.Path(path_type=Path)


def path_option(
    name: str, default: str, text: str, *, in_project: str = ""
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns the option for a path that has a default, and another one `in_project`."""
    if not in_project:
        return click.option(name, type=PATH, default=Path(default), show_default=True, help=text)
    return click.option(
        name,
        type=PATH,
        default=lambda: Path(in_project if project_settings() else default),
        help=f"{text}  [default: {in_project} in a project, else {default}]",
    )


def setting_option(
    kind: type[Any], name: str, flag: str = "", *, optional: bool = False, **more: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns the option for a field of a settings class, whose annotation is its help text.

    It is --NAME unless there is another `flag`; an `optional` one is None where it is not given.
    """
    default, hint = getattr(kind, name), field_types(kind)[name]
    choices = get_args(hint) if get_origin(hint) is Literal else ()
    more.setdefault("type", click.Choice(choices) if choices else type(default))
    text = get_type_hints(kind, include_extras=True)[name].__metadata__[-1]
    text += f"  [default: {default}]" * bool(optional and default)
    shown = not optional and default != "" and default is not False
    more = {"default": None if optional else default, "show_default": shown, "help": text, **more}
    return click.option(flag or f"--{name.replace('_', '-')}", name, **more)


runs_dir_option = path_option("--runs-dir", "runs", "Directory of the runs on this machine.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def parameter_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --params and --param to a command, and passes it `given`: values by name, None without any."""

    @click.option("--params", "file", type=PATH, metavar="FILE", help="File of pipeline parameters (TOML).")
    @click.option(
        "--param",
        "-p",
        "texts",
        multiple=True,
        metavar="NAME=VALUE",
        help="Pipeline parameter; overrides FILE.",
    )
    @functools.wraps(command)
    def with_parameters(*args: Any, file: Path | None, texts: tuple[str, ...], **values: Any) -> Any:
        from shardline.pipelines.parameters import read_parameters

        given = None if file is None else read_parameters(file)
        if texts:
            given = {**(given or {}), **split_pairs(texts, "--param", PipelineError)}
        return command(*args, given=given, **values)

    return with_parameters


def environment_options(
    command: Callable[..., Any], *, needed: Iterable[str] = ("project", "location")
) -> Callable[..., Any]:
    """Adds the platform options to a command, and passes it `environment`.

    With --json or --dry-run, standard output has only the command's result; progress goes to standard error.
    Raises SettingsError when a `needed` field of the environment is missing.
    """

    @functools.wraps(command)
    def with_environment(*args: Any, settings: Path | None, **values: Any) -> Any:
        flags = {name: values.pop(name) for name in _HELP}
        environment = load_environment(settings, flags, os.environ, needed=needed)
        quiet = bool(values.get("as_json") or values.get("dry_run"))
        with progress.sink(lambda event: click.echo(progress.render(event), err=quiet)):
            return command(*args, environment=environment, **values)

    return environment_flags(with_environment)


def environment_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the platform options to a command as plain values: `settings` (a path or None), and texts."""
    for name, text in reversed(_HELP.items()):
        command = click.option(f"--{name.replace('_', '-')}", name, default="", help=text)(command)
    text = (
        "Settings file (TOML); VERTEX_* variables and options override its table [vertex].  "
        "[default: settings.toml in a project]"
    )
    return click.option("--settings", type=PATH, help=text)(command)


def typed(*words: str) -> str:
    """Returns a command to type, in quotes, with the platform options of the present one."""
    given = click.get_current_context().params
    for name in PLATFORM_OPTIONS:
        if value := given.get(name):
            words = (*words, f"--{name.replace('_', '-')}", shlex.quote(str(value)))
    return f"'shardline {' '.join(words)}'"


def show_json(content: Any) -> None:
    """Prints the JSON object of --json and --dry-run."""
    click.echo(json.dumps(content, indent=2, ensure_ascii=False))


def show(as_json: bool, content: Any, *lines: str) -> None:
    """Prints the result of a command: JSON with --json, otherwise lines of text."""
    if as_json:
        show_json(content)
    else:
        for line in lines:
            click.echo("\n".join(map(printable, line.split("\n"))))


def show_table(rows: Iterable[tuple[str, ...]]) -> None:
    """Prints rows of texts in aligned columns; the first row is the heading."""
    head, *others = [tuple(map(printable, row)) for row in rows]
    click.echo(table(head, others, align="l"))


def proof_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --proven and --runs-dir to a command, and passes it `prove`, which describes runs of a file."""

    @click.option("--proven", is_flag=True, help="Refuse a pipeline that has not succeeded on this machine.")
    @runs_dir_option
    @functools.wraps(command)
    def with_proofs(*args: Any, proven: bool, runs_dir: Path, **values: Any) -> Any:
        from shardline.pipelines.parameters import describe_proof

        return command(*args, prove=functools.partial(describe_proof, runs_dir, proven), **values)

    return with_proofs
