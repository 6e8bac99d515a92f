"""The model card, in both of its forms."""

import dataclasses
from html.parser import HTMLParser

import pytest

from shardline.components.model_store import Export
from shardline.components.validate.evaluation import ClassScore, Evaluation
from shardline.components.validate.model_card import TrainingRecord, make_card
from shardline.trainer.data.features import Feature
from shardline.trainer.data.manifest import Manifest, Shard, Split
from tests.helpers.labels import class_label, counted

OUTPUTS = {
    "probabilities": {"dtype": "float32", "shape": [None, 2]},
    "label": {"dtype": "int64", "shape": [None]},
    "label_name": {"dtype": "string", "shape": [None]},
}

EXPORT = Export(
    signatures={
        "serving_default": {"inputs": {"images": {"dtype": "string", "shape": [None]}}, "outputs": OUTPUTS}
    },
    parameters=1234,
    bytes=56789,
    compared_examples=256,
    max_difference=1.2e-7,
    git_revision="0123abc",
    versions={"keras": "3.15.1"},
)

TRAINING = TrainingRecord({"model": "mnist_cnn", "settings": {"epochs": 3, "augmentation": ""}})


IMAGE = (Feature("image", "uint8", (12, 12, 3), "png"),)


def a_manifest(names=("healthy", "sick"), features=IMAGE):
    split = Split(
        (Shard("test-00000-of-00001.tfrecord", 9, 1, "0"),), counted((9,) + (0,) * (len(names) - 1))
    )
    return Manifest(
        "sha256:1",
        "images:leaves",
        {},
        (class_label(names),),
        features,
        {"test": split},
        rejected={"broken": 2},
    )


def an_evaluation(names=("healthy", "sick"), **values):
    return Evaluation(
        fingerprint="sha256:1",
        split="test",
        examples=9,
        accuracy=0.75,
        log_loss=0.5,
        non_finite=0,
        class_names=tuple(names),
        classes=tuple(ClassScore(name, 9, 0.5, 0.25, 0.1 * i) for i, name in enumerate(names)),
        confusion=(),
        mistakes=(),
        metrics={"accuracy": 0.75, "ece": 0.0123456},
        intervals={"accuracy": (0.7, 0.8)},
        **values,
    )


def a_card(names=("healthy", "sick"), export=EXPORT, **values):
    return make_card(
        a_manifest(tuple(names)), export, TRAINING, an_evaluation(names, **values), "Blessed: accuracy"
    )


class Text(HTMLParser):
    """Gathers the text and the tags of a page."""

    def __init__(self, page):
        super().__init__()
        self.text, self.tags = [], set()
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)

    def handle_data(self, data):
        self.text.append(data.strip())


def test_the_card_says_what_a_user_of_the_model_needs():
    text = a_card().to_markdown()

    assert text.startswith(
        "# mnist\\_cnn\n\nBlessed: accuracy\n\n## Use\n\nTells 2 classes of images apart: "
    )
    assert "| serving\\_default | images: string \\[n\\] → probabilities: float32 \\[n, 2\\]; label:" in text
    assert "| accuracy | 0.75 | 0.7 to 0.8 |\n| ece | 0.01235 |  |" in text
    assert "| healthy | 9 | 0.500 | 0.250 |" in text
    assert "| examples | test 9 |" in text
    assert "| rejected examples | 2 (2 broken) |" in text
    assert "| settings.epochs | 3 |" in text
    assert "augmentation" not in text
    assert "| max difference | 1.2e-07 |" in text
    assert "| git revision | 0123abc |" in text


def test_both_forms_say_the_same():
    card = a_card()
    page = Text(card.to_html())

    for section in card.sections:
        assert {section.title, *filter(None, [section.text])} <= set(page.text)
        assert {cell for row in section.rows for cell in row if cell} <= set(page.text)
    assert not {"script", "link", "img", "iframe"} & page.tags
    assert page.text.index("mnist_cnn") < page.text.index("Blessed: accuracy")


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "a|b", "*a*_b_", "猫", "a&amp;b"])
def test_names_are_shown_as_they_are(name):
    card = a_card([name, "other"])

    page = Text(card.to_html())
    assert "script" not in page.tags
    assert name in page.text
    rows = [line for line in card.to_markdown().splitlines() if line.startswith("| other |")]
    assert rows == ["| other | 9 | 0.500 | 0.250 |"]
    assert "<" not in card.to_markdown()


def test_a_model_of_many_classes_and_columns_has_a_short_card():
    names = [f"class {i}" for i in range(1000)]
    columns = {f"column {i}": {"dtype": "float32", "shape": [None]} for i in range(300)}
    signature = {"serving_default": {"inputs": columns, "outputs": OUTPUTS}}

    text = a_card(names, dataclasses.replace(EXPORT, signatures=signature)).to_markdown()

    assert "class 39 and 960 more." in text
    assert "column 19: float32 \\[n\\]; 280 more" in text
    assert len(text) < 5_000


def test_a_table_is_described_by_its_columns():
    manifest = a_manifest(features=(Feature("year", "int64"), Feature("city", "string")))

    text = make_card(manifest, EXPORT, TRAINING, an_evaluation(), "Blessed").to_markdown()

    assert "Tells 2 classes of rows of the columns year, city apart" in text


def test_what_is_not_known_is_left_out():
    bare = dataclasses.replace(EXPORT, compared_examples=None, max_difference=None, git_revision=None)
    evaluation = dataclasses.replace(an_evaluation(), metrics={}, intervals={}, non_finite=3)

    text = make_card(a_manifest(), bare, TrainingRecord(), evaluation, "Not blessed").to_markdown()

    assert text.startswith("# model\n")
    assert "## Training" not in text
    assert "difference" not in text
    assert "3 of them got an output that is not finite" in text
    assert "| accuracy | 0.75 |  |" in text
