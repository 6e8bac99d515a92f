"""The report as text: what it says, and that it says it safely. A browser opens it in test_report_browser."""

import dataclasses
import io
import re
from html.parser import HTMLParser

import pytest
from PIL import Image

from shardline.components.validate.evaluation import Curve, Mistake, Slice
from shardline.components.validate.model_card import TrainingRecord
from shardline.components.validate.verdict import Blessing, JudgedRule
from shardline.trainer.data.manifest import Feature
from tests.helpers.reports import (
    EXPORT,
    RULES,
    make_evaluation,
    make_manifest,
    make_report,
    with_champion,
)

NAMES = ("top", "middle", "bottom")


class Page(HTMLParser):
    """Gathers the rows of a page's tables as text, its tags and its pictures."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.rows, self.pictures, self.text = set(), [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th") and self.rows:
            self.rows[-1].append("")
        elif tag in ("img", "svg"):
            self.pictures.append(dict(attributes))

    def handle_endtag(self, tag):
        if tag == "table":
            self.rows.append([])

    def handle_data(self, data):
        self.text.append(data)
        if self.rows and self.rows[-1] and data.strip():
            self.rows[-1][-1] = f"{self.rows[-1][-1]} {data.strip()}".strip()

    def row(self, start):
        return next(row for row in self.rows if row and row[0].startswith(start))


def test_every_rule_is_shown_with_its_sides_and_its_verdict():
    page = Page(make_report(make_evaluation(NAMES)))

    assert page.row("accuracy >= 0.9")[1:] == ["0.9000 0.8500 to 0.9400", ">= 0.9", "✓ passed"]
    compared = page.row("accuracy > champion")
    assert "p = 0.124, must be below 0.05" in compared[0]
    assert "champion 0.88; difference within -0.0100 to 0.0500" in compared[0]
    assert compared[3] == "✗ failed"
    undecided = page.row("recall[x=1]")
    assert "4 examples, needs 20" in undecided[0]
    assert undecided[1:] == ["not measured", ">= 0.9", "? undecided"]
    assert page.row("f1 >= champion")[3].endswith(" skipped")


def test_warnings_are_shown():
    blessing = Blessing(True, RULES[:1], "accuracy is high", ("Shifted images are told apart worse.",))

    assert "Shifted images are told apart worse." in make_report(make_evaluation(NAMES), blessing=blessing)


def test_outputs_that_are_not_finite_are_counted_at_the_top():
    shown = make_report(dataclasses.replace(make_evaluation(NAMES), non_finite=1234))

    assert re.search(r"not finite</dt><dd[^>]*>1,234<", shown)


def test_the_challenger_stands_beside_the_champion():
    page = Page(make_report(with_champion(make_evaluation(NAMES))))

    assert page.row("accuracy accuracy")[1:] == [
        "0.9000 0.8500 to 0.9400",
        "0.8800",
        "+0.0200 unclear -0.0100 to 0.0500",
    ]
    assert page.row("log loss")[1:] == ["0.2500", "0.2000", "+0.0500 worse"]
    assert page.row("latency of one example, 95th")[1:] == ["12.50 ms", "20.00 ms", "-7.50 ms better"]
    assert page.row("camera=left") == [
        "camera=left",
        "40",
        "0.8000 0.7000 to 0.9000",
        "0.9000",
        "-0.1000 worse",
    ]


def test_without_a_champion_nothing_is_said_of_one():
    shown = make_report(make_evaluation(NAMES), blessing=Blessing(True, RULES[:1], "accuracy is high"))

    assert "hampion" not in shown


def test_slices_come_weakest_first_and_the_undecided_last():
    slices = [Slice(f"s={i:02d}", 30, i / 100, True) for i in range(50, 0, -1)]
    page = Page(make_report(make_evaluation(NAMES, slices=[Slice("few=1", 2, 0.0, False), *slices])))

    assert [row[0] for row in page.rows if row and row[0].startswith("s=")] == [
        f"s={i:02d}" for i in range(1, 41)
    ]
    assert "40 of 51, all of them are in evaluation.json" in "".join(page.text)

    page = Page(make_report(make_evaluation(NAMES, slices=[Slice("few=1", 2, 0.0, False), *slices[:3]])))
    assert [row[0] for row in page.rows if row and re.fullmatch("(s|few)=.*", row[0])][-1] == "few=1"
    assert page.row("few=1")[1] == "2 undecided"


def test_a_report_on_a_table_has_columns_and_no_pictures():
    columns = (Feature("age", "float32"), Feature("city", "string"), Feature("label", "int64"))
    mistakes = [Mistake("row 7", "top", "bottom", 0.9, b"")]

    page = Page(
        make_report(make_evaluation(NAMES, mistakes=mistakes), manifest=make_manifest(NAMES, columns))
    )

    assert page.row("2 columns") == ["2 columns", "age, city"]
    assert "row 7" in page.text
    assert "img" not in page.tags


def test_images_of_any_size_are_said_to_be():
    image = (Feature("image", "uint8", (None, None, 3), "jpeg"), *make_manifest(NAMES).features[1:])

    page = Page(make_report(make_evaluation(NAMES), manifest=make_manifest(NAMES, image)))

    assert page.row("image")[1] == "any x any x 3, jpeg"


def test_the_export_is_described():
    page = Page(make_report(make_evaluation(NAMES)))

    assert page.row("serving_default")[1] == "images: string [n] → probabilities: float32 [n, 3]"
    assert page.row("git revision")[1] == "4ccda76"


def test_every_plot_can_be_heard():
    labels = [one["aria-label"] for one in Page(make_report(make_evaluation(NAMES))).pictures]

    assert labels == [
        "loss per epoch: training from 1 to 0.5, validation from 1.1 to 0.7",
        "accuracy per epoch: training from 0.5 to 0.9",
        "Confusion matrix of 3 classes: 27 examples on the diagonal, 1 beside it.",
        "Reliability: 0.50 right of 10 at confidence 0.45, 0.99 right of 90 at confidence 0.97.",
        "ROC of 3 classes; smallest areas: top 0.900, middle 0.900, bottom 0.900.",
        "Precision over recall of 3 classes; smallest areas: top 0.800, middle 0.800, bottom 0.800.",
    ]


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "{{ 7 * 7 }}"]
)
def test_no_text_of_a_user_becomes_markup(name):
    plain = make_evaluation((name, "dog"), slices=[Slice(f"x={name}", 30, 0.5, True)])
    curves = tuple(Curve(name, 0.5, (0.0, 1.0), (0.0, 1.0), (1.0, 0.0)) for _ in range(2))
    evaluation = with_champion(dataclasses.replace(plain, roc=curves, precision_recall=curves))
    rule = JudgedRule(name, name, 0.5, ">=", 0.9, "failed", note=name)
    signatures = {name: {"inputs": {}, "outputs": {}}}
    export = dataclasses.replace(EXPORT, git_revision=name, signatures=signatures)

    shown = make_report(evaluation, blessing=Blessing(False, (rule,), name, (name,)), export=export)

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

    assert len(shown.encode()) < 1_000_000
    assert "Confusion matrix of 26 classes" in shown
    assert "25 of 1,000 classes with the most mistakes" in shown
    assert Page(shown).row("class 0 of a thousand")[:3] == [
        "class 0 of a thousand",
        "class 999 of a thousand",
        "1",
    ]


def test_class_names_that_begin_alike_are_told_apart_in_the_matrix():
    names = ("melanocytic nevus, left", "melanocytic nevus, right")

    shown = make_report(make_evaluation(names))

    assert {"melanoc…s, left", "melanoc…, right"} <= {text.strip() for text in Page(shown).text}


def test_a_report_is_the_same_each_time():
    evaluation = with_champion(make_evaluation(NAMES))

    assert make_report(evaluation) == make_report(evaluation)


def test_settings_are_shown_where_they_are_set_and_classes_once():
    settings = {
        "model": "m",
        "class_names": list(NAMES),
        "settings": {"epochs": 6, "augment": "", "hparams": {}},
    }

    page = Page(make_report(make_evaluation(NAMES), training=TrainingRecord(settings)))

    assert page.row("settings.epochs") == ["settings.epochs", "6"]
    assert not [row for row in page.rows if row and row[0] in ("settings.augment", "class_names")]
