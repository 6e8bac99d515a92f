"""The command `shardline`, and its subcommands `compile` and `new`."""

from __future__ import annotations

import contextlib
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from shardline.components.text import fitted
from shardline.pipelines.cli.checks import check, doctor, show_findings
from shardline.pipelines.cli.data import dataset, drift, preprocess
from shardline.pipelines.cli.models import champion, rehearse, validate
from shardline.pipelines.cli.options import PATH, CommandGroup, path_option, show
from shardline.pipelines.cli.runs import cancel, explain, launch, logs, run, status, submit, train, upload
from shardline.pipelines.cli.schedule import schedule
from shardline.pipelines.project.new import KINDS
from shardline.trainer.base.crash import as_error
from shardline.trainer.base.errors import EXIT_INTERRUPTED

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
    from shardline.components.code import left_out
    from shardline.pipelines import settings as environments
    from shardline.pipelines.compile import check_compiled, write_compiled
    from shardline.pipelines.parameters import load_study

    environment = environments.load(settings)
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
    "--kind", type=click.Choice(list(KINDS)), help="Kind of examples.  [default: images, or that of the data]"
)
@click.option("--name", default="", help="Name of the package.  [default: from DIR]")
def new(directory: Path, data: str | None, label: str, kind: str | None, name: str) -> None:
    """Write a project to DIR: model, data, settings, tests, Makefile.

    It runs at once: 'make run' on this machine, 'make submit' on Vertex AI. With --data, its model fits your
    data, which stay where they are; else it has sample data and a source, to be replaced. DIR must be new or
    empty.
    """
    from shardline.pipelines.project import new as projects

    if label and data is None:
        raise click.UsageError("--label belongs to --data PATH, the table that has this column")
    name = name or projects.package_name(directory)
    found = None
    if data is not None:
        from shardline.pipelines.project.data import inspect  # needs numpy

        found = inspect(data, label, kind or "")
    kind = found.kind if found else kind or "images"
    files = projects.write(directory, kind, name, projects.origin(), found)
    sample = f"{KINDS[kind]} and a model of them, for you to replace"
    head = f"{directory}: a package {name} with {f'a model of {found.path}' if found else sample}"
    lines = [*found.found] if found else [str(file) for file in files]
    steps = (f"cd {shlex.quote(str(directory))}", "make run", "make test")
    show(False, None, head, "", *lines, "", "Next:", "", *(f"    {step}" for step in steps))


main.add_section("Start", new, doctor, compile, check)
main.add_section("Data and models", preprocess, dataset, drift, validate, champion)
main.add_section("Run on this machine", run, rehearse, train, launch)
main.add_section("Run on the platform", upload, submit, schedule, cancel)
main.add_section("Look at runs", status, logs, explain)

if __name__ == "__main__":
    sys.argv[0] = "shardline"  # the program of the commands that a run proposes
    main()
