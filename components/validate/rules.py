"""Gate: the rules that a model must pass, default and a user's, their syntax, and the policies.

A rule is one comparison: `accuracy >= 0.95`, `recall[class=healthy] >= champion - 0.1`. With the name of one
of the default rules before it, it replaces that rule; "off" leaves that rule out.

    rule    = [name ":"] (value operator limit [tail] | "off")
    value   = [label "."] quality | "drift[" feature "]"
    quality = metric | metric "[" feature "=" value "]" | "worst_slice(" metric ")"
    limit   = number | ("champion" | "baseline") [("+" | "-" | "*") number] | "best(" number ")"
    tail    = "(p <" number ")" | "(within" number ["%"] ")"

With several labels, a rule names the label: `sentiment.rmse <= 0.9`. `baseline` is a constant answer: the
most frequent class, all labels of a multilabel, the means of numbers; `best(8)` the best of 8 champions, the
present one and those 1, 2, 4, 8, 16, 32 and 64 before it. "(p < 0.05)" requires a significant lead; "(within
0.01)" allows a model to be worse by that much. Rules are parsed by a regular expression; nothing in them is
evaluated as code.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from shardline.components.text import enumerate_names
from shardline.components.validate import metrics
from shardline.components.validate.export.formats import FORMATS, Format
from shardline.components.validate.metrics.evaluation import MIN_SLICE, Evaluation, Interval, Slice
from shardline.trainer.base import files
from shardline.trainer.base.deserialize import Count, check_types, did_you_mean, read_dataclass
from shardline.trainer.base.errors import SettingsError, error_prefix
from shardline.trainer.manifest import CLASS, MULTILABEL, REGRESSION, Label, Manifest, Split

#: Metrics of one class, as in `recall[class=healthy]`.
CLASS_METRICS = metrics.PARTS[CLASS][1]

#: All of them are False for NaN.
OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}

#: Metric of one feature: the distance of its values from those that the champion was trained on.
DRIFT = "drift"

#: Written in place of a comparison, leaves out the rule of this name.
OFF = "off"

#: Reference and name of the rule about a slow regression over time: the best of some champions. How many
#: these may be.
BEST = "best"
_LAST = range(2, 17)

#: Note on a rule that is unmeasured because an evaluation lacks its metric.
NOT_MEASURED = "it was not measured"

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RULE = re.compile(
    rf"""\s*(?:(?P<name>[a-z]+)\s*:\s*)?
     (?:(?P<off>{OFF})
      |(?:(?P<label>[^\[\]()<>=.\s][^\[\]()<>=.]*)\.)?
       (?:worst_slice\(\s*(?P<worst>\w+)\s*\)
         |{DRIFT}\s*\[(?P<drift>.+)\]
         |(?P<metric>\w+)\s*(?:\[(?P<slice>[^=]+=.*)\])?)
       \s*(?P<operator>>=|<=|==|>|<)
       \s*(?:(?P<limit>{_NUMBER})
            |{BEST}\s*\(\s*(?P<last>\d+)\s*\)
            |(?P<reference>champion|baseline)\s*(?:(?P<sign>[-+*])\s*(?P<offset>{_NUMBER}))?)
       \s*(?:\(\s*(?:p\s*<\s*(?P<p>{_NUMBER})|within\s+(?P<within>{_NUMBER})\s*(?P<percent>%)?)\s*\))?)\s*""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class GateRule:
    """One comparison that a model must pass.

    Attributes:
        text: The rule as it was written, without its name.
        metric: Name of the metric; of a class, one of CLASS_METRICS.
        operator: One of OPERATORS; OFF for a rule that is left out.
        limit: The number to compare with, or the number added to the reference's value.
        factor: Factor of the reference's value, before `limit` is added.
        label: Name of the label, "" for the only one.
        slice: Name of the slice, "class=healthy", of a converted model, "format=onnx", or of the feature
            whose drift is limited; "" for all examples.
        worst: Whether the rule is about the worst slice.
        reference: What the limit is relative to: "champion", "baseline", BEST, or "" for a plain number.
        p: The lead over the reference must have a smaller p.
        within: How much worse than the reference a model may be, if `relative` as a share of its value.
        name: Name of the default rule that it replaces; "" for an additional rule.
        why: Purpose of a default rule; "" for a user's.
        last: Number of the champions, the best of which is the reference BEST.
    """

    text: str
    metric: str
    operator: str
    limit: float
    slice: str = ""
    worst: bool = False
    reference: str = ""
    p: float | None = None
    within: float | None = None
    relative: bool = False
    name: str = ""
    why: str = ""
    factor: float = 1.0
    label: str = ""
    last: int = 0

    @property
    def expression(self) -> str:
        """The metric expression, left of the operator: "recall[class=healthy]"."""
        prefix = f"{self.label}." if self.label else ""
        if self.worst:
            return f"{prefix}worst_slice({self.metric})"
        return f"{prefix}{self.metric}[{self.slice}]" if self.slice else f"{prefix}{self.metric}"

    @property
    def format(self) -> str:
        """Name of the format of a rule about a converted model, or ""."""
        feature, _, value = self.slice.partition("=")
        return value if feature == "format" and value in FORMATS else ""

    @property
    def of_champions(self) -> bool:
        """Whether it compares with the champion, or with the best of some."""
        return self.reference in ("champion", BEST)

    @property
    def is_drift(self) -> bool:
        """Whether it compares the training data with the champion's."""
        return self.metric in (DRIFT, "drifted")

    def measure(self, evaluation: Evaluation) -> tuple[float | None, Interval | None, str]:
        """Returns the value of the expression, None where it is unknown, its 95 % interval, and a note."""
        part = evaluation.of(self.label)
        interval, value, note = evaluation.intervals.get(self.expression), None, ""
        if self.worst:
            slices = self.measure_slices(evaluation)
            values = [(found, item.name) for item, found in slices if item.decided]
            if not values:
                return None, interval, "every slice has too few examples"
            value, note = (max if self.metric in metrics.LOWER_IS_BETTER else min)(values)
            few = len(slices) - len(values)
            note += f"; {few:,} with too few examples" if few else ""
        elif self.format:
            converted = next((each for each in evaluation.formats if each.name == self.format), None)
            if converted and self.metric in metrics.FORMAT_METRICS:
                value = float(getattr(converted, self.metric))
            elif converted:
                value, interval = converted.value, converted.interval
        elif self.metric == DRIFT:
            value = next((drift.distance for drift in evaluation.drift if drift.feature == self.slice), None)
        elif self.slice.startswith("number="):
            score = next((each for each in part.numbers if f"number={each.name}" == self.slice), None)
            value = getattr(score, self.metric) if score else None
        elif self.slice:
            chosen = next((item for item in part.slices if item.name == self.slice), None)
            interval = chosen.interval if chosen and self.metric == metrics.MAIN.get(part.kind) else interval
            if chosen and chosen.decided:
                return self._values([chosen], part)[0], interval, ""
            note = f"{chosen.examples if chosen else 0:,} examples are too few"
        else:
            value = evaluation.metrics.get(self.expression)
            note = "" if value is None else evaluation.notes.get(self.metric, "")
        return value, interval, note or NOT_MEASURED * (value is None)

    def measure_slices(self, evaluation: Evaluation) -> list[tuple[Slice, float]]:
        """Returns the slices that a rule about the worst slice is about, with their values."""
        part = evaluation.of(self.label)
        classes = {f"class={name}" for name in part.class_names}
        is_main = self.metric == metrics.MAIN[part.kind]
        slices = [item for item in part.slices if is_main or item.name in classes]
        return list(zip(slices, self._values(slices, part), strict=True))

    def _values(self, slices: Iterable[Slice], part: Evaluation) -> list[float]:
        is_main = self.metric == metrics.MAIN[part.kind]
        scores = {f"{metrics.PARTS[part.kind][0]}={score.name}": score for score in part.classes}
        # For a single label of a multilabel, macro F1 is its F1.
        return [
            item.value
            if is_main and not item.name.startswith("label=")
            else float(getattr(scores[item.name], "f1" if is_main else self.metric))
            for item in slices
        ]


