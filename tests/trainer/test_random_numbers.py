"""Dropout, random layers and `keras.random`: each replica draws its own numbers, the same in every run."""

import json

import numpy as np
import pytest

from tests.helpers import comparison, replicas

KERAS = ("dropout", "noise", "flip", "keras.random")


def drawn(kind, directory, processes=1):
    """Returns, by replica, what each way drew in each step, and the state of the generators."""
    replicas.run(["-m", "tests.helpers.random_layers", kind, str(directory)], processes)
    files = [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]
    draws = []
    for file in files:
        for replica in range(len(file["drawn"][0]["dropout"])):
            steps = [{name: values[replica] for name, values in step.items()} for step in file["drawn"]]
            draws.append((steps, [state[replica] for state in file["state"]]))
    return draws


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return drawn("one", tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory):
    return drawn("mirrored", tmp_path_factory.mktemp("mirrored"))


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    return drawn("tcp", tmp_path_factory.mktemp("workers"), 2)


@pytest.fixture(
    scope="module",
    params=["mirrored", pytest.param("workers", marks=[pytest.mark.multiworker, pytest.mark.matrix])],
)
def two(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("way", [*KERAS, "tf.random"])
def test_replicas_draw_numbers_of_their_own_in_every_step(two, way):
    (first, _), (second, _) = two

    values = [step[way] for step in (*first[:3], *second[:3])]
    assert len({tuple(value) for value in values}) == 6


def test_two_replicas_drop_as_one_does_with_twice_the_batch(one, two):
    """Half of all units, and what one replica drops says nothing about the other."""
    several = [comparison.flat([step["dropout"] for step in steps]) / 2 for steps, _ in two]
    alone = comparison.flat([step["dropout"] for step in one[0][0]]) / 2

    for kept in (*several, alone):
        assert kept.mean() == pytest.approx(0.5, abs=0.05)
    assert np.corrcoef(*several)[0, 1] == pytest.approx(0, abs=0.1)


@pytest.mark.parametrize("way", KERAS)
def test_the_first_replica_draws_as_one_alone(one, two, way):
    ((alone, _),), ((first, _), _) = one, two

    assert [step[way] for step in first] == [step[way] for step in alone]


def test_generators_stay_the_same_on_all_replicas(one, two):
    """So a checkpoint holds them once, and a run goes on from it on any number of replicas."""
    ((_, alone),), ((_, first), (_, second)) = one, two

    assert first == second == alone


@pytest.mark.multiworker
def test_where_a_replica_runs_does_not_matter(mirrored, workers):
    for (one, _), (other, _) in zip(mirrored, workers, strict=True):
        assert [{way: step[way] for way in KERAS} for step in one] == [
            {way: step[way] for way in KERAS} for step in other
        ]
