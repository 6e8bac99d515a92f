"""Gradient exchange: two processes train as one with twice the batch, for every use of an optimizer."""

import pytest

from tests.helpers import comparison
from tests.helpers.comparison import CASES
from tests.helpers.parameters import with_matrix

pytestmark = pytest.mark.multiworker

#: Those that differ most; tests of mirrored devices take others.
EVERYDAY = {
    "accumulation",
    "half",
    "two_optimizers",
    "sparse_clipnorm",
    "uneven_weighted_masked",
    "empty",
    "stretch",
}


@pytest.fixture(scope="module")
def one(request, tmp_path_factory):
    return comparison.run("one", tmp_path_factory.mktemp("one"), request)[0]


@pytest.fixture(scope="module", params=["tcp", pytest.param("ring", marks=pytest.mark.matrix)])
def two(tmp_path_factory, request):
    """The results of each of two processes; that they ended at all says that nobody hangs."""
    return comparison.run(request.param, tmp_path_factory.mktemp("two"), request, 2)


@pytest.mark.parametrize("case", with_matrix({case: case for case in CASES}, {*CASES} - EVERYDAY))
def test_two_workers_with_batch_b_equal_one_with_batch_2b(one, two, case):
    comparison.assert_equal_to_one(case, one[case], [worker[case] for worker in two])


@pytest.mark.parametrize(
    "case",
    [
        "half_overflow",
        *(pytest.param(one, marks=pytest.mark.matrix) for one in ("overflow", "overflow_accumulation")),
    ],
)
def test_an_overflow_of_one_worker_keeps_both_in_step(two, case):
    comparison.assert_in_step([worker[case] for worker in two])


def test_numbers_are_summed_over_the_processes(two):
    assert [worker["total"] for worker in two] == [[3.0, 1.5]] * 2


def test_what_each_worker_keeps_for_itself_is_averaged(two):
    """A moving mean and an accumulated gradient."""
    first, second = (worker["merged"] for worker in two)
    means = (comparison.flat(first["before"]) + comparison.flat(second["before"])) / 2
    for worker in (first, second):
        assert comparison.flat(worker["before"]) != pytest.approx(means, abs=1e-4)
        assert comparison.flat(worker["after"]) == pytest.approx(means, abs=1e-6)
