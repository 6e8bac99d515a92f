"""`shardline probe`: whether a server gives the answers that a model gave when it was judged."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from shardline.pipelines.cli.options import PATH, json_option, settings_option, show
from shardline.trainer import progress
from shardline.trainer.errors import SettingsError


@click.command()
@click.argument("server", metavar="URL|ENDPOINT")
@click.argument("exported", type=PATH, metavar="EXPORTED_DIR")
@click.option(
    "--tolerance", default=0.01, show_default=True, help="Largest difference of a probability, 0..1."
)
@click.option("--timeout", default=30.0, show_default=True, help="Seconds that one answer may take.")
@click.option(
    "--deployed-model",
    default="",
    metavar="ID",
    help="Of ENDPOINT, ask until this one has answered; one without traffic cannot be asked.",
)
@settings_option
@json_option
def probe(
    server: str,
    exported: Path,
    tolerance: float,
    timeout: float,
    deployed_model: str,
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
            asked = probes.endpoint_server(server, model=deployed_model, api_endpoint=host, timeout_s=timeout)
        elif deployed_model:
            raise SettingsError("--deployed-model is about an endpoint of the platform, and a URL is given")
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