def parse_rules(texts: Iterable[str]) -> tuple[GateRule, ...]:
    """Parses rules; raises SettingsError as `parse_rule` does."""
    return tuple(map(parse_rule, texts))


def parse_rule(text: str) -> GateRule:
    """Parses a rule; raises SettingsError when it is malformed or names an unknown metric."""
    match = _RULE.fullmatch(text)
    if not match or (match["off"] and not match["name"]):
        raise SettingsError(
            f"cannot read the rule {text!r}; write it like 'accuracy >= 0.95', "
            "'recall[class=healthy] >= 0.9', 'worst_slice(accuracy) >= 0.8', 'accuracy >= champion - 0.005', "
            "'accuracy > champion (p < 0.05)', 'accuracy >= best(8) (within 0.01)', or 'champion: off'"
        )
    part = match.groupdict()
    written = " ".join(text.split())
    if part["name"]:
        written = written.partition(":")[2].lstrip()
    if part["off"]:
        return GateRule(OFF, "", OFF, 0.0, name=part["name"])
    number = float(part["offset"] or 0)
    offset = {"-": -number, "*": 0.0}.get(part["sign"], number)
    feature, _, value = (part["slice"] or "").partition("=")
    slice_name = f"{feature.strip()}={value.strip()}" if part["slice"] else ""
    reference = BEST if part["last"] else part["reference"] or ""
    rule = GateRule(
        text=written,
        metric=DRIFT if part["drift"] else part["worst"] or part["metric"],
        operator=part["operator"],
        limit=offset if reference else float(part["limit"]),
        slice=part["drift"].strip() if part["drift"] else slice_name,
        worst=bool(part["worst"]),
        reference=reference,
        p=float(part["p"]) if part["p"] else None,
        within=float(part["within"]) / (100 if part["percent"] else 1) if part["within"] else None,
        relative=bool(part["percent"]),
        name=part["name"] or "",
        factor=number if part["sign"] == "*" else 1.0,
        label=(part["label"] or "").strip(),
        last=int(part["last"] or 0),
    )
    if not math.isfinite(rule.limit):
        raise SettingsError(f"the limit of the rule {rule.text!r} is too large a number")
    if not rule.reference and rule.metric in (*metrics.SHARES, *CLASS_METRICS) and not 0 <= rule.limit <= 1:
        raise SettingsError(f"{rule.expression} must be within 0..1, got {rule.limit:g}; 0.95 means 95 %")
    _check_metric(rule)
    _check_tail(rule)
    return rule


