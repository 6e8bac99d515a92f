"""Commands about datasets: `shardline preprocess`, `dataset stats|schema|verify` and `drift`."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from shardline.components.preprocess.settings import PreprocessSettings
from shardline.pipelines.cli.options import PATH, CommandGroup, json_option, setting_option, show, show_json
from shardline.pipelines.local.terminal import foreground
from shardline.pipelines.tables import split_pairs
from shardline.trainer.base import files
from shardline.trainer.base.deserialize import check_keys
from shardline.trainer.base.errors import SettingsError

#: Settings that have no option of their own.
OTHERS = (
    *("check_images", "data_dir", "max_bad_fraction", "max_pixels", "on_anomaly"),
    *("resize_mode", "split_gap", "split_salt"),
)


_setting = functools.partial(setting_option, PreprocessSettings)


def _pairs(
    flag: str, name: str, metavar: str, text: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def read(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, Any]:
        pairs = split_pairs((part for one in values for part in one.split(",")), flag)
        return {key: _convert(f"{flag} {key}", value, name) for key, value in pairs.items()}

    return click.option(flag, name, multiple=True, callback=read, metavar=metavar, help=text)


def _convert(shown: str, text: str, name: str) -> Any:
    """Returns the value of a setting, or of an item of it, from a text."""
    from shardline.pipelines.parameters import convert, field_declaration

    return convert(shown, text, field_declaration(PreprocessSettings, name, item=True))


@click.command()
@click.argument("source")
@click.argument("out", type=PATH)
@_setting("labels", metavar="CSV")
@_pairs("--feature", "features", "OURS=THEIRS,...", "Name of a feature in the source: image=image/encoded.")
@_setting("label", metavar="KIND:COLUMN,...")
@_pairs(
    "--column",
    "columns",
    "NAME=TYPE,...",
    "text, integer, number, day-first or month-first; else from its values.",
)
@_pairs("--split", "split", "NAME=SHARE,...", "Shares of the splits; else train=0.8,validation=0.1,test=0.1.")
@_setting("stratify", is_flag=True)
@_setting("key")
@_setting("group", metavar="FEATURE")
@_setting("split_by_time", metavar="COLUMN")
@_setting("seed")
@_setting("shards")
@_setting("readers")
@_setting("image_size", metavar="PX")
@_setting("encoding")
@_setting("processes")
@_setting("on_bad_record")
@_setting("schema", metavar="FILE")
@click.option(
    "--option",
    "-o",
    "others",
    multiple=True,
    metavar="NAME=VALUE",
    callback=lambda context, option, values: _others(values),
    help=f"Any other setting: {', '.join(OTHERS)}.",
)
@click.option("--overwrite", is_flag=True, help="Replace the dataset in OUT.")
@click.option("--dry-run", is_flag=True, help="Show what would be read, and what BigQuery would bill.")
@json_option
def preprocess(
    source: str,
    out: Path,
    features: dict[str, str],
    others: dict[str, Any],
    overwrite: bool,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Write SOURCE to OUT as TFRecord shards with a manifest.

    SOURCE is digits, tfds:NAME[:CONFIG], images:DIR, text:DIR, tfrecord:GLOB, table:PATH, bigquery:TABLE or
    QUERY, or pkg.module:Source.
    After an interruption, the same command continues.
    """
    from shardline.components.preprocess import run
    from shardline.components.preprocess.inspect import profile

    settings = PreprocessSettings(source=source, features=features, **options, **others)
    if dry_run:
        # Without reading it.
        from shardline.components.changes.detection import fingerprint
        from shardline.components.preprocess.sources import bigquery, check_form

        check_form(source)
        settings = replace(settings, source=bigquery.pin_snapshot(source))
        found = {"source": settings.source, "content": fingerprint(settings).text}
        if settings.source.startswith(bigquery.PREFIX):
            found["cost"] = bigquery.BigQuery(settings).cost()
        show(as_json, found, *(f"{name}: {text}" for name, text in found.items()))
        return
    with foreground(sys.stderr if as_json else None):
        manifest = run.preprocess(settings, out, overwrite=overwrite)
    if as_json:
        show_json(profile.describe(manifest))


def _others(values: tuple[str, ...]) -> dict[str, Any]:
    given = split_pairs(values, "--option")
    check_keys(given, OTHERS, "--option ")
    return {name: _convert(f"--option {name}", text, name) for name, text in given.items()}


@click.group(cls=CommandGroup)
def dataset() -> None:
    """Inspect a finished dataset directory."""


@dataset.command("stats")
@click.argument("directory", type=PATH)
@json_option
def show_stats(directory: Path, as_json: bool) -> None:
    """Show manifest, labels, columns and image sizes of DIRECTORY."""
    from shardline.components.preprocess.inspect import profile
    from shardline.trainer import manifest as manifests

    manifest = manifests.load(directory)
    found = profile.make_profile(directory, manifest, "")
    show(as_json, {**profile.describe(manifest), "profile": asdict(found)}, profile.render(manifest, found))


@dataset.command("schema")
@click.argument("directory", type=PATH)
@click.option("--output", type=PATH, help="New file to write.  [default: standard output]")
def draft_schema(directory: Path, output: Path | None) -> None:
    """Draft a schema from the columns and labels of DIRECTORY.

    It is for preprocess --schema. Edit the draft: it describes this dataset, not what the next one may
    contain.
    """
    from shardline.components.preprocess.inspect.profile import draft, make_profile
    from shardline.trainer import manifest as manifests

    if output and output.exists():
        raise SettingsError(f"{output} exists; choose another --output, or remove it")
    manifest = manifests.load(directory)
    with foreground(sys.stderr):
        found = draft(manifest, make_profile(directory, manifest, "", whole=True))
    if not output:
        show_json(found)
        return
    text = json.dumps(found, indent=2, ensure_ascii=False)
    files.write_text(output, f"{text}\n")
    click.echo(f"{output}: {len(found['fields']):,} fields; edit the draft before you use it")


@dataset.command("verify")
@click.argument("directory", type=PATH)
@click.option("--deep", is_flag=True, help="Decode every image, too.")
@json_option
def run_verify(directory: Path, deep: bool, as_json: bool) -> None:
    """Compare every record of DIRECTORY with the manifest.

    Prints the file and the record (from 0) of all damage, and exits with 1 if there is any.
    """
    from shardline.components.preprocess.inspect.verify import verify

    with foreground(sys.stderr):
        found = verify(directory, deep=deep)
    show(as_json, found.to_json(), *map(str, found.damages), found.summary())
    sys.exit(1 if found.damages else 0)


@click.command()
@click.argument("before", type=PATH)
@click.argument("after", type=PATH, required=False)
@json_option
def drift(before: Path, after: Path | None, as_json: bool) -> None:
    """Compare the training data of two datasets, feature by feature.

    Without AFTER, compares the training split of BEFORE with its test split. Exits with 1 if a feature has
    drifted.
    """
    from shardline.components.validate.metrics import drift

    found = drift.compare_datasets(before, after or before, ("train", "train" if after else "test"))
    moved = sum(item.moved for item in found)
    summary = (
        f"drift: {moved} of {len(found)} features moved" if moved else f"no drift in {len(found)} features"
    )
    show(
        as_json,
        {"drifted": moved, "features": list(map(asdict, found))},
        drift.drift_table(found),
        "",
        summary,
    )
    sys.exit(1 if moved else 0)
