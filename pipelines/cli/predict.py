"""The command `shardline predict`."""

from __future__ import annotations

import json
from typing import Any

import click

_WORKERS = "1,2,4,8,16,32"
_WANTED = (0.5, 0.8, 0.9)


@click.command()
@click.option("--step-ms", type=float, required=True, help="A step on one worker, in milliseconds.")
@click.option("--batch", type=int, required=True, help="Examples of that step.")
@click.option("--gradient-mb", type=float, required=True, help="4 bytes a trainable weight; 2 if compressed.")
@click.option("--bandwidth-gbit", type=float, default=10.0, show_default=True, help="Between two workers.")
@click.option("--latency-ms", type=float, default=0.1, show_default=True, help="Between two workers.")
@click.option("--accumulation", type=int, default=1, show_default=True, help="Steps to an exchange.")
@click.option("--workers", default=_WORKERS, show_default=True, help="Numbers of workers.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def predict(
    step_ms: float,
    batch: int,
    gradient_mb: float,
    bandwidth_gbit: float,
    latency_ms: float,
    accumulation: int,
    workers: str,
    as_json: bool,
) -> None:
    """Predict how training scales to more workers, from one worker's step and the network.

    Each worker keeps its batch. docs/performance.md explains the model and holds it against measurements.
    """
    from shardline.pipelines.scaling import Step

    step = Step(
        seconds=step_ms / 1e3,
        gradient_bytes=gradient_mb * 1e6,
        bandwidth=bandwidth_gbit * 1e9 / 8,
        latency=latency_ms / 1e3,
        accumulation=accumulation,
    )
    rows: list[dict[str, Any]] = [
        {
            "workers": count,
            "step_ms": step.on(count) * 1e3,
            "exchange_ms": step.exchange(count) / accumulation * 1e3,
            "examples_per_second": count * batch / step.on(count),
            "efficiency": step.efficiency(count),
            "batch_for": {f"{wanted:g}": batch * step.batch_factor(count, wanted) for wanted in _WANTED},
        }
        for count in _counts(workers)
    ]
    if as_json:
        click.echo(json.dumps({"rows": rows}, indent=2))
        return
    wanted = "".join(f"{f'batch for {share:.0%}':>16}" for share in _WANTED)
    click.echo(f"{'workers':>7}{'step':>12}{'exchange':>12}{'examples/s':>14}{'efficiency':>12}{wanted}")
    for row in rows:
        batches = "".join(f"{row['batch_for'][f'{share:g}']:>16,.0f}" for share in _WANTED)
        click.echo(
            f"{row['workers']:>7}{row['step_ms']:>9,.1f} ms{row['exchange_ms']:>9,.1f} ms"
            f"{row['examples_per_second']:>14,.0f}{row['efficiency']:>12.2f}{batches}"
        )


def _counts(text: str) -> list[int]:
    from shardline.trainer.errors import SettingsError

    try:
        counts = [int(item) for item in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise SettingsError(f"--workers takes whole numbers from 1 on, 1,2,4, got {text!r}")
    return counts
