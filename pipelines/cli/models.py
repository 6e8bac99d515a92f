"""Commands that try or judge a model: `shardline rehearse`, `validate`, and `probe` of a server."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from shardline.components.validate.gate import FIRST_RUNS, Gate, read_gate
from shardline.pipelines.cli.options import (
    PATH,
    foreground,
    json_option,
    parameter_options,
    settings_option,
    show,
)
from shardline.trainer import progress
from shardline.trainer.errors import SettingsError


@click.command()
@click.argument("pipeline", type=PATH)
@click.argument("dataset", type=PATH)
@parameter_options
def rehearse(pipeline: Path, dataset: Path, given: Mapping[str, Any] | None) -> None:
    """Try on a few examples of DATASET what a run of PIPELINE does from the training on, within a minute.

    One step of training, the model saved and loaded again, its export, and its judgement by the gate, as the
    pipeline's own task of this name does before its training job. Nothing is kept.
    """
    from shardline.pipelines.preflight import to_rehearse
    from shardline.pipelines.spec import load_pipeline

    training, gate, readers, servers = to_rehearse(load_pipeline(pipeline), given or {})
    from shardline.components.rehearse import rehearsal
    from shardline.pipelines.local import processes

    with foreground(), processes.own_scratch():
        rehearsal.rehearse(dataset, training, gate, readers=readers, parameter_servers=servers)


@click.command()
@click.argument("model", type=PATH)
@click.argument("dataset", type=PATH)
@click.argument("out", type=PATH)
@click.option("--rules", "file", type=PATH, metavar="FILE", help="TOML or JSON with rules and policy.")
@click.option(
    "--rule",
    "texts",
    multiple=True,
    metavar="RULE",
    help="A rule, 'accuracy >= 0.9'; with a name, 'classes: off', in the place of the gate's own.",
)
@click.option("--min-accuracy", type=float, default=0.0, help="The rule 'accuracy >= ...'.")
@click.option("--champion", default="", metavar="DIR", help="Where champions are published.")
@click.option(
    "--first-run",
    type=click.Choice(FIRST_RUNS),
    help="Of a model where there is no champion yet, or too few test examples: bless (default).",
)
@click.option(
    "--model-function",
    default="",
    metavar="PKG.MODULE:NAME",
    help="By which MODEL was built: its module is imported for the classes that it registers.",
)
@click.option(
    "--also",
    "formats",
    multiple=True,
    metavar="FORMAT",
    help="Convert to this format, too, and measure it: onnx, tflite, int8.",
)
def validate(
    model: Path,
    dataset: Path,
    out: Path,
    champion: str,
    formats: tuple[str, ...],
    model_function: str,
    **rules: Any,
) -> None:
    """Export MODEL.keras, evaluate the export on DATASET's test split, and write a report, all to OUT.

    The gate's own rules are in force: not worse than the champion, better than always the same answer, no
    class that is never predicted, enough test examples, and an export that answers as the model does. A rule
    compares a metric, of all examples, of a slice or of the worst slice, with a number or with the champion,
    which is evaluated again on the same examples:

    \b
      accuracy >= 0.95
      recall[class=healthy] >= 0.9
      worst_slice(accuracy) >= 0.8
      latency_p95_ms <= 50
      accuracy >= champion - 0.005
      accuracy > champion (p < 0.05)
      champion: accuracy >= champion (within 0.02)

    Exits with 0 when the model is blessed, with 1 when it is not, with 2 when it could not be evaluated.
    """  # noqa: D301  # click wants the character itself
    gate = _gate(**rules)
    from shardline.trainer import tensorflow_internals

    tensorflow_internals.import_tensorflow()
    from shardline.components.validate import validation
    from shardline.pipelines.local import processes

    # TensorFlow writes the code that it generates to temporary files.
    with foreground(), processes.own_scratch():
        outcome = validation.validate(
            model,
            dataset,
            out,
            gate=gate,
            champion_uri=champion,
            formats=formats,
            model_function=model_function,
        )
    sys.exit(0 if outcome.blessed else 1)


def _gate(file: Path | None, texts: tuple[str, ...], min_accuracy: float, first_run: str | None) -> Gate:
    gate = read_gate(file) if file else Gate()
    gate = gate.with_min_accuracy(min_accuracy).with_rules(texts)
    return replace(gate, first_run=first_run) if first_run else gate


@click.command()
@click.argument("server", metavar="URL|ENDPOINT")
@click.argument("exported", type=PATH, metavar="EXPORTED_DIR")
@click.option(
    "--tolerance", default=0.01, show_default=True, help="Largest difference of a probability, 0..1."
)
@click.option("--timeout", default=30.0, show_default=True, help="Seconds that one answer may take.")
@settings_option
@json_option
def probe(
    server: str,
    exported: Path,
    tolerance: float,
    timeout: float,
    settings: Path | None,
    as_json: bool,
) -> None:
    """Send the golden examples in EXPORTED_DIR to URL|ENDPOINT, and compare its answers.

    URL is a REST predict endpoint as TensorFlow Serving has it, http://HOST:8501/v1/models/NAME; ENDPOINT is
    projects/P/locations/L/endpoints/ID. EXPORTED_DIR is what a validation has written, or a version of the
    champion.

    Exits with 0 when the answers agree, with 1 when they do not, with 3 when the server fails.
    """
    from shardline.components.register import probe as probes
    from shardline.components.vertex.forms import ENDPOINT
    from shardline.pipelines.remote.environment import load_environment

    if not 0 < timeout <= 3600:
        raise SettingsError(f"--timeout must be from 0 to 3600 seconds, got {timeout:g}")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # it prints a line of its own for a lost connection
    with progress.sink(lambda event: click.echo(progress.render(event), err=as_json)):
        if server.startswith("projects/"):
            if not ENDPOINT.fits(server):
                raise SettingsError(f"ENDPOINT must be {ENDPOINT.words}, got {server!r}")
            host = load_environment(settings, {}, os.environ, needed=()).api_endpoint
            asked = probes.endpoint_server(server, api_endpoint=host, timeout_s=timeout)
        else:
            asked = probes.rest_server(server, timeout_s=timeout)
        found = probes.probe(asked, exported, tolerance=tolerance)
    show(
        as_json,
        {"server": server, **found.to_json()},
        f"agrees    {'yes' if found.agrees else 'no'}: {found}",
        *([f"answered  deployed model {', '.join(found.models)}"] if found.models else []),
    )
    sys.exit(0 if found.agrees else 1)
