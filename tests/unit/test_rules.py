"""Rules: how they are read, and the verdict on every kind of them."""

import dataclasses
import json

import pytest
from click.testing import CliRunner

from shardline.components.validate.gate import judge
from shardline.components.validate.gate.verdict import NoChampion, reject_by_holm
from shardline.components.validate.metrics.evaluation import (
    Baseline,
    BestLead,
    ClassScore,
    Converted,
    Evaluation,
    Lead,
    Slice,
)
from shardline.components.validate.rules import DEFAULT_RULES, RARE_RULES, Gate, parse_rule, parse_rules
from shardline.pipelines.cli import data
from shardline.pipelines.cli.main import main
from shardline.trainer.base.errors import SettingsError
from shardline.trainer.manifest import (
    CLASS,
    MULTILABEL,
    REGRESSION,
    Feature,
    Label,
    Manifest,
    Shard,
    Split,
    Tally,
)
from tests.helpers.datasets import CLASS_NAMES
from tests.helpers.labels import class_label, counted


def evaluation(accuracy=0.95, *, champion=None, lead=None, **metrics):
    return Evaluation(
        fingerprint="sha256:0",
        split="test",
        examples=180,
        non_finite=metrics.get("non_finite", 0),
        class_names=("healthy", "ill"),
        classes=(ClassScore("healthy", 170, 0.9, 0.97, 0.93), ClassScore("ill", 10, 0.7, 0.6, 0.65)),
        confusion=((0, 0, 165), (0, 1, 5), (1, 0, 4), (1, 1, 6)),
        mistakes=(),
        metrics={"accuracy": accuracy, **metrics},
        intervals={"accuracy": (accuracy - 0.02, accuracy + 0.02), "recall[class=healthy]": (0.95, 0.99)},
        slices=(
            Slice("class=healthy", 170, 0.97, True, (0.95, 0.99), 170),
            Slice("class=ill", 10, 0.6, True, (0.3, 0.9), 10),
            Slice("camera=left", 4, 0.25, False),
        ),
        champion=evaluation(champion) if champion is not None else None,
        leads={"accuracy": lead} if lead else {},
    )


def rules_of(*texts):
    """The rules of a gate with these texts, for one label of kind class."""
    return Gate(rules=texts).for_labels([class_label(CLASS_NAMES)])


def judge_rule(text, evaluated, **policy):
    blessing = judge(evaluated, parse_rules([text]), Gate(**policy))
    return blessing.rules[0].verdict, blessing


def sound(accuracy=0.95, **others):
    """An evaluation that passes all default rules, which need only metrics that are always measured."""
    measured = {"examples": 180, "non_finite": 0, "never_predicted": 0, "max_difference": 1e-6}
    measured |= {"golden_difference": 1e-7, "constant_labels": 0}
    plain = evaluation(accuracy, **{**measured, "batch_difference": 1e-7, **others})
    lead = Lead(accuracy - 0.9, (accuracy - 0.93, accuracy - 0.87), 0.001 if accuracy > 0.93 else 0.2)
    baseline = Baseline("healthy", {"accuracy": 0.9}, {"accuracy": lead})
    alone = {"accuracy": BestLead(note="there is no other champion to compare with")}
    return dataclasses.replace(plain, baseline=baseline, best=alone)


