"""The order of examples over replicas and steps."""

import pytest

from trainer.data.order import EpochPlan, worker_shards
from trainer.errors import SettingsError

PLANS = [
    # records, replicas, batch, steps
    (96, 2, 8, 6),
    (97, 1, 16, 7),  # the rest of one is a step of its own
    (97, 2, 8, 6),  # the rest of one is too small for two replicas and joins the last step
    (98, 2, 8, 7),
    (31, 2, 16, 1),  # less than one global batch
    (2, 2, 16, 1),
    (7, 3, 1, 2),  # batch 1: the rest joins
    (1437, 2, 16, 45),
]


@pytest.mark.parametrize(("records", "replicas", "batch", "steps"), PLANS)
def test_every_replica_has_an_example_in_every_step_and_each_example_is_used_once(
    records, replicas, batch, steps
):
    plan = EpochPlan(records, replicas, batch)
    sizes = [plan.batch_sizes(replica) for replica in range(replicas)]

    assert plan.steps == steps
    assert [len(of_replica) for of_replica in sizes] == [steps] * replicas
    assert min(min(of_replica) for of_replica in sizes) >= 1
    assert sum(map(sum, sizes)) == records
    assert [len(range(r, records, replicas)) for r in range(replicas)] == list(map(sum, sizes))
    # Every step but the last is full, on every replica.
    assert all(size == batch for of_replica in sizes for size in of_replica[:-1])


def test_fewer_examples_than_replicas_are_refused():
    with pytest.raises(SettingsError, match="3 examples are too few for 4 replicas"):
        EpochPlan(3, 4, 1)


def test_whole_shards_go_to_workers_where_their_number_divides():
    files = [f"s{i}" for i in range(4)]

    assert worker_shards(files, 2, 1).files == ("s1", "s3")
    assert worker_shards(files, 2, 1).indices == (1, 3)
    assert worker_shards(files, 2, 1).policy == "file"


@pytest.mark.parametrize("workers", [3, 8])  # not a divisor; more workers than shards
def test_elsewhere_a_worker_reads_all_shards_and_keeps_its_records(workers):
    shards = worker_shards(["a", "b", "c", "d"], workers, 2)

    assert (shards.policy, shards.files, shards.keep_every, shards.keep_offset) == (
        "data",
        ("a", "b", "c", "d"),
        workers,
        2,
    )
