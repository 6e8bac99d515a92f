"""Reports on evaluations that are made up, without a model: every part of a report has something to show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from shardline.components.model_store import Export
from shardline.components.validate.gate import Blessing, TrainingRecord
from shardline.components.validate.gate.judged import JudgedRule
from shardline.components.validate.metrics.evaluation import (
    Bin,
    ClassScore,
    Curve,
    Evaluation,
    Lead,
    Mistake,
    NumberScore,
    Slice,
)
from shardline.components.validate.report import render_report
from shardline.trainer.manifest import CLASS, MULTILABEL, Feature, Label, Manifest, Shard, Split
from tests.helpers.labels import LABELLED, class_label, counted

IMAGE = (Feature("image", "uint8", (12, 12, 3), "png"), Feature("label", "int64"), Feature("key", "string"))

EXPORT = Export(
    labels=(class_label(("top", "middle", "bottom")),),
    signatures={
        "serving_default": {
            "inputs": {"images": {"dtype": "string", "shape": [None]}},
            "outputs": {"probabilities": {"dtype": "float32", "shape": [None, 3]}},
        }
    },
    git_revision="4ccda76",
    parameters=1234,
    bytes=5678,
    versions={"keras": "3.15.1"},
)

TRAINING = TrainingRecord(
    {"model": "mnist_cnn", "seed": 0},
    {"epoch": (1.0, 2.0), "loss": (1.0, 0.5), "val_loss": (1.1, 0.7), "accuracy": (0.5, 0.9)},
)

RULES = (
    JudgedRule("accuracy >= 0.9", "accuracy", 0.9, ">=", 0.9, "passed", interval=(0.85, 0.94)),
    JudgedRule(
        "accuracy > champion (p < 0.05)",
        "accuracy",
        0.9,
        ">",
        0.88,
        "failed",
        champion=0.88,
        difference=(-0.01, 0.05),
        p=0.124,
        note="p = 0.124, must be below 0.05",
    ),
    JudgedRule(
        "recall[x=1] >= 0.9", "recall[x=1]", None, ">=", 0.9, "unmeasured", note="4 examples, needs 20"
    ),
    JudgedRule("f1 >= champion", "f1", 0.9, ">=", None, "skipped", note="there is no champion yet"),
)


def make_evaluation(
    names: Sequence[str], *, slices: Sequence[Slice] = (), mistakes: Sequence[Mistake] = ()
) -> Evaluation:
    """Returns an evaluation of 9 right examples of each class, and one more of the first that is wrong."""
    confusion = Counter({(each, each): 9 for each in range(len(names))})
    confusion[0, len(names) - 1] += 1
    line = (0.0, 0.1, 1.0)
    return Evaluation(
        fingerprint="sha256:0",
        split="test",
        examples=confusion.total(),
        non_finite=0,
        class_names=tuple(names),
        classes=tuple(ClassScore(name, 9, 0.9, 1.0, 0.95) for name in names),
        confusion=tuple((*pair, count) for pair, count in confusion.items()),
        mistakes=tuple(mistakes),
        metrics={"accuracy": 0.9, "macro_f1": 0.89, "log_loss": 0.25, "latency_p95_ms": 12.5, "size_mb": 1.5},
        intervals={"accuracy": (0.85, 0.94)},
        slices=tuple(slices)
        or (Slice("camera=left", 40, 0.8, True, (0.7, 0.9)), Slice("x=1", 4, 0.5, False)),
        calibration=(Bin(0.4, 0.5, 10, 0.45, 0.5), Bin(0.9, 1.0, 90, 0.97, 0.99)),
        roc=tuple(Curve(name, 0.9, line, (0.0, 0.8, 1.0), (1.0, 0.5, 0.0)) for name in names[:20]),
        precision_recall=tuple(Curve(name, 0.8, line, (1.0, 0.9, 0.3), line) for name in names[:20]),
    )


def with_champion(evaluation: Evaluation) -> Evaluation:
    """Returns the evaluation beside that of a champion: a little less accurate, slower, better on a slice."""
    champion = replace(
        evaluation,
        metrics={**evaluation.metrics, "accuracy": 0.88, "log_loss": 0.2, "latency_p95_ms": 20.0},
        slices=tuple(replace(one, value=one.value + 0.1) for one in evaluation.slices),
    )
    leads = {"accuracy": Lead(0.02, (-0.01, 0.05), 0.124)}
    leads["accuracy[camera=left]"] = Lead(-0.1, (-0.2, -0.01), 0.98)
    return replace(evaluation, leads=leads, champion=champion)


def make_manifest(names: Sequence[str], features: tuple[Feature, ...] = IMAGE) -> Manifest:
    """Returns the manifest of a dataset that is nowhere."""
    split = Split((Shard("test-00000-of-00001.tfrecord", 100, 1, "00000000"),), counted((100,)))
    return Manifest("sha256:0", "bands", {"seed": 0}, (class_label(names),), features, {"test": split})


def make_blessing(**changes: Any) -> Blessing:
    """Returns the verdict of the usual rules, but for some fields."""
    usual = {"blessed": False, "rules": RULES, "reason": "accuracy is not above the champion's"}
    return Blessing(**{**usual, **changes})


def make_report(evaluation: Evaluation, **changes: Any) -> str:
    """Renders a report on an evaluation.

    Args:
        evaluation: What it is about.
        changes: Other arguments of `render_report` than usual.
    """
    given: dict[str, Any] = {
        "blessing": make_blessing(),
        "manifest": make_manifest(evaluation.class_names),
        "export": EXPORT,
        "training": TRAINING,
    }
    return render_report(evaluation, **{**given, **changes})


def make_kind(kind: str) -> Evaluation:
    """Returns an evaluation of made-up examples of labels, by their name in `LABELLED`."""
    parts = [_make_part(label) for label in LABELLED[kind]]
    if len(parts) == 1:
        return parts[0]
    metrics = {f"{part.label}.{name}": value for part in parts for name, value in part.metrics.items()}
    intervals = {f"{part.label}.{name}": ends for part in parts for name, ends in part.intervals.items()}
    empty = replace(
        parts[0], label="", kind="", outputs=(), class_names=(), classes=(), confusion=(), slices=()
    )
    empty = replace(empty, calibration=(), roc=(), precision_recall=())
    return replace(empty, metrics=metrics, intervals=intervals, parts=tuple(parts))


def _make_part(label: Label) -> Evaluation:
    rng = np.random.default_rng(3)
    slices = (Slice("city=Ulm", 80, 0.7, True, (0.6, 0.8)), Slice("income=5e+06..6e+06", 40, 0.9, True))
    if label.kind == CLASS:
        return replace(make_evaluation(label.outputs, slices=slices), label=label.name)
    whole = replace(make_evaluation(("a", "b")), label=label.name, kind=label.kind, outputs=label.outputs)
    whole = replace(whole, examples=200, confusion=(), calibration=(), slices=slices)
    whole = replace(whole, roc=(), precision_recall=(), intervals={})
    if label.kind == MULTILABEL:
        scores = tuple(
            ClassScore(name, 40 * place + 20, 0.8, 0.2 * place + 0.3, 0.6)
            for place, name in enumerate(label.outputs)
        )
        return replace(
            whole,
            class_names=label.outputs,
            classes=scores,
            metrics={"macro_f1": 0.71, "micro_f1": 0.8, "subset_accuracy": 0.5, "hamming_loss": 0.1},
            intervals={"macro_f1": (0.65, 0.77)},
            mistakes=(Mistake("test/7", "upper, large", "small", None, b""),),
        )
    true = rng.uniform(20, 140, 200)
    points = tuple(zip(true.tolist(), (0.8 * true + 12 + rng.normal(0, 9, 200)).tolist(), strict=True))
    errors = {"0.05": -21.5, "0.25": -9.1, "0.5": -3.2, "0.75": 2.9, "0.95": 12.4}
    units = label.units or ("",) * len(label.outputs)
    return replace(
        whole,
        class_names=(),
        classes=(),
        numbers=tuple(
            NumberScore(name, unit, 13.25, 10.1, -3.4, errors, points)
            for name, unit in zip(label.outputs, units, strict=True)
        ),
        slices=tuple(replace(one, value=20 * one.value, interval=(11.0, 15.5)) for one in slices),
        metrics={"rmse": 13.25, "mae": 10.1, "median_absolute_error": 8.8, "mape": 0.153, "r2": 0.871},
        intervals={"rmse": (11.9, 14.6), "mae": (9.0, 11.2)},
        mistakes=(Mistake("test/7", "139.2", "88.5", None, b""), Mistake("test/31", "21", "55", None, b"")),
    )
