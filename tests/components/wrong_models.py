"""Wrong models, and what the gate says to each: `python -m tests.components.wrong_models`.

All are made for real, of the digits or of tables, and judged by the default rules, against a good champion.
Prints the table for benchmarks/GATE.md; numbers, which differ a little between machines, are left out of it.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from shardline.components.model_store.champions import publish
from shardline.components.preprocess.sources.directories import Digits
from shardline.components.preprocess.sources.example import Example
from shardline.components.validate.gate import Blessing
from shardline.components.validate.rules import Gate
from shardline.components.validate.validation import validate
from shardline.trainer.manifest import Feature
from tests.helpers import preprocessing
from tests.helpers.costly import Large, Slow

_EPOCHS = 12


class Leaked:
    """The digits, with a copy of each test example in training."""

    def __init__(self) -> None:
        self.class_names = Digits().class_names

    def __iter__(self) -> Iterator[Example]:
        for index, example in enumerate(Digits()):
            values = {"label": example.label, "image": example.image}
            split = "train" if index % 10 else "test"
            yield Example(key=f"{index}", split=split, **values)
            if split == "test":
                yield Example(key=f"copy of {index}", split="train", **values)


class Coarse:
    """40,000 rows of three columns with 12 combinations, whose share of "yes" is `SHARES`."""

    class_names = ("no", "yes")
    features = tuple(Feature(name, "float32") for name in "abc")
    SHARES = (0.06, 0.1, 0.15, 0.2, 0.25, 0.45, 0.63, 0.75, 0.8, 0.85, 0.9, 0.94)

    def __iter__(self) -> Iterator[Example]:
        drawn = np.random.default_rng(0)
        for row, (number, chance) in enumerate(
            zip(drawn.integers(0, 12, 40_000), drawn.random(40_000), strict=True)
        ):
            values = {"a": number // 6, "b": number // 3 % 2, "c": number % 3}
            label = int(chance < self.SHARES[number])
            yield Example(key=f"{row}", label=label, features={k: float(v) for k, v in values.items()})


class Rare:
    """3,000 rows of two numbers; 9 % are "yes", which follows from their sum but for some noise."""

    class_names = ("no", "yes")
    features = (Feature("a", "float32"), Feature("b", "float32"))

    def __iter__(self) -> Iterator[Example]:
        for row, (a, b, noise) in enumerate(np.random.default_rng(0).normal(size=(3_000, 3))):
            yield Example(
                key=f"{row}", label=int(a + b + noise > 2.3), features={"a": float(a), "b": float(b)}
            )


def of_combinations(*flipped: int) -> keras.Model:
    """Returns a model that answers as is best for each combination of `Coarse`, but for those flipped."""
    inputs = {name: keras.Input((), name=name) for name in "abc"}
    number = keras.ops.cast(inputs["a"] * 6 + inputs["b"] * 3 + inputs["c"], "int32")
    table = keras.layers.Embedding(12, 2)
    model = keras.Model(inputs, keras.layers.Softmax()(table(number)))
    shares = [1 - share if index in flipped else share for index, share in enumerate(Coarse.SHARES)]
    table.set_weights([np.log([[1 - share, share] for share in shares])])
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def of_sums(a: float, b: float, bias: float) -> keras.Model:
    """Returns a model that says "yes" in `Rare` by a weighted sum of the two numbers."""
    inputs = {name: keras.Input((), name=name) for name in "ab"}
    dense = keras.layers.Dense(2, "softmax")
    model = keras.Model(inputs, dense(keras.ops.stack([inputs["a"], inputs["b"]], axis=1)))
    dense.set_weights([np.array([[0.0, a], [0.0, b]]), np.array([0.0, bias])])
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def build(*layers: keras.layers.Layer) -> keras.Model:
    """Returns a small compiled model; `layers` come before its last."""
    keras.utils.set_random_seed(0)
    flat = [keras.Input((8, 8, 1), dtype="uint8"), keras.layers.Rescaling(1 / 255), keras.layers.Flatten()]
    dense = keras.layers.Dense(32, "relu")
    model = keras.Sequential([*flat, dense, *layers, keras.layers.Dense(10, "softmax", name="last")])
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def load(dataset: Path, *splits: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Returns images and labels of some splits."""
    found = [example for split in splits for example in preprocessing.read(dataset, split)]
    images = np.stack([tf.io.decode_image(example["image"]).numpy() for example in found])
    return images, np.array([example["label"] for example in found])


def trained(
    dataset: Path, *splits: str, epochs: int = _EPOCHS, shuffled: bool = False, first: int | None = None
) -> keras.Model:
    images, labels = (values[:first] for values in load(dataset, *(splits or ("train",))))
    if shuffled:
        labels = np.random.default_rng(0).permutation(labels)
    model = build()
    model.fit(images, labels, batch_size=32, epochs=epochs, verbose=0)
    return model


def changed(model: keras.Model, change: Callable[[Any, Any], tuple[Any, Any]], *layers: Any) -> keras.Model:
    """Returns a copy of a model with other weights in its last layer, and more layers before it."""
    copy = build(*layers)
    copy.get_layer(index=2).set_weights(model.get_layer(index=2).get_weights())
    copy.get_layer("last").set_weights(list(change(*model.get_layer("last").get_weights())))
    return copy


@dataclass(frozen=True)
class Case:
    """A wrong model or a fault of the data: what is shown of it, how it is made, its data and rules."""

    shown: str
    make: Callable[[keras.Model, Path], keras.Model]
    data: str = "digits"
    rules: tuple[str, ...] = ()


