"""Golden examples: compared as plain values, and asked of an export in a process without Shardline."""

import copy
import math
import shutil

import pytest

from shardline.components import model_store
from shardline.components.model_store import Export
from shardline.components.validate.export import signatures as golden
from shardline.components.validate.export.signatures import CleanProcess
from shardline.trainer.base.errors import ModelError
from shardline.trainer.manifest import Label
from tests.helpers.labels import class_label

ROWS = [
    {"probabilities": [0.7, 0.2, 0.1], "label": 0, "label_name": "a"},
    {"probabilities": [0.4, 0.4, 0.2], "label": 0, "label_name": "a"},
    {"probabilities": [None, None, None], "label": 0, "label_name": "a"},
]
EXPORT = Export(labels=(class_label("abc"),), golden={"predictions": ROWS})


def answers(row=0, **changes):
    """Returns the golden answers, one of them changed."""
    changed = copy.deepcopy(ROWS)
    changed[row] |= changes
    return changed


@pytest.mark.parametrize(
    ("found", "difference", "words"),
    [
        (answers(), 0.0, ""),
        (answers(probabilities=[0.6, 0.25, 0.15]), 0.1, "example 0: probability of 'a' is 0.6 instead of"),
        # Two classes are as probable as each other: rounding decides.
        (answers(1, probabilities=[0.399, 0.401, 0.2], label=1, label_name="b"), 0.001, "example 1: prob"),
        (answers(label_name="b"), 1.0, "example 0: label, label_name [0, 'b'] instead of [0, 'a']"),
        (answers(1, label=1, label_name="c"), 1.0, "example 1: label, label_name [1, 'c'] instead of [0"),
        (
            [*ROWS[:2], {"probabilities": [1, 0, 0]}],
            1.0,
            "other rows or outputs than the golden ones ('label'",
        ),
        (ROWS[:2], 1.0, "other rows or outputs than the golden ones ("),
        (answers(probabilities=[1.0]), 1.0, "other rows or outputs than the golden ones ("),
        (answers(probabilities=[math.nan, 0.2, 0.1]), 1.0, "example 0: probability of 'a' is nan"),
        (answers(2, probabilities=[math.nan] * 3), 0.0, ""),  # not finite on both sides
        (answers(2, probabilities=[0.1, 0.2, 0.7]), 1.0, "example 2: probability of 'a' is 0.1 instead of"),
    ],
)
def test_answers_are_compared_with_the_golden_ones(found, difference, words):
    agreement = golden.compare_golden(EXPORT, found)

    assert agreement.difference == pytest.approx(difference)
    assert agreement.description.startswith(words)
    assert bool(agreement.description) == bool(words)


@pytest.mark.parametrize(("labels", "difference"), [([1, 1, 0], 0.0), ([1, 0, 0], 1.0)])
def test_labels_of_a_multilabel_are_those_from_the_threshold_on(labels, difference):
    rows = [{"probabilities": [0.7, 0.5, 0.1], "labels": labels}]
    export = Export(labels=(Label("label", "multilabel", tuple("abc")),), golden={"predictions": rows})

    assert golden.compare_golden(export, rows).difference == difference


def asked(process, out):
    return golden.ask_golden(process, out)()


def test_an_export_gives_its_golden_answers_without_shardline(exported, clean_process):
    assert asked(clean_process, exported).difference < 1e-6


def test_an_answer_that_was_not_waited_for_is_dropped(exported, tmp_path, clean_process):
    clean_process.ask(tmp_path / "missing", {"instances": [1]})

    assert asked(clean_process, exported).difference < 1e-6


def test_an_operation_that_only_a_plug_in_has_is_one_line_with_its_name(exported, tmp_path, clean_process):
    out = shutil.copytree(exported, tmp_path / "copy")
    graph = out / model_store.SAVED_MODEL / "saved_model.pb"
    graph.write_bytes(graph.read_bytes().replace(b"\x07Softmax", b"\x07Softmex"))
    found = asked(clean_process, out)

    assert found.difference == 1.0
    assert found.description.startswith("the export cannot be used with TensorFlow alone: ")
    assert "Softmex" in found.description
    assert "\n" not in found.description


def test_nothing_but_tensorflow_can_be_imported(tmp_path, monkeypatch):
    """A stub of TensorFlow, next to which a package of the model's author is installed."""
    (tmp_path / "mine.py").touch()
    (tmp_path / "tensorflow.py").write_text(
        """
import importlib.util
class saved_model:
    def load(path):
        names = ("json", "mine", "shardline", "keras", "numpy")
        raise ValueError([name for name in names if importlib.util.find_spec(name)])
import sys
sys.modules.pop("shardline", None)
"""
    )
    monkeypatch.setattr(golden, "_package_directories", lambda: [str(tmp_path)])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with CleanProcess() as process:
        number = process.ask(tmp_path, {"instances": [1]})
        with pytest.raises(ModelError, match=r"ValueError: \['json'\]$"):
            process.answer(number)


def test_a_process_that_dies_is_one_line(exported, clean_process):
    with CleanProcess() as process:
        process._process.kill()
        process._process.wait()
        found = asked(process, exported)

    assert found.difference == 1.0
    assert "ended while running the export: exit code -9" in found.description


def test_an_export_that_answers_too_late_is_one_line(exported, monkeypatch):
    monkeypatch.setattr(golden, "_TIMEOUT_S", 0.05)
    with CleanProcess() as process:
        found = asked(process, exported)

    assert found.difference == 1.0
    assert "no answer for 0 s" in found.description


def test_a_tensorflow_that_is_on_the_path_alone_is_found(monkeypatch, tmp_path):
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").touch()
    monkeypatch.delitem(golden.sys.modules, "tensorflow")
    monkeypatch.syspath_prepend(tmp_path)

    assert str(tmp_path) in golden._package_directories()