# Reading


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("accuracy >= 0.95", ("accuracy", ">=", 0.95, "", False, "", None)),
        ("max_difference <= 1e-5", ("max_difference", "<=", 1e-5, "", False, "", None)),
        ("recall[class=healthy] >= .9", ("recall", ">=", 0.9, "class=healthy", False, "", None)),
        # A class may be called anything, a closing bracket and an operator included.
        ("f1[class=a] >= b] > 0.5", ("f1", ">", 0.5, "class=a] >= b", False, "", None)),
        ("accuracy[ camera = left eye ] > 0.5", ("accuracy", ">", 0.5, "camera=left eye", False, "", None)),
        ("worst_slice( accuracy ) >= 0.8", ("accuracy", ">=", 0.8, "", True, "", None)),
        ("accuracy >= champion - 0.005", ("accuracy", ">=", -0.005, "", False, "champion", None)),
        ("accuracy > champion (p < 0.05)", ("accuracy", ">", 0, "", False, "champion", 0.05)),
        ("recall[class=x] > champion (p<0.01)", ("recall", ">", 0, "class=x", False, "champion", 0.01)),
    ],
)
def test_a_rule_is_read(text, expected):
    rule = parse_rule(text)

    found = (rule.metric, rule.operator, rule.limit, rule.slice, rule.worst, rule.reference, rule.p)
    assert found == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot read the rule ''; write it like 'accuracy >= 0.95'"),
        ("accuracy", "cannot read the rule"),
        ("accuracy >= __import__('os')", "cannot read the rule"),
        ("accuracy >= champion / 2", "cannot read the rule"),
        ("acuracy >= 0.9", "no metric 'acuracy' (in the rule 'acuracy >= 0.9'); did you mean accuracy?"),
        # Of a single class only; over all classes it is macro_recall.
        ("recall >= 0.9", "there is no metric 'recall' (in"),
        ("log_loss[class=a] <= 1", "of the slice 'class=a' (in the rule"),
        ("worst_slice(size_mb) <= 1", "there is no metric 'size_mb' of slices"),
        ("accuracy >= 0.9 (p < 0.05)", "write it like 'accuracy > champion (p < 0.05)'"),
        ("size_mb > champion (p < 0.05)", "what is in brackets does not fit"),
        ("p90_absolute_error < champion (p < 0.05)", "p is known of accuracy"),
        ("accuracy > champion (p < 2)", "what is in brackets does not fit"),
        ("accuracy >= 0.9 (within 0.1)", "what is in brackets"),
        ("accuracy >= champion (within 200 %)", "what is in brackets"),
        ("log_loss <= champion (within 1e999)", "what is in brackets"),
        ("max_difference <= champion", "max_difference is compared with a number"),
        ("ece <= baseline", "there is no metric 'ece' of the baseline"),
        ("recall[class=a] >= baseline", "the baseline has no slices"),
        ("accuracy >= best(8)", "best(8) does not fit the rule"),  # without a tolerance
        ("accuracy >= best(1) (within 0.01)", "with 2 to 16 champions"),
        ("worst_slice(accuracy) >= best(8) (within 0.01)", "best(8) does not fit"),
        ("top5_accuracy >= best(8) (within 0.01)", "a tolerance, and one of accuracy, "),
        ("pr_auc[format=onnx] >= 0.9", "there is no metric 'pr_auc' of the slice 'format=onnx'"),
        ("accuracy[format=onnx] >= champion", "accuracy[format=onnx] is compared with a number"),
        ("drifted <= champion", "drifted is compared with a number"),
        ("drift <= 0.1", "there is no metric 'drift'"),
    ],
)
def test_what_is_no_rule_is_refused(text, message):
    with pytest.raises(SettingsError) as refused:
        parse_rule(text)

    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("text", "name", "reference", "within", "relative"),
    [
        ("accuracy >= champion (within 0.01)", "", "champion", 0.01, False),
        ("champion: log_loss <= champion (within 2 %)", "champion", "champion", 0.02, True),
        ("baseline : macro_f1 > baseline", "baseline", "baseline", None, False),
        ("best: rmse <= best( 12 ) (within 2 %)", "best", "best", 0.02, True),
    ],
)
def test_names_references_and_tolerances_are_read(text, name, reference, within, relative):
    rule = parse_rule(text)

    assert (rule.name, rule.reference, rule.within, rule.relative) == (name, reference, within, relative)
    assert rule.text == text.partition(":")[2].strip() or not name


def test_a_rule_with_a_name_takes_the_place_of_the_gates_own():
    rules = rules_of("classes: off", "examples: examples >= 500", "accuracy >= 0.5", "ece <= 0.1")

    assert [rule.name for rule in rules] == [*(rule.name for rule in DEFAULT_RULES), "", ""]
    assert [rule.text for rule in rules if rule.name == "classes"] == ["off"]
    assert [rule.text for rule in rules if rule.name == "examples"] == ["examples >= 500"]
    with pytest.raises(SettingsError, match="no rule 'clases' to replace; there are champion, baseline"):
        Gate(rules=("clases: off",))


@pytest.mark.parametrize(
    "text", ["champion: accuracy >= 0.5", "examples: accuracy >= 0.9", "classes: recall[class=a] >= 0.5"]
)
def test_a_rule_about_something_else_takes_no_place(text):
    with pytest.raises(SettingsError, match="is about something else than"):
        Gate(rules=(text,))


def test_a_rule_that_is_off_leaves_a_trace():
    rules = rules_of("champion: off", "classes: off")

    blessing = judge(sound(), rules, missing=NoChampion("champion.json is damaged"))

    assert blessing.blessed
    assert {rule.name for rule in blessing.rules if rule.verdict == "off"} == {"champion", "classes"}
    assert blessing.warnings == (
        "Rules of the gate that are switched off: champion, classes",
        "Not compared with the champion: champion.json is damaged",
    )
    assert "the rule 'champion' is off" in blessing.reason
    assert blessing.headline.startswith("Blessed: compared with no champion")


