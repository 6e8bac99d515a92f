"""The input pipeline: same examples in the same step on any number of replicas, each once per epoch."""

import dataclasses
import itertools

import numpy as np
import pytest
import tensorflow as tf

from shardline.trainer.base.errors import DatasetError, SettingsError
from shardline.trainer.checkpoint.state import Position
from shardline.trainer.data.examples import decode_batch
from shardline.trainer.data.pipeline import InputPipeline
from shardline.trainer.data.transforms import class_weights, load_augmentation, load_transform
from shardline.trainer.manifest import Feature, Split
from shardline.trainer.sharding import EpochPlan
from tests.helpers.datasets import write_dataset
from tests.helpers.labels import counted

BRIGHTEN = "tests.helpers.augmentations:brighten"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dataset")
    return directory, write_dataset(directory, records={"train": 97, "validation": 8, "test": 8}, shards=4)


def make_feed(dataset, replicas, batch, seed=7, **options):
    directory, manifest = dataset
    plan = EpochPlan(manifest.splits["train"].records, replicas, batch)
    return InputPipeline(directory, manifest, "train", plan, shuffle_seed=seed, **options)


def steps(dataset, replicas, batch, epochs, *, workers=None, seed=7, start=0, **options):
    """Returns, per step, the set of images (as bytes) that all replicas together train on."""
    feed = make_feed(dataset, replicas, batch, seed, **options)
    workers = workers or replicas
    plan = feed.plan
    first = dataclasses.replace(plan, start=start).steps
    found = [set() for _ in range(first + plan.steps * (len(epochs) - 1))]
    for worker in range(workers):
        elements = list(feed.worker_dataset(workers, worker, epochs, start).as_numpy_iterator())
        local = replicas // workers
        assert len(elements) == len(found) * local
        for i, (images, labels) in enumerate(elements):
            assert images.dtype == np.uint8
            assert labels.dtype == np.int64
            found[i // local] |= {image.tobytes() for image in images}
    return found


@pytest.mark.parametrize(
    ("replicas", "workers"),
    [  # file, data, two replicas a worker; file, data, mirrored
        (2, 2),
        (3, 3),
        (4, 2),
    ],
)
def test_a_step_has_the_same_examples_on_any_number_of_replicas(dataset, replicas, workers):
    alone = steps(dataset, 1, 2 * replicas, range(2))
    together = steps(dataset, replicas, 2, range(2), workers=workers)
    full = 97 // (2 * replicas) - 1  # the last steps may share out the rest differently

    assert together[:full] == alone[:full]


def test_no_two_seeds_and_epochs_have_the_same_order(dataset):
    """Nor the same order within a shard: records 0, 4, 8, ... of the epoch come from the first one."""
    orders, shards = set(), set()
    for seed in (0, 1, 2, 4, 8, 2**32, 2**40):
        feed = make_feed(dataset, 1, 97, seed)
        for images, _ in feed.worker_dataset(1, 0, range(3)).as_numpy_iterator():
            order = [hash(image.tobytes()) for image in images]
            orders.add(tuple(order))
            shards.add(tuple(order[::4]))
    assert len(orders) == len(shards) == 7 * 3


@pytest.mark.parametrize("other", [1, 2**32])
def test_every_run_epoch_and_example_has_an_augmentation_of_its_own(dataset, other):
    augmentation = load_augmentation(BRIGHTEN, dataset[1].info())
    feeds = [make_feed(dataset, 1, 97, seed, augmentation=augmentation, epochs=2) for seed in (0, other)]
    seeds = [raw["seed"] for feed in feeds for raw in feed.raw_batches().as_numpy_iterator()]
    assert len({tuple(seed) for seed in np.concatenate(seeds)}) == 4 * 97


@pytest.mark.parametrize(("replicas", "in_memory"), [(3, False), (2, True)])
def test_an_epoch_has_every_example_once_and_each_epoch_its_own_order(dataset, replicas, in_memory):
    found = steps(dataset, replicas, 4, range(3, 8), in_memory=in_memory)  # each is read while one is trained
    size = len(found) // 5
    epochs = [found[first : first + size] for first in range(0, len(found), size)]

    for number, epoch in enumerate(epochs):
        assert sum(map(len, epoch)) == 97
        assert len(set().union(*epoch)) == 97
        # The order is that of the epoch's number, wherever a run begins.
        assert epoch == steps(dataset, replicas, 4, range(3 + number, 4 + number))
    assert all(one != other for one, other in itertools.combinations(epochs, 2))


@pytest.mark.parametrize(("replicas", "augment"), [(2, BRIGHTEN), (3, "")])
def test_what_is_kept_in_memory_comes_in_the_order_in_which_it_is_read(dataset, replicas, augment):
    info = dataset[1].info()
    options = {"augmentation": load_augmentation(augment, info)} if augment else {}
    for worker in range(2):
        read, kept = (
            list(
                make_feed(dataset, replicas, 5, in_memory=in_memory, **options)
                .worker_dataset(replicas, worker, range(2), 30)
                .as_numpy_iterator()
            )
            for in_memory in (False, True)
        )
        assert len(read) == len(kept)
        for one, other in zip(read, kept, strict=True):
            for left, right in zip(one, other, strict=True):
                np.testing.assert_array_equal(left, right)


def test_a_shard_of_another_size_is_refused(tmp_path):
    manifest = write_dataset(tmp_path)
    shard = tmp_path / manifest.splits["train"].shards[1].file
    shard.write_bytes(shard.read_bytes()[:-1])
    feed = InputPipeline(tmp_path, manifest, "train", EpochPlan(96, 1, 8))

    with pytest.raises(DatasetError, match=f"{shard.name} has .* bytes, the manifest says"):
        feed.worker_dataset(1, 0, range(1))
    shard.unlink()
    with pytest.raises(DatasetError, match=f"cannot read .*{shard.name}: No such file"):
        feed.worker_dataset(1, 0, range(1))


def test_raw_images_give_the_same_batches(tmp_path):
    shape = (10, 14, 1)
    plain = tmp_path / "plain", write_dataset(tmp_path / "plain", shape=shape)
    other = tmp_path / "other", write_dataset(tmp_path / "other", shape=shape, encoding="raw")

    assert steps(other, 1, 8, range(1)) == steps(plain, 1, 8, range(1))


def test_raw_pixels_of_another_size_are_refused():
    with pytest.raises(tf.errors.InvalidArgumentError):
        decode_batch(tf.constant([bytes(12 * 12 * 3 - 1)]), Feature("image", "uint8", (12, 12, 3), "raw"))


@pytest.mark.parametrize("name", ["words", "pixels_of_any_number", "of_any_rank"])
def test_a_transform_whose_examples_vary_in_size_is_refused(dataset, name):
    transform = load_transform(f"tests.helpers.augmentations:{name}")
    with pytest.raises(
        SettingsError, match=r"transform makes batches of .*, whose examples vary in size; give"
    ):
        _ = make_feed(dataset, 1, 8, transform=transform).element_spec


@pytest.mark.parametrize(("replicas", "workers", "done"), [(3, 3, 1), (4, 2, 2), (2, 2, 0)])
def test_a_run_resumes_in_the_middle_of_an_epoch(dataset, replicas, workers, done):
    plan = EpochPlan(97, replicas, 4)
    start = sum(plan.step_sizes[:done])
    whole = steps(dataset, replicas, 4, range(1, 3), workers=workers)

    assert steps(dataset, replicas, 4, range(1, 3), workers=workers, start=start) == whole[done:]


@pytest.mark.parametrize(("replicas", "workers", "batch"), [(3, 3, 5), (1, 1, 7), (4, 2, 3)])
def test_an_epoch_resumes_with_other_replicas_and_batches(dataset, replicas, workers, batch):
    """32 examples were trained by 2 x 8: 32 is no multiple of 3 replicas or of a batch of 7."""
    before = steps(dataset, 2, 8, range(1))[:2]
    after = steps(dataset, replicas, batch, range(1), workers=workers, start=32)

    assert sum(map(len, before + after)) == 97
    assert len(set().union(*before, *after)) == 97


def test_raw_batches_decode_to_the_same_on_another_machine(dataset):
    feed = make_feed(dataset, 1, 8, augmentation=load_augmentation(BRIGHTEN, dataset[1].info()), epochs=2)
    raw = list(feed.raw_batches(Position(examples=16)))

    decode = tf.function(feed.decode)
    decoded = [decode(batch)[0].numpy().tobytes() for batch in raw]
    direct = [x.tobytes() for x, _ in feed.worker_dataset(1, 0, range(2), 16).as_numpy_iterator()]
    assert decoded == direct
    assert len(direct) == 11 + 13
    assert {key: value.dtype for key, value in raw[0].items()} == {"example": tf.string, "seed": tf.int64}


def test_an_example_is_augmented_alike_on_any_number_of_workers(dataset):
    augmentation = load_augmentation(BRIGHTEN, dataset[1].info())
    alone = steps(dataset, 1, 6, range(2), augmentation=augmentation)
    together = steps(dataset, 3, 2, range(2), augmentation=augmentation)
    plain = steps(dataset, 1, 6, range(2))

    assert set().union(*together) == set().union(*alone)
    assert together[:14] == alone[:14]
    assert len(set().union(*alone)) > 180  # other numbers in each epoch
    assert set().union(*plain).isdisjoint(alone[0])
    resumed = steps(dataset, 1, 6, range(2), augmentation=augmentation, start=60)
    assert resumed == alone[10:]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "cropped",
            r"returned \(uint8 \(4, 12, 3\), int64 \(\)\); it must return \(x, y\) of the same shapes and",
        ),
        ("only_x", r"returned uint8 \(12, 12, 3\); it must return"),
        ("broken", r"failed on an example.*ValueError.*augmentations.py.*no such filter"),
        ("not_a_function", "is not a function but int"),
        ("brigthen", "has no 'brigthen', it has .*brighten"),
    ],
)
def test_an_augmentation_that_cannot_be_used_is_refused(dataset, name, message):
    with pytest.raises(SettingsError, match=message):
        load_augmentation(f"tests.helpers.augmentations:{name}", dataset[1].info())


