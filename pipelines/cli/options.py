"""Options and output that several commands have in common."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from shardline.components.text import table
from shardline.trainer.base import progress
from shardline.trainer.base.errors import PipelineError, SettingsError, ShardlineError, printable

if TYPE_CHECKING:
    from shardline.pipelines.local.terminal import Terminal

_HELP = {
    "project": "Project.",
    "location": "Region.",
    "pipeline_root": "Directory for the outputs of runs, gs://BUCKET/PATH.",
    "service_account": "Service account of the runs.",
    "registry": "KFP repository, https://LOCATION-kfp.pkg.dev/PROJECT/REPOSITORY.",
}
_NEEDED = ("project", "location")

#: Type of an argument or option that is a path.
PATH = click.Path(path_type=Path)


def path_option(name: str, default: str, text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns the option for a path that has a default."""
    return click.option(name, type=PATH, default=Path(default), show_default=True, help=text)


json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
dry_run_option = click.option("--dry-run", is_flag=True, help="Print the request as JSON and send nothing.")
settings_option = click.option(
    "--settings",
    type=PATH,
    help="Settings file (TOML) with a table [vertex]; VERTEX_* and options override it.",
)


def parameter_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command --params and --param, and passes it `given`: values by name, or None without any."""

    @click.option("--params", "file", type=PATH, metavar="FILE", help="A file (TOML) of pipeline parameters.")
    @click.option(
        "--param",
        "-p",
        "texts",
        multiple=True,
        metavar="NAME=VALUE",
        help="A pipeline parameter; it overrides FILE.",
    )
    @functools.wraps(command)
    def with_parameters(*args: Any, file: Path | None, texts: tuple[str, ...], **values: Any) -> Any:
        from shardline.pipelines.parameters import read_parameters

        given = None if file is None else read_parameters(file)
        if texts:
            given = {**(given or {}), **pairs(texts, "--param", PipelineError)}
        return command(*args, given=given, **values)

    return with_parameters


def environment_options(
    command: Callable[..., Any], *, needed: Iterable[str] = _NEEDED
) -> Callable[..., Any]:
    """Gives a command the options that name the project and region, and passes it `environment`.

    With --json or --dry-run standard output holds the command's result only; progress goes to standard
    error. Fields of the environment that are `needed` must be given.
    """

    @functools.wraps(command)
    def with_environment(*args: Any, settings: Path | None, **values: Any) -> Any:
        from shardline.pipelines.settings import load_environment

        # gRPC prints a line of its own for each connection that fails.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        flags = {name: values.pop(name) for name in _HELP}
        environment = load_environment(settings, flags, os.environ, needed=needed)
        quiet = bool(values.get("as_json") or values.get("dry_run"))
        with progress.sink(lambda event: click.echo(progress.render(event), err=quiet)):
            return command(*args, environment=environment, **values)

    return environment_flags(with_environment)


#: For commands that call only the registry.
registry_options = functools.partial(environment_options, needed=("registry",))


def environment_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command the same options as plain values: `settings` (a path, or None) and one text each."""
    for name, text in reversed(_HELP.items()):
        command = click.option(f"--{name.replace('_', '-')}", name, default="", help=text)(command)
    return settings_option(command)


def show_json(content: Any) -> None:
    """Prints the one JSON object of --json and --dry-run."""
    click.echo(json.dumps(content, indent=2, ensure_ascii=False))


def show(as_json: bool, content: Any, *lines: str) -> None:
    """Prints a command's result: as JSON, or in lines for a person."""
    if as_json:
        show_json(content)
    else:
        for line in lines:
            click.echo("\n".join(map(printable, line.split("\n"))))


def show_table(rows: Iterable[tuple[str, ...]]) -> None:
    """Prints rows of texts in aligned columns; the first row is the heading."""
    head, *others = rows
    click.echo(table(head, others, align="l"))


runs_dir_option = path_option("--runs-dir", "runs", "Where run directories are made.")


def proof_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command --proven and --runs-dir, and passes it `proofs`: the runs of this machine."""

    @click.option("--proven", is_flag=True, help="Refuse a file that has not succeeded here.")
    @runs_dir_option
    @functools.wraps(command)
    def with_proofs(*args: Any, proven: bool, runs_dir: Path, **values: Any) -> Any:
        from shardline.pipelines.parameters import Proofs

        return command(*args, proofs=Proofs(runs_dir, required=proven), **values)

    return with_proofs


#: Replicas that one machine may be asked for.
MOST_REPLICAS = 100

network_option = click.option(
    "--network",
    type=click.Choice(["auto", "isolated", "host"]),
    default="auto",
    envvar="SHARDLINE_NETWORK",
    show_envvar=True,
    show_default=True,
    help="Network of a job with several replicas: its own, which nobody outside reaches and which reaches "
    "nobody (isolated; auto: where the kernel allows it), or this machine's (host).",
)
inject_option = click.option(
    "--inject",
    "injections",
    multiple=True,
    metavar="FAILURE",
    help="Rehearse a failure: preempt:worker:0@step=30, kill:chief@t=5s, slow:worker:1=2x.",
)


#: Modules of the extra `local` that every local run needs, and those that a run of our own pipelines needs.
EVERY_RUN = ("psutil", "rich")
OUR_RUNS = (*EVERY_RUN, "numpy", "tensorflow", "keras", "sklearn", "jinja2", "PIL", "matplotlib")


def require_local(modules: Iterable[str]) -> None:
    """Refuses a local run where modules are not installed; SettingsError names them and the extra."""
    if absent := [name for name in modules if not _is_installed(name)]:
        raise SettingsError(
            f"a local run needs {', '.join(absent)}, which is not installed: pip install 'shardline[local]'"
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


@contextlib.contextmanager
def foreground(stream: TextIO | None = None) -> Iterator[Terminal]:
    """Shows the progress of this process on a stream, standard output unless given."""
    from shardline.pipelines.local.terminal import open_terminal

    with open_terminal(stream) as terminal, progress.sink(terminal.show):
        yield terminal


def pairs(texts: Iterable[str], option: str, error: type[ShardlineError]) -> dict[str, str]:
    """Splits texts of the form NAME=VALUE; raises `error` for another form or a name that is given twice."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise error(f"{option} takes NAME=VALUE, got {text!r}")
        if name in found:
            raise error(f"{option} {name} is given twice: {found[name]!r} and {value!r}")
        found[name] = value
    return found