def allowed_metrics(rule: GateRule, kinds: Collection[str] = tuple(metrics.BY_KIND)) -> tuple[str, ...]:
    """Returns the metrics that a rule of this form may name, for labels of these kinds."""
    part, main = rule.slice.partition("=")[0], [metrics.MAIN[kind] for kind in kinds]
    if rule.metric == DRIFT and rule.slice:
        return (DRIFT,)
    if rule.format:
        return (*main, *metrics.FORMAT_METRICS)
    if rule.worst:
        return tuple(dict.fromkeys((*main, *(CLASS_METRICS if CLASS in kinds else ()))))
    if part in dict(metrics.PARTS.values()):
        parts = (metrics.PARTS[kind] for kind in kinds)
        return tuple(metric for name, of_one in parts if name == part for metric in of_one)
    if rule.slice:
        return tuple(main)
    quality = (metric for kind in kinds for metric in metrics.BY_KIND[kind])
    return tuple(dict.fromkeys(metric.name for metric in (*quality, *metrics.SERVING, *metrics.CHECKS)))


def _check_metric(rule: GateRule) -> None:
    if rule.reference and (rule.format or rule.is_drift or rule.metric in metrics.CHALLENGER_METRICS):
        raise SettingsError(f"{rule.expression} is compared with a number (in the rule {rule.text!r})")
    if rule.reference == "baseline" and (rule.slice or rule.worst):
        raise SettingsError(f"the baseline has no slices (in the rule {rule.text!r}); compare all examples")
    is_baseline = rule.reference == "baseline"
    known = metrics.LEAD_METRICS if is_baseline else allowed_metrics(rule)
    if rule.metric not in known:
        scope = " of slices" if rule.worst else " of the baseline" * is_baseline
        scope = f" of the slice {rule.slice!r}" if rule.slice else scope
        hint = did_you_mean(rule.metric, known) or f"there are: {', '.join(known)}"
        raise SettingsError(f"there is no metric {rule.metric!r}{scope} (in the rule {rule.text!r}); {hint}")
    is_whole = rule.metric in metrics.LEAD_METRICS and not (rule.slice or rule.worst)
    if rule.reference == BEST and not (is_whole and rule.within is not None and rule.last in _LAST):
        raise SettingsError(
            f"{BEST}({rule.last}) does not fit the rule {rule.text!r}; write it like 'accuracy >= best(8) "
            f"(within 0.01)', with {_LAST[0]} to {_LAST[-1]} champions, a tolerance, and one of "
            f"{', '.join(metrics.LEAD_METRICS)} of all examples"
        )


