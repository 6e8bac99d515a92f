"""Batch sequence of a program's data: the same for every reader, from any step on; what has none is named."""

import types
from itertools import chain

import numpy as np
import pytest
import tensorflow as tf

from shardline.trainer.base import progress
from shardline.trainer.base.errors import SettingsError, ShardlineError
from shardline.trainer.checkpoint.state import Position
from shardline.trainer.data.adapters import DataAdapter

COUNT, SIZE, STEPS = 23, 4, 6


@pytest.fixture(autouse=True)
def no_global_seed():
    """With a global seed, which another test may have set, every dataset has a seed."""
    tf.random.set_seed(None)


def stream(data, *, replicas=1, seed=7, steps=None, name="train_data", batch_size=SIZE, **options):
    """A stream of a program's data, as `fit` makes it."""
    size = None if isinstance(data, tf.data.Dataset) else batch_size
    return DataAdapter(0, 1, replicas, seed, size).read_batches(data, name, steps=steps, **options)


def numbers(stream, start=0, count=3 * STEPS):
    """The examples of each batch from a number on."""
    return [batch.ravel().tolist() for batch in stream.batches(start).take(count).as_numpy_iterator()]


def range_():
    return tf.data.Dataset.range(COUNT)


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
    "plain": lambda: range_().batch(SIZE),
    "shuffled": lambda: shuffled().batch(SIZE),
    "shuffled batches": lambda: range_().batch(SIZE).shuffle(6, seed=3),
    "shuffled once": lambda: range_().shuffle(10, seed=3, reshuffle_each_iteration=False).batch(SIZE),
    "twice": lambda: shuffled().shuffle(5, seed=4).batch(SIZE),
    "cached, shuffled": lambda: range_().cache().shuffle(10, seed=5).batch(SIZE),
    "shuffled, cached": lambda: shuffled().cache().batch(SIZE),
    "shuffled, cached, shuffled": lambda: shuffled().cache().shuffle(10, seed=5).batch(SIZE).prefetch(2),
    "repeated": lambda: shuffled(12).repeat(2).batch(SIZE),
    "twice, repeated": lambda: shuffled(12).shuffle(5, seed=4).repeat(2).batch(SIZE),
    "interleaved": lambda: tf.data.Dataset.range(6).interleave(in_bodies, cycle_length=3).batch(SIZE),
    "generated": lambda: generated().shuffle(10, seed=3).batch(SIZE),
    "table": looked_up,
    "variable": captured,
    "windows": lambda: shuffled(24).window(4).flat_map(lambda window: window.batch(4)).batch(1),
    "joined": lambda: shuffled(12).concatenate(shuffled(11)).batch(SIZE),
    "joined, shuffled": lambda: (
        tf.data.Dataset.range(12).concatenate(tf.data.Dataset.range(11)).shuffle(9, seed=3).batch(SIZE)
    ),
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


def test_epochs_before_a_resume_are_begun_and_not_read():
    read = []

    def number(value):
        read.append(int(value))
        return value

    numbered = tf.data.Dataset.range(COUNT).map(lambda value: tf.py_function(number, [value], tf.int64))
    data = numbered.map(lambda value: tf.ensure_shape(value, [])).shuffle(30, seed=1).shuffle(5, seed=2)
    found = stream(data.batch(SIZE))
    numbers(found, 5 * STEPS, 1)
    assert len(read) == COUNT


def test_a_repetition_is_not_read_ahead():
    """Shuffles past the end of an epoch would draw from the generator of those that follow."""
    data = shuffled(8).repeat().batch(SIZE).prefetch(50)
    found = stream(data, steps=2)
    expected = [batch.tolist() for batch in shuffled(8).repeat().batch(SIZE).take(1).as_numpy_iterator()]
    assert [found.first_batch.numpy().tolist()] == expected
    second = shuffled(8).repeat().batch(SIZE)
    for _ in second.take(1):
        pass
    whole = [batch.tolist() for batch in second.take(6).as_numpy_iterator()]
    assert numbers(found, 0, 6) == whole


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (lambda: tf.data.Dataset.range(9).shuffle(5), "(shuffle(5))"),
        (lambda: tf.data.Dataset.range(9).map(abs, 2, deterministic=False), "(deterministic=False)"),
        (lambda: tf.data.Dataset.random().take(9), "(a random dataset)"),
        (
            lambda: tf.data.Dataset.range(3).interleave(lambda n: tf.data.Dataset.range(n).shuffle(4)),
            "(shuffle(4))",
        ),
    ],
)
def test_what_has_no_seed_is_named(data, named, capsys):
    data = data().batch(3)
    stream(data)
    assert f"warning: train_data has no seed {named}: a resumed run reads" in capsys.readouterr().out
    DataAdapter(0, 2, 2, 0).read_batches(data, "data", steps=None, restart=True)
    assert f"data has no seed {named}: each process shuffles on its own, and" in capsys.readouterr().out
    stream(shuffled().batch(SIZE))
    assert capsys.readouterr().out == ""


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
    found = stream(range_().batch(SIZE).take(3))
    assert (found.steps, list(found.sizes(0))) == (3, [SIZE] * 3)