def test_a_first_model_of_a_rare_class_is_told_by_the_metric_that_sees_it():
    first = judge(sound(pr_auc=0.6), RARE_RULES[:1], champion="", missing=NoChampion("none yet", first=True))

    assert first.headline == "Blessed: first champion, accuracy 0.9500, pr_auc 0.6000"


@pytest.mark.parametrize(
    ("text", "accuracy", "headline"),
    [
        ("champion: accuracy >= champion - 0.05", 0.91, "Blessed: as good as the champion (4.0 points worse"),
        ("champion: accuracy >= champion + 0.02", 0.96, "Not blessed: accuracy 0.9600 is below 0.97"),
        ("examples: examples >= 1000", 0.95, "Not blessed: test examples: 180, below 1000"),
    ],
)
def test_a_headline_says_what_a_rule_of_a_user_compares(text, accuracy, headline):
    gate = parse_rules([text])

    assert judge(sound(accuracy, champion=0.95), gate).headline.startswith(headline)


@pytest.mark.parametrize(
    ("text", "measured", "words"),
    [
        ("accuracy >= 0.97", {}, "blocked: accuracy 0.9500 is below 0.97"),
        ("classes: never_predicted == 0", {"never_predicted": 2}, "blocked by the rule classes: "),
        ("champion: accuracy >= champion", {}, "as good as the champion"),
    ],
)
def test_a_verdict_in_words_names_the_rule_that_blocks_its_value_and_its_bound(text, measured, words):
    verdict = judge(sound(champion=0.95, **measured), parse_rules([text])).explain()

    assert verdict.startswith(words)
    assert measured == {} or verdict.endswith("2, not 0")


def test_a_verdict_in_words_has_the_first_rule_and_the_names_of_others():
    gate = parse_rules(["accuracy >= 0.97", "champion: accuracy >= champion + 0.02", "examples >= 900"])

    words = judge(sound(champion=0.95), gate).explain()

    assert words.startswith("blocked by the rule champion: accuracy 0.9500 is below 0.97")
    assert words.endswith("; also accuracy >= 0.97, examples >= 900")


# A file


def test_a_gate_is_read_from_a_file(tmp_path):
    toml, content = tmp_path / "gate.toml", {"rules": ["accuracy >= 0.9", "ece <= 0.1"], "first_run": "bless"}
    toml.write_text('rules = ["accuracy >= 0.9", "ece <= 0.1"]\nfirst_run = "bless"\n')
    (tmp_path / "gate.json").write_text(json.dumps(content))

    gate = Gate.read(toml)

    assert gate == Gate.read(tmp_path / "gate.json")
    assert ([*gate.rules], gate.first_run) == (content["rules"], "bless")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rules = [", "gate.toml is not TOML"),
        ("rulez = []", "unknown key rulez; did you mean rules?"),
        ("rules = 'accuracy >= 0.9'", "rules must be a list"),
        ("rules = ['acuracy >= 0.9']", "gate.toml: there is no metric 'acuracy'"),
        ("rules = ['accuracy >= 0.9']\nfirst_run = 'ask'", "first_run must be 'bless' or 'block', got 'ask'"),
        ("undecided = 'ask'", "undecided must be 'bless' or 'block', got 'ask'"),
        ("rules = ['accuracy >= 0.9']\nmin_slice = 0", "min_slice must be at least 1, got 0"),
    ],
)
def test_a_file_with_a_mistake_is_refused(text, message, tmp_path):
    (tmp_path / "gate.toml").write_text(text)

    with pytest.raises(SettingsError, match=r"gate\.toml") as refused:
        Gate.read(tmp_path / "gate.toml")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recall[class=tip] >= 0.9", "about class 'tip'; the dataset has top, middle, bottom"),
        ("accuracy[lens=wide] >= 0.9", "about feature 'lens'; the dataset can be sliced by class, camera"),
        ("accuracy >= champion", "champion_uri is empty; set it"),
        ("recall[class=middle] >= 0.9", "about class 'middle', but the test split has no example of it"),
    ],
)
def test_a_rule_about_what_is_not_there_is_refused(text, message):
    features = tuple(Feature(name, "string") for name in ("image", "label", "key", "camera"))
    test = Split((Shard("test-00000-of-00001.tfrecord", 9, 1, "0"),), counted((9, 0, 0)))
    manifest = Manifest("sha256:0", "source", {}, (class_label(CLASS_NAMES),), features, {"test": test})

    with pytest.raises(SettingsError, match=message):
        Gate(rules=(text,)).for_dataset(manifest)
    Gate(rules=("recall[class=top] >= 0.9", "accuracy[camera=left] >= 0.9")).for_dataset(manifest)


