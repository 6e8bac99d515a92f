"""Random datasets follow the run's seed and the epoch, so a run resumes from any step."""

import itertools
import types

import numpy as np
import pytest
import tensorflow as tf

from shardline.trainer.adapters.adapter import DataAdapter
from shardline.trainer.base import progress

COUNT, SIZE, STEPS = 23, 4, 6


@pytest.fixture(autouse=True)
def no_global_seed():
    """A dataset made again draws other seeds where a test before, or this one, has set a global one."""
    tf.random.set_seed(None)
    yield
    tf.random.set_seed(None)


def stream(data, *, replicas=1, seed=7, steps=None, name="train_data", batch_size=SIZE, **options):
    """A stream of a program's data, as `fit` makes it."""
    size = None if isinstance(data, tf.data.Dataset) else batch_size
    return DataAdapter(0, 1, replicas, seed, size).read(data, name, steps=steps, **options)


def numbers(stream, start=0, count=3 * STEPS):
    """The examples of each batch from a number on."""
    return [batch.ravel().tolist() for batch in stream.batches(start).take(count).as_numpy_iterator()]


def shuffled(count=COUNT):
    return tf.data.Dataset.range(count).shuffle(10)


def in_bodies(number):
    return tf.data.Dataset.range(4).map(lambda one: 4 * number + one).shuffle(4)


def generated():
    return tf.data.Dataset.from_generator(
        lambda: iter(range(COUNT)), output_signature=tf.TensorSpec([], tf.int64)
    )


def looked_up():
    keys, values = tf.range(COUNT, dtype=tf.int64), 100 + tf.range(COUNT, dtype=tf.int64)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), -1)
    return shuffled().map(table.lookup).batch(SIZE)


def captured():
    variable = tf.Variable(1000, dtype=tf.int64)
    return shuffled().map(lambda number: number + variable).batch(SIZE)


DATASETS = {
    "plain": lambda: tf.data.Dataset.range(COUNT).batch(SIZE),
    "shuffled": lambda: shuffled().batch(SIZE),
    "shuffled batches": lambda: tf.data.Dataset.range(COUNT).batch(SIZE).shuffle(6),
    "seeded": lambda: tf.data.Dataset.range(COUNT).shuffle(10, seed=3).batch(SIZE),
    "shuffled once": lambda: (
        tf.data.Dataset.range(COUNT).shuffle(10, reshuffle_each_iteration=False).batch(SIZE)
    ),
    "twice": lambda: shuffled().shuffle(5).batch(SIZE),
    "cached, shuffled": lambda: tf.data.Dataset.range(COUNT).cache().shuffle(10).batch(SIZE),
    "shuffled, cached": lambda: shuffled().cache().batch(SIZE),
    "shuffled, cached, shuffled": lambda: shuffled().cache().shuffle(10).batch(SIZE).prefetch(2),
    "repeated": lambda: shuffled(12).repeat(2).batch(SIZE),
    "interleaved": lambda: tf.data.Dataset.range(6).interleave(in_bodies, cycle_length=3).batch(SIZE),
    "in parallel": lambda: (
        tf.data.Dataset.range(6)
        .interleave(in_bodies, cycle_length=3, num_parallel_calls=2, deterministic=False)
        .batch(SIZE)
    ),
    "mapped": lambda: (
        shuffled().map(lambda one: 2 * one, num_parallel_calls=4, deterministic=False).batch(SIZE)
    ),
    "generated": lambda: generated().shuffle(10).batch(SIZE),
    "random": lambda: tf.data.Dataset.random().take(COUNT).batch(SIZE),
    "zipped": lambda: (
        tf.data.Dataset.zip(shuffled(), shuffled()).map(lambda one, other: one + 100 * other).batch(SIZE)
    ),
    "sampled": lambda: tf.data.Dataset.sample_from_datasets(
        [tf.data.Dataset.range(12), tf.data.Dataset.range(100, 111)]
    ).batch(SIZE),
    "table": looked_up,
    "variable": captured,
    "windows": lambda: shuffled(24).window(4).flat_map(lambda window: window.batch(4)).batch(1),
    "endless": lambda: shuffled().repeat().batch(SIZE),
}


@pytest.mark.parametrize("case", DATASETS)
def test_a_resumed_sequence_is_the_same(case):
    steps = 4 if case == "endless" else None
    whole = numbers(stream(DATASETS[case](), steps=steps))
    assert len(whole) == 3 * STEPS
    again = stream(DATASETS[case](), steps=steps)
    for start in (1, STEPS - 1, STEPS, 2 * STEPS + 3):
        assert numbers(again, start, 3 * STEPS - start) == whole[start:], start


