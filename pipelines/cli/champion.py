"""The commands `shardline champion show` and `shardline champion rollback`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardline.pipelines.cli.options import json_option, show_json
from shardline.trainer.errors import ModelError

if TYPE_CHECKING:
    from shardline.components.register.version import Version


@click.group()
def champion() -> None:
    """Look at the champion, the published model in use, and go back to an earlier one."""


@champion.command()
@click.argument("directory")
@json_option
def show(directory: str, as_json: bool) -> None:
    """Show the champion in DIRECTORY (or gs://) and the versions that it can go back to."""
    from shardline.components.register.champion import champion_directory, current
    from shardline.components.register.version import complete_versions

    path = champion_directory(directory)
    present = current(path)
    if present is None:
        raise ModelError(f"nothing has been published in {path}; give the directory of a champion")
    if as_json:
        versions = [asdict(version) for version in reversed(complete_versions(path))]
        show_json({"champion": _facts(path, present), "versions": versions})
        return
    for name, value in _facts(path, present).items():
        click.echo(f"{name:<12}{value}")
    click.echo()
    for version in reversed(complete_versions(path)):
        mark = "*" if version.version == present.version else " "
        click.echo(f"{mark} {version.version}  accuracy {version.accuracy:.4f}  {version.created}")


@champion.command()
@click.argument("directory")
@click.option("--to", "version", default="", metavar="VERSION", help="Default: the one that it replaced.")
@json_option
def rollback(directory: str, version: str, as_json: bool) -> None:
    """Make the version that the champion in DIRECTORY (or gs://) replaced the champion again."""
    from shardline.components.register import champion as champions

    restored = champions.rollback(champions.champion_directory(directory), version)
    if as_json:
        show_json(asdict(restored))
        return
    click.echo(f"version {restored.version} is the champion (accuracy {restored.accuracy:.4f})")


def _facts(directory: Path, version: Version) -> dict[str, str]:
    from shardline.components.export_validate import layout
    from shardline.components.register.champion import read_part

    export = read_part(directory / version.path, layout.EXPORT_FILE)
    return {
        "champion": version.version,
        "path": str(directory / version.path),
        "accuracy": f"{version.accuracy:.4f}",
        "dataset": version.fingerprint,
        "published": version.created,
        "replaced": version.previous or "nothing",
        "parameters": f"{export.get('parameters', 0):,}",
        "size": f"{export.get('bytes', 0) / 1e6:.1f} MB",
        "revision": export.get("git_revision") or "unknown",
        "made with": ", ".join(f"{name} {number}" for name, number in export.get("versions", {}).items()),
    }