@pytest.mark.parametrize(
    ("data", "sizes"),
    [
        (shuffled().batch(SIZE), [4, 4, 4, 4, 4, 3]),
        (range_().batch(SIZE, drop_remainder=True).prefetch(1), [4] * 5),
        (range_().batch(SIZE).map(lambda batch: batch + 1), [4, 4, 4, 4, 4, 3]),
        (generated().batch(SIZE), [4, 4, 4, 4, 4, 3]),
        (np.arange(COUNT), [COUNT]),
    ],
)
def test_an_epoch_is_all_of_the_data(data, sizes):
    found = stream(data, batch_size=None)
    assert list(found.sizes(0)) == list(found.sizes(2)) == sizes
    assert [len(batch) for batch in numbers(found, 0, found.steps)] == sizes


def test_epochs_of_a_number_of_steps_continue_where_the_last_has_ended():
    found = stream(range_().batch(5), steps=3)
    assert [list(found.sizes(epoch)) for epoch in range(3)] == [[5, 5, 5], [5, 3, 5], [5, 5, 5]]
    assert numbers(found, 3, 3)[0][0] == 15


def test_a_batch_that_cannot_be_shared_is_refused_when_it_comes():
    data = tf.data.Dataset.from_generator(
        lambda: ([1, 2], [3]), output_signature=tf.TensorSpec([None], tf.int64)
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="fewer examples than there are replicas"):
        local(stream(data, replicas=2), 2, 0, 4, workers=1)