def _check_tail(rule: GateRule) -> None:
    fits = bool(rule.reference) and rule.limit == 0 and rule.factor == 1  # the reference's own value
    lower = rule.metric in metrics.LOWER_IS_BETTER
    if rule.within is not None:
        most = 1.0 if rule.relative or rule.metric in (*metrics.SHARES, *CLASS_METRICS) else math.inf
        fits = fits and rule.operator == ("<=" if lower else ">=") and 0 <= rule.within < most
    elif rule.p is not None:
        of_class = rule.slice.partition("=")[0] in dict(metrics.PARTS.values()) and rule.metric != "accuracy"
        has_lead = not rule.worst and (of_class if rule.slice else rule.metric in metrics.LEAD_METRICS)
        fits = fits and rule.operator == ("<" if lower else ">") and has_lead and 0 < rule.p < 1
    else:
        return
    if not fits:
        raise SettingsError(
            f"what is in brackets does not fit the rule {rule.text!r}; write it like 'accuracy > champion "
            "(p < 0.05)', 'rmse < champion (p < 0.05)', 'accuracy >= champion (within 0.01)', one point, or "
            "'log_loss <= champion (within 2 %)', a share of the other's value; p is known of "
            f"{', '.join(metrics.LEAD_METRICS)}, and of precision, recall or f1 of a class"
        )


#: Policies for what cannot be judged: it passes, or blocks the model.
Policy = Literal["bless", "block"]

#: How often a rule may block a model that is as good as the champion: LEVEL in one comparison; FAMILY in all
#: of slices, or of several labels, together, and in LOOKS weekly comparisons with the best of some champions.
LEVEL, FAMILY, LOOKS = 0.025, 0.05, 104

_EXAMPLES = {CLASS: "'accuracy >= 0.9'", MULTILABEL: "'macro_f1 >= 0.8'", REGRESSION: "'rmse <= 10'"}
#: Reference and name of the rule about the champion.
CHAMPION = "champion"
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
            f"{BEST}: {champion.replace(CHAMPION, 'best(8)')}": "Small losses have not added up.",
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
RARE_RULES = _reference_rules(
    f"{metrics.OF_RARE} >= champion (within 0.01)", f"{metrics.OF_RARE} > baseline (p < 0.025)"
)
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


