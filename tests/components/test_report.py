"""The report as text: what it says, and that it says it safely. A browser opens it in test_report_browser."""

import dataclasses
import io
import re
from pathlib import Path

import pytest
from PIL import Image

from shardline.components.html import relink_page
from shardline.components.validate.gate import TrainingRecord
from shardline.components.validate.gate.judged import JudgedRule
from shardline.components.validate.metrics.evaluation import Curve, Lead, Mistake, Slice
from shardline.components.validate.report.report import draw_confusion, find_logs
from shardline.trainer.manifest import Feature
from tests.helpers.pages import Page
from tests.helpers.reports import (
    EXPORT,
    RULES,
    make_blessing,
    make_evaluation,
    make_manifest,
    make_report,
    with_champion,
)

NAMES = ("top", "middle", "bottom")


def test_every_rule_is_shown_with_its_sides_and_its_verdict():
    page = Page(make_report(make_evaluation(NAMES)))

    assert page.row("accuracy >= 0.9")[1:] == ["✓ passed", "0.9000 0.8500 to 0.9400", ">= 0.9"]
    compared = page.row("accuracy > champion")
    assert "p = 0.124, must be below 0.05" in compared[0]
    assert "champion 0.88; difference within -0.0100 to 0.0500" in compared[0]
    assert compared[1] == "✗ failed"
    unmeasured = page.row("recall[x=1]")
    assert "4 examples, needs 20" in unmeasured[0]
    assert unmeasured[1:] == ["? unmeasured", "not measured", ">= 0.9"]
    assert page.row("f1 >= champion")[1].endswith(" skipped")


def test_rules_that_decide_come_first_with_their_name_and_what_they_are_for():
    named = JudgedRule(
        "never_predicted == 0", "never_predicted", 1, "==", 0, "failed", name="classes", why="Why."
    )
    page = Page(make_report(make_evaluation(NAMES), blessing=make_blessing(rules=(*RULES, named))))

    verdicts = [row[1].split()[-1] for row in page.rows if len(row) == 4 and row[1][1:2] == " "]
    assert verdicts == ["failed", "failed", "unmeasured", "skipped", "passed"]
    assert page.row("classes : Why. never_predicted == 0")[1:] == ["✗ failed", "1", "== 0"]


def test_warnings_facts_and_settings_are_shown():
    chosen = {"epochs": 6, "augment": "", "hparams": {}}
    settings = {"model": "m", "class_names": [*NAMES], "settings": chosen}
    evaluation = dataclasses.replace(make_evaluation(NAMES), non_finite=1234)
    names = ("melanocytic nevus, left", "melanocytic nevus, right")
    blessing = make_blessing(warnings=("Shifted images are classified worse.",))
    image = (Feature("image", "uint8", (None, None, 3), "jpeg"), *make_manifest(NAMES).features[1:])
    history = {"loss": (0.9, 0.5, 0.4, 0.3, 0.2), "val_loss": (0.9, 0.5, 0.6, 0.7, 0.8)}
    arguments = {"training": TrainingRecord(settings, history), "manifest": make_manifest(NAMES, image)}

    shown = make_report(evaluation, blessing=blessing, **arguments)

    page = Page(shown)
    assert "Shifted images are classified worse." in shown
    assert "The curves cross after epoch 2:" in shown
    assert re.search(r"not finite</dt><dd[^>]*>1,234<", shown)
    assert page.row("image")[1] == "any x any x 3, jpeg"
    assert page.row("serving_default")[1] == "images: string [n] → probabilities: float32 [n, 3]"
    assert page.row("git revision")[1] == "4ccda76"
    assert page.row("epochs") == ["epochs", "6"]
    assert not [row for row in page.rows if row and row[0] in ("augment", "class_names")]
    # Names with the same beginning stay distinct in the matrix.
    alike = {text.strip() for text in Page(make_report(make_evaluation(names))).text}
    assert {"melanoc…s, left", "melanoc…, right"} <= alike


def test_the_challenger_stands_beside_the_champion():
    page = Page(make_report(with_champion(make_evaluation(NAMES))))

    assert page.row("accuracy accuracy")[1:] == [
        "0.9000 0.8500 to 0.9400",
        "0.8800",
        "+0.0200 unclear -0.0100 to 0.0500",
    ]
    assert page.row("F1, mean of classes")[1:] == ["0.8900", "0.8900", "±0.0000"]
    # No interval, so neither better nor worse.
    assert page.row("log loss")[1:] == ["0.2500", "0.2000", "+0.0500"]
    assert page.row("latency of one example, 95th")[1:] == ["12.50 ms", "20.00 ms", "-7.50 ms"]
    assert page.row("camera=left") == [
        "camera=left",
        "40",
        "0.8000 0.7000 to 0.9000",
        "0.9000",
        "-0.1000 worse -0.2000 to -0.0100",
    ]


