"""Programs in examples/fit: two processes train as one, and a killed run resumes bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from sklearn.datasets import load_digits

from tests.helpers import replicas

pytestmark = [pytest.mark.multiworker, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits of 8 x 8 in the size and the file of MNIST's."""
    found = load_digits()
    images = np.kron(found.images[:600] * 15, np.ones((1, 3, 3)))
    path = tmp_path_factory.mktemp("digits") / "mnist.npz"
    np.savez(
        path, x_train=np.pad(images, [(0, 0), (2, 2), (2, 2)]).astype("uint8"), y_train=found.target[:600]
    )
    return path


def command(name: str, digits: Path, model: Path, *more: Any) -> list[str]:
    """What a replica of `shardline launch` runs."""
    given = ["--data", digits, "--model", model, *more]
    return ["-m", "shardline.trainer.program", f"examples/fit/{name}.py", *map(str, given)]


def weights(path: Path) -> list[np.ndarray[Any, Any]]:
    return keras.saving.load_model(path, compile=False).get_weights()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "name",
    [
        "tensorflow_tutorial",
        pytest.param("ray_mnist", marks=pytest.mark.matrix),
        pytest.param("kubeflow_mnist", marks=pytest.mark.matrix),
    ],
)
def test_two_processes_end_as_one(tmp_path: Path, digits: Path, name: str) -> None:
    more = ["--steps", 6, *(["--logs", tmp_path / "logs"] if name == "kubeflow_mnist" else [])]
    for count in (1, 2):
        outputs = replicas.run(command(name, digits, tmp_path / f"{count}.keras", *more), count)
        assert all(f"Epoch {epoch}/3" in outputs[0] for epoch in (1, 2, 3))
    for one, two in zip(weights(tmp_path / "1.keras"), weights(tmp_path / "2.keras"), strict=True):
        # Adam makes a step of its own size, 1e-3, of the rounding of a gradient that is nearly zero.
        np.testing.assert_allclose(two, one, atol=5e-3 if name == "kubeflow_mnist" else 1e-5)
        assert np.median(np.abs(two - one)) < 1e-4
