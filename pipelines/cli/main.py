"""The command `shardline`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from pipelines.cli.champion import champion
from pipelines.cli.check import check, show
from pipelines.cli.data import dataset, preprocess
from pipelines.cli.foreground import inject_option, pairs
from pipelines.cli.train import train
from pipelines.cli.validate import validate
from trainer.errors import PipelineError, ShardlineError

# Every command imports what it needs inside: `shardline --help` waits for neither KFP nor TensorFlow.

_DIRECTORY = click.Path(path_type=Path)


class _Failure(click.ClickException):
    """A mistake of the user, or a failed run, as click shows it."""

    def __init__(self, error: ShardlineError) -> None:
        super().__init__(" ".join(str(error).split()))
        self.exit_code = error.exit_code  # type: ignore[misc]  # click reads it from the instance


class _Group(click.Group):
    """Ends with one line and the error's exit code where a command meets a mistake, not with a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ShardlineError as error:
            raise _Failure(error) from None


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="shardline")
def main() -> None:
    """From a dataset and a Keras model to a retraining pipeline for Vertex AI Pipelines."""


@main.command()
@click.option("--settings", type=_DIRECTORY, default=Path("settings/local.toml"), show_default=True)
@click.option("--output", type=_DIRECTORY, default=Path("compiled/retrain.yaml"), show_default=True)
@click.option("--check", is_flag=True, help="Write nothing; fail when the file differs from the code.")
def compile(settings: Path, output: Path, check: bool) -> None:
    """Compile the retraining pipeline."""
    from pipelines import compile as compiling
    from pipelines import settings as environments

    environment = environments.load(settings)
    if check:
        compiling.check(environment, output)
        click.echo(f"{output} is what the code compiles to")
    else:
        changed, warnings = compiling.write(environment, output)
        if warnings:
            show(str(output), warnings)
        click.echo(f"{output} {'written' if changed else 'is up to date'}")


@main.command()
@click.argument("pipeline", type=_DIRECTORY)
@click.option("--param", "-p", "params", multiple=True, metavar="NAME=VALUE", help="A pipeline parameter.")
@click.option("--runs-dir", type=_DIRECTORY, default=Path("runs"), show_default=True)
@click.option("--require-blessing", is_flag=True, help="Exit with 1 when the model is not blessed.")
@inject_option
def run(
    pipeline: Path,
    params: tuple[str, ...],
    runs_dir: Path,
    require_blessing: bool,
    injections: tuple[str, ...],
) -> None:
    """Run a compiled pipeline on this machine, with a process for every replica.

    Everything goes to a new directory under RUNS_DIR. The retraining pipeline's champion_uri is
    RUNS_DIR/champions/SOURCE unless it is given.
    """
    from pipelines.local.run import run_pipeline
    from pipelines.parameters import check_parameters
    from pipelines.preflight import check_retrain
    from pipelines.retrain import NAME
    from pipelines.spec import defaults, load_pipeline

    spec = load_pipeline(pipeline)
    parameters = check_parameters(spec, pairs(params, "--param", PipelineError))
    if spec["pipelineInfo"]["name"] == NAME:
        check_retrain(defaults(spec) | parameters)
        # Models of different data do not replace each other.
        source = re.sub(r"\W+", "-", parameters.get("source", defaults(spec)["source"]))
        parameters.setdefault("champion_uri", str((runs_dir / "champions" / source).absolute()))
    run_pipeline(
        pipeline, parameters, runs_dir=runs_dir, require_blessing=require_blessing, injections=injections
    )


main.add_command(check)
main.add_command(preprocess)
main.add_command(dataset)
main.add_command(train)
main.add_command(champion)
main.add_command(validate)
