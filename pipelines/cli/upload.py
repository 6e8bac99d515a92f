"""Commands that publish: `shardline upload` a pipeline, `shardline image build` and `push` its image."""

from __future__ import annotations

import dataclasses
import functools
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardline.pipelines.cli.options import (
    PATH,
    dry_run_option,
    json_option,
    path_option,
    registry_options,
    show,
    show_json,
)
from shardline.pipelines.image import build as images
from shardline.pipelines.image.build import Image
from shardline.pipelines.image.settings import VARIANTS

if TYPE_CHECKING:
    from shardline.pipelines.remote.environment import Environment


@click.command()
@click.argument("pipeline", type=PATH)
@click.option("--tag", "tags", multiple=True, help="A tag of the version; an existing one is moved.")
@dry_run_option
@json_option
@registry_options
def upload(
    pipeline: Path, tags: tuple[str, ...], dry_run: bool, as_json: bool, environment: Environment
) -> None:
    """Put PIPELINE, a compiled pipeline, into the registry, and point tags at it.

    A version that is there already is not uploaded again.
    """
    from shardline.pipelines.check.checks import refuse_errors
    from shardline.pipelines.check.pipeline import Aim
    from shardline.pipelines.remote import upload as registry
    from shardline.pipelines.spec import load_pipeline

    spec = load_pipeline(pipeline)
    refuse_errors(spec, aim=Aim.SENT)
    registry.check_tags(tags)
    name, address = spec["pipelineInfo"]["name"], environment.registry.rstrip("/")
    if dry_run:
        show_json(registry.upload_requests(address, name, pipeline, tags))
        return
    done = registry.upload(address, name, pipeline, tags)
    lines = [f"{'uploaded' if done.is_new else 'is there already:'} {done.url}"]
    for tag in dict.fromkeys(tags):
        before = done.moved.get(tag)
        how = "already" if before is None else f"now{f', and not at {before}' if before else ''}"
        lines.append(f"tag {tag} points at it {how}")
    show(as_json, {**dataclasses.asdict(done), "url": done.url}, *lines)


@click.group()
def image() -> None:
    """Build the container image of all components and of the trainer, and push it."""


def _image_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options that say which image, and passes it `image`."""

    @functools.wraps(command)
    def with_image(*, settings: Path, tags: tuple[str, ...], variant: str, **values: Any) -> None:
        from shardline.pipelines import settings as environments

        command(image=Image.of(environments.load(settings).image, tags=tags, variant=variant), **values)

    wrapped: Callable[..., None] = with_image
    for option in (
        json_option,
        click.option("--dry-run", is_flag=True, help="Print the commands as JSON and run none."),
        click.option("--allow-dirty", is_flag=True, help="Also where files differ from the git revision."),
        click.option(
            "--variant",
            type=click.Choice(VARIANTS),
            default=VARIANTS[0],
            show_default=True,
            help="control is without TensorFlow and called NAME-control.",
        ),
        click.option("--tag", "tags", multiple=True, help="Instead of the settings' own; repeatable."),
        path_option("--settings", "settings/local.toml", "Settings file whose image this is."),
    ):
        wrapped = option(wrapped)
    return wrapped


@image.command()
@_image_options
def build(image: Image, allow_dirty: bool, dry_run: bool, as_json: bool) -> None:
    """Build the image with docker or podman, at the top of a clone.

    The git revision becomes the image's label, so a tree with changes is refused.
    """
    revision = images.source_revision(allow_dirty=allow_dirty)
    if dry_run:
        _show_commands([images.build_command(images.find_tool(needed=False), image, revision)])
        return
    images.build(images.find_tool(), image, revision)
    words = f"built {', '.join(image.names)} from revision {revision or 'unknown'}"
    show(as_json, {**_facts(image), "revision": revision}, words)


@image.command()
@_image_options
def push(image: Image, allow_dirty: bool, dry_run: bool, as_json: bool) -> None:
    """Push the image that was built, and print the digest by which settings pin it."""
    if dry_run:
        _show_commands(images.push_commands(images.find_tool(needed=False), image))
        return
    pinned, revision = images.push(images.find_tool(), image, allow_dirty=allow_dirty)
    content = {**_facts(image), "revision": revision, "pinned": pinned, "digest": pinned.partition("@")[2]}
    pin = f'pin it in the settings: image = "{pinned}"'
    show(as_json, content, f"pushed {', '.join(image.names)}", pin)


def _show_commands(commands: list[list[str]]) -> None:
    show_json({"commands": [shlex.join(command) for command in commands]})


def _facts(image: Image) -> dict[str, Any]:
    return {"names": list(image.names), "variant": image.variant}
