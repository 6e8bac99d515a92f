"""What the gate finds of retrained models, by their answers alone and with their log loss.

python -m benchmarks.retrainings

Models of the digits and, with SHARDLINE_TEST_DATA, of the kind of a snippet are trained as a champion is, or
for a third or five times the epochs, on half of the data, or with other seeds. Test splits are drawn from
their answers.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.feature_extraction.text import HashingVectorizer

from shardline.components.validate.gate.gate import CHAMPION, LABEL_RULES, Gate
from shardline.components.validate.gate.verdict import judge
from shardline.components.validate.metrics.evaluation import Evaluation
from shardline.components.validate.metrics.scores import ClassOutcomes
from shardline.trainer.data.features import CLASS, Label

DRAWS = 12
SIZES = (50, 167, 500, 2_000)


class Task(NamedTuple):
    """A task: inputs and classes for training and test, epochs and learning rate."""

    inputs: Any
    classes: Any
    trained: int
    epochs: int
    rate: float


def digits() -> Task:
    """Returns the digits of scikit-learn."""
    inputs, classes = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(classes))
    return Task(inputs[order].astype("float32") / 16, classes[order], 900, 12, 0.01)


def snippets(path: Path) -> Task:
    """Returns the words of snippets, and the kind of each."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    rows = [rows[index] for index in np.random.default_rng(0).permutation(len(rows))[:9_000]]
    words = HashingVectorizer(n_features=2_000, alternate_sign=False).transform([row["text"] for row in rows])
    classes = np.unique([row["kind"] for row in rows], return_inverse=True)[1]
    return Task(words.toarray().astype("float32"), classes, 4_000, 9, 0.003)


def answers(task: Task, seed: int, epochs: float = 1, share: float = 1) -> Any:
    """Trains a model and returns its probabilities for the test examples."""
    keras.utils.set_random_seed(seed)
    layers = [keras.Input(task.inputs.shape[1:]), keras.layers.Dense(32, "relu")]
    model = keras.Sequential([*layers, keras.layers.Dense(int(task.classes.max()) + 1, "softmax")])
    model.compile(keras.optimizers.Adam(task.rate), "sparse_categorical_crossentropy")
    count = int(share * task.trained)
    model.fit(task.inputs[:count], task.classes[:count], epochs=int(epochs * task.epochs), verbose=0)
    return model.predict(task.inputs[task.trained :], batch_size=512, verbose=0)


VARIANTS: dict[str, Callable[[Task, int], Any]] = {
    "other seeds": lambda task, seed: answers(task, seed),
    "1 of 3 of the epochs": lambda task, seed: answers(task, seed, epochs=1 / 3),
    "half of the data": lambda task, seed: answers(task, seed, share=0.5),
    "5 times the epochs": lambda task, seed: answers(task, seed, epochs=5),
}


def outcomes(label: Label, true: Any, probabilities: Any) -> ClassOutcomes:
    """Returns the outcomes of a model by its probabilities."""
    return ClassOutcomes(label, true, probabilities, {}, predicted=probabilities.argmax(axis=1))


def evaluation(found: ClassOutcomes) -> Evaluation:
    """Returns what the gate reads of a model."""
    return Evaluation(fingerprint="", split="test", outputs=found.label.outputs, **found.summarize(10))


def verdicts(task: Task, champions: Any, models: Any, n: int) -> Iterator[tuple[str, str]]:
    """Yields the verdicts of the rule `champion` on draws of n test examples, without and with log loss."""
    random, true = np.random.default_rng(n), task.classes[task.trained :]
    label = Label("label", CLASS, tuple(map(str, range(true.max() + 1))))
    gate = Gate(tuple(rule for rule in LABEL_RULES[CLASS] if rule.name == CHAMPION))
    for theirs, ours in ((theirs, ours) for theirs in champions for ours in models):
        for _ in range(DRAWS):
            rows = random.choice(len(true), n, replace=False)
            model, champion = (outcomes(label, true[rows], each[rows]) for each in (ours, theirs))
            whole = replace(evaluation(model), champion=evaluation(champion), leads=model.leads(champion))
            without = replace(whole, leads={"accuracy": whole.leads["accuracy"]})
            yield judge(without, gate).rules[0].verdict, judge(whole, gate).rules[0].verdict


def main() -> None:
    """Prints the table of docs/judging.md."""
    tasks = {"digits": digits()}
    if data := os.environ.get("SHARDLINE_TEST_DATA"):
        tasks["snippets"] = snippets(Path(data, "text", "snippets.csv"))
    print("| data | model | " + " | ".join(f"n = {n:,}" for n in SIZES) + " |")
    print("|---|---|" + "---|" * len(SIZES))
    for name, task in tasks.items():
        champions = [answers(task, seed) for seed in (1, 2)]
        for shown, train in VARIANTS.items():
            models, cells = [train(task, seed) for seed in (11, 12)], []
            for n in SIZES:
                if n > len(task.classes) - task.trained:
                    cells.append("")
                    continue
                found = list(verdicts(task, champions, models, n))
                cells.append(
                    " / ".join(
                        f"{100 * np.mean([each[k] == 'failed' for each in found]):.0f} %" for k in (0, 1)
                    )
                )
            print(f"| {name} | {shown} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