def misses_eights(good: keras.Model, dataset: Path) -> keras.Model:
    """Returns the champion with a lower bias of 8, so that it misses four of the 8s that it knew."""
    images, labels = load(dataset, "test")
    scores = np.log(good.predict(images[labels == 8], verbose=0))
    ahead = np.sort(scores[:, 8] - np.delete(scores, 8, axis=1).max(axis=1))
    lost = ahead[ahead > 0][3:5].mean()
    return changed(good, lambda k, b: (k, b - lost * (np.arange(10) == 8)))


def _same(kernel: Any, bias: Any) -> tuple[Any, Any]:
    return kernel, bias


CASES = (
    Case("worse: trained for one epoch", lambda _, data: trained(data, epochs=1)),
    Case("equal: the champion once more", lambda good, _: changed(good, _same)),
    Case(
        "blind: never says 8",
        lambda good, _: changed(good, lambda k, b: (k, b - 100.0 * (np.arange(10) == 8))),
    ),
    Case("worse on one slice only: misses 4 of 17 8s", misses_eights),
    Case("the same, and a rule on this slice", misses_eights, rules=("recall[class=8] >= 0.9",)),
    Case("trained on shuffled labels", lambda _, data: trained(data, shuffled=True)),
    Case("leaked: a copy of each test example is in training", lambda _, data: trained(data), "leaked"),
    Case("NaN in a weight", lambda good, _: changed(good, lambda k, b: (k, b * np.nan))),
    Case("too slow", lambda good, _: changed(good, _same, Slow())),
    Case("too large", lambda good, _: changed(good, _same, Large())),
    Case("overconfident: logits times 20", lambda good, _: changed(good, lambda k, b: (20 * k, 20 * b))),
    Case("other order of the labels", lambda good, _: changed(good, lambda k, b: (k[:, ::-1], b[::-1]))),
    Case("trained on the test split", lambda _, data: trained(data, "train", "test", epochs=5 * _EPOCHS)),
    Case("tiny test split: 15 examples", lambda good, _: changed(good, _same), "tiny"),
    Case("overfitted: 100 epochs on 100 images", lambda _, data: trained(data, epochs=100, first=100)),
    Case("a table of 12 combinations: an equal model", lambda *_: of_combinations(), "coarse"),
    Case("the same, 0.8 points worse", lambda *_: of_combinations(5), "coarse"),
    Case("the same, 2.2 points worse", lambda *_: of_combinations(6), "coarse"),
    Case("9 % are yes: an equal model", lambda *_: of_sums(1.9, 1.9, -4.6), "rare"),
    Case("the same, trained with balanced weights", lambda *_: of_sums(1.9, 1.9, -2.3), "rare"),
    Case("the same, always says no", lambda *_: of_sums(0.0, 0.0, -2.3), "rare"),
    Case("the same, at random", lambda *_: of_sums(1.9, -1.9, -2.3), "rare"),
)


def judged(work: Path) -> Iterator[tuple[Case, Blessing]]:
    """Yields each case with the verdict on it; all is written to `work`."""
    datasets = {name: work / name for name in ("digits", "leaked", "tiny", "coarse", "rare")}
    preprocessing.run("digits", datasets["digits"])
    preprocessing.run("digits", datasets["tiny"], split={"train": 0.89, "validation": 0.1, "test": 0.01})
    preprocessing.run("tests.components.wrong_models:Leaked", datasets["leaked"])
    half = {"train": 0.4, "validation": 0.1, "test": 0.5}
    preprocessing.run("tests.components.wrong_models:Coarse", datasets["coarse"], split=half)
    preprocessing.run("tests.components.wrong_models:Rare", datasets["rare"], split=half)
    good = trained(datasets["digits"])
    champions = {"digits": good, "coarse": of_combinations(), "rare": of_sums(1.9, 1.9, -4.6)}
    for data, model in champions.items():
        (work / "champions" / data).mkdir(parents=True)
        validate(save(model, work), datasets[data], exported := work / f"champion of {data}", gate=Gate())
        publish(exported, work / "champions" / data)
    for index, case in enumerate(CASES):
        data = datasets[case.data]
        store = work / "champions" / (case.data if case.data in champions else "digits")
        gate = Gate(rules=tuple(case.rules), champion_uri=str(store))
        model_file = save(case.make(good, data), work)
        yield case, validate(model_file, data, work / f"{index}", gate=gate).blessing


def save(model: keras.Model, work: Path) -> Path:
    model.save(work / "model.keras")
    return work / "model.keras"


def row(case: Case, blessing: Blessing) -> str:
    """Returns a row of the table."""
    found = [(rule.name or rule.rule, rule.verdict) for rule in blessing.rules]
    broken = [f"`{name}` {verdict}" for name, verdict in found if verdict != "passed"]
    # Where it is blocked, the rules say it.
    warnings = without_numbers("; ".join(blessing.warnings)) if blessing.blessed else ""
    verdict = "blessed" if blessing.blessed else "**blocked**"
    return f"| {case.shown} | {verdict} | {', '.join(broken)} | {warnings} |"


def without_numbers(text: str) -> str:
    text = re.sub(r"(?<![\w'])[\d.,]*\d(?!')", "…", text)
    return re.sub(r"… \(…\)(, … \(…\))*( and … more)?", "…", text)


def table(work: Path) -> str:
    """Returns the table for benchmarks/GATE.md."""
    rows = [row(case, blessing) for case, blessing in judged(work)]
    head = ["| model or data | verdict | rules that did not pass | warning |", "|---|---|---|---|"]
    return "\n".join([*head, *rows, ""])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        sys.stdout.write(table(Path(directory)))
