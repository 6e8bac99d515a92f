"""Gate: the rules that a model must pass, default and a user's, and the policy for a first run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from shardline.components.text import enumerate_names
from shardline.components.validate.export.formats import check_names
from shardline.components.validate.gate.rules import BEST, DRIFT, OFF, GateRule, allowed_metrics, parse_rules
from shardline.components.validate.metrics.evaluation import MIN_SLICE
from shardline.components.validate.metrics.metrics import BY_KIND, MAIN, OF_RARE, PARTS, QUALITY
from shardline.trainer.base import files
from shardline.trainer.base.deserialize import Count, check_types, read
from shardline.trainer.base.errors import SettingsError, error_prefix
from shardline.trainer.data.features import CLASS, MULTILABEL, REGRESSION, Label
from shardline.trainer.data.manifest import Manifest, Split

#: Policies for what cannot be judged, and the default one.
Policy = Literal["bless", "block"]
DEFAULT_POLICY: Policy = "bless"

#: How often a rule may block a model that is as good as the champion: LEVEL in one comparison; FAMILY in all
#: of slices, or of several labels, together, and in LOOKS weekly comparisons of a rule about a slow slide.
LEVEL, FAMILY, LOOKS = 0.025, 0.05, 104

_EXAMPLES = {CLASS: "'accuracy >= 0.9'", MULTILABEL: "'macro_f1 >= 0.8'", REGRESSION: "'rmse <= 10'"}
#: Names of the rules about the champion and a slow slide, skipped where no champion_uri is set.
CHAMPION, SLIDE = "champion", "slide"
#: Name of the rule about the number of examples; first_run decides where there are too few.
EXAMPLES = "examples"
#: Name of the rule about test examples whose labels vary; its notes name the labels that do not.
VARIETY = "variety"


def _default_rules(reasons: Mapping[str, str]) -> tuple[GateRule, ...]:
    pairs = zip(parse_rules(reasons), reasons.values(), strict=True)
    return tuple(replace(rule, why=why) for rule, why in pairs)


def _reference_rules(champion: str, baseline: str) -> tuple[GateRule, ...]:
    return _default_rules(
        {
            f"{CHAMPION}: {champion}": "The model is not worse than the champion.",
            f"baseline: {baseline}": "The model is better than always giving the same answer.",
            f"{SLIDE}: {champion.replace(CHAMPION, 'best(8)')}": "Small losses have not added up.",
        }
    )


#: Default rules about the predictions of a label, by its kind, unless a rule with their name replaces them.
LABEL_RULES = {
    CLASS: _reference_rules("accuracy >= champion (within 0.01)", "accuracy > baseline (p < 0.025)"),
    MULTILABEL: _reference_rules("macro_f1 >= champion (within 0.01)", "macro_f1 > baseline (p < 0.025)"),
    REGRESSION: _reference_rules("rmse <= champion (within 2 %)", "rmse < baseline (p < 0.025)"),
}
#: The same for a label with a class that has less than RARE of an equal share of the test examples, of two
#: classes less than 20 %, and at least RAREST of them: accuracy hardly tells a model from a constant answer
#: there, and a random one has a higher macro F1.
RARE_RULES = _reference_rules(f"{OF_RARE} >= champion (within 0.01)", f"{OF_RARE} > baseline (p < 0.025)")
RARE, RAREST = 0.4, 5
#: Default rules about the model. Rounding differs by batch size and machine, in 16 bits by a percent.
MODEL_RULES = _default_rules(
    {
        "classes: never_predicted == 0": "The model predicts each class at least once.",
        f"{EXAMPLES}: examples >= 50": "There are enough test examples for a verdict.",
        f"{VARIETY}: constant_labels == 0": "The test examples have different answers.",
        "export: max_difference <= 0.02": "The exported model gives the same answers as the trained one.",
        "golden: golden_difference <= 0.001": "A process that has TensorFlow alone gives the same answers.",
        "finite: non_finite == 0": "All outputs are finite: none is NaN or infinite.",
        "batch: batch_difference <= 0.02": "The answer to an example is the same in any request.",
    }
)
#: The default rules for a label of kind class; `Gate.for_labels` returns those for other labels.
DEFAULT_RULES = (*LABEL_RULES[CLASS], *MODEL_RULES)


@dataclass(frozen=True)
class Gate:
    """Rules, all of which must pass, and the policies for rules that cannot be judged.

    Attributes:
        first_run: Policy where there is no champion yet, or too few test examples: "bless" lets a model
            pass, "block" does not.
        undecided: Policy where too few examples leave open whether a model is worse: "bless" or "block".
        min_slice: Smallest slice that is judged, in examples.
        allow_unmeasured: Whether a model may pass when a rule could not be judged.
    """

    rules: tuple[GateRule, ...] = DEFAULT_RULES
    first_run: Policy = DEFAULT_POLICY
    undecided: Policy = DEFAULT_POLICY
    min_slice: Count = MIN_SLICE
    allow_unmeasured: bool = False

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def slide_rules(self) -> tuple[GateRule, ...]:
        """The rules about a slow slide: `expression`, `label` and `last` say what has to be measured."""
        return tuple(rule for rule in self.rules if rule.reference == BEST)

    def with_rules(self, texts: Iterable[str]) -> Gate:
        """Returns this gate with more rules; a rule with a name replaces the rule of that name.

        Raises SettingsError when a rule cannot be parsed, or its name is not that of a default rule about the
        same metric or reference.
        """
        rules, defaults = list(self.rules), {rule.name: rule for rule in DEFAULT_RULES}
        for rule in parse_rules(texts):
            if rule.name and rule.name not in defaults:
                raise SettingsError(
                    f"there is no rule {rule.name!r} to replace; there are {', '.join(defaults)}"
                )
            if rule.name and rule.operator != OFF:
                default = defaults[rule.name]
                # A rule about something else would drop the check of the default.
                side = "reference" if default.reference else "metric"
                if getattr(rule, side) != getattr(default, side):
                    raise SettingsError(
                        f"the rule {rule.text!r} is about something else than {default.name!r}, "
                        f"{default.text!r}; write it without the name, or leave that one out by "
                        f"'{default.name}: off'"
                    )
            namesakes = (each for each in rules if rule.name and each.name == rule.name)
            replaced = next((each for each in namesakes if rule.label in ("", each.label)), None)
            if replaced:
                rules[rules.index(replaced)] = rule
            else:  # also a rule about one of several labels: the default stays for the others
                rules.append(rule)
        return replace(self, rules=tuple(rules))

    def for_labels(self, labels: Sequence[Label], test: Split | None = None) -> Gate:
        """Returns this gate with the default rules for the kinds of the labels, for each of several labels.

        Those of a label with a rare class in the `test` split are RARE_RULES.
        Raises SettingsError when a user's rule does not name one of several labels, or names an unknown label
        or a metric that its kind does not have, or two rules are about the slide of one metric.
        """
        rules: list[GateRule] = []
        for rule in self.rules:
            if rule.why and rule.reference:
                replaced = {each.label for each in self.rules if each.name == rule.name and not each.why}
                for label in labels:
                    default = next(each for each in _label_rules(label, test) if each.name == rule.name)
                    if len(labels) == 1:
                        rules.append(default)
                    elif label.name not in replaced:
                        rules.append(replace(default, label=label.name, text=f"{label.name}.{default.text}"))
            elif not (rule.why and rule.name == "classes" and {it.kind for it in labels} == {REGRESSION}):
                _check_label(rule, labels)
                rules.append(rule)
        gate = replace(self, rules=tuple(rules))
        slides = {rule.expression: rule for rule in gate.slide_rules}
        if unneeded := next((rule for rule in gate.slide_rules if rule not in slides.values()), None):
            instead = f"{SLIDE}: {slides[unneeded.expression].text}"
            raise SettingsError(f"two rules are about the slide of {unneeded.expression}; write {instead!r}")
        return gate

    def with_min_accuracy(self, least: float) -> Gate:
        """Returns this gate with a rule for the smallest accuracy, 0..1 (else SettingsError); 0 adds none."""
        if not 0.0 <= least <= 1.0:  # NaN fails this too.
            raise SettingsError(f"min_accuracy must be within 0..1, got {least}; 0.95 means 95 %")
        return self.with_rules([f"accuracy >= {least!r}"]) if least else self

    def check(self, manifest: Manifest, champion_uri: str, formats: Sequence[str] = ()) -> None:
        """Checks that the rules fit the dataset, before any work is done.

        Raises SettingsError when a rule is about a class or a feature that the dataset does not have, a class
        without test examples, a format that is not in `formats`, or, for a user's rule, a champion where
        `champion_uri` is "".
        """
        self.check_formats(formats)
        self.check_champion(champion_uri)
        columns = [item.name for item in manifest.columns if not item.shape]
        known = [name for name in columns if name not in manifest.split_columns]
        test = manifest.splits.get("test")
        for rule in self.for_labels(manifest.labels, test).rules:
            feature, _, value = rule.slice.partition("=")
            if not feature or rule.format:
                continue
            label = _find_label(rule, manifest.labels)
            part, problem = PARTS[label.kind][0], ""
            counts = test.labels[label.name].counts if test and label.class_names else ()
            if rule.metric == DRIFT:
                names = _profiled_features(manifest)
                if rule.slice not in names:
                    problem = f"feature {rule.slice!r}; drift is measured of {enumerate_names(names)}"
            elif feature != part and feature not in known:
                sliced = enumerate_names([part, *known])
                problem = f"feature {feature!r}; the dataset can be sliced by {sliced}"
            elif feature == part and value not in label.outputs:
                problem = f"{part} {value!r}; the dataset has {enumerate_names(label.outputs)}"
            elif feature == part and counts and not counts[label.outputs.index(value)]:
                problem = (
                    f"{part} {value!r}, but the test split has no example of it; add some, or use another "
                    "split_salt"
                )
            if problem:
                raise SettingsError(f"the rule {rule.text!r} is about {problem}")

    def check_champion(self, champion_uri: str) -> None:
        """Raises SettingsError when a user's rule needs a champion, and `champion_uri` is ""."""
        for rule in self.rules:
            of_champions = rule.reference in ("champion", BEST) and rule.name not in (CHAMPION, SLIDE)
            if of_champions and not champion_uri:
                raise SettingsError(
                    f"the rule {rule.text!r} compares with the champion, but champion_uri is empty; set it"
                )

    def check_formats(self, formats: Sequence[str]) -> None:
        """Raises SettingsError when a format is unknown, or a rule is about a format not in `formats`."""
        check_names(formats)
        for rule in self.rules:
            if rule.format and rule.format not in formats:
                raise SettingsError(
                    f"the rule {rule.text!r} is about the format {rule.format}, into which the model is not "
                    "converted; add it to formats, or to --also"
                )


