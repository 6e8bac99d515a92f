"""The command `shardline`, and its subcommands `compile`, `new`, `check` and `doctor`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardline.components.code import left_out
from shardline.components.text import enumerate_names, fitted
from shardline.pipelines import project
from shardline.pipelines.cli.data import champion, dataset, drift, preprocess, rehearse, validate
from shardline.pipelines.cli.options import (
    PATH,
    CommandGroup,
    environment_flags,
    json_option,
    parameter_options,
    path_option,
    runs_dir_option,
    show,
    show_json,
)
from shardline.pipelines.cli.runs import cancel, explain, launch, logs, run, status, submit, train, upload
from shardline.pipelines.cli.schedule import schedule
from shardline.pipelines.local import foreground
from shardline.pipelines.settings import (
    load_environment,
    load_settings,
    read_environment,
    read_settings_file,
)
from shardline.trainer.base.crash import as_error
from shardline.trainer.base.errors import EXIT_FAILED, EXIT_INTERRUPTED, SettingsError

if TYPE_CHECKING:
    from shardline.pipelines.check import Finding
    from shardline.pipelines.doctor import Diagnosis

# Every command imports what it needs inside: `shardline --help` waits for neither KFP nor TensorFlow.


class _Main(CommandGroup):
    """Group that turns an error into one line and the error's exit code, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except KeyboardInterrupt:  # as `run` and `train` end, and not with the 1 of a failure
            click.echo("Aborted!", err=True)
            ctx.exit(EXIT_INTERRUPTED)
        except Exception as failure:
            error = as_error(failure)
            shown = click.ClickException(fitted(error.line, sys.stderr))
            shown.exit_code = error.exit_code  # type: ignore[misc]  # click reads it from the instance
            raise shown from None


@click.group(cls=_Main, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="shardline")
def main() -> None:
    """Turn a dataset and a Keras model into a retraining pipeline for Vertex AI Pipelines."""


@click.command()
@path_option("--settings", "settings/local.toml", "Settings file (TOML).", in_project="settings.toml")
@click.option(
    "--pipeline",
    type=click.Choice(["retrain", "tune"]),
    default="retrain",
    show_default=True,
    help="Pipeline to compile.",
)
@path_option(
    "--study", "settings/tune.toml", "Study file of the tuning pipeline (TOML).", in_project="tune.toml"
)
@click.option(
    "--output", type=PATH, help="File to write.  [default: compiled/retrain.yaml or compiled/tune.yaml]"
)
@click.option("--image", "digest", help="Image instead of the settings', as in NAME@sha256:DIGEST.")
@click.option("--check", is_flag=True, help="Write nothing; fail if the file is out of date.")
def compile(
    settings: Path, pipeline: str, study: Path, output: Path | None, digest: str | None, check: bool
) -> None:
    """Compile the retraining or the tuning pipeline."""
    from shardline.pipelines.compile import check_compiled, write_compiled
    from shardline.pipelines.parameters import load_study

    environment = load_settings(settings)
    if digest is not None:
        environment = replace(environment, image=digest)
    searched = load_study(study) if pipeline == "tune" else None
    output = output or Path("compiled", f"{pipeline}.yaml")
    if check:
        check_compiled(environment, output, searched)
        click.echo(f"{output} is up to date")
    else:
        changed, warnings = write_compiled(environment, output, searched)
        # The output may be standard output, which must then hold nothing but the pipeline.
        aside = not output.is_file() or output.is_relative_to("/dev")
        if warnings:
            show_findings(str(output), warnings, err=aside)
        held = environment.code.packages
        code = f", with the code of {', '.join(held)}" if held else ""
        click.echo(f"{output} {'written' if changed else 'is up to date'}{code}", err=aside)
        with contextlib.chdir(environment.directory):
            without = [file for package in held for file in left_out(package)]
        for file in without:
            click.echo(f"without {file}: files of data above 100 kB are not packed", err=aside)


@click.command()
@click.argument("directory", type=PATH, metavar="DIR")
@click.option(
    "--data", metavar="PATH", help="Your table, or directory with a folder of images for each class."
)
@click.option("--label", default="", help="Column to predict, as of 'preprocess'.  [default: label]")
@click.option(
    "--kind",
    type=click.Choice(list(project.KINDS)),
    help="Kind of examples.  [default: images, or that of the data]",
)
@click.option("--name", default="", help="Name of the package.  [default: from DIR]")
def new(directory: Path, data: str | None, label: str, kind: str | None, name: str) -> None:
    """Write a project to DIR: model, data, settings, tests, Makefile.

    It runs at once: 'make run' on this machine, 'make submit' on Vertex AI. With --data, its model fits your
    data, which stay where they are; else it has sample data and a source, to be replaced. DIR must be new or
    empty.
    """
    if label and data is None:
        raise click.UsageError("--label belongs to --data PATH, the table that has this column")
    name = name or project.package_name(directory)
    found = None
    if data is not None:
        from shardline.pipelines.project.data import inspect_data  # needs numpy

        found = inspect_data(data, label, kind or "")
    kind = found.kind if found else kind or "images"
    files = project.write_project(directory, kind, name, project.own_requirement(), found)
    sample = f"{project.KINDS[kind]} and a model of them, for you to replace"
    head = f"{directory}: a package {name} with {f'a model of {found.path}' if found else sample}"
    lines = [*found.found] if found else [str(file) for file in files]
    steps = (f"cd {shlex.quote(str(directory))}", "make run", "make test")
    show(False, None, head, "", *lines, "", "Next:", "", *(f"    {step}" for step in steps))


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
    from shardline.pipelines.remote import SCHEDULES_TABLE, load_schedules
    from shardline.pipelines.spec import read_pipeline

    if path.suffix not in (".toml", ".example"):
        return check_pipeline(Pipeline.parse(read_pipeline(path), path, given))
    keys = read_settings_file(path).keys()
    if not keys.isdisjoint({"metric", "parameter"}):  # keys of every study, and of no settings
        load_study(path)
        return []
    if SCHEDULES_TABLE not in keys:
        from shardline.pipelines.compile import compile_pipeline  # with KFP's compiler

        pipeline, values = (
            Pipeline.parse(compile_pipeline(load_settings(path)), path, given),
            read_environment(path),
        )
        return check_pipeline(
            dataclasses.replace(pipeline, location=values.get("location", ""), environment=values)
        )
    findings = []
    for name, declared in load_schedules(path).items():
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

    if not local:
        try:
            environment = load_environment(settings, flags, os.environ)
            known = load_settings(environment.file) if environment.file else None
        except SettingsError:
            yield from examine_machine(runs_dir, toy=False)  # it needs no settings
            raise
        yield from examine_platform(environment, known)
    yield from examine_machine(runs_dir, toy=local)


main.add_section("Start", new, doctor, compile, check)
main.add_section("Data and models", preprocess, dataset, drift, validate, champion)
main.add_section("Run on this machine", run, rehearse, train, launch)
main.add_section("Run on the platform", upload, submit, schedule, cancel)
main.add_section("Look at runs", status, logs, explain)

if __name__ == "__main__":
    sys.argv[0] = "shardline"  # the program of the commands that a run proposes
    main()
