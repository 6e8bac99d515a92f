"""Commands about past runs: `shardline runs` and `shardline runs compare`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import starmap
from typing import TYPE_CHECKING, Any

import click

from shardline.components.runs.record import RunRecord
from shardline.components.text import duration
from shardline.pipelines.cli.options import CommandGroup, json_option, show_json, show_table
from shardline.pipelines.cli.runs import Place, local_time, run_options
from shardline.pipelines.local.terminal import foreground

if TYPE_CHECKING:
    from shardline.components.runs.platform_run import PlatformRun

#: Characters of a value that are shown.
_WIDTH = 40


@click.group(cls=CommandGroup, invoke_without_command=True)
@click.option("--limit", default=10, show_default=True, type=click.IntRange(min=1), help="Number of runs.")
@json_option
@run_options
@click.pass_context
def runs(context: click.Context, /, limit: int, as_json: bool, place: Place) -> None:
    """List the newest runs in RUNS_DIR, and on the platform.

    The platform's are listed where --settings or --project is given.
    """
    if context.invoked_subcommand is not None:
        return
    from shardline.components.runs.platform_run import latest_runs
    from shardline.pipelines.engines.engine import newest_here

    listed, where = newest_here(place.runs_dir, limit), str(place.runs_dir)
    if place.settings is not None or place.flags["project"]:
        platform = place.platform()
        listed += [("platform", run) for run in latest_runs(platform, limit)]
        where = f"{where} and {platform.parent}"
    found = sorted(starmap(_row, listed), key=lambda row: row["created"], reverse=True)[:limit]
    if as_json:
        show_json({"runs": found})
    elif not found:
        click.echo(f"no runs in {where}")
    else:
        show_table([("RUN", "WHERE", "PIPELINE", "STATE", "BEGAN", "TOOK", ""), *map(_cells, found)])


def _row(place: str, run: PlatformRun) -> dict[str, Any]:
    about = {"run": run.job_id, "place": place, "pipeline": run.pipeline, "state": run.state}
    return {**about, "created": run.created, "duration_s": run.seconds, "outcome": run.error}


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    took = "" if row["duration_s"] is None else duration(row["duration_s"])
    began = local_time(row["created"])
    return row["run"], row["place"], row["pipeline"], row["state"], began, took, row["outcome"][:80]


@runs.command()
@click.argument("a")
@click.argument("b")
@json_option
@run_options
def compare(a: str, b: str, as_json: bool, place: Place) -> None:
    """Compare the parameters, data and metrics of the runs A and B.

    Each is a run directory, the name of a run in RUNS_DIR, latest, the id of a job of Slurm, or that of a run
    on the platform.
    """
    with foreground():
        records = [place.engine(run).record() for run in (a, b)]
    sections = [_sections(record) for record in records]
    if as_json:
        show_json(
            {"runs": [{"run": record.name, **of} for record, of in zip(records, sections, strict=True)]}
        )
        return
    rows, same = [("", *(record.name for record in records), "")], 0
    for title in sections[0]:
        one, other = (of[title] for of in sections)
        names = list(dict.fromkeys([*one, *other]))
        differing = [name for name in names if one.get(name) != other.get(name)]
        same += len(names) - len(differing)
        if differing:
            rows.append((title, "", "", ""))
        for name in differing:
            pair = one.get(name), other.get(name)
            numbers = all(isinstance(value, float) for value in pair)
            change = f"{pair[1] - pair[0]:+.4g}" if numbers else ""  # type: ignore[operator]
            rows.append((f"  {name}", *map(_shown, pair), change))
    show_table(rows)
    click.echo(f"{same} values are the same")


def _sections(record: RunRecord) -> dict[str, dict[str, Any]]:
    """Returns the facts about a run as flat mappings by section."""
    outcome = {"state": record.state, "verdict": record.verdict, "seconds": record.duration_s}
    code = {"pipeline": record.pipeline, "sha256": record.sha256, **record.versions}
    return {
        "outcome": outcome,
        "parameters": dict(_flat(record.parameters)),
        "data": dict(_flat(record.data)),
        "metrics": dict(record.metrics),
        "code": {name: value for name, value in code.items() if value},
    }


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH // 2]}...{text[3 - _WIDTH // 2 :]}"
