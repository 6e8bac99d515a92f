"""Epochs of a `tf.data.Dataset`: in the same order from any step on, and what has none is named."""

import types

import numpy as np
import pytest
import tensorflow as tf

from shardline.trainer.adapters.adapter import DataAdapter
from shardline.trainer.base import progress

COUNT, SIZE, STEPS = 23, 4, 6


def stream(data, *, replicas=1, seed=7, steps=None, name="train_data", batch_size=SIZE, **options):
    """A stream of a program's data, as `fit` makes it."""
    size = None if isinstance(data, tf.data.Dataset) else batch_size
    return DataAdapter(0, 1, replicas, seed, size).read(data, name, steps=steps, **options)


def numbers(stream, start=0, count=3 * STEPS):
    """The examples of each batch from a number on."""
    return [batch.ravel().tolist() for batch in stream.batches(start).take(count).as_numpy_iterator()]


def shuffled(count=COUNT):
    return tf.data.Dataset.range(count).shuffle(10, seed=3)


def in_bodies(number):
    return tf.data.Dataset.range(4).map(lambda one: 4 * number + one).shuffle(4, seed=3)


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
    "shuffled batches": lambda: tf.data.Dataset.range(COUNT).batch(SIZE).shuffle(6, seed=3),
    "shuffled once": lambda: (
        tf.data.Dataset.range(COUNT).shuffle(10, seed=3, reshuffle_each_iteration=False).batch(SIZE)
    ),
    "twice": lambda: shuffled().shuffle(5, seed=4).batch(SIZE),
    "cached, shuffled": lambda: tf.data.Dataset.range(COUNT).cache().shuffle(10, seed=5).batch(SIZE),
    "shuffled, cached": lambda: shuffled().cache().batch(SIZE),
    "shuffled, cached, shuffled": lambda: shuffled().cache().shuffle(10, seed=5).batch(SIZE).prefetch(2),
    "repeated": lambda: shuffled(12).repeat(2).batch(SIZE),
    "interleaved": lambda: tf.data.Dataset.range(6).interleave(in_bodies, cycle_length=3).batch(SIZE),
    "generated": lambda: generated().shuffle(10, seed=3).batch(SIZE),
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
    for start in (1, STEPS - 1, STEPS, 2 * STEPS + 3):
        again = stream(DATASETS[case](), steps=steps)
        assert numbers(again, start, 3 * STEPS - start) == whole[start:], start


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (tf.data.Dataset.range(9).shuffle(5).batch(3), "(shuffle(5))"),
        (tf.data.Dataset.range(9).map(abs, 2, deterministic=False).batch(3), "(deterministic=False)"),
        (tf.data.Dataset.random().take(9).batch(3), "(a random dataset)"),
        (
            tf.data.Dataset.range(3).interleave(lambda n: tf.data.Dataset.range(n).shuffle(4)).batch(3),
            "(shuffle(4))",
        ),
    ],
)
def test_what_has_no_seed_is_named(data, named, capsys):
    stream(data)
    assert f"warning: train_data has no seed {named}: a resumed run reads" in capsys.readouterr().out
    DataAdapter(0, 2, 2, 0).read(data, "data", steps=None, restart=True)
    assert f"data has no seed {named}: each process shuffles on its own, and" in capsys.readouterr().out
    stream(shuffled().batch(SIZE))
    assert capsys.readouterr().out == ""


def split(data):
    return (part.batch(SIZE) for part in (data.skip(10), data.take(10)))


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
        tf.data.Dataset.from_tensor_slices((many, many[:, 0])).shuffle(100, seed=1).batch(256),
    ):
        found = stream(data, batch_size=256, shuffle=isinstance(data, tuple))
        assert found.steps == 5860
        batches = found.batches(5859).take(2)
        assert [len(y) for _, y in batches.as_numpy_iterator()] == [96, 256]


def test_a_part_of_the_batches_has_sizes():
    found = stream(tf.data.Dataset.range(COUNT).batch(SIZE).take(3))
    assert (found.steps, list(found.sizes(0))) == (3, [SIZE] * 3)