def _label_rules(label: Label, test: Split | None) -> Iterator[GateRule]:
    """Yields the default rules about the predictions of a label."""
    counts = test.labels[label.name].counts if test and label.kind == CLASS else ()
    rarest = min((count for count in counts if count >= RAREST), default=0)
    if not 0 < rarest * len(counts) < RARE * sum(counts):
        yield from LABEL_RULES[label.kind]
        return
    name, share = label.outputs[counts.index(rarest)], 100 * rarest / sum(counts)
    of_rare = f" {MAIN[CLASS].capitalize()} would hardly see {name}, {share:.2g} % of the test examples."
    yield from (replace(rule, why=rule.why + of_rare) for rule in RARE_RULES)


def _find_label(rule: GateRule, labels: Sequence[Label]) -> Label:
    return next((label for label in labels if label.name == rule.label), labels[0])


def _check_label(rule: GateRule, labels: Sequence[Label]) -> None:
    names = [label.name for label in labels]
    if rule.label and (rule.label not in names or len(labels) == 1):
        known = enumerate_names(names) if len(labels) > 1 else "one label: write its metrics without a name"
        raise SettingsError(f"the rule {rule.text!r} is about label {rule.label!r}; the dataset has {known}")
    is_quality = rule.metric in {metric.name for metric in QUALITY}
    needs_label = rule.worst or (rule.slice and rule.metric != DRIFT) or is_quality
    if rule.operator == OFF or not needs_label:
        return
    if len(labels) > 1 and not rule.label and not rule.format:
        raise SettingsError(
            f"the rule {rule.text!r} does not say which label it is about; write the label's name before the "
            f"metric, {names[0]}.{rule.text}: there are {enumerate_names(names)}"
        )
    kind = _find_label(rule, labels).kind
    if rule.metric not in (fitting := allowed_metrics(rule, [kind])):
        part, of_one = PARTS[kind]
        plain = not (rule.slice or rule.worst)
        names = [metric.name for metric in BY_KIND[kind]] if plain else [*fitting]
        of_part = f" and, for one {part}, {of_one[-1]}[{part}=...]" if rule.slice else ""
        only = "min_accuracy is for classes only, and " if plain and rule.metric == MAIN[CLASS] else ""
        raise SettingsError(
            f"the rule {rule.text!r} does not fit a label of kind {kind}, which has "
            f"{', '.join(names)}{of_part}; {only}a rule for this label is written like {_EXAMPLES[kind]}"
        )