@pytest.mark.parametrize(
    ("counts", "metric"),
    [
        ((81, 19), "pr_auc"),
        ((9, 91), "pr_auc"),
        ((80, 20), "accuracy"),
        ((96, 4), "accuracy"),  # too few to tell anything
        ((3, 4), "accuracy"),
        ((30, 30, 30, 10), "accuracy"),
        ((32, 31, 30, 7), "pr_auc"),
        ((10,) * 10, "accuracy"),
        ((0, 0), "accuracy"),
    ],
)
def test_the_default_metric_of_a_label_sees_a_rare_class(counts, metric):
    names = tuple("abcd"[: len(counts)]) if len(counts) < 5 else tuple("abcdefghij")
    test = Split((), {"label": Tally(counts), "other": Tally(counts)})
    alone, of_two = (
        Gate().for_labels([Label(name, CLASS, names) for name in labels], test)
        for labels in (("label",), ("label", "other"))
    )

    by_name = {rule.name: rule for rule in alone}
    assert [by_name[name].metric for name in ("champion", "baseline", "best")] == [metric] * 3
    rarest = names[counts.index(min(counts))]
    assert (f"see {rarest}, " in by_name["baseline"].why) == (metric == "pr_auc")
    assert [rule.expression for rule in of_two if rule.name == "champion"] == [
        f"label.{metric}",
        f"other.{metric}",
    ]


def test_a_multilabel_and_a_number_keep_their_metrics_where_a_label_is_rare():
    labels = [Label("tags", MULTILABEL, ("a", "b")), Label("price", REGRESSION, ("price",))]
    test = Split((), {"tags": Tally((95, 5)), "price": Tally()})

    expressions = [rule.expression for rule in Gate().for_labels(labels, test) if rule.name == "champion"]
    assert expressions == ["tags.macro_f1", "price.rmse"]


@pytest.mark.parametrize("limit", ["-0.01", "1.01", "95"])
def test_a_share_is_compared_with_a_share(limit):
    with pytest.raises(SettingsError, match=r"within 0\.\.1, got .*; 0\.95 means 95 %"):
        Gate(rules=(f"accuracy >= {limit}",))


# Judging


@pytest.mark.parametrize(
    ("accuracy", "non_finite", "least", "blessed", "reason"),
    [
        (0.9778, 0, 0.95, True, "accuracy 0.9778 >= 0.95"),
        (0.95, 0, 0.95, True, "accuracy 0.9500 >= 0.95 (may be below: the interval begins at 0.9300)"),
        (0.9, 0, 0.95, False, "accuracy 0.9000 is below 0.95"),
        # Rounded to four digits it would read "0.9500 is below 0.95".
        (0.949996, 0, 0.95, False, "accuracy 0.949996 is below 0.95"),
        (0.99, 3, 0.95, False, "examples with non-finite output: 3, not 0"),
    ],
)
def test_judge(accuracy, non_finite, least, blessed, reason):
    gate = parse_rules([f"accuracy >= {least}", "non_finite == 0"])

    verdict = judge(evaluation(accuracy, non_finite=non_finite), gate)

    assert verdict.blessed == blessed
    assert reason in verdict.reason


# The gate's own rules

AHEAD = Lead(0.01, (0.002, 0.018), 0.01)
LEVEL = Lead(0.01, (-0.01, 0.03), 0.2)
WORSE = Lead(-0.05, (-0.08, -0.02), 1.0)
BARELY = Lead(-0.012, (-0.022, -0.002), 0.99)
UNCLEAR = Lead(-0.005, (-0.03, 0.02), 0.6)
SAME = Lead(0.0, (0.0, 0.0), 1.0)
WITHIN = Lead(-0.008, (-0.009, -0.007), 1.0)
AS_GOOD = Lead(-0.001, (-0.006, 0.004), 0.6)


