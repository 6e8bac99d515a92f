"""Gate: the rules that a model must pass, the policy for those that cannot be judged, and the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from shardline.components.parameters import FIRST_RUN, FIRST_RUNS
from shardline.components.validate.evaluation import MIN_SLICE, Evaluation, Interval, Slice
from shardline.components.validate.rules import OPERATORS, Rule, parse_rule, parse_rules
from shardline.trainer import files
from shardline.trainer.data.manifest import Manifest
from shardline.trainer.errors import SettingsError

_NO_SLICES = ("image", "label", "key")
_MOST_NAMES = 20
_NON_FINITE = "examples with non-finite output"

# Changes that should not change a prediction, and the share of images from which on they are worth a warning.
_HARMLESS = {"jpeg_flips": "Encoding as JPEG", "shift_flips": "A shift by one pixel"}
_MOST_FLIPS = 0.1

# Kernels for other batch sizes round differently, in 16 bits by a percent; more is a model's own doing.
_BATCH = parse_rule("batch_difference <= 0.02")


@dataclass(frozen=True)
class Gate:
    """Rules and the policy for those that cannot be judged.

    Attributes:
        rules: All of them must pass.
        first_run: Policy for rules about a champion where none can be measured on the same examples (none
            yet, unreadable, of other classes): "bless" skips them, "block" fails them.
        min_slice: Smallest slice that is judged, in examples.
        allow_undecided: Whether a model may pass though a rule could not be judged.
    """

    rules: tuple[Rule, ...]
    first_run: str = FIRST_RUN
    min_slice: int = MIN_SLICE
    allow_undecided: bool = False

    def __post_init__(self) -> None:
        if self.first_run not in FIRST_RUNS:
            raise SettingsError(f"first_run must be {' or '.join(FIRST_RUNS)}, got {self.first_run!r}")
        if not isinstance(self.min_slice, int) or self.min_slice < 1:
            raise SettingsError(f"min_slice must be a whole number from 1 on, got {self.min_slice!r}")
        if not isinstance(self.allow_undecided, bool):
            raise SettingsError(f"allow_undecided must be true or false, got {self.allow_undecided!r}")

    def with_rules(self, texts: Iterable[str]) -> Gate:
        """Returns this gate with more rules; raises SettingsError when one of them cannot be read."""
        return replace(self, rules=(*self.rules, *parse_rules(texts)))

    def check(self, manifest: Manifest, champion_uri: str) -> None:
        """Checks that the rules fit the dataset, before any work is done for them.

        Raises SettingsError when a rule is about a class or a feature that the dataset does not have, or
        about a champion where `champion_uri` is "".
        """
        known = ["class"]
        known += [item.name for item in manifest.features if item.name not in _NO_SLICES and not item.shape]
        for rule in self.rules:
            if rule.champion and not champion_uri:
                raise SettingsError(
                    f"the rule {rule.text!r} compares with the champion; say where champions are published"
                )
            feature, _, value = rule.slice.partition("=")
            if feature == "class" and value not in manifest.class_names:
                raise SettingsError(
                    f"the rule {rule.text!r} is about class {value!r}; "
                    f"the dataset has {_enumerate(manifest.class_names)}"
                )
            if feature and feature not in known:
                raise SettingsError(
                    f"the rule {rule.text!r} is about feature {feature!r}; the dataset can be sliced by "
                    f"{_enumerate(known)}"
                )


def accuracy_gate(min_accuracy: float) -> Gate:
    """Returns the gate with one rule, a smallest accuracy; raises SettingsError if it is not within 0..1."""
    check_min_accuracy(min_accuracy)
    return Gate(parse_rules([f"accuracy >= {min_accuracy!r}"]))


def check_min_accuracy(min_accuracy: float) -> None:
    """Raises SettingsError when a smallest accuracy is not within 0..1."""
    if not 0.0 <= min_accuracy <= 1.0:  # NaN fails this too.
        raise SettingsError(f"min_accuracy must be within 0..1, got {min_accuracy}; 0.95 means 95 %")


def read_gate(path: Path) -> Gate:
    """Reads a gate from a TOML or JSON file: `rules`, a list of texts, and optionally its policy.

    Raises:
        SettingsError: When it cannot be read, has unknown names, or one of its rules cannot be read.
    """
    reader = files.read_json if path.suffix == ".json" else files.read_toml
    content = reader(path, SettingsError)
    known = [item.name for item in fields(Gate)]
    if unknown := [name for name in content if name not in known]:
        named = ", ".join(map(repr, unknown))
        raise SettingsError(f"{path} has unknown {named}; it may have {', '.join(known)}")
    rules = content.pop("rules", None)
    if not isinstance(rules, list) or not rules or not all(isinstance(rule, str) for rule in rules):
        raise SettingsError(f"{path} must have rules = [...], a list of texts like 'accuracy >= 0.95'")
    try:
        return Gate(parse_rules(rules), **content)
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from None


def _enumerate(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")


#: "undecided": there is too little to judge on. "skipped": the rule needs a champion that is not there, and
#: the policy for a first run allows it.
Verdict = Literal["passed", "failed", "undecided", "skipped"]


@dataclass(frozen=True)
class JudgedRule:
    """One rule, its two sides and the verdict on it.

    Attributes:
        rule: The rule as it was written: "accuracy >= champion - 0.005".
        name: Its left side: "accuracy", "recall[class=healthy]", "worst_slice(accuracy)".
        left: Value of the left side; None where it could not be measured.
        right: The limit; None where it is a champion's value that could not be measured.
        interval: 95 % interval of the left side; None where there is none.
        champion: The champion's value, where the rule compares with it.
        difference: 95 % interval of the value minus the champion's, by paired bootstrap.
        p: As in `Lead`; None where the rule does not ask for it.
        note: What else a person must know (which slice is the worst, why it is undecided), or "".
    """

    rule: str
    name: str
    left: float | None
    operator: str
    right: float | None
    verdict: Verdict
    interval: Interval | None = None
    champion: float | None = None
    difference: Interval | None = None
    p: float | None = None
    note: str = ""

    @property
    def left_text(self) -> str:
        """The value as a person reads it; never rounded to the limit when it is not equal to it."""
        if self.left is None:
            return "not measured"
        if isinstance(self.left, int):
            return f"{self.left:,}"
        short = f"{self.left:.4f}" if self.left == 0 or 0.001 <= abs(self.left) < 1000 else f"{self.left:.4g}"
        return repr(self.left) if float(short) == self.right and self.left != self.right else short

    @property
    def right_text(self) -> str:
        """The limit as a person reads it."""
        return "the champion's" if self.right is None else f"{self.right:g}"

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        if self.verdict in ("undecided", "skipped"):
            return f"{self.rule} is {self.verdict}{note}"
        failed = "is not" if self.p is None else "is not significantly"
        comparison = self.operator if self.verdict == "passed" else f"{failed} {self.operator}"
        return f"{self.name} {self.left_text} {comparison} {self.right_text}{note}"


@dataclass(frozen=True)
class Blessing:
    """The verdict on an exported model.

    Attributes:
        blessed: Whether the model may be published.
        reason: Reason for the verdict, in one sentence.
        warnings: What a person should know though it decides nothing, a sentence each.
    """

    blessed: bool
    rules: tuple[JudgedRule, ...]
    reason: str
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the content of blessing.json."""
        return asdict(self)