@pytest.mark.parametrize("case", ["seeded", "shuffled batches", "shuffled, cached, shuffled", "interleaved"])
def test_each_epoch_has_all_examples_in_another_order(case):
    found = stream(DATASETS[case]())
    epochs = [list(itertools.chain(*numbers(found, first * STEPS, STEPS))) for first in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [sorted(epochs[0])] * 3
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


@pytest.mark.parametrize("case", ["plain", "shuffled once", "shuffled, cached"])
def test_an_order_that_the_dataset_keeps_is_kept(case):
    first, second, third = (numbers(stream(DATASETS[case]()), at * STEPS, STEPS) for at in range(3))
    assert first == second == third


def split(data):
    return (part.batch(SIZE) for part in (data.skip(10), data.take(10)))


@pytest.mark.parametrize(("seed", "globally"), [(5, None), (5, 3), (None, 3)])
def test_what_a_program_splits_off_stays_apart(seed, globally):
    tf.random.set_seed(globally)
    data = tf.data.Dataset.range(COUNT).shuffle(COUNT, seed=seed, reshuffle_each_iteration=False)
    train, test = split(data)
    read = [list(itertools.chain(*part.as_numpy_iterator())) for part in (train, test)]
    assert list(itertools.chain(*numbers(stream(train, seed=3), 0, 4))) == read[0]
    assert list(itertools.chain(*numbers(stream(test, seed=0), 0, 3))) == read[1]


def test_an_order_without_a_seed_is_the_same_for_every_run_and_reported():
    data = tf.data.Dataset.range(COUNT).shuffle(COUNT, reshuffle_each_iteration=False)
    train, test = split(data)
    with (lines := []) is None or progress.sink(lines.append):
        found = stream(train, seed=3)
    assert "train_data is shuffled once and without a seed" in lines[0].text
    parts = [itertools.chain(*numbers(found, 0, 4)), itertools.chain(*numbers(stream(test, seed=0), 0, 3))]
    assert sorted(itertools.chain(*parts)) == list(range(COUNT))


@pytest.mark.parametrize("case", ["shuffled", "twice", "zipped"])
def test_a_dataset_that_is_made_again_is_the_same_with_a_global_seed(case):
    tf.random.set_seed(3)
    first, second = (numbers(stream(DATASETS[case]())) for _ in range(2))
    assert first == second


def test_a_seed_of_the_dataset_counts():
    one, again, other = (
        numbers(stream(tf.data.Dataset.range(COUNT).shuffle(COUNT, seed=seed).batch(SIZE)))
        for seed in (1, 1, 2)
    )
    assert one == again != other


def test_a_repetition_that_reshuffles_keeps_doing_so():
    first, second = numbers(stream(shuffled(12).repeat(2).batch(12)), 0, 2)
    assert first != second


def test_what_is_shuffled_with_equal_seeds_stays_together():
    inputs = tf.data.Dataset.range(COUNT).shuffle(COUNT, seed=5)
    labels = tf.data.Dataset.range(100, 100 + COUNT).shuffle(COUNT, seed=5)
    for x, y in stream(tf.data.Dataset.zip(inputs, labels).batch(SIZE)).batches().take(12):
        np.testing.assert_array_equal(x + 100, y)


def test_what_is_shuffled_without_seeds_is_in_an_order_of_its_own():
    pairs = stream(tf.data.Dataset.zip(shuffled(), shuffled()).batch(COUNT)).batches().take(1)
    ((x, y),) = pairs.as_numpy_iterator()
    assert x.tolist() != y.tolist()


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_cache_is_filled_once(kind, tmp_path):
    calls = []

    def called(number):
        calls.append(int(number))
        return number

    def mapped(number):
        return tf.ensure_shape(tf.py_function(called, [number], tf.int64), [])

    data = (
        shuffled().map(mapped).cache(str(tmp_path / "cache") if kind == "file" else "").shuffle(5).batch(SIZE)
    )
    found = stream(data)
    assert calls == []
    whole = numbers(found)
    assert sorted(calls) == list(range(COUNT))
    assert numbers(found, 4, 4) == whole[4:8]
    assert len(calls) == COUNT


def test_epochs_of_a_validation_are_the_same_batches():
    found = stream(shuffled().batch(SIZE), steps=2, restart=True, name="validation_data")
    first = numbers(found, 0, 2)
    assert numbers(found, 0, 6) == first * 3
    assert [list(found.sizes(epoch)) for epoch in range(3)] == [[4, 4]] * 3


def test_batches_of_an_unknown_number_are_counted_with_a_line_that_says_so():
    with (lines := []) is None or progress.sink(lines.append):
        stream(generated().batch(SIZE))
    assert [line.text for line in lines] == [
        "counting the batches of train_data, which does not know their number; give steps_per_epoch, or of a "
        "validation validation_steps, to leave this out"
    ]


def local(found, replicas, worker, count, *, workers=None, sized=False):
    """What a process of several replicas hands to them, one after the other."""
    strategy = types.SimpleNamespace(
        num_replicas_in_sync=replicas, distribute_datasets_from_function=lambda made: made(None)
    )
    parts = found.distribute(strategy, worker, workers or replicas, sized=sized)
    return list(parts.take(count).as_numpy_iterator())


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("case", ["shuffled", "generated"])
def test_the_parts_of_all_replicas_are_the_batch(replicas, case):
    whole = numbers(stream(DATASETS[case]()), 0, 9)
    parts = [
        local(stream(DATASETS[case](), replicas=replicas), replicas, worker, 9) for worker in range(replicas)
    ]
    joined = [np.concatenate(step).tolist() for step in zip(*parts, strict=True)]
    assert joined == whole
    lengths = [[len(part) for part in step] for step in zip(*parts, strict=True)]
    assert all(max(each) - min(each) <= 1 and min(each) for each in lengths)


def test_the_replicas_of_one_process_take_turns():
    found = stream(DATASETS["plain"](), replicas=4)
    of_first, of_second = (local(found, 4, worker, 4, workers=2) for worker in range(2))
    assert [part.tolist() for part in of_first] == [[0], [1], [4], [5]]
    assert [part.tolist() for part in of_second] == [[2], [3], [6], [7]]


def test_a_part_comes_with_the_size_of_the_batch():
    (part, size), *_, (last, last_size) = local(stream(DATASETS["plain"](), replicas=2), 2, 1, 6, sized=True)
    assert (part.tolist(), size, size.dtype) == ([2, 3], 4, np.float32)
    assert (last.tolist(), last_size) == ([21, 22], 3)


@pytest.mark.parametrize("kind", ["dataset", "arrays"])
def test_a_rest_that_is_too_small_joins_the_batch_before_it(kind):
    def data():
        texts = np.array([f"text {number}" for number in range(9)])
        x = {"number": np.arange(9, dtype=np.int64), "pixels": np.ones([9, 2, 2], np.uint8)}
        return (x, texts) if kind == "arrays" else tf.data.Dataset.from_tensor_slices((x, texts)).batch(4)

    found = stream(data(), replicas=2)
    assert (found.steps, list(found.sizes(0))) == (2, [4, 5])
    batches = list(found.batches().take(4).as_numpy_iterator())
    assert [y.tolist() for _, y in batches[:2]] == [
        [b"text %d" % at for at in of] for of in (range(4), range(4, 9))
    ]
    assert [x["number"].tolist() for x, _ in batches] == [[0, 1, 2, 3], [4, 5, 6, 7, 8]] * 2
    ((resumed, _),) = found.batches(3).take(1).as_numpy_iterator()
    assert resumed["number"].tolist() == [4, 5, 6, 7, 8]
    assert list(stream(data(), replicas=1).sizes(0)) == [4, 4, 1]


def test_batches_of_one_stay_what_they_are():
    found = stream(tf.data.Dataset.range(5).batch(1), replicas=2)
    assert list(found.sizes(0)) == [1] * 5
    assert numbers(found, 0, 5) == [[number] for number in range(5)]


def test_many_examples_are_beside_the_graph():
    many = np.zeros([1_500_000, 8], np.float32)
    for data in (
        (many, many[:, 0]),
        tf.data.Dataset.from_tensor_slices((many, many[:, 0])).shuffle(100).batch(256),
    ):
        found = stream(data, batch_size=256, shuffle=isinstance(data, tuple))
        assert found.steps == 5860
        batches = found.batches(5859).take(2)
        assert [len(y) for _, y in batches.as_numpy_iterator()] == [96, 256]


def test_a_part_of_the_batches_has_sizes():
    found = stream(tf.data.Dataset.range(COUNT).batch(SIZE).take(3))
    assert (found.steps, list(found.sizes(0))) == (3, [SIZE] * 3)
