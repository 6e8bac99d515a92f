"""Commands about champions: `shardline champion list|show|promote|rollback|prune`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from shardline.pipelines.cli.options import json_option, show

if TYPE_CHECKING:
    from shardline.components.model_store.catalog import Version

_NEVER = "never the champion"


@click.group()
def champion() -> None:
    """List published models, and say which of them is the champion, the one in use.

    DIRECTORY is the champion_uri: a directory, or gs://BUCKET/PATH, which is reached through the storage
    client and need not be mounted.
    """


@champion.command("list")
@click.argument("directory")
@json_option
def list_versions(directory: str, as_json: bool) -> None:
    """List the versions in DIRECTORY (or gs://), the newest first; * is the champion."""
    from shardline.components.model_store.champions import complete_versions, require_current
    from shardline.components.text import table

    present = require_current(directory).version
    versions = complete_versions(directory)[::-1]
    rows = [_row(item, "*" if item.version == present else "") for item in versions]
    show(
        as_json,
        {"champion": present, "versions": list(map(asdict, versions))},
        table(("", "version", "quality", "created", "by", "run", ""), rows, align="l"),
    )


@champion.command("show")
@click.argument("directory")
@click.argument("version", default="")
@json_option
def show_champion(directory: str, version: str, as_json: bool) -> None:
    """Show a VERSION in DIRECTORY (or gs://), or the champion and those to which it can be rolled back."""
    from shardline.components.model_store.catalog import open_store, read_catalog
    from shardline.components.model_store.champions import complete_versions, require_current

    if version:
        place = open_store(directory)
        facts = {"version": version, **_facts(directory, read_catalog(place)[0].require(version, place))}
        show(as_json, facts, *_lines(facts))
        return
    present = require_current(directory)
    versions = complete_versions(directory)[::-1]
    about = {"champion": present.version, **_facts(directory, present)}
    show(
        as_json,
        {"champion": about, "versions": list(map(asdict, versions))},
        *_lines(about),
        "",
        *(
            f"{'*' if item == present else ' '} {item.version}  {item.quality}  {item.created}"
            for item in versions
        ),
    )


@champion.command()
@click.argument("directory")
@click.argument("version")
@click.option(
    "--override", default="", metavar="REASON", help="Promote what the gate has blocked; kept in its record."
)
@json_option
def promote(directory: str, version: str, override: str, as_json: bool) -> None:
    """Make VERSION the champion in DIRECTORY (or gs://).

    VERSION is one that `list` names, or the directory of a validated model, written with a slash: ./OUT of
    `shardline validate`, or the artifact `exported` of a run that was not registered. It is copied first.
    """
    from shardline.components.model_store import champions

    _tell(champions.promote(directory, version, override=override), as_json)


@champion.command()
@click.argument("directory")
@click.option(
    "--to",
    "version",
    default="",
    metavar="VERSION",
    help="Version to go back to; default: the one that the champion replaced.",
)
@json_option
def rollback(directory: str, version: str, as_json: bool) -> None:
    """Roll the champion in DIRECTORY (or gs://) back to the version that it replaced."""
    from shardline.components.model_store import champions

    _tell(champions.rollback(directory, version), as_json)


@champion.command()
@click.argument("directory")
@click.option(
    "--keep",
    type=click.IntRange(min=0),
    required=True,
    metavar="N",
    help="Versions to keep besides: the newest.",
)
@json_option
def prune(directory: str, keep: int, as_json: bool) -> None:
    """Remove old versions from DIRECTORY (or gs://), but never the champion or what it replaced."""
    from shardline.components.model_store import champions

    removed = champions.prune(directory, keep)
    lines = [f"removed {name}" for name in removed] or ["nothing to remove"]
    show(as_json, {"removed": removed}, *lines)


def _tell(present: Version, as_json: bool) -> None:
    words = f"version {present.version} is the champion ({present.quality})"
    show(as_json, asdict(present), words)


def _row(item: Version, mark: str) -> tuple[str, ...]:
    created = item.created.removesuffix("+00:00").replace("T", " ")
    return (mark, item.version, item.quality, created, item.by, item.run, _note(item))


def _note(item: Version) -> str:
    """Returns what is unusual about a version."""
    if item.override:
        return f"blocked by the gate, promoted all the same: {item.override}"
    if not item.blessed:
        return "blocked by the gate"
    return "" if item.been_champion else _NEVER


def _facts(directory: str, version: Version) -> dict[str, str]:
    from shardline.components.model_store.champions import read_export, where

    export, commit = read_export(directory, version), version.commit
    known = {
        "path": where(directory, version.version),
        "quality": version.quality,
        "metrics": _metrics(version),
        "dataset": version.fingerprint,
        "put here": " by ".join(filter(None, (version.created, version.by))),
        "run": version.run,
        "copied from": version.source,
        "verdict": version.verdict,
        "override": version.override,
        "committed": f"{commit.how} {commit.at} by {commit.by}" if commit.how else _NEVER,
        "replaced": version.previous or "nothing" if version.been_champion else "",
        "parameters": f"{export.parameters:,}",
        "size": f"{export.bytes / 1e6:.1f} MB",
        "revision": export.git_revision or "unknown",
        "made with": ", ".join(f"{name} {number}" for name, number in export.versions.items()),
    }
    return {name: value for name, value in known.items() if value or name == "made with"}


def _metrics(version: Version) -> str:
    """Returns the first of the metrics, which are those of quality; `list --json` has all."""
    known = [f"{name} {value:.4g}" for name, value in version.metrics.items() if value is not None]
    return ", ".join(known[:8])


def _lines(facts: dict[str, str]) -> list[str]:
    return [f"{name:<12}{value}" for name, value in facts.items()]
