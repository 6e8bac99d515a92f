"""Commands that check before a run: `shardline check` and `doctor`."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardline.components.text import enumerate_names, fitted
from shardline.pipelines.cli.options import (
    PATH,
    environment_flags,
    json_option,
    parameter_options,
    runs_dir_option,
    show,
    show_json,
)
from shardline.pipelines.local.terminal import foreground
from shardline.trainer.base.errors import EXIT_FAILED, SettingsError

if TYPE_CHECKING:
    from shardline.pipelines.check import Finding
    from shardline.pipelines.doctor import Diagnosis

_COLOURS = {"error": "red", "warning": "yellow"}


@click.command()
@click.argument("files", nargs=-1, required=True, type=PATH)
@parameter_options
@json_option
def check(files: tuple[Path, ...], given: Mapping[str, Any] | None, as_json: bool) -> None:
    """Find mistakes in compiled pipelines and settings before a run.

    FILES are compiled pipelines (YAML or JSON), Shardline's or not, and settings, schedules and studies
    (TOML). Parameters are checked with --params or --param. Exits with 1 for errors. docs/check.md
    lists the rules.
    """
    findings = {str(file): _check_file(file, given) for file in files}
    if as_json:
        files_found = [
            {"file": name, **_counts(found), "findings": list(map(dataclasses.asdict, found))}
            for name, found in findings.items()
        ]
        show_json({"files": files_found})
    else:
        for name, found in findings.items():
            show_findings(name, found)
    if any(finding.severity == "error" for found in findings.values() for finding in found):
        sys.exit(EXIT_FAILED)


def _check_file(path: Path, given: Mapping[str, Any] | None) -> list[Finding]:
    """Returns the findings in a file: a pipeline, settings (which are compiled), schedules or a study.

    A schedule is checked with its pipeline and parameters, or alone if its pipeline is in the registry.
    """
    from shardline.pipelines.check import Pipeline, apply_rules, check_pipeline
    from shardline.pipelines.parameters import load_study
    from shardline.pipelines.remote import schedules
    from shardline.pipelines.settings import load, read_environment
    from shardline.pipelines.spec import read_pipeline
    from shardline.pipelines.tables import read_settings_file

    if path.suffix not in (".toml", ".example"):
        return check_pipeline(Pipeline.parse(read_pipeline(path), path, given))
    keys = read_settings_file(path).keys()
    if not keys.isdisjoint({"metric", "parameter"}):  # keys of every study, and of no settings
        load_study(path)
        return []
    if schedules.TABLE not in keys:
        from shardline.pipelines.compile import compile_pipeline  # with KFP's compiler

        pipeline, values = Pipeline.parse(compile_pipeline(load(path)), path, given), read_environment(path)
        return check_pipeline(
            dataclasses.replace(pipeline, location=values.get("location", ""), environment=values)
        )
    findings = []
    for name, declared in schedules.load_schedules(path).items():
        if declared.pipeline.startswith("https://"):
            own = list(apply_rules([declared]))
        else:
            file = Path(declared.pipeline)
            own = check_pipeline(Pipeline.parse(read_pipeline(file), file, declared.parameters), declared)
        findings += [dataclasses.replace(found, where=f"schedules.{name}: {found.where}") for found in own]
    return findings


def show_findings(name: str, found: list[Finding], *, err: bool = False) -> None:
    """Prints the findings of a file and their number by severity, to standard error if `err`."""
    alike = groupby(found, key=lambda finding: (finding.code, finding.severity, finding.why, finding.fix))
    for (code, severity, why, fix), group in alike:
        places = [finding.where for finding in group]
        where = enumerate_names(places, 3)
        stream = sys.stderr if err else sys.stdout
        styled = click.style(f"{severity} {code}", _COLOURS[severity])
        click.echo(fitted(f"{styled} {where}: {why}", stream), err=err)
        click.echo(fitted(f"    -> {fix}", stream), err=err)
    counts = _counts(found)
    summary = ", ".join(
        f"{count} {word if count > 1 else word[:-1]}" for word, count in counts.items() if count
    )
    click.echo(f"{name}: {summary or 'nothing found'}", err=err)


def _counts(found: list[Finding]) -> dict[str, int]:
    errors = sum(finding.severity == "error" for finding in found)
    return {"errors": errors, "warnings": len(found) - errors}


@click.command()
@click.option("--local", is_flag=True, help="Check only this machine, not the platform.")
@runs_dir_option
@json_option
@environment_flags
def doctor(local: bool, runs_dir: Path, as_json: bool, settings: Path | None, **flags: str) -> None:
    """Check this machine and the platform before a run.

    Says what is wrong and how to fix it, and changes nothing. With --settings, checks the image and machines
    of the pipeline, too. Exits with 1 if a run would fail.
    """
    found = []
    with foreground(sys.stderr):
        for item in _examine(local, runs_dir, settings, flags):
            found.append(item)
            if not as_json:
                fix = f"; {item.fix}" if item.fix else ""
                level = item.level.replace("error", "ERROR")
                click.echo(f"{level:<7}  {item.what}: {item.found}{fix}")
    healthy = all(item.level != "error" for item in found)
    show(as_json, {"healthy": healthy, "findings": list(map(dataclasses.asdict, found))})
    sys.exit(0 if healthy else EXIT_FAILED)


def _examine(
    local: bool, runs_dir: Path, settings: Path | None, flags: dict[str, str]
) -> Iterator[Diagnosis]:
    from shardline.pipelines.doctor import examine_machine, examine_platform
    from shardline.pipelines.settings import load, load_environment

    if not local:
        try:
            environment = load_environment(settings, flags, os.environ)
            known = load(environment.file) if environment.file else None
        except SettingsError:
            yield from examine_machine(runs_dir, toy=False)  # it needs no settings
            raise
        yield from examine_platform(environment, known)
    yield from examine_machine(runs_dir, toy=local)