@pytest.mark.parametrize(
    ("evaluated", "verdict", "headline"),
    [
        (sound(0.90, champion=0.95, lead=WORSE), "failed", "Not blessed: 5.0 points worse than the champion"),
        # Worse beyond doubt, by no more than the tolerance.
        (
            sound(0.942, champion=0.95, lead=WITHIN),
            "passed",
            "Blessed: as good as the champion (0.8 points worse",
        ),
        # Worse beyond doubt, by more than the tolerance perhaps by chance.
        (
            sound(0.938, champion=0.95, lead=BARELY),
            "undecided",
            "1.2 points worse than the champion on 180 examples, which may be within what is allowed",
        ),
        # By more than the tolerance, but perhaps by chance.
        (
            sound(0.938, champion=0.95, lead=UNCLEAR),
            "undecided",
            "Blessed: 1.2 points worse than the champion on 180 examples, which may be",
        ),
        (
            sound(0.945, champion=0.95, lead=UNCLEAR),
            "undecided",
            "0.5 points worse than the champion on 180 examples, which may be chance",
        ),
        (
            sound(0.95, champion=0.95, lead=UNCLEAR),
            "undecided",
            "Blessed: as good as the champion on 180 examples; a loss below ",
        ),
        (sound(0.94, champion=0.95), "passed", "as good as the champion (1.0 points worse"),
        (sound(0.97, champion=0.95, lead=AHEAD), "passed", "Blessed: 2.0 points better than the champion"),
        (sound(0.95, champion=0.95, lead=SAME), "passed", "Blessed: as good as the champion"),
    ],
)
def test_without_a_rule_written_a_worse_model_is_blocked(evaluated, verdict, headline):
    blessing = judge(evaluated, DEFAULT_RULES)

    assert (blessing.rules[0].name, blessing.rules[0].verdict) == ("champion", verdict)
    assert headline in blessing.headline
    assert blessing.blessed == (verdict != "failed")
    assert all(rule.why for rule in blessing.rules)


@pytest.mark.parametrize(
    ("changes", "broken", "headline"),
    [
        (
            {"accuracy": 0.91},
            "baseline",
            "Not blessed: not significantly better than always answering healthy",
        ),
        ({"never_predicted": 1}, "classes", "Not blessed: never predicts"),
        (
            {"max_difference": 0.3},
            "export",
            "Not blessed: the exported model answers differently from the trained one",
        ),
        (
            {"golden_difference": 0.3},
            "golden",
            "Not blessed: with TensorFlow alone the exported model answers differently",
        ),
        ({"non_finite": 2}, "finite", "Not blessed: outputs that are NaN or infinite, for 2 examples"),
        (
            {"batch_difference": 0.3},
            "batch",
            "Not blessed: answers depend on the other examples of a request",
        ),
        ({"constant_labels": 1}, "variety", "Not blessed: cannot be judged, "),
    ],
)
def test_each_of_the_gates_own_rules_blocks(changes, broken, headline):
    blessing = judge(sound(**changes), DEFAULT_RULES)

    assert [rule.name for rule in blessing.rules if rule.verdict == "failed"] == [broken]
    assert not blessing.blessed
    assert blessing.headline.startswith(headline)
    assert judge(sound(), DEFAULT_RULES).blessed
    noted = dataclasses.replace(sound(golden_difference=1.0), notes={"golden_difference": "Op 'Mine'"})
    assert "Op 'Mine'" in judge(noted, DEFAULT_RULES).reason


@pytest.mark.parametrize("first_run", ["bless", "block"])
def test_too_few_examples_are_left_to_the_policy(first_run):
    blessing = judge(sound(examples=49), DEFAULT_RULES, Gate(first_run=first_run))

    assert blessing.blessed == (first_run == "bless")
    assert f"too few to judge; first_run is {first_run}" in blessing.reason


def test_what_was_not_measured_blocks():
    """Fail closed: a rule that has nothing to judge on lets nothing pass."""
    unmeasured = judge(evaluation(), DEFAULT_RULES)

    assert not unmeasured.blessed
    verdicts = {rule.name: rule.verdict for rule in unmeasured.rules}
    assert {verdicts.pop("champion"), verdicts.pop("best")} == {"skipped"}  # there is no champion_uri
    assert set(verdicts.values()) == {"unmeasured"}


@pytest.mark.parametrize(
    ("text", "evaluated", "verdict"),
    [
        ("recall[class=healthy] >= 0.9", evaluation(), "passed"),
        ("precision[class=healthy] >= 0.95", evaluation(), "failed"),
        ("accuracy[camera=left] >= 0.1", evaluation(), "unmeasured"),  # four examples
        ("accuracy[camera=right] >= 0.1", evaluation(), "unmeasured"),  # none at all
        ("worst_slice(accuracy) >= 0.6", evaluation(), "passed"),  # of those with enough examples
        ("worst_slice(f1) >= 0.95", evaluation(), "failed"),
        ("latency_p95_ms <= 50", evaluation(latency_p95_ms=49.0), "passed"),
        ("latency_p95_ms <= 50", evaluation(), "unmeasured"),
        ("log_loss <= 1", evaluation(log_loss=float("nan")), "failed"),
        ("accuracy >= champion (within 0.1)", evaluation(float("nan"), champion=0.9), "failed"),
        ("accuracy >= champion - 0.005", evaluation(0.95, champion=0.956), "failed"),
        ("accuracy > champion", evaluation(0.95, champion=0.95), "failed"),
        ("accuracy > champion (p < 0.05)", evaluation(0.95, champion=0.94, lead=AHEAD), "passed"),
        ("accuracy > champion (p < 0.05)", evaluation(0.95, champion=0.94, lead=LEVEL), "failed"),
        ("recall[class=ill] > champion (p < 0.05)", evaluation(champion=0.9), "unmeasured"),
        ("ece <= champion", evaluation(champion=0.9, ece=0.1), "unmeasured"),  # the champion's is not known
    ],
)
def test_every_kind_of_rule(text, evaluated, verdict):
    found, blessing = judge_rule(text, evaluated)

    assert found == verdict
    assert blessing.blessed == (verdict == "passed")


