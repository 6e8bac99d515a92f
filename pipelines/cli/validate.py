"""The command `shardline validate`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import click

from shardline.components.export_validate.rules.gate import FIRST_RUNS, Gate, accuracy_gate, read_gate
from shardline.pipelines.cli.foreground import foreground

_PATH = click.Path(path_type=Path)
_MIN_ACCURACY = 0.95


@click.command()
@click.argument("model", type=_PATH)
@click.argument("dataset", type=_PATH)
@click.argument("out", type=_PATH)
@click.option("--rules", "file", type=_PATH, metavar="FILE", help="TOML or JSON with rules and policy.")
@click.option("--rule", "texts", multiple=True, metavar="RULE", help="A rule, 'accuracy >= 0.9'.")
@click.option(
    "--min-accuracy",
    type=float,
    help=f"The rule 'accuracy >= ...'; {_MIN_ACCURACY} where there is no other rule.",
)
@click.option("--champion", default="", metavar="DIR", help="Where champions are published.")
@click.option(
    "--first-run",
    type=click.Choice(FIRST_RUNS),
    help="Rules about a champion that cannot be measured: skip them, or do not let the model pass (default).",
)
@click.option("--also", "formats", multiple=True, metavar="FORMAT", help="Convert as well: onnx, tflite.")
def validate(
    model: Path,
    dataset: Path,
    out: Path,
    file: Path | None,
    texts: tuple[str, ...],
    min_accuracy: float | None,
    champion: str,
    first_run: str | None,
    formats: tuple[str, ...],
) -> None:
    """Export MODEL.keras, judge the export on DATASET's test split, and report, all in OUT.

    A rule compares a metric of all examples, of a slice or of the worst slice with a number or with the
    champion, which is measured again on the same examples:

    \b
      accuracy >= 0.95
      recall[class=healthy] >= 0.9
      worst_slice(accuracy) >= 0.8
      latency_p95_ms <= 50
      accuracy >= champion - 0.005
      accuracy > champion (p < 0.05)

    Exits with 0 when the model is blessed, with 1 when it is not, with 2 when it could not be judged.
    """  # noqa: D301  # click wants the character itself
    gate = _gate(file, texts, min_accuracy, first_run)
    from shardline.trainer import quiet

    quiet.import_tensorflow()
    from shardline.components.export_validate import run as validation

    with foreground():
        blessing = validation.validate(model, dataset, out, gate=gate, champion_uri=champion, formats=formats)
    sys.exit(0 if blessing.blessed else 1)


def _gate(
    file: Path | None, texts: tuple[str, ...], min_accuracy: float | None, first_run: str | None
) -> Gate:
    gate = read_gate(file) if file else Gate(())
    gate = gate.with_rules(texts)
    if min_accuracy is None and not gate.rules:
        min_accuracy = _MIN_ACCURACY
    if min_accuracy is not None:
        gate = replace(gate, rules=(*gate.rules, *accuracy_gate(min_accuracy).rules))
    return replace(gate, first_run=first_run) if first_run else gate
