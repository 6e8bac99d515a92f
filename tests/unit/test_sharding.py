"""Sharding: the order of examples over replicas and steps, and the shards of each worker."""

import pytest

from shardline.trainer.base.errors import SettingsError
from shardline.trainer.sharding import EpochPlan, shard_policy, stream_count, worker_shards

PLANS = [
    # records, replicas, batch, start, steps
    (96, 2, 8, 0, 6),
    (97, 1, 16, 0, 7),  # the rest of one is a step of its own
    (97, 2, 8, 0, 6),  # the rest of one is too small for two replicas and joins the last step
    (98, 2, 8, 0, 7),
    (31, 2, 16, 0, 1),  # less than one global batch
    (2, 2, 16, 0, 1),
    (7, 3, 1, 0, 2),  # batch 1: the rest joins
    (1437, 2, 16, 0, 45),
    (97, 2, 8, 48, 3),  # after three steps
    (97, 3, 8, 32, 3),  # resumed with more replicas: the start is no multiple of them
    (97, 2, 5, 31, 7),
    (97, 2, 8, 95, 1),
    (97, 2, 8, 97, 0),  # the epoch is over
]


@pytest.mark.parametrize(("records", "replicas", "batch", "start", "steps"), PLANS)
def test_every_replica_has_an_example_in_every_step_and_each_example_is_used_once(
    records, replicas, batch, start, steps
):
    plan = EpochPlan(records, replicas, batch, start)
    sizes = [plan.batch_sizes(replica) for replica in range(replicas)]

    assert plan.steps == len(plan.step_sizes) == steps
    assert [len(of_replica) for of_replica in sizes] == [steps] * replicas
    assert min((size for of_replica in sizes for size in of_replica), default=1) >= 1
    assert [*map(sum, zip(*sizes, strict=True))] == [*plan.step_sizes]
    assert sum(plan.step_sizes) == records - start
    for replica, of_replica in enumerate(sizes):
        assert sum(of_replica) == sum(p % replicas == replica for p in range(start, records))
    # Every step but the last is full, on every replica.
    assert all(size == batch for of_replica in sizes for size in of_replica[:-1])


def test_the_rest_of_an_epoch_has_the_steps_that_the_whole_one_has_left():
    whole = EpochPlan(97, 2, 8)

    for done in range(whole.steps + 1):
        rest = EpochPlan(97, 2, 8, start=sum(whole.step_sizes[:done]))
        assert [*rest.step_sizes] == [*whole.step_sizes][done:] == [*whole.step_sizes[done:]]
        assert [*rest.batch_sizes(1)] == [*whole.batch_sizes(1)][done:]


def test_a_rest_of_fewer_examples_than_replicas_is_left_out_where_no_step_is_before_it():
    plan = EpochPlan(97, 4, 8, start=95)

    assert (plan.steps, [*plan.step_sizes], [*plan.batch_sizes(3)]) == (0, [], [])


def test_an_epoch_of_any_length_is_planned_without_a_list_of_its_steps():
    plan = EpochPlan(10**15, 2, 32)

    assert (plan.steps, [*plan.step_sizes[-2:]]) == (15_625_000_000_000, [64, 64])


def test_fewer_examples_than_replicas_are_refused():
    with pytest.raises(SettingsError, match="3 examples are too few for 4 replicas"):
        EpochPlan(3, 4, 1)


def test_whole_shards_go_to_workers_where_their_number_divides():
    shards = worker_shards(4, 4, 2, 1)

    assert ([*shards.indices], [*shards.streams], shards.keep_every) == ([1, 3], [1, 3], 1)


def test_a_worker_reads_the_shards_of_its_streams():
    shards = worker_shards(120, 60, 20, 7)

    assert [*shards.streams] == [7, 27, 47]
    assert {index % 60 for index in shards.indices} == {*shards.streams}
    assert len(shards.indices) == 6


@pytest.mark.parametrize("workers", [3, 8])  # not a divisor; more workers than shards
def test_elsewhere_a_worker_reads_all_shards_and_keeps_its_records(workers):
    shards = worker_shards(4, 4, workers, 2)

    assert ([*shards.streams], shards.keep_every, shards.keep_offset) == ([0, 1, 2, 3], workers, 2)


@pytest.mark.parametrize(
    ("shards", "readers", "streams"),
    [
        (64, 1, 64),  # each shard is a stream
        (65, 1, 13),
        (600, 1, 60),
        (600, 8, 40),  # 60 is no multiple of the workers for which it was written
        (10_000, 1, 40),
        (10_000, 16, 16),
        (601, 1, 64),  # a prime: one shard at a time would be slow
        (200, 100, 100),  # as many as workers
    ],
)
def test_streams_bound_the_open_shards_and_suit_the_workers(shards, readers, streams):
    assert stream_count(shards, readers) == streams


@pytest.mark.parametrize(
    ("shards", "workers", "name", "reason"),
    [
        (4, 2, "file", "4 shards, 2 input workers: each reads whole shards"),
        (4, 3, "data", "4 shards, 3 input workers: each reads all shards and keeps its share"),
    ],
)
def test_a_policy_comes_with_its_reason(shards, workers, name, reason):
    chosen = shard_policy(shards, shards, workers)

    assert chosen.name == name
    assert reason in chosen.reason
