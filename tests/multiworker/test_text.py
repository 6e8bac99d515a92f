"""Texts of varying length, and smaller last batches, on two processes: as Keras trains, resumed exactly."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from shardline.trainer.models.saving import load_model
from tests.helpers import replicas
from tests.helpers.datasets import write_labelled
from tests.helpers.parameters import with_matrix
from tests.helpers.replicas import finish
from tests.multiworker.test_fit import NAMES, assert_close, run, start

pytestmark = [pytest.mark.multiworker, pytest.mark.timeout(240)]

LAST_BATCHES = ["pydataset", "zip", "take", "concatenate"]
#: Programs, and the way of their gradients.
CASES = {
    "recurrent": (["bidirectional"], "auto"),
    "feed_forward": (["classification", "transformer"], "auto"),
    "last_batches": (LAST_BATCHES, "auto"),
    "grpc": (["transformer", "pydataset"], "ring"),
    "tcp": (["bidirectional", "translation"], "tcp"),
    "more": (["tagging", "translation"], "auto"),
    "more_grpc": (["classification", "bidirectional", "tagging", "translation", *LAST_BATCHES], "ring"),
}


@pytest.mark.parametrize(("names", "communication"), with_matrix(CASES, {"tcp", "more", "more_grpc"}))
def test_two_processes_train_as_keras_does_alone(
    tmp_path: Path, names: list[str], communication: str
) -> None:
    (by_keras,) = run(tmp_path, "by_keras_alone", 1, names=names)
    chief, worker = run(tmp_path, "texts", names=names, communication=communication)
    assert chief == worker
    assert_close(chief, by_keras)


@pytest.mark.parametrize(
    "name",
    [
        "bidirectional",
        *(pytest.param(each, marks=pytest.mark.matrix) for each in ("classification", "transformer")),
    ],
)
def test_a_killed_program_continues_bit_for_bit(tmp_path: Path, name: str) -> None:
    paths = tmp_path / "undisturbed", tmp_path / "killed"
    for path in paths:
        path.mkdir()
    undisturbed = run(paths[0], "killed_text", name=name)
    codes, _ = finish(start(paths[1], "killed_text", name=name, kill="worker-0"))
    assert codes[NAMES.index("worker-0")] == -signal.SIGKILL
    assert run(paths[1], "killed_text", name=name) == undisturbed


def test_two_workers_train_on_a_table_of_texts_as_one(tmp_path: Path) -> None:
    """Texts are looked up in the model, and as long on each replica as the longest there."""
    sentences = ("one", "two and two", "three is much longer than all the others")
    write_labelled(tmp_path / "data", "class", cities=sentences, records={"train": 46, "validation": 9})
    model, weights = "tests.helpers.text_programs:of_dataset", []
    for count, size in ((1, 4), (2, 2)):
        out = tmp_path / str(count)
        given = ["--dataset", tmp_path / "data", "--model", model, "--model-dir", out, "--epochs", 2]
        given += ["--per-replica-batch-size", size]
        replicas.run(["-m", "shardline.trainer.task", *map(str, given)], count)
        weights.append(load_model(out / "model.keras", function=model).get_weights())
    for one, two in zip(*weights, strict=True):
        np.testing.assert_allclose(two, one, atol=1e-5)