def test_a_difference_has_a_colour_only_beyond_chance_and_where_a_rule_is_about_it():
    leads = {"accuracy": Lead(0.02, (0.01, 0.03), 0.01), "macro_f1": Lead(-0.02, (-0.03, -0.01), 1.0)}
    evaluation = with_champion(make_evaluation(NAMES))
    champion = dataclasses.replace(
        evaluation.champion, metrics={**evaluation.champion.metrics, "macro_f1": 0.91}
    )
    evaluation = dataclasses.replace(evaluation, leads=leads, champion=champion)

    coloured = re.findall(r'class="number short (good|bad)">(\S+?)<', make_report(evaluation))

    assert coloured == [("good", "+0.0200")]  # RULES are about accuracy, not about F1, loss and latency
    assert '-0.0200<span class="note">worse' in make_report(evaluation)


def test_slices_come_weakest_first_and_the_undecided_last():
    slices = [Slice(f"s={i:02d}", 30, i / 100, True) for i in range(50, 0, -1)]
    page = Page(make_report(make_evaluation(NAMES, slices=[Slice("few=1", 2, 0.0, False), *slices])))

    assert [row[0] for row in page.rows if row and row[0].startswith("s=")] == [
        f"s={i:02d}" for i in range(1, 41)
    ]
    assert "40 of 50, all of them are in evaluation.json" in "".join(page.text)
    assert page.text.index("s=08") < page.text.index("32 more slices") < page.text.index("s=09")
    assert page.row("few=1")[1] == "2"

    few = [Slice("few=1", 2, 0.0, False), Slice("none=1", 0, 0.0, False), Slice("large=1", 90, 0.48, True)]
    page = Page(make_report(make_evaluation(NAMES, slices=[*few, *slices[:3]])))
    shown = [row[0] for row in page.rows if row and re.fullmatch("(s|few|none|large)=.*", row[0])]
    assert shown == ["large=1", "s=48", "s=49", "s=50", "few=1"]
    assert "weakest slice: large=1" in "".join(page.text)


def test_classes_come_weakest_first_and_those_never_predicted_are_marked():
    evaluation = make_evaluation(NAMES, slices=[Slice("class=middle", 9, 0.0, True)])
    confusion = tuple(cell for cell in evaluation.confusion if cell[1] != 1)
    worst = zip(evaluation.classes, (0.9, 0.0, 0.5), strict=True)
    scores = [dataclasses.replace(score, f1=f1) for score, f1 in worst]
    page = Page(make_report(dataclasses.replace(evaluation, confusion=confusion, classes=tuple(scores))))

    rows = [row[0] for row in page.rows if len(row) == 5 and row[1] == "9"]
    assert rows == ["middle never predicted", "bottom", "top"]


def test_the_verdict_stands_at_the_top_in_words_with_date_run_and_links():
    blessing = make_blessing(headline="4.8 points worse than the champion: not registered")
    origin = {"created": "2026-01-31 09:15 UTC", "run": "retrain-1", "logs": "gs://bucket/logs"}

    shown = make_report(make_evaluation(NAMES), blessing=blessing, **origin)

    page = " ".join("".join(Page(shown).text).split())
    assert "✗ 4.8 points worse than the champion: not registered accuracy is not above" in page
    assert "2026-01-31 09:15 UTC · run retrain-1 · model card" in page
    assert "tensorboard --logdir gs://bucket/logs" in page
    assert re.findall('<a href="(.*?)"', shown) == ["model_card.html"]
    assert 'href="exported/model_card.html"' in relink_page(shown, Path("out/exported"), Path("out"))


def test_a_report_on_a_table_has_columns_and_no_pictures():
    columns = (Feature("age", "float32"), Feature("city", "string"), Feature("label", "int64"))
    row = {f"c{i}": str(i) for i in range(9)} | {"review": "<b>Not " + "good " * 9, "city": "Ulm"}
    mistakes = [Mistake("row 7", "top", "bottom", 0.9, b"", values=row)]

    page = Page(
        make_report(make_evaluation(NAMES, mistakes=mistakes), manifest=make_manifest(NAMES, columns))
    )

    assert page.row("2 columns") == ["2 columns", "age, city"]
    assert "row 7" in "".join(page.text)
    shown = page.text[page.text.index("review") :]  # the text first, what is not among the first 8 folded
    assert shown[1].startswith("<b>Not good")
    assert shown.index("c6") < shown.index("3 more columns") < shown.index("c7") < shown.index("Ulm")
    assert "img" not in page.tags


