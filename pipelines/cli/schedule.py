"""Commands about schedules: `shardline schedule apply`, list and delete."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardline.pipelines.cli.options import (
    CommandGroup,
    environment_options,
    json_option,
    path_option,
    proof_options,
    show,
    show_json,
    show_table,
)
from shardline.pipelines.cli.runs import read_spec
from shardline.pipelines.settings import Environment
from shardline.trainer.base.deserialize import did_you_mean
from shardline.trainer.base.errors import EXIT_FAILED, SettingsError, error_prefix, printable

if TYPE_CHECKING:
    from shardline.pipelines.check import Schedule
    from shardline.pipelines.remote import SchedulePlan


@click.group(cls=CommandGroup)
def schedule() -> None:
    """Run pipelines on a schedule."""


@schedule.command()
@click.argument("names", nargs=-1)
@path_option("--file", "settings/schedules.toml", "File of schedules (TOML).", in_project="schedules.toml")
@click.option("--dry-run", is_flag=True, help="Show the changes and make none.")
@click.option("--check", is_flag=True, help="With --dry-run: exit with 1 if there are changes to make.")
@json_option
@proof_options
@environment_options
def apply(
    names: tuple[str, ...],
    file: Path,
    dry_run: bool,
    check: bool,
    as_json: bool,
    environment: Environment,
    prove: Callable[..., str],
) -> None:
    """Create or update the schedules NAMES as a file declares them.

    By default these are all of the file. All are checked before the first change. Schedules that are up to
    date or not in the file stay as they are. After an interruption, run the command again.
    """
    from shardline.pipelines.remote import apply_plan, list_schedules, load_schedules, plan_schedule

    if check and not dry_run:
        raise click.UsageError("--check needs --dry-run: it reports whether there are changes to make")
    declared = load_schedules(file)
    wanted = list(_wanted(environment, file, declared, names, prove))
    known = list_schedules(environment.platform)
    plans, content = [], []
    for item, request, proof in wanted:
        named = [other for other in known if other.get("displayName") == item.display_name]
        plans.append((plan_schedule(item, request, named), proof))
    for plan, proof in plans:
        kept = plan.existing[0] if plan.existing and not plan.steps else None
        if not dry_run:
            kept = apply_plan(environment.platform, plan)
        if not as_json:
            click.echo("\n".join(map(printable, _lines(plan, proof, kept, dry_run))))
        about = {"name": plan.name, "action": plan.action, "paused": plan.paused, "proof": proof}
        about["differences"] = [difference._asdict() for difference in plan.differences]
        content.append({**about, "requests": [step._asdict() for step in plan.steps]})
    others = sorted({str(item.get("displayName")) for item in known} - {*declared})
    show(
        as_json,
        {"schedules": content, "not_declared": others},
        *([f"not in {file}, and left alone: {', '.join(others)}"] if others else []),
        *([] if declared else [f"{file} declares no schedules"]),
    )
    if check and any(about["requests"] for about in content):
        sys.exit(EXIT_FAILED)


def _lines(plan: SchedulePlan, proof: str, kept: Mapping[str, Any] | None, dry_run: bool) -> Iterator[str]:
    following = _next_run(kept) if kept else ""
    then = "; is paused" if plan.paused else f"; fires next {following}" if following else ""
    yield f"{plan.name}: {'would be ' if dry_run and plan.steps else ''}{plan.action}{then}"
    for difference in plan.differences:
        yield f"  {difference.field}: {difference.before} -> {difference.after}"
    if plan.steps:
        yield f"  proof: {proof}"


@schedule.command("list")
@json_option
@environment_options
def list_(as_json: bool, environment: Environment) -> None:
    """List the pipeline schedules on the platform."""
    from shardline.pipelines.remote import list_schedules

    found = sorted(
        list_schedules(environment.platform), key=lambda item: (item.get("displayName", ""), item["name"])
    )
    if as_json:
        without = [
            {name: item[name] for name in item if name != "createPipelineJobRequest"} for item in found
        ]
        show_json({"schedules": without})
    elif found:
        show_table([("NAME", "ID", "STATE", "CRON", "NEXT RUN", "RUNS"), *map(_row, found)])
    else:
        click.echo(f"no schedules in {environment.platform.parent}")


@schedule.command()
@click.argument("name")
@json_option
@environment_options
def delete(name: str, as_json: bool, environment: Environment) -> None:
    """Delete the schedules NAME that Shardline made; active runs continue."""
    from shardline.pipelines.remote import delete_schedules

    found = delete_schedules(environment.platform, name)
    count = f" ({len(found)} schedules of this name)" if len(found) > 1 else ""
    show(
        as_json,
        {"name": name, "changed": found},
        f"{name} deleted{count}" if found else f"{name}: nothing to do",
    )


def _wanted(
    environment: Environment,
    file: Path,
    declared: dict[str, Schedule],
    names: Sequence[str],
    prove: Callable[..., str],
) -> Iterator[tuple[Schedule, dict[str, Any], str]]:
    from shardline.components.changes import in_zone
    from shardline.pipelines.check import check_run, split_zone
    from shardline.pipelines.remote import schedule_request
    from shardline.pipelines.spec import defaults

    for name in dict.fromkeys(names or declared):
        if name not in declared:
            near = did_you_mean(name, declared, after="; ")
            raise SettingsError(f"{file} declares no schedule {name!r}{near}")
        wanted = declared[name]
        with error_prefix(f"{file}: schedules.{name}: "):
            spec, template_uri, content = read_spec(wanted.pipeline)
            parameters, warnings = check_run(
                spec, wanted.parameters, wanted, location=environment.location, uri=template_uri
            )
            source = (defaults(spec) | parameters).get("source")
            # The platform tells a run its time in UTC alone.
            if isinstance(source, str) and (zoned := in_zone(source, split_zone(wanted.cron)[0])) != source:
                parameters["source"] = zoned
            proof = prove(content, defaults(spec) | parameters)
        for warning in warnings:
            click.echo(f"warning {warning.code} {name}: {warning.why}; {warning.fix}", err=True)
        yield wanted, schedule_request(environment, spec, parameters, template_uri=template_uri), proof


def _row(item: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns a schedule of the platform as a row: name, id, state, cron, next run, runs."""
    most = f" of {item['maxRunCount']}" if "maxRunCount" in item else ""
    count = f"{item.get('startedRunCount', 0)}{most}"
    name, cron = item.get("displayName", ""), item.get("cron", "")
    return name, str(item["name"]).rpartition("/")[2], item["state"].lower(), cron, _next_run(item), count


def _next_run(item: Mapping[str, Any]) -> str:
    """Returns when a schedule fires next, in its own zone and in UTC; "" if it does not."""
    from shardline.pipelines.remote import next_run

    if (there := next_run(item)) is None:
        return ""
    in_utc = "" if there.tzname() == "UTC" else f" ({there.astimezone(datetime.UTC):%H:%M} UTC)"
    return f"{there:%a %Y-%m-%d %H:%M %Z}{in_utc}"
