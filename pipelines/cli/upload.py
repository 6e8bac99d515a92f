"""Commands that publish: `shardline upload` a pipeline, `shardline image build` and `push` its image."""

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
    dry_run_option,
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
@click.option("--tag", "tags", multiple=True, help="A tag of the version; an existing one is moved.")
@dry_run_option
@json_option
@proof_options
@registry_options
def upload(
    pipeline: Path,
    tags: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
    environment: Environment,
    proofs: Proofs,
) -> None:
    """Put PIPELINE, a compiled pipeline, into the registry, and point tags at it.

    A version that is there already is not uploaded again.
    """
    from shardline.pipelines.check.checks import refuse_errors
    from shardline.pipelines.check.pipeline import Aim, Pipeline
    from shardline.pipelines.remote import upload as registry
    from shardline.pipelines.spec import parse_pipeline, read_pipeline

    content = read_pipeline(pipeline)
    spec = parse_pipeline(content, pipeline)
    refuse_errors(Pipeline(spec, aim=Aim.SENT))
    registry.check_tags(tags)
    proof = proofs.of(content)
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
    show(as_json, {**dataclasses.asdict(done), "url": done.url, "proof": proof}, *lines, f"proof: {proof}")


@click.group()
def image() -> None:
    """Build the container image of all components and of the trainer, and push it."""


def _image_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options that say which image, and passes it `image` and its `content`."""

    @functools.wraps(command)
    def with_image(*, settings: Path, tags: tuple[str, ...], variant: str | None, **values: Any) -> None:
        from shardline.pipelines import settings as environments

        read = environments.load(settings)
        content = environments.load_image(settings) or ImageSettings(name=read.image)
        if variant == "control":
            content = dataclasses.replace(content, variant=variant)
        else:
            content = dataclasses.replace(content, variant=variant or content.variant)
            content = content.fitted(read.accelerators)
        command(image=Image.of(content.name, tags=tags, variant=content.variant), content=content, **values)

    wrapped: Callable[..., None] = with_image
    for option in (
        json_option,
        click.option("--dry-run", is_flag=True, help="Print the commands as JSON and run none."),
        click.option("--allow-dirty", is_flag=True, help="Also where files differ from the git revision."),
        click.option(
            "--variant",
            type=click.Choice(VARIANTS),
            help="Instead of the one that the machines of the settings need; control, without TensorFlow, is "
            "called NAME-control.",
        ),
        click.option("--tag", "tags", multiple=True, help="Instead of the settings' own; repeatable."),
        path_option("--settings", "settings/local.toml", "Settings file whose image this is."),
    ):
        wrapped = option(wrapped)
    return wrapped


@image.command()
@_image_options
@click.option(
    "--context", type=PATH, help="Write what docker builds from into this directory, and build nothing."
)
@click.option("--revision", default="", help="Instead of what git says here.")
def build(
    image: Image,
    content: ImageSettings,
    allow_dirty: bool,
    dry_run: bool,
    as_json: bool,
    context: Path | None,
    revision: str,
) -> None:
    """Build the image with docker or podman: Shardline, and what the table [image] of the settings names.

    The git revision becomes the image's label, so a tree with changes is refused.
    """
    from shardline.pipelines.image.context import assemble, copied

    revision = images.source_revision(given=revision, allow_dirty=allow_dirty)
    facts = {**_facts(image), **copied(content), "revision": revision}
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
    from shardline.pipelines.image.context import left_out

    for package in map(Path, content.packages):
        if ignored := left_out(package):
            some = ", ".join(map(str, ignored[:3])) + (", ..." if len(ignored) > 3 else "")
            count = f"{len(ignored)} files" if len(ignored) > 1 else "1 file"
            name = package.resolve().name
            click.echo(f"{count} of {name} that git ignores left out of the image: {some}", err=True)


@image.command()
@_image_options
def push(image: Image, content: ImageSettings, allow_dirty: bool, dry_run: bool, as_json: bool) -> None:
    """Push the image that was built, and print the digest by which settings pin it."""
    if dry_run:
        commands = images.push_commands(images.find_tool(needed=False), image)
        show_json({"commands": [shlex.join(command) for command in commands]})
        return
    pinned, revision = images.push(images.find_tool(), image, allow_dirty=allow_dirty)
    facts = {**_facts(image), "revision": revision, "pinned": pinned, "digest": pinned.partition("@")[2]}
    # With its tag, which the next build takes.
    name = f"{image.names[0]}@{facts['digest']}"
    pin = f'pin it in the settings, as image or as the name in [image]: "{name}"'
    show(as_json, facts, f"pushed {', '.join(image.names)}", pin)


def _facts(image: Image) -> dict[str, Any]:
    return {"names": list(image.names), "variant": image.variant}