@pytest.mark.parametrize(
    ("rule", "other"),
    [("accuracy > champion", "the champion's"), ("accuracy >= best(8) (within 0.01)", "the best champion's")],
)
def test_a_reference_that_is_not_known_is_named(rule, other):
    blessing = judge(evaluation(), parse_rules([rule]))

    assert blessing.rules[0].right_text == other


def test_what_is_unmeasured_blocks_unless_it_is_allowed():
    _, blocked = judge_rule("accuracy[camera=left] >= 0.1", evaluation())
    _, allowed = judge_rule("accuracy[camera=left] >= 0.1", evaluation(), allow_unmeasured=True)

    assert (blocked.blessed, allowed.blessed) == (False, True)
    assert blocked.reason == "accuracy[camera=left] >= 0.1 is unmeasured (4 examples are too few)"


@pytest.mark.parametrize(("first_run", "verdict"), [("bless", "skipped"), ("block", "failed")])
def test_the_policy_decides_where_there_is_no_champion_yet(first_run, verdict):
    rules = parse_rules(["accuracy >= 0.9", "accuracy >= champion"])
    gate = Gate(first_run=first_run, allow_unmeasured=True)

    blessing = judge(
        evaluation(), rules, gate, missing=NoChampion("there is no champion in champions yet", first=True)
    )

    assert blessing.rules[1].verdict == verdict
    assert blessing.blessed == (first_run == "bless")
    assert f"there is no champion in champions yet; first_run is {first_run}" in blessing.reason


def test_every_rule_is_listed_with_both_sides_and_verdict():
    gate = parse_rules(["accuracy > champion (p < 0.05)", "non_finite == 0"])
    evaluated = evaluation(0.95, champion=0.94, lead=AHEAD, non_finite=2)

    content = json.loads(json.dumps(dataclasses.asdict(judge(evaluated, gate, champion="v1"))))

    first, second = content["rules"]
    sides = {"metric": "accuracy", "left": 0.95, "operator": ">", "right": 0.94, "reference": "champion"}
    chance = {"difference": [0.002, 0.018], "p": 0.01, "note": "p = 0.010, must be below 0.05"}
    assert {
        **sides,
        **chance,
        "champion": 0.94,
        "verdict": "passed",
        "blocks": False,
    }.items() <= first.items()
    assert first["interval"] == pytest.approx([0.93, 0.97])
    assert (second["left"], second["verdict"]) == (2, "failed")
    assert (content["blessed"], content["champion"]) == (False, "v1")


# Converted models


def test_a_converted_model_is_judged_by_its_own_values():
    onnx = Converted("onnx", 0.93, (0.91, 0.95), 0.3, 1.5, 2.5, 0.04)
    evaluated = dataclasses.replace(evaluation(), formats=(onnx,))

    for text, verdict in (
        ("accuracy[format=onnx] >= 0.9", "passed"),
        ("accuracy[format=onnx] >= 0.94", "failed"),
        ("size_mb[ format = onnx ] <= 1", "passed"),
        ("latency_p95_ms[format=onnx] < 2", "failed"),
        ("max_difference[format=onnx] <= 0.05", "passed"),
    ):
        assert judge_rule(text, evaluated)[0] == verdict
    assert judge_rule("accuracy[format=onnx] >= 0.9", evaluated)[1].rules[0].interval == (0.91, 0.95)


def test_a_rule_about_a_format_that_is_not_made_is_refused():
    with pytest.raises(SettingsError, match=r"is not converted; add it to formats, or to --also$"):
        Gate(rules=("size_mb[format=onnx] <= 1",), formats=("litert",))
    with pytest.raises(SettingsError, match="must be 'onnx' or 'litert', got 'coreml'"):
        Gate(formats=("coreml",))


def test_a_champion_that_is_there_and_cannot_be_measured_blocks_whatever_the_policy():
    rules = parse_rules(["accuracy >= champion"])

    blessing = judge(
        evaluation(), rules, Gate(allow_unmeasured=True), missing=NoChampion("champion.json is damaged")
    )

    assert (blessing.blessed, blessing.rules[0].verdict) == (False, "failed")
    assert "champion.json is damaged" in blessing.reason


