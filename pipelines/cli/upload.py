"""Commands that publish: `shardline upload`, `shardline image build` and `shardline image push`."""

from __future__ import annotations

import dataclasses
import functools
import shlex
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardline.pipelines.cli.options import (
    PATH,
    CommandGroup,
    json_option,
    path_option,
    proof_options,
    registry_options,
    show,
    show_json,
)
from shardline.pipelines.image import build as images
from shardline.pipelines.image.build import Image
from shardline.pipelines.image.settings import VARIANTS, ImageSettings

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


@click.group(cls=CommandGroup)
def image() -> None:
    """Build and push the image of the components and the trainer."""


def _image_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of an image to a command, and passes it `image` and its `content`."""

    @functools.wraps(command)
    def with_image(*, settings: Path, tags: tuple[str, ...], variant: str | None, **values: Any) -> None:
        from shardline.pipelines import settings as environments

        read = environments.load(settings)
        content = environments.load_image(settings) or ImageSettings(name=read.image)
        content = dataclasses.replace(content, variant=variant or content.variant)
        if variant != "control":
            content = content.with_variant_for(read.accelerators)
        command(image=Image.of(content.name, tags=tags, variant=content.variant), content=content, **values)

    wrapped: Callable[..., None] = with_image
    for option in (
        json_option,
        click.option("--dry-run", is_flag=True, help="Print the commands as JSON and run none."),
        click.option("--allow-dirty", is_flag=True, help="Accept files that differ from the git revision."),
        click.option(
            "--variant",
            type=click.Choice(VARIANTS),
            help="Variant; control has no TensorFlow and is called NAME-control.  [default: by the settings' "
            "machines]",
        ),
        click.option("--tag", "tags", multiple=True, help="Tag instead of the settings'. Repeatable."),
        path_option("--settings", "settings/local.toml", "Settings file (TOML).", in_project="settings.toml"),
    ):
        wrapped = option(wrapped)
    return wrapped


@image.command()
@_image_options
@click.option("--context", type=PATH, help="Write the build context to this directory, and build nothing.")
@click.option("--revision", default="", help="Git revision.  [default: that of the working tree]")
def build(
    image: Image,
    content: ImageSettings,
    allow_dirty: bool,
    dry_run: bool,
    as_json: bool,
    context: Path | None,
    revision: str,
) -> None:
    """Build the image with docker or podman.

    It holds Shardline and what the table [image] of the settings names. Its label is the git revision, so a
    tree with changes is refused.
    """
    from shardline.pipelines.image.context import assemble, user_contents

    revision = images.source_revision(revision=revision, allow_dirty=allow_dirty)
    facts = {**_facts(image), **user_contents(content), "revision": revision}
    if dry_run:
        commands = [images.build_command(images.find_tool(needed=False), image, context or "CONTEXT")]
        show_json({"commands": [shlex.join(command) for command in commands], **facts})
        return
    if content.base and "@" not in content.base:
        click.echo(
            f"the base {content.base} is named with a tag, which can be moved: add @sha256:...", err=True
        )
    _say_left_out(content)
    if context is not None:
        assemble(content, revision, context)
        show(
            as_json,
            {**facts, "context": str(context)},
            f"docker builds {', '.join(image.names)} from {context}",
        )
        return
    tool = images.find_tool()
    with tempfile.TemporaryDirectory(prefix="shardline-image-") as name:
        made = Path(name) / "context"
        assemble(content, revision, made)
        images.build(tool, image, made)
    words = f"built {', '.join(image.names)} ({image.variant}) from revision {revision or 'unknown'}"
    own = [*facts["packages"], *([f"{facts['requirements']} requirements"] if facts["requirements"] else [])]
    show(as_json, facts, f"{words}, with {', '.join(own)}" if own else words)


def _say_left_out(content: ImageSettings) -> None:
    from shardline.pipelines.image.context import ignored_files

    for package in map(Path, content.packages):
        if ignored := ignored_files(package):
            some = ", ".join(map(str, ignored[:3])) + (", ..." if len(ignored) > 3 else "")
            count = f"{len(ignored)} files" if len(ignored) > 1 else "1 file"
            name = package.resolve().name
            click.echo(f"left out of the image: {count} of {name} that git ignores: {some}", err=True)


@image.command()
@_image_options
def push(image: Image, content: ImageSettings, allow_dirty: bool, dry_run: bool, as_json: bool) -> None:
    """Push the built image, and print the digest by which settings pin it."""
    if dry_run:
        commands = images.push_commands(images.find_tool(needed=False), image)
        show_json({"commands": [shlex.join(command) for command in commands]})
        return
    pinned, revision = images.push(images.find_tool(), image, allow_dirty=allow_dirty)
    facts = {**_facts(image), "revision": revision, "pinned": pinned, "digest": pinned.partition("@")[2]}
    # With its tag, which the next build uses.
    name = f"{image.names[0]}@{facts['digest']}"
    pin = f'pin it in the settings, as image or as the name in [image]: "{name}"'
    show(as_json, facts, f"pushed {', '.join(image.names)}", pin)


def _facts(image: Image) -> dict[str, Any]:
    return {"names": list(image.names), "variant": image.variant}
