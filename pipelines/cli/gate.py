"""Command about the rules of the gate: `shardline gate plan`."""

from __future__ import annotations

import textwrap
from dataclasses import replace

import click

from shardline.components.text import table
from shardline.components.validate.gate.gate import LABEL_RULES
from shardline.components.validate.gate.rules import parse_rule
from shardline.pipelines.cli.options import CommandGroup, show
from shardline.trainer.base.errors import SettingsError

# Shares of the examples that only one of two models answers rightly.
_SHARES = (0.01, 0.02, 0.05, 0.1)


@click.group(cls=CommandGroup)
def gate() -> None:
    """Plan how many test examples a rule of the gate needs."""


@gate.command()
@click.option("--examples", type=click.IntRange(1, 10**9), help="Number of test examples: what they show.")
@click.option("--loss", type=click.FloatRange(1e-4, 1, max_open=True), help="Loss to find: what it needs.")
@click.option("--champion", default="", metavar="DIR", help="Directory or gs:// path of the champions.")
def plan(examples: int | None, loss: float | None, champion: str) -> None:
    """Say which loss --examples can show, or how many show a --loss.

    A rule such as 'accuracy >= champion (within 0.01)' blocks a model that is worse beyond chance. How often
    it does depends on the share of examples that only one of the two models answers rightly, as measured of
    the champion in DIR and the model that it replaced. A loss of 0.01 is one point or, where the rule is
    relative, 1 % of the value.
    """
    if ((loss is None) == (examples is None) and (examples or not champion)) or loss != loss:
        raise click.UsageError("give --examples N or --loss SHARE")
    from shardline.components.validate.gate.power import COUNTED, POWER, Measured, PairedTest, odds

    measured = Measured.of_champion(champion) if champion else Measured(1, {COUNTED[0]: None})
    defaults = {rules[0].metric: rules[0].text for rules in LABEL_RULES.values()}
    # A class has a macro F1, too: its main metric comes first.
    mains = (name for main in defaults for name in measured.metrics if name.rpartition(".")[2] == main)
    main = next(mains, COUNTED[0])
    metric = main.rpartition(".")[2]
    rule = parse_rule(defaults[metric].replace(metric, main))
    assert rule.within is not None
    known = PairedTest.of(measured, rule)
    if champion and not known:
        raise SettingsError(
            f"chance in the rule {rule.text!r} is not known: {main} of {champion} has no interval"
        )
    rows = []
    for test in [known] if known else [PairedTest(1, rule.within, differ=share) for share in _SHARES]:
        number = test.examples_needed(loss) if loss else examples or test.examples
        if number is None:
            raise SettingsError(f"no number of examples finds a loss of {loss:g}, as {rule.text!r} allows it")
        test = replace(test, examples=number)
        least, allowed = loss or test.smallest_loss(), odds(test.power(test.within))
        share = "" if test.differ is None else f"{100 * test.differ:.3g} %"
        rows.append((share, f"{number:,}", test.text(least) if least else "no loss", allowed))
    head = ("differ", "examples", f"found in {odds(POWER)}", f"{test.text(test.within)} found in")
    show(False, None, f"Rule: {rule.text}", table(head, rows), *textwrap.wrap(test.basis, 79))
