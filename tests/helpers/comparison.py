"""Compares the results of exchange_cases on two replicas with those on one."""

import json

import numpy as np
import pytest

from tests.helpers import replicas as processes

#: Cases of exchange_cases, by name: without an import of TensorFlow.
CASES = [
    "global_clipnorm", "clipnorm", "clipvalue", "adam_schedule", "adamw", "nadam", "ema", "ema_overwrite",
    "accumulation", "loss_scale_factor", "overflow", "overflow_accumulation", "half", "two_optimizers",
    "multi_optimizer", "multi_optimizer_scaled", "sparse", "sparse_clipnorm", "sparse_accumulation", "uneven",
    "uneven_clipped", "uneven_accumulation", "uneven_half", "masked", "uneven_masked", "weighted_mean",
    "uneven_weighted_masked", "empty", "stretch",
]  # fmt: skip

# float16 rounds the gradients of half a batch otherwise than those of the whole.
TOLERANCES = {"half": 1e-3, "uneven_half": 1e-3}


def selected(request):
    """Returns the cases of the tests of the file that are run."""
    parameters = [
        getattr(item, "callspec", None) for item in request.session.items if item.path == request.path
    ]
    return sorted({one.params["case"] for one in parameters if one and "case" in one.params})


def run(kind, directory, request, count=1):
    """Trains the cases, and returns the results of each process of exchange_cases, by case."""
    processes.run(["-m", "tests.helpers.exchange_cases", kind, str(directory), *selected(request)], count)
    names = ("chief-0", "worker-0")[:count]
    return [json.loads((directory / f"{name}.json").read_text()) for name in names]


def assert_equal_to_one(case, one, several):
    """`several` are the results of the processes of a run, each with one or more replicas."""
    tolerance = TOLERANCES.get(case, 1e-5)
    replicas = [
        replica for result in several for replica in zip(result["weights"], *result["state"], strict=True)
    ]
    (expected,) = zip(one["weights"], *one["state"], strict=True)
    assert len(replicas) == 2
    for found in replicas:
        assert flat(found) == pytest.approx(flat(expected), abs=tolerance)
    for result in several:
        assert result["losses"] == pytest.approx(one["losses"], abs=tolerance)


def assert_in_step(several):
    """Weights and state of the optimizers, the loss scale among them, are the same on all replicas."""
    first, *others = [r for result in several for r in zip(result["weights"], *result["state"], strict=True)]
    assert others
    for other in others:
        np.testing.assert_array_equal(flat(other), flat(first))


def flat(values):
    """Returns all numbers of nested lists."""
    if isinstance(values, float | int):
        return np.array([values], float)
    return np.concatenate([flat(value) for value in values]) if len(values) else np.zeros(0)