def test_every_plot_can_be_heard():
    labels = [one["aria-label"] for one in Page(make_report(make_evaluation(NAMES))).pictures]

    assert labels == [
        "loss per epoch: training from 1 to 0.5, validation from 1.1 to 0.7",
        "accuracy per epoch: training from 0.5 to 0.9",
        "Confusion matrix of 3 classes: 27 examples on the diagonal, 1 off it.",
        "Reliability: 0.50 right of 10 at confidence 0.45, 0.99 right of 90 at confidence 0.97.",
        "ROC of 3 classes; smallest areas: top 0.900, middle 0.900, bottom 0.900.",
        "Precision over recall of 3 classes; smallest areas: top 0.800, middle 0.800, bottom 0.800.",
    ]


@pytest.mark.parametrize(
    "name",
    ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "{{ 7 * 7 }}", "$x_{1$", "a&amp;b"],
)
def test_no_text_of_a_user_becomes_markup(name):
    plain = make_evaluation((name, "dog"), slices=[Slice(f"x={name}", 30, 0.5, True)])
    curves = tuple(Curve(name, 0.5, (0.0, 1.0), (0.0, 1.0), (1.0, 0.0)) for _ in range(2))
    evaluation = with_champion(dataclasses.replace(plain, roc=curves, precision_recall=curves))
    rule = JudgedRule(name, name, 0.5, ">=", 0.9, "failed", note=name)
    signatures = {name: {"inputs": {}, "outputs": {}}}
    export = dataclasses.replace(EXPORT, git_revision=name, signatures=signatures)

    shown = make_report(
        evaluation, blessing=make_blessing(rules=(rule,), reason=name, warnings=(name,)), export=export
    )

    page = Page(shown)
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert page.row(f"x={name}")[0] == f"x={name}"
    assert "7 * 7" not in name or "{{ 7 * 7 }}" in shown


def test_a_thousand_classes_with_photographs_stay_small_and_readable():
    Image.effect_noise((640, 480), 60).save(photo := io.BytesIO(), "JPEG")
    names = [f"class {i} of a thousand" for i in range(1000)]
    mistakes = [Mistake(f"{i}", names[i], names[i + 1], 0.9, photo.getvalue()) for i in range(24)]
    slices = [Slice(f"class={name}", 9, 0.9, False) for name in names]

    shown = make_report(with_champion(make_evaluation(names, slices=slices, mistakes=mistakes)))

    page = Page(shown)
    assert len(shown.encode()) < 1_000_000
    # It needs nothing but itself.
    assert not {"script", "link", "iframe", "object", "base"} & page.tags
    outside = [one for one in page.references if not one.startswith(("data:image/", "#"))]
    assert outside == ["model_card.html"]
    inside = [one[1:] for one in page.references if one.startswith("#")]
    assert inside
    assert all(page.ids.count(name) == 1 for name in inside)
    assert re.findall(r"@import|url\((?!#)", shown) == []
    assert all(image.get("alt") or image.get("aria-label") for image in page.pictures)
    assert "Confusion matrix of 25 classes" in shown
    assert "25 of 1,000 classes with the most mistakes" in shown


def test_the_learning_curves_are_found_where_all_attempts_of_a_job_write_them(tmp_path):
    logs = tmp_path / "outputs" / "jobs" / "retrain-1" / "logs"
    logs.mkdir(parents=True)
    model = tmp_path / "outputs" / "retrain-1" / "train" / "model" / "model.keras"

    assert find_logs(model, TrainingRecord({}, {}), "retrain-1") == str(logs)
    assert find_logs(model, TrainingRecord({}, {}), "retrain-2") == ""


def test_of_a_large_matrix_the_classes_with_the_most_mistakes_are_drawn():
    cells = ((0, 0, 9), (0, 1, 1), (1, 1, 10), (2, 0, 3), (2, 2, 5), (2, 3, 2))  # no example of d
    drawn = draw_confusion(cells, ("a", "b", "c", "d"), 2)  # a has 4, c 5; b has 1, d has 2

    assert "Confusion matrix of 2 classes: 14 examples on the diagonal, 3 off it." in drawn
    assert re.findall(r">([a-d])<", drawn) == ["a", "c", "a", "c"]


def test_a_report_is_the_same_each_time_and_without_a_champion_says_nothing_of_one():
    evaluation, alone = make_evaluation(NAMES), make_blessing(blessed=True, rules=RULES[:1])

    assert "hampion" not in make_report(evaluation, blessing=alone)
    assert make_report(with_champion(evaluation)) == make_report(with_champion(evaluation))
