"""Gate: the rules that a model must pass, its own and those of a user, and the policy for a first run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from shardline.components.parameters import FIRST_RUN, FIRST_RUNS
from shardline.components.validate.evaluation import MIN_SLICE
from shardline.components.validate.formats import check_names
from shardline.components.validate.rules import DRIFT, OFF, Rule, parse_rule, parse_rules
from shardline.trainer import files
from shardline.trainer.data.manifest import Manifest
from shardline.trainer.errors import SettingsError

_NO_SLICES = ("image", "label", "key")
_MOST_NAMES = 20

#: The rule about the champion: without a place for champions there is nothing that it could compare with.
CHAMPION = "champion"
#: The rule about the number of examples, of which first_run says what becomes of it.
EXAMPLES = "examples"

#: The gate's own rules, in force unless one with their name takes their place: rule, and what it is for.
#: Kernels for other batch sizes, and other machines, round differently, in 16 bits by a percent.
DEFAULTS = tuple(
    replace(parse_rule(text), why=why)
    for text, why in (
        (
            "champion: accuracy >= champion (within 0.01)",
            "A model that is worse replaces none that is better.",
        ),
        ("baseline: accuracy > baseline (p < 0.025)", "Whoever always gives the same answer needs no model."),
        ("classes: never_predicted == 0", "A class that is never predicted might as well not be there."),
        ("examples: examples >= 50", "On fewer test examples a verdict is chance."),
        ("export: max_difference <= 0.02", "The exported model answers as the trained one does."),
        ("golden: golden_difference <= 0.001", "A server that has TensorFlow alone gives the same answers."),
        ("finite: non_finite == 0", "An output that is no number is no answer."),
        ("batch: batch_difference <= 0.02", "What else is in a request does not matter."),
    )
)


@dataclass(frozen=True)
class Gate:
    """Rules and the policy for those that cannot be judged.

    Attributes:
        rules: All of them must pass.
        first_run: What becomes of rules about a champion where the place for champions is empty, and of a
            model with too few test examples: "bless" lets it pass, "block" does not.
        min_slice: Smallest slice that is judged, in examples.
        allow_undecided: Whether a model may pass though a rule could not be judged.
    """

    rules: tuple[Rule, ...] = DEFAULTS
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
        """Returns this gate with more rules; one with a name takes the place of the rule of that name.

        Raises SettingsError when one of them cannot be read, there is no rule of its name, or that one is
        about something else.
        """
        rules, names = list(self.rules), [one.name for one in DEFAULTS]
        for rule in parse_rules(texts):
            if rule.name and rule.name not in names:
                raise SettingsError(
                    f"there is no rule {rule.name!r} to replace; there are {', '.join(names)}"
                )
            found = [place for place, one in enumerate(rules) if rule.name and one.name == rule.name]
            if found:
                _check_replacement(rule, next(one for one in DEFAULTS if one.name == rule.name))
                rules[found[0]] = rule
            else:
                rules.append(rule)
        return replace(self, rules=tuple(rules))

    def with_min_accuracy(self, least: float) -> Gate:
        """Returns this gate with a smallest accuracy, none for 0; SettingsError if it is not within 0..1."""
        if not 0.0 <= least <= 1.0:  # NaN fails this too.
            raise SettingsError(f"min_accuracy must be within 0..1, got {least}; 0.95 means 95 %")
        return self.with_rules([f"accuracy >= {least!r}"]) if least else self

    def check(self, manifest: Manifest, champion_uri: str, formats: Sequence[str] = ()) -> None:
        """Checks that the rules fit the dataset, before any work is done for them.

        Raises SettingsError when a rule is about a class or a feature that the dataset does not have, about
        a format that is not among `formats`, or one of the user's about a champion where `champion_uri` is
        "".
        """
        self.check_formats(formats)
        self.check_champion(champion_uri)
        known = ["class"]
        known += [item.name for item in manifest.features if item.name not in _NO_SLICES and not item.shape]
        for rule in self.rules:
            if rule.format:
                continue
            if rule.metric == DRIFT:
                _check_drift(rule, manifest)
                continue
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

    def check_champion(self, champion_uri: str) -> None:
        """Raises SettingsError when a rule beside the gate's own needs a champion, and there is no place."""
        for rule in self.rules:
            if rule.reference == "champion" and rule.name != CHAMPION and not champion_uri:
                raise SettingsError(
                    f"the rule {rule.text!r} compares with the champion; say where champions are published"
                )

    def check_formats(self, formats: Sequence[str]) -> None:
        """Raises SettingsError when one of them is unknown, or a rule is about another one."""
        check_names(formats)
        for rule in self.rules:
            if rule.format and rule.format not in formats:
                raise SettingsError(
                    f"the rule {rule.text!r} is about the format {rule.format}, into which the model is not "
                    "converted; add it to formats, or to --also"
                )


def _check_replacement(rule: Rule, default: Rule) -> None:
    """Refuses a rule about something else than the one whose place it takes: that would be open then."""
    same = rule.reference == default.reference if default.reference else rule.metric == default.metric
    if rule.operator != OFF and not same:
        raise SettingsError(
            f"the rule {rule.text!r} is about something else than {default.name!r}, {default.text!r}; write "
            f"it without the name, and '{default.name}: off' to leave that one out"
        )


def _check_drift(rule: Rule, manifest: Manifest) -> None:
    names = ["label"]
    for feature in manifest.features:
        if feature.encoding:
            names += [f"{feature.name} {what}" for what in ("brightness", "height", "width")]
        elif feature.name not in _NO_SLICES and not feature.shape:
            names += [feature.name, *([f"{feature.name} length"] if feature.dtype == "string" else [])]
    if rule.slice not in names:
        raise SettingsError(
            f"the rule {rule.text!r} is about feature {rule.slice!r}; what may drift is {_enumerate(names)}"
        )


def read_gate(path: Path) -> Gate:
    """Reads a gate from a TOML or JSON file: `rules`, a list of texts, and its policy; all may be left out.

    Raises:
        SettingsError: When it cannot be read, has unknown names, or one of its rules cannot be read.
    """
    reader = files.read_json if path.suffix == ".json" else files.read_toml
    content = reader(path, SettingsError)
    known = [item.name for item in fields(Gate)]
    if unknown := [name for name in content if name not in known]:
        named = ", ".join(map(repr, unknown))
        raise SettingsError(f"{path} has unknown {named}; it may have {', '.join(known)}")
    rules = content.pop("rules", [])
    if not isinstance(rules, list) or not all(isinstance(rule, str) for rule in rules):
        raise SettingsError(f"{path} must have rules = [...], a list of texts like 'accuracy >= 0.95'")
    try:
        return Gate(**content).with_rules(rules)
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from None


def _enumerate(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")
