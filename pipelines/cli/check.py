"""The command `shardline check`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardline.pipelines.cli.foreground import pairs
from shardline.trainer.errors import EXIT_FAILED, PipelineError

if TYPE_CHECKING:
    from shardline.pipelines.check.findings import Finding

_COLOURS = {"error": "red", "warning": "yellow"}
#: Places shown of a finding that there is in many.
_PLACES = 3


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--param", "-p", "params", multiple=True, metavar="NAME=VALUE", help="A pipeline parameter.")
@click.option("--cron", help="The schedule that it is to run on: 'TZ=Europe/Vienna 0 6 * * 1'.")
@click.option("--max-concurrent-run-count", type=int, default=1, show_default=True, help="With --cron.")
@click.option("--max-concurrent-active-run-count", type=int, help="With --cron; no limit unless given.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def check(
    files: tuple[Path, ...],
    params: tuple[str, ...],
    cron: str | None,
    max_concurrent_run_count: int,
    max_concurrent_active_run_count: int | None,
    as_json: bool,
) -> None:
    """Say what is wrong with compiled pipelines and settings, before anything runs.

    FILES are pipelines (YAML or JSON) of anybody's, or our settings (TOML). Parameters are checked when some
    are given with --param, or with --cron. Exits with 1 when there are errors, with 2 when a file is no
    pipeline. docs/check.md lists the rules.
    """
    from shardline.pipelines.check.load import load
    from shardline.pipelines.check.run import check as find
    from shardline.pipelines.check.schedule import Schedule

    given = pairs(params, "--param", PipelineError) if params or cron is not None else None
    schedule = None
    if cron is not None:
        schedule = Schedule(
            cron=cron,
            max_concurrent_run_count=max_concurrent_run_count,
            max_concurrent_active_run_count=max_concurrent_active_run_count,
        )
    findings = {str(file): find(load(file, given), schedule) for file in files}
    if as_json:
        click.echo(json.dumps(_report(findings), indent=2))
    else:
        for name, found in findings.items():
            show(name, found)
    if any(finding.severity == "error" for found in findings.values() for finding in found):
        sys.exit(EXIT_FAILED)


def _report(findings: dict[str, list[Finding]]) -> dict[str, Any]:
    return {
        "files": [
            {
                "file": name,
                **_counts(found),
                "findings": [dataclasses.asdict(finding) for finding in found],
            }
            for name, found in findings.items()
        ]
    }


def show(name: str, found: list[Finding]) -> None:
    """Prints what was found in a file, and how many of each kind."""
    alike = groupby(found, key=lambda finding: (finding.code, finding.severity, finding.why, finding.fix))
    for (code, severity, why, fix), group in alike:
        click.echo(f"{click.style(f'{severity} {code}', fg=_COLOURS[severity])} {_places(group)}: {why}")
        click.echo(f"    -> {fix}")
    counts = _counts(found)
    summary = ", ".join(
        f"{count} {word if count > 1 else word[:-1]}" for word, count in counts.items() if count
    )
    click.echo(f"{name}: {summary or 'nothing found'}")


def _places(group: Iterable[Finding]) -> str:
    places = [finding.where for finding in group]
    more = f" and {len(places) - _PLACES} more" if len(places) > _PLACES else ""
    return ", ".join(places[:_PLACES]) + more


def _counts(found: list[Finding]) -> dict[str, int]:
    errors = sum(finding.severity == "error" for finding in found)
    return {"errors": errors, "warnings": len(found) - errors}