@dataclass(frozen=True, kw_only=True)
class Gate:
    """When a model is good enough, and where it is published then; each annotation is its help text.

    Raises:
        SettingsError: A value is of the wrong type or out of range, or a rule cannot be parsed, is about a
            format that is not in `formats`, or has the name of no default rule about the same.
    """

    rules: Annotated[
        tuple[str, ...], "Add a rule, 'accuracy >= 0.9', or replace a default one by name, 'classes: off'."
    ] = ()
    first_run: Annotated[Policy, "Verdict without a champion, or on too few test examples."] = "bless"
    undecided: Annotated[Policy, "Verdict where too few examples leave open whether the model is worse."] = (
        "bless"
    )
    champion_uri: Annotated[str, "Directory or gs:// path of the champions."] = ""
    formats: Annotated[tuple[Format, ...], "Convert to this format, too, and evaluate it: onnx, litert."] = ()
    min_slice: Annotated[Count, "Smallest slice that is judged, in examples."] = MIN_SLICE
    allow_unmeasured: Annotated[bool, "Let a model pass where a rule could not be judged."] = False

    def __post_init__(self) -> None:
        check_types(self)
        for rule in parse_rules(self.rules):
            _check_name(rule)
            if rule.format and rule.format not in self.formats:
                raise SettingsError(
                    f"the rule {rule.text!r} is about the format {rule.format}, into which the model is not "
                    "converted; add it to formats, or to --also"
                )

    @classmethod
    def read(cls, path: Path) -> Gate:
        """Reads a gate from a TOML or JSON file; SettingsError when it cannot be read, or is no gate."""
        content = (files.read_json if path.suffix == ".json" else files.read_toml)(path, SettingsError)
        with error_prefix(f"{path}: "):
            return read_dataclass(cls, content)

    def check_champion(self) -> None:
        """Raises SettingsError when a user's rule needs a champion, and `champion_uri` is ""."""
        for rule in parse_rules(self.rules):
            if rule.of_champions and rule.name not in (CHAMPION, BEST) and not self.champion_uri:
                raise SettingsError(
                    f"the rule {rule.text!r} compares with the champion, but champion_uri is empty; set it"
                )

    def for_labels(self, labels: Sequence[Label], test: Split | None = None) -> tuple[GateRule, ...]:
        """Returns all rules for a dataset: the default ones, for each of several labels, and the user's.

        Those of a label with a rare class in the `test` split are RARE_RULES.
        Raises SettingsError when a user's rule does not name one of several labels, or names an unknown label
        or a metric that its kind does not have, or two rules compare one metric with the best of champions.
        """
        # Of two rules with one name the last; where one is about one label, the default is for the others.
        parsed = enumerate(parse_rules(self.rules))
        own = {(rule.name, rule.label) if rule.name else number: rule for number, rule in parsed}
        for rule in own.values():
            _check_label(rule, labels)
        rules = list[GateRule]()
        for default in DEFAULT_RULES:
            if replacing := own.pop((default.name, ""), None):
                rules.append(replacing)
            elif default.reference:
                for label in (label for label in labels if (default.name, label.name) not in own):
                    rule = next(each for each in _label_rules(label, test) if each.name == default.name)
                    named = replace(rule, label=label.name, text=f"{label.name}.{rule.text}")
                    rules.append(named if len(labels) > 1 else rule)
            elif default.name != "classes" or {label.kind for label in labels} != {REGRESSION}:
                rules.append(default)
        rules += own.values()
        of_best = {rule.expression: rule for rule in rules if rule.reference == BEST}
        if twice := [rule for rule in rules if rule.reference == BEST and rule not in of_best.values()]:
            instead = f"{BEST}: {of_best[twice[0].expression].text}"
            raise SettingsError(
                f"two rules compare {twice[0].expression} with the best of champions; write {instead!r}"
            )
        return tuple(rules)

    def for_dataset(self, manifest: Manifest) -> tuple[GateRule, ...]:
        """Returns all rules for a dataset, checked before any work is done.

        Raises SettingsError as `for_labels` and `check_champion`, and when a rule is about a class or a
        feature that the dataset does not have, or a class without test examples.
        """
        self.check_champion()
        test = manifest.splits.get("test")
        rules = self.for_labels(manifest.labels, test)
        for rule in rules:
            if rule.slice and not rule.format and (problem := _find_problem(rule, manifest, test)):
                raise SettingsError(f"the rule {rule.text!r} is about {problem}")
        return rules