def test_classes_have_weights(dataset):
    feed = make_feed(dataset, 1, 8, class_weights=class_weights({"middle": 3}, dataset[1]))

    for _, labels, weights in feed.worker_dataset(1, 0, range(1)).as_numpy_iterator():
        assert weights.dtype == np.float32
        np.testing.assert_array_equal(weights, np.where(labels == 1, 3.0, 1.0))


def test_balanced_classes_weigh_the_same(dataset):
    _, manifest = dataset
    counts = manifest.splits["train"].labels["label"].counts
    weights = class_weights("balanced", manifest)
    assert [count * weight for count, weight in zip(counts, weights, strict=True)] == pytest.approx(
        [97 / 3] * 3
    )

    train = Split(manifest.splits["train"].shards, counted((90, 7, 0)))
    skewed = dataclasses.replace(manifest, splits={"train": train})
    assert class_weights("balanced", skewed) == pytest.approx((97 / 270, 97 / 21, 0))
    assert class_weights("", manifest) == ()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"midle": 2}, "no class 'midle', it has middle, "),
        ({"middle": -1}, "'middle' must be a number of at least 0, got -1"),
        ({"middle": True}, "got True"),
        ({"middle": float("nan")}, "got nan"),
    ],
)
def test_class_weights_that_cannot_be_are_refused(dataset, setting, message):
    with pytest.raises(SettingsError, match=message):
        class_weights(setting, dataset[1])
