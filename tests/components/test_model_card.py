"""The model card, in both of its forms."""

import dataclasses
import re

import pytest

from shardline.components.validate.gate import TrainingRecord
from shardline.components.validate.gate.judged import JudgedRule
from shardline.components.validate.report import make_card
from shardline.trainer.manifest import Feature
from tests.helpers.pages import Page
from tests.helpers.reports import EXPORT, make_blessing, make_evaluation, make_manifest

TRAINING = TrainingRecord({"model": "mnist_cnn", "settings": {"epochs": 3, "augmentation": ""}})
NAMES = ("healthy", "sick")


def a_card(names=NAMES, export=EXPORT, training=TRAINING, features=None, verdict=None, **values):
    image = (features,) if features else ()
    manifest = dataclasses.replace(make_manifest(names, *image), rejected={"broken": 2})
    evaluation = dataclasses.replace(make_evaluation(names), **values)
    return make_card(
        manifest, export, training, evaluation, make_blessing(headline="Blessed: accuracy", **(verdict or {}))
    )


def test_the_card_says_what_a_user_of_the_model_needs():
    export = dataclasses.replace(EXPORT, compared_examples=256, max_difference=1.2e-7)
    text = a_card(
        export=export, metrics={"accuracy": 0.75, "ece": 0.0123456, "rmse": 45161.2}, non_finite=3
    ).to_markdown()

    for part in (
        "# mnist\\_cnn\n\nBlessed: accuracy\n\n## Use\n\nClassifies images into 2 classes: ",
        "| serving\\_default | images: string \\[n\\] → probabilities: float32 \\[n, 3\\] |",
        "| accuracy | 0.75 | 0.85 to 0.94 |\n| ece | 0.01235 |  |\n| rmse | 45,161 |  |",
        "3 of them got an output that is not finite",
        "| examples | test 100 |",
        "| rejected examples | 2 (2 broken) |",
        "<summary>Settings of the training</summary>\n\n| what | value |\n",
        "| epochs | 3 |",
        "| max difference | 1.2e-07 |",
        "| git revision | 4ccda76 |",
    ):
        assert part in text
    assert "augmentation" not in text


def test_both_forms_say_the_same():
    card = a_card()
    page = Page(card.to_html())
    text = [part.strip() for part in page.text]

    for section in card.sections:
        assert {section.title, *section.paragraphs} <= set(text)
        assert {cell for row in section.rows for cell in row if cell} <= set(text)
    assert not {"script", "link", "img", "iframe"} & page.tags
    assert text.index("mnist_cnn") < text.index("Blessed: accuracy")


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "a|b", "*a*_b_", "a&amp;b"])
def test_names_are_shown_as_they_are(name):
    card = a_card([name, "other"])

    page = Page(card.to_html())
    assert "script" not in page.tags
    assert any(name in text for text in page.text)
    assert "<" not in re.sub("</?(details|summary)>", "", card.to_markdown())


def test_a_model_of_many_classes_and_columns_has_a_short_card():
    names = [f"class {i}" for i in range(1000)]
    columns = {f"column {i}": {"dtype": "float32", "shape": [None]} for i in range(300)}
    signature = {"serving_default": {"inputs": columns, "outputs": {}}}

    text = a_card(names, dataclasses.replace(EXPORT, signatures=signature)).to_markdown()

    assert "class 39 and 960 more." in text
    assert "column 19: float32 \\[n\\]; 280 more" in text
    assert len(text) < 5_000


def test_a_table_is_described_by_its_columns():
    text = a_card(features=(Feature("year", "int64"), Feature("city", "string"))).to_markdown()

    assert "Classifies rows of the columns year, city into 2 classes" in text


def test_what_is_not_known_is_left_out():
    bare = dataclasses.replace(EXPORT, git_revision=None)

    known = {"metrics": {"accuracy": 0.9}, "intervals": {}}
    text = a_card(export=bare, training=TrainingRecord(), **known).to_markdown()

    assert text.startswith("# model\n")
    assert "## Training" not in text
    assert "difference" not in text
    assert "| accuracy | 0.9 |  |" in text


def test_what_decides_comes_before_the_settings():
    card = a_card()

    shown = [section.title for section in card.sections if not section.folded]
    assert shown == ["Use", "Rules", "Quality", "Dataset", "Limits of use", "Training"]
    rules = card.sections[1].rows
    verdicts = [verdict.partition(":")[0] for _, verdict, *_ in rules]
    assert verdicts == ["failed", "unmeasured", "skipped", "passed"]
    page = card.to_html()
    assert page.index("Limits of use") < page.index("<details>") < page.index("Settings of the training")


SCHEDULE = {"class_name": "CosineDecay", "config": {"initial_learning_rate": 1e-5, "name": "x"}}


@pytest.mark.parametrize(
    ("rate", "shown"), [(1e-5, "1e-05"), (SCHEDULE, "CosineDecay(initial\\_learning\\_rate=1e-05)")]
)
def test_the_learning_rate_is_the_optimizers_not_the_setting(rate, shown):
    record = {"model": "m", "learning_rates": [rate], "settings": {"learning_rate": 0.0}}
    training = TrainingRecord(record, {"epoch": (1.0, 2.0), "learning_rate": (1.0, 2e-4)})

    text = a_card(training=training).to_markdown()

    assert f"| learning rate | {shown}; 0.0002 in the last epoch |" in text
    assert "0.0 " not in text


def test_a_card_has_no_path_of_the_machine_that_made_it():
    manifest = dataclasses.replace(make_manifest(NAMES), source="table:/home/ann/my rides.csv")
    settings = {"initial_model": "/tmp/run/model.keras", "hparams": {"f": "/etc/f"}}
    note = "no champion in /home/ann/runs/champions/home-ann"
    rules = (JudgedRule("r", "r", 1.0, ">", 2.0, "failed", note=note),)
    blessing = make_blessing(headline="/home/ann/x is worse", rules=rules, warnings=("see /home/ann/y",))
    training = TrainingRecord({"settings": settings})

    card = make_card(manifest, EXPORT, training, make_evaluation(NAMES), blessing)

    for text in (card.to_markdown(), Page(card.to_html()).text):
        assert not re.search("ann|/tmp|/etc", str(text))
    assert "table:…/my rides.csv" in card.to_markdown()
    assert "model.keras" in card.to_markdown()