def _check_name(rule: GateRule) -> None:
    defaults = {default.name: default for default in DEFAULT_RULES}
    if rule.name and rule.name not in defaults:
        raise SettingsError(f"there is no rule {rule.name!r} to replace; there are {', '.join(defaults)}")
    if rule.name and rule.operator != OFF:
        default = defaults[rule.name]
        # A rule about something else would drop the check of the default.
        side = "reference" if default.reference else "metric"
        if getattr(rule, side) != getattr(default, side):
            raise SettingsError(
                f"the rule {rule.text!r} is about something else than {default.name!r}, {default.text!r}; "
                f"write it without the name, or leave that one out by '{default.name}: off'"
            )


def _find_problem(rule: GateRule, manifest: Manifest, test: Split | None) -> str:
    """Returns what the slice of a rule names that a dataset lacks, and what it has; "" for nothing."""
    feature, _, value = rule.slice.partition("=")
    label = _find_label(rule, manifest.labels)
    part, columns = metrics.PARTS[label.kind][0], [item.name for item in manifest.columns if not item.shape]
    known = [name for name in columns if name not in manifest.split_columns]
    counts = test.labels[label.name].counts if test and label.class_names else ()
    if rule.metric == DRIFT:
        names = _profiled_features(manifest)
        missing = f"feature {rule.slice!r}; drift is measured of {enumerate_names(names)}"
        return "" if rule.slice in names else missing
    if feature != part:
        sliced = enumerate_names([part, *known])
        return "" if feature in known else f"feature {feature!r}; the dataset can be sliced by {sliced}"
    if value not in label.outputs:
        return f"{part} {value!r}; the dataset has {enumerate_names(label.outputs)}"
    if counts and not counts[label.outputs.index(value)]:
        no_example = "but the test split has no example of it; add some, or use another split_salt"
        return f"{part} {value!r}, {no_example}"
    return ""


def _label_rules(label: Label, test: Split | None) -> Iterator[GateRule]:
    """Yields the default rules about the predictions of a label."""
    counts = test.labels[label.name].counts if test and label.kind == CLASS else ()
    rarest = min((count for count in counts if count >= RAREST), default=0)
    if not 0 < rarest * len(counts) < RARE * sum(counts):
        yield from LABEL_RULES[label.kind]
        return
    name, share, main = label.outputs[counts.index(rarest)], 100 * rarest / sum(counts), metrics.MAIN[CLASS]
    of_rare = f" {main.capitalize()} would hardly see {name}, {share:.2g} % of the test examples."
    yield from (replace(rule, why=rule.why + of_rare) for rule in RARE_RULES)


def _find_label(rule: GateRule, labels: Sequence[Label]) -> Label:
    return next((label for label in labels if label.name == rule.label), labels[0])


def _check_label(rule: GateRule, labels: Sequence[Label]) -> None:
    names = [label.name for label in labels]
    if rule.label and (rule.label not in names or len(labels) == 1):
        known = enumerate_names(names) if len(labels) > 1 else "one label: write its metrics without a name"
        raise SettingsError(f"the rule {rule.text!r} is about label {rule.label!r}; the dataset has {known}")
    is_quality = rule.metric in {metric.name for metric in metrics.QUALITY}
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
        part, of_one = metrics.PARTS[kind]
        plain = not (rule.slice or rule.worst)
        names = [metric.name for metric in metrics.BY_KIND[kind]] if plain else [*fitting]
        of_part = f" and, for one {part}, {of_one[-1]}[{part}=...]" if rule.slice else ""
        raise SettingsError(
            f"the rule {rule.text!r} does not fit a label of kind {kind}, which has "
            f"{', '.join(names)}{of_part}; a rule for this label is written like {_EXAMPLES[kind]}"
        )


def _profiled_features(manifest: Manifest) -> list[str]:
    names = [label.name for label in manifest.labels if not label.feature.shape]
    for feature in (item for item in manifest.features if item.encoding):
        names += [f"{feature.name} {quantity}" for quantity in ("brightness", "height", "width")]
    for feature in manifest.columns:
        if not feature.shape and feature.name not in manifest.split_columns:
            names += [feature.name, *([f"{feature.name} length"] if feature.dtype == "string" else [])]
    return names