def judge(
    evaluation: Evaluation, gate: Gate, *, no_champion: str = "", warnings: tuple[str, ...] = ()
) -> Blessing:
    """Returns the verdict on an evaluation.

    Besides the gate's own rules two always hold: every output is finite, and the size of a batch does not
    matter. `no_champion` says why there is no champion in the evaluation; "" where there is one or none is
    asked for. Given `warnings` come before those about unstable predictions.
    """
    wrong = evaluation.non_finite
    finite: Verdict = "failed" if wrong else "passed"
    rules = [_judge(rule, evaluation, gate, no_champion) for rule in gate.rules]
    rules.append(JudgedRule(f"{_NON_FINITE} == 0", _NON_FINITE, wrong, "==", 0, finite))
    if _BATCH.metric in evaluation.metrics:
        rules.append(_judge(_BATCH, evaluation, gate, no_champion))
    stopping = ("failed",) if gate.allow_undecided else ("failed", "undecided")
    blocking = [rule for rule in rules if rule.verdict in stopping]
    shown = blocking or [rules[0], *(rule for rule in rules[1:] if rule.verdict in ("undecided", "skipped"))]
    flipping = [
        f"{change} changes the predicted class of {share:.0%} of the images that were tried"
        for metric, change in _HARMLESS.items()
        if (share := evaluation.metrics.get(metric, 0.0)) > _MOST_FLIPS
    ]
    reason = "; ".join(map(str, shown))
    return Blessing(not blocking, tuple(rules), reason, (*warnings, *flipping))


