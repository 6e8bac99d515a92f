"""Gate: the rules that a model must pass, its own and those of a user, and the policy for a first run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from shardline.components.text import enumerate_names
from shardline.components.validate.export.formats import check_names
from shardline.components.validate.gate.rules import DRIFT, OFF, GateRule, parse_rule, parse_rules, vocabulary
from shardline.components.validate.metrics.evaluation import MIN_SLICE
from shardline.components.validate.metrics.metrics import (
    BY_KIND,
    OF_QUANTILES,
    PARTS,
    QUALITY,
    names_of_quantiles,
)
from shardline.trainer.base import files
from shardline.trainer.base.deserialize import check_types
from shardline.trainer.base.errors import SettingsError
from shardline.trainer.data.features import CLASS, MULTILABEL, REGRESSION, Label
from shardline.trainer.data.manifest import Manifest

#: Policies for rules about a champion that cannot be measured, and the default one.
FIRST_RUNS = ("bless", "block")
FIRST_RUN = "bless"

#: The rule about the champion: without a place for champions there is nothing that it could compare with.
CHAMPION = "champion"
#: The rule about the number of examples, of which first_run says what becomes of it.
EXAMPLES = "examples"
#: The rule about test examples that differ in what is to be predicted; the notes say why they do not.
VARIETY = "variety"


def _own(text: str, why: str) -> GateRule:
    return replace(parse_rule(text), why=why)


def _own_of(champion: str, baseline: str) -> tuple[GateRule, ...]:
    return (
        _own(f"{CHAMPION}: {champion}", "A model that is worse replaces none that is better."),
        _own(f"baseline: {baseline}", "Whoever always gives the same answer needs no model."),
    )


#: The gate's own rules about the answers to a label, by its kind, in force unless one with their name takes
#: their place: rule, and what it is for.
OF_LABEL = {
    CLASS: _own_of("accuracy >= champion (within 0.01)", "accuracy > baseline (p < 0.025)"),
    MULTILABEL: _own_of("macro_f1 >= champion (within 0.01)", "macro_f1 > baseline (p < 0.025)"),
    REGRESSION: _own_of("rmse <= champion (within 2 %)", "rmse < baseline (p < 0.025)"),
}
#: The others. Kernels for other batch sizes, and other machines, round differently, in 16 bits by a percent.
OF_MODEL = (
    _own("classes: never_predicted == 0", "A class that is never predicted might as well not be there."),
    _own(f"{EXAMPLES}: examples >= 50", "On fewer test examples a verdict is chance."),
    _own(f"{VARIETY}: constant_labels == 0", "Where one answer is always right, no model can be judged."),
    _own("export: max_difference <= 0.02", "The exported model answers as the trained one does."),
    _own("golden: golden_difference <= 0.001", "A server that has TensorFlow alone gives the same answers."),
    _own("finite: non_finite == 0", "An output that is no number is no answer."),
    _own("batch: batch_difference <= 0.02", "What else is in a request does not matter."),
)
#: The gate's own rules for one class of several; `Gate.for_labels` has those of other labels.
DEFAULTS = (*OF_LABEL[CLASS], *OF_MODEL)


@dataclass(frozen=True)
class Gate:
    """Rules, all of which must pass, and the policy for those that cannot be judged.

    Attributes:
        first_run: What becomes of rules about a champion where the place for champions is empty, and of a
            model with too few test examples: "bless" lets it pass, "block" does not.
        min_slice: Smallest slice that is judged, in examples.
        allow_undecided: Whether a model may pass though a rule could not be judged.
    """

    rules: tuple[GateRule, ...] = DEFAULTS
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
        rules, own = list(self.rules), {one.name: one for one in DEFAULTS}
        for rule in parse_rules(texts):
            if rule.name and rule.name not in own:
                raise SettingsError(f"there is no rule {rule.name!r} to replace; there are {', '.join(own)}")
            if rule.name and rule.operator != OFF:
                default = own[rule.name]
                # About something else it would leave open what the default asks.
                side = "reference" if default.reference else "metric"
                if getattr(rule, side) != getattr(default, side):
                    raise SettingsError(
                        f"the rule {rule.text!r} is about something else than {default.name!r}, "
                        f"{default.text!r}; write it without the name, or leave that one out by "
                        f"'{default.name}: off'"
                    )
            taken = (one for one in rules if rule.name and one.name == rule.name)
            place = next((one for one in taken if rule.label in ("", one.label)), None)
            if place:
                rules[rules.index(place)] = rule
            else:  # also of one of several labels: those of the others stay
                rules.append(rule)
        return replace(self, rules=tuple(rules))

    def for_labels(self, labels: Sequence[Label]) -> Gate:
        """Returns this gate with its own rules for the kinds of some labels, of several one for each.

        Raises SettingsError when a rule that a user has written does not say which of several labels it is
        about, names one that is not there, or a metric that its kind does not have.
        """
        rules: list[GateRule] = []
        for rule in self.rules:
            if rule.why and rule.name in (CHAMPION, "baseline"):
                written = {one.label for one in self.rules if one.name == rule.name and not one.why}
                for label in labels:
                    own = next(one for one in OF_LABEL[label.kind] if one.name == rule.name)
                    if len(labels) == 1:
                        rules.append(own)
                    elif label.name not in written:
                        rules.append(replace(own, label=label.name, text=f"{label.name}.{own.text}"))
            elif not (rule.why and rule.name == "classes" and {one.kind for one in labels} == {REGRESSION}):
                _check_label(rule, labels)
                rules.append(rule)
        return replace(self, rules=tuple(rules))

    def with_min_accuracy(self, least: float) -> Gate:
        """Returns this gate with a smallest accuracy, none for 0; SettingsError if it is not within 0..1."""
        if not 0.0 <= least <= 1.0:  # NaN fails this too.
            raise SettingsError(f"min_accuracy must be within 0..1, got {least}; 0.95 means 95 %")
        return self.with_rules([f"accuracy >= {least!r}"]) if least else self

    def check(self, manifest: Manifest, champion_uri: str, formats: Sequence[str] = ()) -> None:
        """Checks that the rules fit the dataset, before any work is done for them.

        Raises SettingsError when a rule is about a class or a feature that the dataset does not have, about a
        class without an example in the test split, about a format that is not among `formats`, or one of the
        user's about a champion where `champion_uri` is "".
        """
        self.check_formats(formats)
        self.check_champion(champion_uri)
        known = [one.name for one in manifest.columns if not one.shape and one.name not in manifest.apart]
        for rule in self.for_labels(manifest.labels).rules:
            feature, _, value = rule.slice.partition("=")
            if not feature or rule.format:
                continue
            label = _find_label(rule, manifest.labels)
            part, there = PARTS[label.kind][0], ""
            if rule.metric == DRIFT:
                names = _drifting(manifest)
                if rule.slice not in names:
                    there = f"feature {rule.slice!r}; what may drift is {enumerate_names(names)}"
            elif feature != part and feature not in known:
                sliced = enumerate_names([part, *known])
                there = f"feature {feature!r}; the dataset can be sliced by {sliced}"
            elif feature == part and value not in label.outputs:
                there = f"{part} {value!r}; the dataset has {enumerate_names(label.outputs)}"
            elif feature == part and label.class_names and not _tested(manifest, label)[value]:
                there = (
                    f"{part} {value!r}, of which the test split has no example; bring some, or take another "
                    "split_salt"
                )
            if there:
                raise SettingsError(f"the rule {rule.text!r} is about {there}")

    def check_quantiles(self, labels: Sequence[Label], quantiles: Mapping[str, tuple[float, ...]]) -> None:
        """Raises SettingsError when a rule is about quantiles, by label, of which the model gives none."""
        for rule in self.rules:
            has = names_of_quantiles(quantiles.get(_find_label(rule, labels).name, ()))
            if rule.metric in {metric.name for metric in OF_QUANTILES} - {*has}:
                fitting = [one.name for one in BY_KIND[REGRESSION] if one not in OF_QUANTILES]
                found = "one quantile" if has else "no quantiles"
                raise SettingsError(
                    f"the rule {rule.text!r} is about quantiles, and the model gives {found}; it has "
                    f"{', '.join([*fitting, *has])}: train it with quantiles, or leave the rule out"
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


def _find_label(rule: GateRule, labels: Sequence[Label]) -> Label:
    """Returns the label that a rule is about; of several the first where it is about none of them."""
    return next((label for label in labels if label.name == rule.label), labels[0])


def _check_label(rule: GateRule, labels: Sequence[Label]) -> None:
    """Refuses a rule about a label or a metric that is not there."""
    names = [label.name for label in labels]
    if rule.label and (rule.label not in names or len(labels) == 1):
        there = enumerate_names(names) if len(labels) > 1 else "one label, whose metrics stand alone"
        raise SettingsError(f"the rule {rule.text!r} is about label {rule.label!r}; the dataset has {there}")
    of_quality = rule.metric in {metric.name for metric in QUALITY}
    of_label = rule.worst or (rule.slice and rule.metric != DRIFT) or of_quality
    if rule.operator == OFF or not of_label:
        return
    if len(labels) > 1 and not rule.label and not rule.format:
        raise SettingsError(
            f"the rule {rule.text!r} does not say which label it is about; write the label's name before the "
            f"metric, {names[0]}.{rule.text}: there are {enumerate_names(names)}"
        )
    kind = _find_label(rule, labels).kind
    if rule.metric not in (fitting := vocabulary(rule, [kind])):
        part, metrics = PARTS[kind]
        raise SettingsError(
            f"the rule {rule.text!r} does not fit a label of kind {kind}, which has {', '.join(fitting)}"
            + (f" and, of one {part}, {metrics[-1]}[{part}=...]" if rule.slice else "")
        )


def _tested(manifest: Manifest, label: Label) -> dict[str, int]:
    """Returns the examples of each class or label in the test split, 1 each where there is none."""
    test = manifest.splits.get("test")
    counts = test.labels[label.name].counts if test else (1,) * len(label.outputs)
    return dict(zip(label.outputs, counts, strict=True))


def _drifting(manifest: Manifest) -> list[str]:
    """Returns the features of a profile."""
    names = [label.name for label in manifest.labels if not label.feature.shape]
    for feature in (one for one in manifest.features if one.encoding):
        names += [f"{feature.name} {what}" for what in ("brightness", "height", "width")]
    for feature in manifest.columns:
        if not feature.shape and feature.name not in manifest.apart:
            names += [feature.name, *([f"{feature.name} length"] if feature.dtype == "string" else [])]
    return names


def read_gate(path: Path) -> Gate:
    """Reads a gate from a TOML or JSON file: `rules`, a list of texts, and its policy; all may be left out.

    Raises SettingsError when it cannot be read, has unknown names, or one of its rules cannot be read.
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


@dataclass(frozen=True, kw_only=True)
class GateSettings:
    """The object `gate`: when a model is good enough, and where it is published then.

    Attributes:
        min_accuracy: The least test accuracy of the exported model, 0..1; 0 for none.
        rules: Rules beside the gate's own, or, with a name, in their place: ["worst_slice(accuracy) >= 0.8",
            "champion: accuracy >= champion - 0.05", "classes: off"].
        first_run: What becomes of a model where there is no champion yet, or too few test examples: bless or
            block.
        champion_uri: Where a blessed model is published; empty publishes nothing.
        formats: What the exported model is converted into, and measured as: ["onnx", "tflite", "int8"].

    Raises:
        SettingsError: A value is of the wrong type or out of range, a rule cannot be read, or one is about a
            format that is not among these.
    """

    min_accuracy: float = 0.0
    rules: tuple[str, ...] = ()
    first_run: str = FIRST_RUN
    champion_uri: str = ""
    formats: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_types(self)
        self.gate.check_formats(self.formats)

    @property
    def gate(self) -> Gate:
        """The gate with all of these rules."""
        return Gate(first_run=self.first_run).with_min_accuracy(self.min_accuracy).with_rules(self.rules)
