"""Command about the rules of the gate: `shardline gate plan`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from shardline.components.text import enumerate_names, table
from shardline.components.validate.gate.rules import GateRule, parse_rule
from shardline.components.validate.metrics.metrics import LOWER_IS_BETTER, MAIN, SHARES
from shardline.pipelines.cli.options import CommandGroup, json_option, show
from shardline.trainer.base.errors import SettingsError
from shardline.trainer.data.features import CLASS

if TYPE_CHECKING:
    from shardline.components.validate.gate.power import PairedTest

#: Shares of the examples that only one of two models answers rightly, where none is known.
_SHARES = (0.01, 0.02, 0.05, 0.1)
_SHARE = click.FloatRange(0, 1, min_open=True, max_open=True)


@click.group(cls=CommandGroup)
def gate() -> None:
    """Plan how many test examples a rule of the gate needs."""


@gate.command()
@click.option(
    "--examples", type=click.IntRange(1, 10**9), help="Number of test examples: what they can show."
)
@click.option(
    "--loss",
    type=click.FloatRange(1e-4, 1, max_open=True),
    help="Loss to find, 0.01 is one point: how many examples it needs.",
)
@click.option("--power", type=_SHARE, default=0.9, show_default=True, help="How often it has to be found.")
@click.option(
    "--differ", type=_SHARE, help="Share of the examples that only one of two models answers rightly."
)
@click.option(
    "--metric", default="", help="Metric of the rule.  [default: accuracy, or the champion's main metric]"
)
@click.option(
    "--within",
    type=click.FloatRange(0, 1, max_open=True),
    help="Loss that the rule allows.  [default: 0.01, or 2 %]",
)
@click.option(
    "--champion",
    default="",
    metavar="DIR",
    help="Directory or gs:// path of champions, to learn --differ from.",
)
@json_option
def plan(
    examples: int | None,
    loss: float | None,
    power: float,
    differ: float | None,
    metric: str,
    within: float | None,
    champion: str,
    as_json: bool,
) -> None:
    """Say what --examples can show, or how many find a --loss.

    A model is called worse by the rule 'accuracy >= champion (within 0.01)' where the difference is beyond
    chance. How often that happens depends on the share of examples that only one of the two models answers
    rightly: --differ, or that of the champion in DIR and the model that it replaced. Of errors, such as rmse,
    a loss is a share of the value.
    """
    if (loss is None) == (examples is None) and (loss is not None or not champion):
        raise click.UsageError("give --examples N or --loss SHARE")
    if champion and differ is not None:
        raise click.UsageError("--differ is read from the --champion: give one of them")
    if any(value != value for value in (loss, power, differ, within)):
        raise click.UsageError("nan is no number")
    tests, rule = _tests(metric, within, differ, champion)
    plans = [replace(test, examples=examples or test.examples) for test in tests]
    if loss is not None:
        needed = [test.examples_needed(loss, power) for test in tests]
        plans = [replace(test, examples=n) for test, n in zip(tests, needed, strict=True) if n]
    if not plans:
        raise SettingsError(
            f"no number of examples finds a loss of {loss:g} in {power:g} of all cases: the rule "
            f"{rule.text!r} allows it; give a larger --loss, or a smaller --within"
        )
    found = [loss or test.smallest_loss(power) for test in plans]
    content = [
        {"differ": test.differ, "examples": test.examples, "loss": least}
        for test, least in zip(plans, found, strict=True)
    ]
    show(as_json, {"rule": rule.text, "power": power, "plans": content}, *_lines(plans, rule, found, power))


def _lines(
    plans: Sequence[PairedTest], rule: GateRule, found: Sequence[float | None], power: float
) -> Iterator[str]:
    """Yields a sentence about one test, a table of several."""
    from shardline.components.validate.gate.power import odds

    yield f"Rule: {rule.text}"
    if len(plans) == 1:
        yield from textwrap.wrap(f"{plans[0].describe(power, found[0])}. {plans[0].basis}", 79)
        return
    head = (f"found in {odds(power)}", f"{plans[0].text(plans[0].within)} found in")
    rows = [
        (
            f"{100 * (test.differ or 0):g} %",
            f"{test.examples:,}",
            test.text(loss) if loss else "no loss",
            odds(test.power(test.within)),
        )
        for test, loss in zip(plans, found, strict=True)
    ]
    yield table(("answers that differ", "examples", *head), rows)


def _tests(
    metric: str, within: float | None, differ: float | None, champion: str
) -> tuple[list[PairedTest], GateRule]:
    """Returns the test of a rule, or, where nothing is known of the models, several, and the rule."""
    from shardline.components.validate.gate.power import COUNTED, Measured, PairedTest

    if champion:
        measured, version = Measured.of_champion(champion)
        mains = [name for name in measured.metrics if name.rpartition(".")[2] in MAIN.values()]
        rule = _rule(metric or mains[0], within)
        if not (test := PairedTest.of(measured, rule)):
            known = enumerate_names([name for name in measured.intervals if "[" not in name])
            raise SettingsError(
                f"{rule.expression} of the champion {version} has no interval; --metric may be {known}"
            )
        return [test], rule
    rule = _rule(metric or MAIN[CLASS], within)
    if rule.metric not in COUNTED:
        raise SettingsError(
            f"how much chance changes {rule.metric} depends on the model: give --champion DIR, or a --metric "
            f"that is a share of examples: {', '.join(COUNTED)}"
        )
    assert rule.within is not None
    shares = _SHARES if differ is None else (differ,)
    return [PairedTest(1, rule.within, differ=share) for share in shares], rule


def _rule(metric: str, within: float | None) -> GateRule:
    """Returns the rule about the champion for a metric; that of errors is relative, as by default."""
    name = metric.rpartition(".")[2]
    usual, unit = (0.01, "") if name in SHARES else (0.02, "%")
    limit = (usual if within is None else within) * (100 if unit else 1)
    operator = "<=" if name in LOWER_IS_BETTER else ">="
    return parse_rule(f"{metric} {operator} champion (within {limit:g}{unit and ' %'})")
