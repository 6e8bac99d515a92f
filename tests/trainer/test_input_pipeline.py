"""The input pipeline: same examples in the same step on any number of replicas, each once per epoch."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.datasets import write_dataset
from trainer.data.manifest import Feature
from trainer.data.order import EpochPlan
from trainer.data.pipeline import Feed, decode_batch
from trainer.errors import DatasetError


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dataset")
    return directory, write_dataset(directory, records={"train": 97, "validation": 8, "test": 8}, shards=4)


def steps(dataset, replicas, batch, epochs, *, workers=None, seed=7):
    """Returns, per step, the set of images (as bytes) that all replicas together train on."""
    directory, manifest = dataset
    plan = EpochPlan(manifest.splits["train"].records, replicas, batch)
    feed = Feed(directory, manifest, "train", plan, shuffle_seed=seed)
    workers = workers or replicas
    found = [set() for _ in range(plan.steps * len(epochs))]
    for worker in range(workers):
        elements = list(feed.worker_dataset(workers, worker, epochs).as_numpy_iterator())
        local = replicas // workers
        assert len(elements) == len(found) * local
        for i, (images, labels) in enumerate(elements):
            assert images.dtype == np.uint8
            assert labels.dtype == np.int64
            found[i // local] |= {image.tobytes() for image in images}
    return found


@pytest.mark.parametrize(
    ("replicas", "workers"),
    [
        (2, 2),
        (4, 4),
        (3, 3),
        (6, 6),
        (4, 2),
        (2, 1),
    ],  # file, file, data, data, two replicas a worker, mirrored
)
def test_a_step_has_the_same_examples_on_any_number_of_replicas(dataset, replicas, workers):
    alone = steps(dataset, 1, 2 * replicas, range(2))
    together = steps(dataset, replicas, 2, range(2), workers=workers)
    full = 97 // (2 * replicas) - 1  # the last steps may share out the rest differently

    assert together[:full] == alone[:full]


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_an_epoch_has_every_example_once_and_each_epoch_its_own_order(dataset, replicas):
    found = steps(dataset, replicas, 4, range(2))
    half = len(found) // 2

    for epoch in (found[:half], found[half:]):
        assert sum(map(len, epoch)) == 97
        assert len(set().union(*epoch)) == 97
    assert found[:half] != found[half:]


def test_a_resumed_run_sees_the_epochs_that_are_left(dataset):
    assert steps(dataset, 2, 4, range(1, 3)) == steps(dataset, 2, 4, range(3))[12:]


def test_a_shard_of_another_size_is_refused(tmp_path):
    manifest = write_dataset(tmp_path)
    shard = tmp_path / manifest.splits["train"].shards[1].file
    shard.write_bytes(shard.read_bytes()[:-1])
    feed = Feed(tmp_path, manifest, "train", EpochPlan(96, 1, 8))

    with pytest.raises(DatasetError, match=f"{shard.name} has .* bytes, the manifest says"):
        feed.worker_dataset(1, 0, range(1))
    shard.unlink()
    with pytest.raises(DatasetError, match="is missing"):
        feed.worker_dataset(1, 0, range(1))


@pytest.mark.parametrize("shape", [(12, 12, 3), (10, 14, 1)])
@pytest.mark.parametrize(
    ("encoding", "compression"),
    [("png", "gzip"), ("raw", ""), ("raw", "gzip")],
    ids=lambda name: name or "plain",
)
def test_every_way_of_storing_gives_the_same_batches(tmp_path, encoding, compression, shape):
    plain = tmp_path / "plain", write_dataset(tmp_path / "plain", shape=shape)
    other = (
        tmp_path / "other",
        write_dataset(tmp_path / "other", shape=shape, encoding=encoding, compression=compression),
    )

    assert steps(other, 1, 8, range(1)) == steps(plain, 1, 8, range(1))


def test_raw_pixels_of_another_size_are_refused():
    with pytest.raises(tf.errors.InvalidArgumentError):
        decode_batch(tf.constant([bytes(12 * 12 * 3 - 1)]), Feature("image", "uint8", (12, 12, 3), "raw"))


def test_images_that_differ_in_size_cannot_be_trained_on(tmp_path):
    manifest = write_dataset(tmp_path)
    features = (Feature("image", "uint8", (None, None, 3), "jpeg"), *manifest.features[1:])

    with pytest.raises(
        DatasetError, match="differ in size and cannot be batched; preprocess with image_size"
    ):
        dataclasses.replace(manifest, features=features).info()
