"""The commands `shardline schedule plan` and `apply`; those of schedules that there are join them."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardline.pipelines.cli.options import dry_run_option, environment_options, json_option, show_json
from shardline.pipelines.cli.schedule_verbs import COMMANDS, near, step_content
from shardline.trainer.errors import EXIT_FAILED, SettingsError, ShardlineError

if TYPE_CHECKING:
    from shardline.pipelines.vertex.calls import Clients
    from shardline.pipelines.vertex.environment import Environment
    from shardline.pipelines.vertex.schedules.plan import Plan

_FILE = Path("settings/schedules.toml")


@click.group()
def schedule() -> None:
    """Run pipelines at certain times: as a file declares it, or by hand."""


def _declared_options(command: Callable[..., Any]) -> Callable[..., Any]:
    file = click.Path(path_type=Path)
    command = click.option("--file", type=file, default=_FILE, show_default=True, help="What is declared.")(
        command
    )
    return click.argument("names", nargs=-1)(command)


@schedule.command()
@_declared_options
@click.option("--check", is_flag=True, help="Exit with 1 when there is something to do.")
@json_option
@environment_options
def plan(names: tuple[str, ...], file: Path, check: bool, as_json: bool, environment: Environment) -> None:
    """Show what 'apply' would do about the schedules NAMES (default: all of the file).

    Shows in what each differs from what is declared, and the next times at which it fires.
    """
    from shardline.pipelines.cli import schedule_view as view
    from shardline.pipelines.vertex.calls import clients

    now = datetime.datetime.now(datetime.UTC)
    plans, _, others = _plans(clients(environment), file, names, now)
    if as_json:
        show_json({"schedules": [view.plan_content(item, now) for item in plans], "not_declared": others})
    else:
        for item in plans:
            click.echo("\n".join([*view.plan_lines(item, now), ""]))
        if others:
            click.echo(f"not in {file}, and left alone: {', '.join(others)}")
        click.echo(view.summary(plans) or f"{file} declares no schedules")
    if check and any(item.steps for item in plans):
        sys.exit(EXIT_FAILED)


@schedule.command()
@_declared_options
@dry_run_option
@json_option
@environment_options
def apply(names: tuple[str, ...], file: Path, dry_run: bool, as_json: bool, environment: Environment) -> None:
    """Make the schedules NAMES (default: all of the file) what they are declared to be.

    All are checked before the first one is touched. Interrupted, it is repaired by being run again.
    """
    from shardline.pipelines.cli import schedule_view as view
    from shardline.pipelines.vertex.calls import clients
    from shardline.pipelines.vertex.schedules.apply import apply_plan

    now = datetime.datetime.now(datetime.UTC)
    platform = clients(environment)
    plans, requests, _ = _plans(platform, file, names, now)
    if dry_run:
        show_json({"requests": [step_content(step) for item in plans for step in item.steps]})
        return
    for item in plans:
        apply_plan(platform, item, requests[item.declared.display_name])
        if not as_json:
            click.echo(view.done_line(item, now))
    if as_json:
        show_json({"schedules": [view.plan_content(item, now) for item in plans]})


def _plans(
    platform: Clients, file: Path, names: Sequence[str], now: datetime.datetime
) -> tuple[list[Plan], dict[str, dict[str, Any]], list[str]]:
    """Returns the plans, the requests of the runs by name, and the schedules that are not in the file."""
    from shardline.pipelines.cli.submit import read_spec
    from shardline.pipelines.preflight import check_run
    from shardline.pipelines.vertex.schedules.apply import list_schedules
    from shardline.pipelines.vertex.schedules.declared import load_schedules
    from shardline.pipelines.vertex.schedules.plan import make_plan
    from shardline.pipelines.vertex.schedules.request import run_request

    declared = load_schedules(file)
    chosen = names or tuple(declared)
    requests = {}
    for name in chosen:
        if name not in declared:
            raise SettingsError(f"{file} declares no schedule {name!r}{near(name, declared)}")
        try:
            spec, template_uri = read_spec(declared[name].pipeline)
            parameters, warnings = check_run(spec, declared[name].parameters, declared[name].checked)
        except ShardlineError as error:
            raise type(error)(f"{file}: schedules.{name}: {error}") from None
        for warning in warnings:
            click.echo(f"warning {warning.code} {name}: {warning.why}; {warning.fix}", err=True)
        requests[name] = run_request(
            platform.environment, declared[name], spec, parameters, template_uri=template_uri
        )
    found = list_schedules(platform)
    plans = [
        make_plan(declared[name], requests[name], [item for item in found if item.display_name == name], now)
        for name in chosen
    ]
    return plans, requests, sorted({item.display_name for item in found} - set(declared))


for command in COMMANDS:
    schedule.add_command(command)
