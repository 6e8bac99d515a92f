"""Commands of `shardline schedule`: plan, apply; list, pause, resume, delete, runs."""

from __future__ import annotations

import datetime
import difflib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardline.pipelines.cli.options import (
    dry_run_option,
    environment_options,
    json_option,
    path_option,
    proof_options,
    show,
    show_json,
    show_table,
)
from shardline.pipelines.cli.plans import (
    Wanted,
    declared_lines,
    done_line,
    existing_content,
    existing_row,
    name_of,
    plan_content,
    plan_lines,
    summary,
)
from shardline.trainer.errors import EXIT_FAILED, PlatformError, SettingsError, ShardlineError

if TYPE_CHECKING:
    from shardline.pipelines.proof import Proofs
    from shardline.pipelines.remote.environment import Environment
    from shardline.pipelines.remote.schedules.plan import Plan
    from shardline.pipelines.remote.schedules.steps import Existing, Step


@click.group()
def schedule() -> None:
    """Run pipelines on a schedule: as a file declares it, or by hand."""


def _declared_options(command: Callable[..., Any]) -> Callable[..., Any]:
    file = path_option("--file", "settings/schedules.toml", "File that declares the schedules.")
    return click.argument("names", nargs=-1)(file(command))


@schedule.command()
@_declared_options
@click.option("--check", is_flag=True, help="Exit with 1 when there is something to do.")
@json_option
@proof_options
@environment_options
def plan(
    names: tuple[str, ...],
    file: Path,
    check: bool,
    as_json: bool,
    environment: Environment,
    proofs: Proofs,
) -> None:
    """Show what 'apply' would do about the schedules NAMES (default: all of the file).

    Shows how each differs from what is declared, and the next times at which it fires. Where the platform
    cannot be asked the file is checked all the same, and the exit code is 3.
    """
    now = datetime.datetime.now(datetime.UTC)
    wanted = _wanted(environment, file, names, proofs)
    try:
        plans, others = _plans(environment, file, wanted, now)
    except PlatformError as error:
        if not as_json:
            for item in wanted.values():
                click.echo("\n".join(declared_lines(item, now)))
        raise PlatformError(f"not compared with the platform: {error}") from None
    show(
        as_json,
        {
            "schedules": [plan_content(item, wanted[name_of(item)], now) for item in plans],
            "not_declared": others,
        },
        *(line for item in plans for line in (*plan_lines(item, wanted[name_of(item)], now), "")),
        *([f"not in {file}, and left alone: {', '.join(others)}"] if others else []),
        summary(plans) or f"{file} declares no schedules",
    )
    if check and any(item.steps for item in plans):
        sys.exit(EXIT_FAILED)


@schedule.command()
@_declared_options
@dry_run_option
@json_option
@proof_options
@environment_options
def apply(
    names: tuple[str, ...],
    file: Path,
    dry_run: bool,
    as_json: bool,
    environment: Environment,
    proofs: Proofs,
) -> None:
    """Make the schedules NAMES (default: all of the file) what they are declared to be.

    All are checked before the first one is touched. After an interruption, run it again.
    """
    from shardline.pipelines.remote.schedules.apply import apply_plan

    now = datetime.datetime.now(datetime.UTC)
    wanted = _wanted(environment, file, names, proofs)
    plans, _ = _plans(environment, file, wanted, now)
    if dry_run:
        _show_requests(step for item in plans for step in item.steps)
        return
    for item in plans:
        apply_plan(environment.platform, item, wanted[name_of(item)].request)
        if not as_json:
            click.echo(done_line(item, now))
            if item.steps:
                click.echo(f"  proof: {wanted[name_of(item)].proof}")
    if as_json:
        show_json({"schedules": [plan_content(item, wanted[name_of(item)], now) for item in plans]})


@schedule.command("list")
@json_option
@environment_options
def list_(as_json: bool, environment: Environment) -> None:
    """List the pipeline schedules on the platform."""
    from shardline.pipelines.remote.schedules.apply import list_schedules

    found = sorted(list_schedules(environment.platform), key=lambda item: (item.display_name, item.name))
    if as_json:
        show_json({"schedules": [existing_content(item) for item in found]})
    elif found:
        show_table([("NAME", "ID", "STATE", "CRON", "NEXT RUN", "RUNS"), *map(existing_row, found)])
    else:
        click.echo(f"no schedules in {environment.platform.parent}")


@schedule.command()
@click.argument("name")
@dry_run_option
@json_option
@environment_options
def pause(name: str, dry_run: bool, as_json: bool, environment: Environment) -> None:
    """Start no more runs of the schedule NAME until it is resumed; runs that have begun go on."""
    from shardline.pipelines.remote.schedules.steps import ACTIVE, Step

    found = _find(environment, name)
    steps = [Step("PauseSchedule", {"name": item.name}) for item in found if item.state == ACTIVE]
    _do(environment, name, steps, ("paused", _states(found)), dry_run, as_json)


@schedule.command()
@click.argument("name")
@click.option("--catch-up", is_flag=True, help="First start the runs that were missed while it was paused.")
@dry_run_option
@json_option
@environment_options
def resume(name: str, catch_up: bool, dry_run: bool, as_json: bool, environment: Environment) -> None:
    """Start runs of the paused schedule NAME again."""
    from shardline.pipelines.remote.schedules.steps import PAUSED, Step

    found = _find(environment, name)
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
    _do(environment, name, steps, (done, _states(found)), dry_run, as_json)


