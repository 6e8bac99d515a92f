"""The command `shardline upload`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardline.pipelines.cli.options import dry_run_option, json_option, registry_options, show_json

if TYPE_CHECKING:
    from shardline.pipelines.vertex.environment import Environment


@click.command()
@click.argument("pipeline", type=click.Path(path_type=Path))
@click.option("--tag", "tags", multiple=True, help="A tag of the version; it is moved when it is there.")
@dry_run_option
@json_option
@registry_options
def upload(
    pipeline: Path, tags: tuple[str, ...], dry_run: bool, as_json: bool, environment: Environment
) -> None:
    """Put PIPELINE, a compiled pipeline, into the registry, and point tags at it.

    What is there already is not uploaded again.
    """
    from shardline.pipelines.check.run import refuse_errors
    from shardline.pipelines.spec import load_pipeline
    from shardline.pipelines.vertex import upload as registry

    spec = load_pipeline(pipeline)
    refuse_errors(spec)
    registry.check_tags(tags)
    name, address = spec["pipelineInfo"]["name"], environment.registry.rstrip("/")
    if dry_run:
        version = registry.version_of(pipeline.read_bytes())
        show_json(registry.upload_requests(address, name, version, pipeline, tags))
        return
    done = registry.upload(address, name, pipeline, tags)
    if as_json:
        show_json({**dataclasses.asdict(done), "url": done.url})
        return
    click.echo(f"{'uploaded' if done.is_new else 'is there already:'} {done.url}")
    for tag in dict.fromkeys(tags):
        before = done.moved.get(tag)
        if before is None:
            click.echo(f"tag {tag} points at it already")
        else:
            click.echo(f"tag {tag} points at it now{f', and not at {before}' if before else ''}")
