"""The commands `shardline schedule plan` and `apply`; those of schedules that there are join them.

The commands about schedules that there are: list, pause, resume, delete, runs.
"""

from __future__ import annotations

import datetime
import difflib
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardline.pipelines.cli.options import (
    dry_run_option,
    environment_options,
    json_option,
    show_json,
    show_table,
)
from shardline.trainer.errors import EXIT_FAILED, SettingsError, ShardlineError

if TYPE_CHECKING:
    from shardline.components.vertex.client import Platform
    from shardline.pipelines.remote.environment import Environment
    from shardline.pipelines.remote.schedules.plan import Plan
    from shardline.pipelines.remote.schedules.steps import Existing, Step


@click.command("list")
@json_option
@environment_options
def list_(as_json: bool, environment: Environment) -> None:
    """List the schedules of pipelines that there are."""
    from shardline.pipelines.cli import schedule_view as view
    from shardline.pipelines.remote.schedules.apply import list_schedules

    found = sorted(list_schedules(environment.platform), key=lambda item: (item.display_name, item.name))
    if as_json:
        show_json({"schedules": [view.existing_content(item) for item in found]})
    elif found:
        show_table([("NAME", "ID", "STATE", "CRON", "NEXT RUN", "RUNS"), *map(view.existing_row, found)])
    else:
        click.echo(f"no schedules in {environment.platform.parent}")


@click.command()
@click.argument("name")
@dry_run_option
@json_option
@environment_options
def pause(name: str, dry_run: bool, as_json: bool, environment: Environment) -> None:
    """Start no more runs of the schedule NAME until it is resumed; runs that have begun go on."""
    from shardline.pipelines.remote.schedules.steps import ACTIVE, Step

    platform, found = _find(environment, name)
    steps = [Step("PauseSchedule", {"name": item.name}) for item in found if item.state == ACTIVE]
    _do(platform, name, steps, "paused", _states(found), dry_run, as_json)


@click.command()
@click.argument("name")
@click.option("--catch-up", is_flag=True, help="First start the runs that were missed while it was paused.")
@dry_run_option
@json_option
@environment_options
def resume(name: str, catch_up: bool, dry_run: bool, as_json: bool, environment: Environment) -> None:
    """Start runs of the paused schedule NAME again."""
    from shardline.pipelines.remote.schedules.steps import PAUSED, Step

    platform, found = _find(environment, name)
    if len(found) > 1:
        raise SettingsError(
            f"{len(found)} schedules are called {name}, and each would start its runs; "
            "'shardline schedule apply' leaves one"
        )
    steps = [
        Step("ResumeSchedule", {"name": item.name, "catchUp": catch_up})
        for item in found
        if item.state == PAUSED
    ]
    done = "resumed, missed runs first" if catch_up else "resumed"
    _do(platform, name, steps, done, _states(found), dry_run, as_json)


@click.command()
@click.argument("name")
@dry_run_option
@json_option
@environment_options
def delete(name: str, dry_run: bool, as_json: bool, environment: Environment) -> None:
    """Delete the schedule NAME, and every other of that name; runs that have begun go on."""
    from shardline.pipelines.remote.schedules.steps import delete_steps

    platform, found = _find(environment, name, required=False)
    steps = list(delete_steps(found, datetime.datetime.now(datetime.UTC)))
    _do(platform, name, steps, "deleted", "does not exist", dry_run, as_json)


@click.command()
@click.argument("name")
@click.option("--limit", default=10, show_default=True, type=click.IntRange(min=1), help="How many.")
@json_option
@environment_options
def runs(name: str, limit: int, as_json: bool, environment: Environment) -> None:
    """List the latest runs that the schedule NAME has started."""
    from shardline.components.vertex.runs import latest_runs
    from shardline.pipelines.cli.runs import show_runs

    platform, found = _find(environment, name)
    conditions = [f'schedule_name="{item.name}"' for item in found]
    started = latest_runs(platform, limit, " OR ".join(conditions))
    show_runs(started, f"{name} has started no run", as_json)


COMMANDS = (list_, pause, resume, delete, runs)


def step_content(step: Step) -> dict[str, Any]:
    """Returns a call as --dry-run shows it."""
    return {"call": step.call, "request": step.request}


def near(name: str, known: Iterable[str]) -> str:
    """Returns what else could be meant by a name, for the end of a message."""
    listed = sorted(known)
    close = difflib.get_close_matches(name, listed, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there are {', '.join(listed)}" if listed else "; there are none"


def _find(environment: Environment, name: str, *, required: bool = True) -> tuple[Platform, list[Existing]]:
    """Returns the schedules that are called `name`.

    Raises:
        SettingsError: When there is none and one is required.
    """
    from shardline.pipelines.remote.schedules.apply import list_schedules

    platform = environment.platform
    known = list_schedules(platform)
    found = [item for item in known if item.display_name == name]
    if required and not found:
        others = near(name, {item.display_name for item in known})
        raise SettingsError(f"there is no schedule {name!r} in {environment.platform.parent}{others}")
    return platform, found


def _do(
    platform: Platform,
    name: str,
    steps: Sequence[Step],
    done: str,
    otherwise: str,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Makes calls about the schedule `name` and says that it is done; or `otherwise`, if there are none."""
    from shardline.pipelines.remote.schedules.apply import call

    if dry_run:
        show_json({"requests": [step_content(step) for step in steps]})
        return
    for step in steps:
        call(platform, name, step)
    changed = [str(step.request["name"]) for step in steps]
    if as_json:
        show_json({"name": name, "changed": changed})
    elif not steps:
        click.echo(f"{name} {otherwise}: nothing to do")
    else:
        count = f" ({len(steps)} schedules of this name)" if len(steps) > 1 else ""
        click.echo(f"{name} {done}{count}")


def _states(found: Sequence[Existing]) -> str:
    return f"is {' and '.join(sorted({item.state.lower() for item in found}))}"


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

    now = datetime.datetime.now(datetime.UTC)
    plans, _, others = _plans(environment, file, names, now)
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
    from shardline.pipelines.remote.schedules.apply import apply_plan

    now = datetime.datetime.now(datetime.UTC)
    plans, requests, _ = _plans(environment, file, names, now)
    if dry_run:
        show_json({"requests": [step_content(step) for item in plans for step in item.steps]})
        return
    for item in plans:
        apply_plan(environment.platform, item, requests[item.declared.display_name])
        if not as_json:
            click.echo(view.done_line(item, now))
    if as_json:
        show_json({"schedules": [view.plan_content(item, now) for item in plans]})


def _plans(
    environment: Environment, file: Path, names: Sequence[str], now: datetime.datetime
) -> tuple[list[Plan], dict[str, dict[str, Any]], list[str]]:
    """Returns the plans, the requests of the runs by name, and the schedules that are not in the file."""
    from shardline.pipelines.cli.runs import read_spec
    from shardline.pipelines.preflight import check_run
    from shardline.pipelines.remote.schedules.apply import list_schedules
    from shardline.pipelines.remote.schedules.declared import load_schedules
    from shardline.pipelines.remote.schedules.plan import make_plan, run_request

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
        requests[name] = run_request(environment, declared[name], spec, parameters, template_uri=template_uri)
    found = list_schedules(environment.platform)
    plans = [
        make_plan(declared[name], requests[name], [item for item in found if item.display_name == name], now)
        for name in chosen
    ]
    return plans, requests, sorted({item.display_name for item in found} - set(declared))


for command in COMMANDS:
    schedule.add_command(command)
