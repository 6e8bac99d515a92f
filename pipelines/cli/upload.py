"""The command `shardline upload`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardline.pipelines.cli.options import (
    PATH,
    json_option,
    proof_options,
    registry_options,
    show,
)

if TYPE_CHECKING:
    from shardline.pipelines.parameters import Proofs
    from shardline.pipelines.settings import Environment


@click.command()
@click.argument("pipeline", type=PATH)
@click.option(
    "--tag", "tags", multiple=True, help="Tag for the version; an existing tag is moved. Repeatable."
)
@json_option
@proof_options
@registry_options
def upload(
    pipeline: Path,
    tags: tuple[str, ...],
    as_json: bool,
    environment: Environment,
    proofs: Proofs,
) -> None:
    """Upload PIPELINE, a compiled pipeline, to the registry.

    Its version gets the tags. An existing version is not uploaded again.
    """
    from shardline.pipelines.check.checks import refuse_errors
    from shardline.pipelines.check.pipeline import Aim, Pipeline
    from shardline.pipelines.remote import upload as registry
    from shardline.pipelines.spec import parse_pipeline, read_pipeline

    content = read_pipeline(pipeline)
    spec = parse_pipeline(content, pipeline)
    refuse_errors(Pipeline(spec, aim=Aim.SENT))
    registry.check_tags(tags)
    proof = proofs.describe(content)
    name, address = spec["pipelineInfo"]["name"], environment.registry.rstrip("/")
    done = registry.upload(address, name, pipeline, tags)
    lines = [f"{'uploaded' if done.is_new else 'already in the registry:'} {done.url}"]
    for tag in dict.fromkeys(tags):
        before = done.moved.get(tag)
        moved = "already" if before is None else "now"
        lines.append(f"tag {tag} {moved} points to it{f', no longer to {before}' if before else ''}")
    show(as_json, {**dataclasses.asdict(done), "url": done.url, "proof": proof}, *lines, f"proof: {proof}")
