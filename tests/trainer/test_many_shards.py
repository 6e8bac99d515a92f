"""Datasets of many shards: few are open at a time, and the order stays the same on any number of workers."""

import resource
import subprocess
import sys

import numpy as np
import pytest

from shardline.trainer.data.examples import describe_dataset
from shardline.trainer.data.pipeline import InputPipeline
from shardline.trainer.sharding import EpochPlan
from tests.helpers.datasets import write_dataset, write_table


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """2,000 shards of one or two images."""
    directory, options = tmp_path_factory.mktemp("many"), {"shape": (12, 12, 1), "encoding": "raw"}
    return directory, write_dataset(directory, records={"train": 2400}, shards=2000, **options)


def images(many, *, workers=1, epochs=range(1), start=0, in_memory=False):
    """Returns the images (as bytes) of each step of all workers."""
    directory, manifest = many
    plan, found = EpochPlan(2400, workers, 120 // workers), []
    feed = InputPipeline(directory, manifest, "train", plan, shuffle_seed=7, in_memory=in_memory)
    for worker in range(workers):
        for step, (batch, _) in enumerate(feed.worker_dataset(workers, worker, epochs, start)):
            found += [set()] * (step == len(found))
            found[step] = found[step] | {image.tobytes() for image in batch.numpy()}
    return found


def test_each_epoch_reads_every_example_once_and_the_shards_in_an_order_of_its_own(many):
    steps = images(many, epochs=range(2))

    assert [len(step) for step in steps] == [120] * 40
    assert len(set().union(*steps[:20])) == len(set().union(*steps[20:])) == 2400
    assert not any(len(one & other) > 60 for one, other in zip(steps[:20], steps[20:], strict=True))


@pytest.mark.parametrize(
    ("workers", "in_memory"),
    [  # shards of their own; all shards; positions of the own ones, which are drawn like the shards
        (2, False),
        (3, False),
        (2, True),
    ],
)
def test_their_order_is_that_of_one_worker_and_of_a_resumed_run(many, workers, in_memory):
    alone = images(many, epochs=range(1, 3))

    assert images(many, workers=workers, epochs=range(1, 3), in_memory=in_memory) == alone
    resumed = images(many, workers=workers, epochs=range(1, 3), start=1200, in_memory=in_memory)
    assert resumed == alone[10:]


def test_a_model_function_gets_examples_of_all_shards(many):
    directory, manifest = many
    found = describe_dataset(directory, manifest).training_examples()["image"]

    assert len(np.unique(found, axis=0)) == 2400


def train(directory, out, limit):
    """Trains two epochs where so many files may be open, by the soft and the hard limit."""
    options = ["--dataset", directory, "--job-dir", out, "--model", "mlp", "--cache", "off", "--epochs", 2]
    return subprocess.run(
        [sys.executable, "-m", "shardline.trainer.task", *map(str, options)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)),
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_six_hundred_shards_train_where_256_files_may_be_open(tmp_path):
    data = tmp_path / "data"
    write_table(data, records={"train": 1200, "validation": 600}, shards=600)
    done = train(data, tmp_path / "out", 256)
    assert done.returncode == 0, done.stderr

    refused = train(data, tmp_path / "refused", 128)
    assert refused.returncode == 2
    (line,) = [line for line in refused.stderr.splitlines() if "open" in line]
    assert "120 shards" in line
    assert "limit of open files is 128" in line