def _profiled_features(manifest: Manifest) -> list[str]:
    names = [label.name for label in manifest.labels if not label.feature.shape]
    for feature in (item for item in manifest.features if item.encoding):
        names += [f"{feature.name} {quantity}" for quantity in ("brightness", "height", "width")]
    for feature in manifest.columns:
        if not feature.shape and feature.name not in manifest.split_columns:
            names += [feature.name, *([f"{feature.name} length"] if feature.dtype == "string" else [])]
    return names


def read_gate(path: Path) -> Gate:
    """Reads a gate from a TOML or JSON file: `rules`, a list of texts, and its policies, all optional.

    Raises SettingsError when it cannot be read, has unknown names, or one of its rules cannot be parsed.
    """
    reader = files.read_json if path.suffix == ".json" else files.read_toml
    content = reader(path, SettingsError)
    rules = content.pop("rules", [])
    if not isinstance(rules, list) or not all(isinstance(rule, str) for rule in rules):
        raise SettingsError(f"{path} must have rules = [...], a list of texts like 'accuracy >= 0.95'")
    with error_prefix(f"{path}: "):
        return read(Gate, content).with_rules(rules)


@dataclass(frozen=True, kw_only=True)
class GateSettings:
    """When a model is good enough, and where it is published then.

    Attributes:
        min_accuracy: Minimum test accuracy of the exported model, 0..1; 0 for none.
        rules: Rules in addition to the default ones or, with a name, in place of one:
            ["worst_slice(accuracy) >= 0.8", "champion: accuracy >= champion - 0.05", "classes: off"].
        first_run: Policy where there is no champion yet, or too few test examples: bless or block.
        undecided: Policy where too few examples leave open whether a model is worse: bless or block.
        champion_uri: Directory or gs:// URI where a blessed model is published; empty publishes nothing.
        formats: Formats into which the exported model is converted, and measured: ["onnx", "litert"].

    Raises:
        SettingsError: A value is of the wrong type or out of range, a rule cannot be parsed, or a rule is
            about a format that is not in `formats`.
    """

    min_accuracy: float = 0.0
    rules: tuple[str, ...] = ()
    first_run: Policy = DEFAULT_POLICY
    undecided: Policy = DEFAULT_POLICY
    champion_uri: str = ""
    formats: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_types(self)
        self.gate.check_formats(self.formats)

    @property
    def gate(self) -> Gate:
        """The gate with these rules."""
        gate = Gate(first_run=self.first_run, undecided=self.undecided)
        return gate.with_min_accuracy(self.min_accuracy).with_rules(self.rules)