def test_the_champion_does_not_soften_the_other_rules():
    gate = parse_rules(["accuracy >= champion", "worst_slice(accuracy) >= 0.95"])

    blessing = judge(evaluation(0.97, champion=0.9), gate)

    assert blessing.reason.startswith("worst_slice(accuracy) 0.6000 is below 0.95 (class=ill")
    assert blessing.blocked_by == ("worst_slice(accuracy) >= 0.95",)


# Chance


def test_what_is_not_decided_is_left_to_the_policy():
    evaluated = sound(0.945, champion=0.95, lead=UNCLEAR)

    blessed, blocked = (
        judge(evaluated, DEFAULT_RULES),
        judge(evaluated, DEFAULT_RULES, Gate(undecided="block")),
    )

    assert (blessed.blessed, blessed.blocked_by, blessed.undecided) == (True, (), True)
    assert (blocked.blessed, blocked.blocked_by, blocked.undecided) == (False, ("champion",), True)
    assert blessed.remedy == blocked.remedy != ""
    assert blocked.headline == blessed.headline.replace("Blessed", "Not blessed")
    words = "accuracy >= champion (within 0.01) is not"
    assert blocked.explain().startswith(f"blocked by the rule champion: {words}")
    assert blocked.explain().endswith(
        "leave open whether it is worse than allowed: -0.005, within -0.03 to +0.02)"
    )


def test_several_labels_are_not_decided_in_one_sentence():
    rules = [f"champion: {label}.accuracy >= champion (within 0.01)" for label in ("a", "b")]
    values = {"a.accuracy": 0.945, "b.accuracy": 0.94}
    champion = dataclasses.replace(evaluation(), metrics=dict.fromkeys(values, 0.95))
    evaluated = dataclasses.replace(
        evaluation(), metrics=values, champion=champion, leads=dict.fromkeys(values, UNCLEAR)
    )

    assert judge(evaluated, parse_rules(rules)).headline == (
        "Blessed: 0.5 points worse in a.accuracy than the champion on 180 examples, which may be chance; "
        "1.0 points worse in b.accuracy than the champion on 180 examples, which may be chance"
    )


def test_the_policy_comes_from_a_parameter_of_a_run_or_from_an_option(tmp_path):
    (tmp_path / "gate.toml").write_text('undecided = "block"\nfirst_run = "block"\n')

    both = data._gate(tmp_path / "gate.toml", (), first_run=None, undecided="bless")

    assert (both.undecided, both.first_run) == ("bless", "block")
    assert Gate(undecided="block").undecided == "block"
    with pytest.raises(SettingsError, match="undecided must be 'bless' or 'block', got 'ask'"):
        Gate(undecided="ask")
    done = CliRunner().invoke(main, ["validate", "--undecided", "ask"])
    assert "'ask' is not one of 'bless', 'block'" in done.output


@pytest.mark.parametrize(
    ("values", "level", "rejected"),
    [
        # The second of four is significant only because the first is.
        ([0.01, 0.04, 0.03, 0.005], 0.05, [True, False, False, True]),
        ([0.024], 0.025, [True]),
        ([0.026], 0.025, [False]),
        ([0.024, 0.024], 0.025, [True, True]),
        ([0.02, 0.02, 0.02], 0.025, [False] * 3),
        ([float("nan"), 0.9], 0.05, [True, False]),  # fail closed
        ([], 0.05, []),
    ],
)
def test_a_family_of_comparisons_fails_by_holms_procedure(values, level, rejected):
    assert reject_by_holm(values, level) == rejected


def sliced(*slices, leads=None):
    """An evaluation with these slices (name, value, interval), and the same of a champion."""
    ours = tuple(Slice(name, 40, value, True, interval, 40) for name, value, interval in slices)
    theirs = tuple(Slice(name, 40, 0.95, True, (0.9, 1.0)) for name, *_ in slices)
    found = dataclasses.replace(evaluation(), classes=(), slices=ours, leads=leads or {})
    return dataclasses.replace(found, champion=dataclasses.replace(evaluation(0.95), slices=theirs))


def test_the_more_slices_there_are_the_more_it_takes_to_fail_one():
    low = ("hour=9", 0.675, None)  # alone, it is below 0.8 with p = 0.03
    others = tuple((f"hour={hour}", 0.9, None) for hour in range(9))

    rule, left = "worst_slice(accuracy) >= 0.8", ("camera=left", 0.5, None)
    alone, _ = judge_rule(rule, sliced(low))
    one_of_ten, blessing = judge_rule(rule, sliced(low, *others))
    far, failing = judge_rule(rule, sliced(low, *others, left))

    assert (alone, one_of_ten, far) == ("failed", "undecided", "failed")
    assert blessing.headline.endswith("; worst_slice(accuracy) is not decided")
    assert failing.rules[0].note == "camera=left 0.5000"