def test_arrays_are_shuffled_in_every_epoch():
    found = stream(np.arange(COUNT), batch_size=5, shuffle=True)
    first, second = numbers(found, 0, 5), numbers(found, 5, 5)
    assert first != second
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(COUNT))
    assert numbers(found, 7, 3) == second[2:]


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        (range_(), {}, r"yields single values, int64 \(\); make batches of them, .batch\(64\)"),
        (shuffled().repeat().batch(SIZE), {}, "train_data has no end; give steps_per_epoch"),
        (range_().take(0).batch(2), {}, "train_data has no batches"),
        (range_().filter(lambda value: value < 0).batch(2), {}, "train_data has no batches"),
        (range_().batch(2), {"replicas": 24}, "23 examples for 24 replicas"),
        (np.zeros(3), {"batch_size": 0}, "batch_size must be at least 1"),
        ("data", {}, "no manifest.json in data"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused(data, options, words):
    with pytest.raises(ShardlineError, match=words):
        stream(data, **options)


def test_random_numbers_of_a_function_are_reported(capsys):
    stream(range_().map(lambda value: value + tf.random.uniform([], 0, 3, tf.int64)).batch(2))
    assert "warning: train_data draws random numbers (RandomUniformInt)" in capsys.readouterr().out


@pytest.mark.parametrize("policy", ["FILE", "OFF"])
def test_a_policy_that_shards_a_dataset_is_refused_between_processes(policy):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = getattr(tf.data.experimental.AutoShardPolicy, policy)
    data = shuffled().batch(SIZE).with_options(options)
    with pytest.raises(SettingsError, match=rf"asks for AutoShardPolicy.{policy}.* leave the policy out"):
        DataAdapter(0, 2, 2, 0).read_batches(data, "train_data", steps=None)
    assert stream(data).steps == STEPS


def test_a_dataset_directory_is_read_from_any_position_on(dataset):
    found = stream(str(dataset), batch_size=20)
    assert (found.steps, list(found.epoch(Position(2, 0, 10)).step_sizes)) == (5, [20, 20, 20, 20, 16])

    def labels(start, count):
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
def test_a_dataset_directory_is_refused(dataset, options, words):
    with pytest.raises(SettingsError, match=words):
        stream(dataset, **options)


def test_with_more_replicas_the_next_step_follows_from_the_examples():
    """The last batch of 3 is a step for two replicas; for four it joins the one before."""
    two, four = (stream(np.arange(COUNT), replicas=count, batch_size=5) for count in (2, 4))
    assert (two.steps, four.steps) == (5, 4)
    assert two.fixed == four.fixed
    assert four.epoch(Position(1, 10, 7)).first_step == 2
    assert four.epoch(Position(1, 20, 9)).first_step == 4  # its last step has begun before


def test_given_steps_and_another_last_batch_are_another_run():
    """The epochs of the data would begin elsewhere."""
    two, four = (stream(np.arange(COUNT), steps=7, replicas=count, batch_size=5) for count in (2, 4))
    assert two.fixed != four.fixed


DECODED = {
    "repeated at the end": (lambda decode: shuffled().map(decode).batch(SIZE).repeat().prefetch(2), 0, 4),
    "repeated, then batched": (lambda decode: shuffled().repeat().map(decode).batch(SIZE), 0, 4),
    "three times": (lambda decode: shuffled().repeat(3).map(decode, 2).batch(SIZE).prefetch(1), 0, 4),
    "an epoch": (lambda decode: shuffled().batch(SIZE).map(decode, num_parallel_calls=2), 0, None),
    "padded": (
        lambda decode: shuffled().map(decode, 3).padded_batch(SIZE).prefetch(1).take(5).repeat(),
        0,
        4,
    ),
    "zipped": (lambda decode: tf.data.Dataset.zip((shuffled().map(decode), range_())).skip(2).batch(2), 0, 4),
    "an unknown number": (lambda decode: generated().map(decode).batch(SIZE).repeat(), 0, 4),
    "decoded, then shuffled": (lambda decode: range_().map(decode).shuffle(9, 3).batch(SIZE), 13, None),
}


@pytest.mark.parametrize("case", DECODED)
def test_what_is_skipped_is_not_decoded_again(case):
    """A resume decodes no more than the batches that it returns, unless a shuffle comes after that."""
    make, again, steps = DECODED[case]
    calls = []

    def decode(number):
        decoded = tf.numpy_function(lambda value: (calls.append(0), value * 2)[1], [number], tf.int64)
        return tf.ensure_shape(decoded, number.shape)

    def read(start, count):
        found = stream(make(decode), steps=steps)
        flat = [tf.nest.flatten(batch) for batch in found.batches(start).take(count).as_numpy_iterator()]
        return [[part.tolist() for part in batch] for batch in flat]

    whole = read(0, 40)
    for start in (3, 34):
        calls.clear()
        assert read(start, 1) == whole[start : start + 1], start
        ahead = 6  # batches that are prefetched, and calls in flight
        assert len(calls) <= SIZE * ahead + again, start


def test_what_is_read_again_is_reported_while_it_is_read():
    """A watchdog that hears of it ends no resume that proceeds, and one that stands still."""
    events = []

    def decode(number):
        tf.py_function(lambda: events.append("read"), [], [])
        return number

    found = stream(range_().map(decode).shuffle(2, seed=3).batch(SIZE))
    found.watch(lambda done, total: events.append((done, total)))
    numbers(found, 4, 1)
    reported = [event for event in events if event != "read"]
    assert (reported[0], reported[-1]) == ((0, 16), (16, 16))
    assert len(reported) > 3
    assert events.index(reported[0]) < events.index("read") < events.index(reported[1])


def test_a_first_batch_reads_nothing_ahead_of_a_shuffle():
    """Parallel calls would draw orders of repetitions to come, as many as they had time for."""
    for _ in range(3):
        found = stream(
            shuffled(8).repeat().batch(4).map(lambda part: part + 1, num_parallel_calls=8), steps=2
        )
        first, second = found.first_batch.numpy().tolist(), numbers(found, 0, 2)
        data = shuffled(8)
        orders = [[number + 1 for number in data.as_numpy_iterator()] for _ in range(2)]
        assert [first, *second] == [orders[0][:4], orders[1][:4], orders[1][4:]]