@schedule.command()
@click.argument("name")
@dry_run_option
@json_option
@environment_options
def delete(name: str, dry_run: bool, as_json: bool, environment: Environment) -> None:
    """Delete the schedule NAME, and every other of that name; runs that have begun go on."""
    from shardline.pipelines.remote.schedules.steps import delete_steps

    found = _find(environment, name, required=False)
    steps = list(delete_steps(found, datetime.datetime.now(datetime.UTC)))
    _do(environment, name, steps, ("deleted", "does not exist"), dry_run, as_json)


@schedule.command()
@click.argument("name")
@click.option("--limit", default=10, show_default=True, type=click.IntRange(min=1), help="How many.")
@json_option
@environment_options
def runs(name: str, limit: int, as_json: bool, environment: Environment) -> None:
    """List the latest runs that the schedule NAME has started."""
    from shardline.components.vertex.runs import latest_runs
    from shardline.pipelines.cli.runs import show_runs

    conditions = [f'schedule_name="{item.name}"' for item in _find(environment, name)]
    started = latest_runs(environment.platform, limit, " OR ".join(conditions))
    show_runs(started, f"{name} has started no run", as_json)


def _wanted(environment: Environment, file: Path, names: Sequence[str], proofs: Proofs) -> dict[str, Wanted]:
    """Returns the chosen schedules of a file by name, each checked with its pipeline and parameters."""
    from shardline.pipelines.cli.runs import read_spec
    from shardline.pipelines.preflight import check_run
    from shardline.pipelines.remote.schedules.declared import load_schedules
    from shardline.pipelines.remote.schedules.plan import run_request

    declared, found = load_schedules(file), {}
    wrong: list[ShardlineError] = []
    for name in names or tuple(declared):
        if name not in declared:
            raise SettingsError(f"{file} declares no schedule {name!r}{_near(name, declared)}")
        wanted = declared[name]
        try:
            spec, template_uri, content = read_spec(wanted.pipeline)
            parameters, warnings = check_run(spec, wanted.parameters, wanted, settings=environment.file)
            proof = proofs.of(content, spec)
        except ShardlineError as error:
            wrong.append(type(error)(f"{file}: schedules.{name}: {error}"))
            continue
        for warning in warnings:
            click.echo(f"warning {warning.code} {name}: {warning.why}; {warning.fix}", err=True)
        request = run_request(environment, wanted, spec, parameters, template_uri=template_uri)
        found[name] = Wanted(wanted, request, proof)
    for other in wrong[:-1]:
        click.echo(f"Error: {other.line}", err=True)
    if wrong:
        raise wrong[-1]
    return found


def _plans(
    environment: Environment, file: Path, wanted: Mapping[str, Wanted], now: datetime.datetime
) -> tuple[list[Plan], list[str]]:
    """Returns the plans of schedules, and those on the platform that are not in the file."""
    from shardline.pipelines.remote.schedules.apply import list_schedules
    from shardline.pipelines.remote.schedules.declared import load_schedules
    from shardline.pipelines.remote.schedules.plan import make_plan

    found = list_schedules(environment.platform)
    plans = [
        make_plan(item.declared, item.request, [other for other in found if other.display_name == name], now)
        for name, item in wanted.items()
    ]
    return plans, sorted({item.display_name for item in found} - set(load_schedules(file)))


def _find(environment: Environment, name: str, *, required: bool = True) -> list[Existing]:
    """Returns the schedules that are called `name`; refuses where there is none and one is required."""
    from shardline.pipelines.remote.schedules.apply import list_schedules

    known = list_schedules(environment.platform)
    found = [item for item in known if item.display_name == name]
    if required and not found:
        others = _near(name, {item.display_name for item in known})
        raise SettingsError(f"there is no schedule {name!r} in {environment.platform.parent}{others}")
    return found


def _near(name: str, known: Iterable[str]) -> str:
    """Returns what else could be meant by a name, for the end of a message."""
    listed = sorted(known)
    if close := difflib.get_close_matches(name, listed, n=1):
        return f"; did you mean {close[0]!r}?"
    return f"; there are {', '.join(listed)}" if listed else "; there are none"


def _do(
    environment: Environment,
    name: str,
    steps: Sequence[Step],
    words: tuple[str, str],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Makes calls about the schedule `name` and says the first of the words; the second if there are none."""
    from shardline.pipelines.remote.schedules.apply import call

    if dry_run:
        _show_requests(steps)
        return
    for step in steps:
        call(environment.platform, name, step)
    done, otherwise = words
    count = f" ({len(steps)} schedules of this name)" if len(steps) > 1 else ""
    text = f"{name} {done}{count}" if steps else f"{name} {otherwise}: nothing to do"
    show(as_json, {"name": name, "changed": [str(step.request["name"]) for step in steps]}, text)


def _show_requests(steps: Iterable[Step]) -> None:
    show_json({"requests": [{"call": step.call, "request": step.request} for step in steps]})


def _states(found: Iterable[Existing]) -> str:
    return f"is {' and '.join(sorted({item.state.lower() for item in found}))}"
