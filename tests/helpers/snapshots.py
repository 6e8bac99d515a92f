"""Snapshots of a tiny model, and the checkpoints that hold them."""

import numpy as np

from shardline.trainer.base.settings import TrainSettings
from shardline.trainer.checkpoint import Checkpoints, Identity, Position, Snapshot


def checkpoints(directory, *, keep=3, write=True, dataset="d1", **options):
    settings = TrainSettings(dataset=dataset, model="mnist_cnn", keep_checkpoints=keep, **options)
    identity = Identity("mnist_cnn", dataset, {"model/0000/kernel": "float32 4"})
    return Checkpoints(settings, directory, identity, write=write)


def snapshot(steps, size=4):
    arrays = {
        "model/0000/kernel": np.full(size, steps, np.float32),
        "optimizer/0000/iteration": np.array(steps, np.int64),
        "random/0000/state": np.array([steps, 7], np.uint32),
    }
    return Snapshot(
        Position(1, 10, steps), arrays, {"history": [{"loss": float("inf")}], "stop_training": False}
    )


def save(directory, *steps, **options):
    written = checkpoints(directory, **options)
    for step in steps:
        written.save(snapshot(step))
    written.wait()
    return written
