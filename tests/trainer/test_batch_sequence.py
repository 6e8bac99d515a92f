"""Batch sequence of a program's own data: the same for every reader, from any step on."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from shardline.trainer.adapters.adapter import DataAdapter
from shardline.trainer.adapters.batches import BatchSequence
from shardline.trainer.base.errors import SettingsError, ShardlineError
from shardline.trainer.checkpoint.state import Position

_COUNT, _BATCH = 23, 5


def numbers() -> tf.data.Dataset:
    return tf.data.Dataset.range(_COUNT)


def shuffled() -> tf.data.Dataset:
    return numbers().shuffle(_COUNT, seed=1).batch(_BATCH)


def repeated() -> tf.data.Dataset:
    return numbers().shuffle(_COUNT, seed=1).repeat().batch(_BATCH)


def generated() -> tf.data.Dataset:
    spec = tf.TensorSpec((), tf.int64)
    return (
        tf.data.Dataset.from_generator(lambda: range(_COUNT), output_signature=spec)
        .shuffle(9, seed=1)
        .batch(_BATCH)
    )


def stream(data: Any, steps: int | None = None, replicas: int = 1, **options: Any) -> BatchSequence:
    adapter = DataAdapter(0, 1, replicas, options.pop("seed", 0), options.pop("batch_size", None))
    return adapter.read(data, "train_data", steps=steps, **options)


def read(found: BatchSequence, start: int, count: int) -> list[list[int]]:
    return [batch.tolist() for batch in found.batches(start).take(count).as_numpy_iterator()]


@pytest.mark.parametrize(
    ("data", "sizes"),
    [
        (shuffled(), [5, 5, 5, 5, 3]),
        (numbers().batch(_BATCH, drop_remainder=True).prefetch(1), [5, 5, 5, 5]),
        (numbers().batch(_BATCH).map(lambda batch: batch + 1), [5, 5, 5, 5, 3]),
        (generated(), [5, 5, 5, 5, 3]),
        (np.arange(_COUNT), [_COUNT]),
    ],
)
def test_an_epoch_is_all_of_the_data(data: Any, sizes: list[int]) -> None:
    found = stream(data)
    assert list(found.sizes(0)) == list(found.sizes(2)) == sizes
    assert [len(batch) for batch in read(found, 0, found.steps)] == sizes


def test_epochs_of_a_number_of_steps_continue_where_the_last_has_ended() -> None:
    found = stream(numbers().batch(_BATCH), 3)
    assert [list(found.sizes(epoch)) for epoch in range(3)] == [[5, 5, 5], [5, 3, 5], [5, 5, 5]]
    assert read(found, 3, 3)[0][0] == 15


#: Two replicas of this process, which take what it reads in turn.
TWO = SimpleNamespace(num_replicas_in_sync=2, distribute_datasets_from_function=lambda make: make(None))


def parts(found: BatchSequence, count: int) -> list[tuple[list[list[int]], float]]:
    """The parts of two replicas in each step, and the examples that the step is said to have."""
    taken = iter(found.distribute(TWO, 0, 1, sized=True).take(2 * count).as_numpy_iterator())
    return [
        ([own.tolist(), other.tolist()], size) for (own, size), (other, _) in zip(taken, taken, strict=True)
    ]


def test_a_batch_that_cannot_be_shared_is_refused_when_it_comes() -> None:
    data = tf.data.Dataset.from_generator(
        lambda: ([1, 2], [3]), output_signature=tf.TensorSpec([None], tf.int64)
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="fewer examples than there are replicas"):
        parts(stream(data, replicas=2), 2)


def test_arrays_are_shuffled_in_every_epoch() -> None:
    found = stream(np.arange(_COUNT), batch_size=_BATCH, shuffle=True)
    first, second = read(found, 0, 5), read(found, 5, 5)
    assert first != second
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(_COUNT))
    assert read(found, 7, 3) == second[2:]


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        (numbers(), {}, r"train_data yields single values, int64 \(\); make batches of them, .batch\(64\)"),
        (repeated(), {}, "train_data has no end; give steps_per_epoch"),
        (numbers().take(0).batch(2), {}, "train_data has no batches"),
        (numbers().filter(lambda value: value < 0).batch(2), {}, "train_data has no batches"),
        (numbers().batch(2), {"replicas": 24}, "23 examples for 24 replicas"),
        (np.zeros(3), {"batch_size": 0}, "batch_size must be at least 1"),
        ("data", {}, "no manifest.json in data"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused(data: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ShardlineError, match=words):
        stream(data, **options)


def test_random_numbers_of_a_function_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    stream(numbers().map(lambda value: value + tf.random.uniform([], 0, 3, tf.int64)).batch(2))
    assert "warning: train_data draws random numbers (RandomUniformInt)" in capsys.readouterr().out


@pytest.mark.parametrize("policy", ["FILE", "OFF"])
def test_a_policy_that_shards_a_dataset_is_refused_between_processes(policy: str) -> None:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = getattr(tf.data.experimental.AutoShardPolicy, policy)
    data = shuffled().with_options(options)
    with pytest.raises(SettingsError, match=rf"asks for AutoShardPolicy.{policy}.* leave the policy out"):
        DataAdapter(0, 2, 2, 0).read(data, "train_data", steps=None)
    assert stream(data).steps == 5


def test_a_dataset_directory_is_read_from_any_position_on(dataset: Path) -> None:
    found = stream(str(dataset), batch_size=20)
    assert (found.steps, list(found.sizes(2))) == (5, [20, 20, 20, 20, 16])

    def labels(start: int, count: int) -> list[list[int]]:
        epoch, done = divmod(start, found.steps)
        batches = found.raw_batches(Position(epoch, 20 * done, start)).map(found.decode)
        return [y.tolist() for _, y in batches.take(count).as_numpy_iterator()]

    whole = labels(0, 12)
    assert [len(batch) for batch in whole[:6]] == [20, 20, 20, 20, 16, 20]
    assert whole[:5] != whole[5:10]
    for start in (3, 5, 9):
        assert labels(start, 12 - start) == whole[start:]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": 3}, "whose epoch is all of it"),
        ({"replicas": 3, "batch_size": 32}, "batch_size must be a multiple of 3, the number of replicas"),
        ({"replicas": 97, "batch_size": 97}, "96 examples are too few for 97 replicas"),
    ],
)
def test_a_dataset_directory_is_refused(dataset: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        stream(dataset, **options)


def test_with_more_replicas_the_next_step_follows_from_the_examples() -> None:
    """The last batch of 3 is a step for two replicas; for four it joins the one before."""
    two, four = (stream(np.arange(_COUNT), replicas=count, batch_size=_BATCH) for count in (2, 4))
    assert (two.steps, four.steps) == (5, 4)
    assert two.fixed == four.fixed
    assert four.next_step(Position(1, 10, 7)) == 2
    assert four.next_step(Position(1, 20, 9)) == 4  # its last step has begun before


def test_given_steps_and_another_last_batch_are_another_run() -> None:
    """The epochs of the data would begin elsewhere."""
    two, four = (stream(np.arange(_COUNT), 7, replicas=count, batch_size=_BATCH) for count in (2, 4))
    assert two.fixed != four.fixed