def _judge(rule: Rule, evaluation: Evaluation, gate: Gate, no_champion: str) -> JudgedRule:
    left, note = _measure(rule, evaluation)
    judged = JudgedRule(
        rule=rule.text,
        name=rule.name,
        left=left,
        operator=rule.operator,
        right=rule.limit,
        verdict="undecided",
        interval=_interval(rule, evaluation),
        note=note,
    )
    if rule.champion:
        if evaluation.champion is None:
            # A policy of its own: allow_undecided is about slices and metrics.
            verdict: Verdict = "skipped" if gate.first_run == "bless" else "failed"
            note = f"{no_champion or 'there is no champion'}; first_run is {gate.first_run}"
            return replace(judged, right=None, verdict=verdict, note=note)
        theirs, theirs_note = _measure(rule, evaluation.champion)
        lead = evaluation.leads.get(rule.name)
        judged = replace(
            judged,
            right=None if theirs is None else theirs + rule.limit,
            champion=theirs,
            difference=lead.interval if lead else None,
            p=lead.p if lead and rule.p is not None else None,
            note=note or (f"of the champion {theirs_note}" if theirs is None else ""),
        )
    if left is None or judged.right is None or (rule.p is not None and judged.p is None):
        return judged
    passed = OPERATORS[rule.operator](left, judged.right)
    if rule.p is not None and judged.p is not None:
        passed = passed and judged.p < rule.p
        judged = replace(judged, note=f"p = {judged.p:.3f}, must be below {rule.p:g}")
    return replace(judged, verdict="passed" if passed else "failed")


def _measure(rule: Rule, evaluation: Evaluation) -> tuple[float | None, str]:
    """Returns the value of a rule's left side, None where it is unknown, and a note."""
    if rule.worst:
        return _worst(rule.metric, evaluation)
    if not rule.slice:
        value = evaluation.metrics.get(rule.metric)
        return value, "" if value is not None else "it was not measured"
    found = next((item for item in evaluation.slices if item.name == rule.slice), None)
    if found is None or not found.decided:
        return None, f"{found.examples if found else 0:,} examples are too few"
    return _of_slice(rule.metric, found, evaluation), ""


def _worst(metric: str, evaluation: Evaluation) -> tuple[float | None, str]:
    slices = [item for item in evaluation.slices if metric == "accuracy" or item.name.startswith("class=")]
    values = [(_of_slice(metric, item, evaluation), item.name) for item in slices if item.decided]
    if not values:
        return None, "every slice has too few examples"
    value, name = min(values)
    few = len(slices) - len(values)
    left_out = f"; {few:,} {'slice has' if few == 1 else 'slices have'} too few examples" if few else ""
    return value, name + left_out


def _of_slice(metric: str, item: Slice, evaluation: Evaluation) -> float:
    if metric == "accuracy":
        return item.accuracy
    name = item.name.removeprefix("class=")
    score = next(score for score in evaluation.classes if score.name == name)
    return float(getattr(score, metric))


def _interval(rule: Rule, evaluation: Evaluation) -> Interval | None:
    if rule.slice and rule.metric == "accuracy":
        return next((item.interval for item in evaluation.slices if item.name == rule.slice), None)
    return evaluation.intervals.get(rule.name)
