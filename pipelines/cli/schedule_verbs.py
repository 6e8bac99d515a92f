"""The commands about schedules that there are: list, pause, resume, delete, runs."""

from __future__ import annotations

import datetime
import difflib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from shardline.pipelines.cli.options import dry_run_option, environment_options, json_option, show_json, show_table
from shardline.trainer.errors import SettingsError

if TYPE_CHECKING:
    from shardline.pipelines.vertex.calls import Clients
    from shardline.pipelines.vertex.environment import Environment
    from shardline.pipelines.vertex.schedules.existing import Existing
    from shardline.pipelines.vertex.schedules.steps import Step


@click.command("list")
@json_option
@environment_options
def list_(as_json: bool, environment: Environment) -> None:
    """List the schedules of pipelines that there are."""
    from shardline.pipelines.cli import schedule_view as view
    from shardline.pipelines.vertex.calls import clients
    from shardline.pipelines.vertex.schedules.apply import list_schedules

    found = sorted(list_schedules(clients(environment)), key=lambda item: (item.display_name, item.name))
    if as_json:
        show_json({"schedules": [view.existing_content(item) for item in found]})
    elif found:
        show_table([("NAME", "ID", "STATE", "CRON", "NEXT RUN", "RUNS"), *map(view.existing_row, found)])
    else:
        click.echo(f"no schedules in {environment.parent}")


@click.command()
@click.argument("name")
@dry_run_option
@json_option
@environment_options
def pause(name: str, dry_run: bool, as_json: bool, environment: Environment) -> None:
    """Start no more runs of the schedule NAME until it is resumed; runs that have begun go on."""
    from shardline.pipelines.vertex.schedules.existing import ACTIVE
    from shardline.pipelines.vertex.schedules.steps import Step

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
    from shardline.pipelines.vertex.schedules.existing import PAUSED
    from shardline.pipelines.vertex.schedules.steps import Step

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
    from shardline.pipelines.vertex.schedules.steps import delete_steps

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
    import dataclasses

    from shardline.pipelines.vertex.status import latest_runs

    platform, found = _find(environment, name)
    conditions = [f'schedule_name="{item.name}"' for item in found]
    started = latest_runs(platform, limit, " OR ".join(conditions))
    if as_json:
        show_json({"runs": [dataclasses.asdict(item) for item in started]})
    elif started:
        rows = [(item.job_id, item.state, item.created, item.duration) for item in started]
        show_table([("RUN", "STATE", "STARTED (UTC)", "DURATION"), *rows])
    else:
        click.echo(f"{name} has started no run")


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


def _find(environment: Environment, name: str, *, required: bool = True) -> tuple[Clients, list[Existing]]:
    """Returns the schedules that are called `name`.

    Raises:
        SettingsError: When there is none and one is required.
    """
    from shardline.pipelines.vertex.calls import clients
    from shardline.pipelines.vertex.schedules.apply import list_schedules

    platform = clients(environment)
    known = list_schedules(platform)
    found = [item for item in known if item.display_name == name]
    if required and not found:
        others = near(name, {item.display_name for item in known})
        raise SettingsError(f"there is no schedule {name!r} in {environment.parent}{others}")
    return platform, found


def _do(
    platform: Clients,
    name: str,
    steps: Sequence[Step],
    done: str,
    otherwise: str,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Makes calls about the schedule `name` and says that it is done; or `otherwise`, if there are none."""
    from shardline.pipelines.vertex.schedules.apply import call

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