def test_slices_on_which_a_model_is_worse_than_the_champion_are_named_with_their_differences():
    rule = "worst_slice(accuracy) >= champion (within 0.01)"
    slices = [("x=1", 0.7, None), ("x=2", 0.93, None)]
    worse, unclear = Lead(-0.25, (-0.4, -0.1), 0.9995), Lead(-0.02, (-0.07, 0.03), 0.8)

    leads = {"accuracy[x=1]": worse, "accuracy[x=2]": unclear}
    failed, blocked = judge_rule(rule, sliced(*slices, leads=leads))
    undecided, _ = judge_rule(rule, sliced(slices[1], leads={"accuracy[x=2]": unclear}))
    passed, _ = judge_rule(rule, sliced(slices[1], leads={"accuracy[x=2]": AHEAD}))

    assert (failed, undecided, passed) == ("failed", "undecided", "passed")
    judged = blocked.rules[0]
    assert (judged.left, judged.right) == (0.7, 0.95)
    assert judged.note == "worse beyond doubt: x=1 -0.25, within -0.4 to -0.1"


def test_a_rule_about_one_slice_and_the_champion_is_in_the_family_of_the_slices():
    texts = [f"accuracy[x={number}] >= champion (within 0.01)" for number in (1, 2)]
    slices = [("x=1", 0.7, None), ("x=2", 0.7, None)]
    leads = {f"accuracy[x={number}]": Lead(-0.15, (-0.3, 0.0), 0.97) for number in (1, 2)}

    both = judge(sliced(*slices, leads=leads), parse_rules(texts))
    one = judge(sliced(*slices, leads=leads), parse_rules(texts[:1]))

    assert [rule.verdict for rule in (*both.rules, *one.rules)] == ["undecided", "undecided", "failed"]


# A slow regression over time


def compared_with_best(**best):
    return dataclasses.replace(sound(0.94, champion=0.945, lead=AS_GOOD), best={"accuracy": BestLead(**best)})


@pytest.mark.parametrize(
    ("best", "verdict", "words"),
    [
        ({"note": "v3 is gone"}, "passed", "v3 is gone"),
        ({"value": 0.96, "lead": Lead(-0.03, (-0.039, -0.021), 1 - 1e-5)}, "failed", "v3 is the best of 8"),
        # It takes p < 0.05 / (104 * 8).
        ({"value": 0.96, "lead": Lead(-0.03, (-0.0405, -0.0195), 1 - 1e-4)}, "passed", "v3 is the best of 8"),
        ({"value": 0.935, "lead": Lead(-0.005, (-0.009, -0.001), 1.0)}, "passed", "v3 is the best of 8"),
        ({"note": "x"} | {"version": "v3"}, "unmeasured", "v3 is the best"),
    ],
)
def test_the_sum_of_small_losses_is_compared_with_the_best_of_the_last_champions(best, verdict, words):
    version = {"version": "v3", "compared": 8} if "lead" in best else {}

    blessing = judge(compared_with_best(**version, **best), DEFAULT_RULES)

    (judged,) = (rule for rule in blessing.rules if rule.name == "best")
    assert judged.verdict == verdict
    assert words in judged.note
    assert blessing.blocked_by == (() if verdict == "passed" else ("best",))
    if verdict == "failed":
        assert blessing.headline == "Not blessed: 3.0 points worse than the best of earlier champions"


@pytest.mark.parametrize(
    "absence", [None, NoChampion("none yet", first=True), NoChampion("champion.json is damaged")]
)
def test_without_a_champion_nothing_is_compared_with_the_best(absence):
    blessing = judge(sound(), DEFAULT_RULES, Gate(first_run="block"), missing=absence)

    assert "skipped" in [rule.verdict for rule in blessing.rules if rule.name == "best"]
    assert "best" not in blessing.blocked_by


def test_one_metric_has_one_rule_about_the_best_of_champions():
    rule, labels = "accuracy >= best(12) (within 0.02)", [class_label(CLASS_NAMES)]
    once = Gate(rules=(f"best: {rule}",)).for_labels(labels)

    assert [(rule.expression, rule.label, rule.last) for rule in once if rule.last] == [("accuracy", "", 12)]
    with pytest.raises(SettingsError, match="two rules compare accuracy with the best of champions"):
        Gate(rules=(rule,)).for_labels(labels)
