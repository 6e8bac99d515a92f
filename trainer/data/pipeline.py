"""The input pipeline: shards of a split to batches of decoded images and labels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tensorflow as tf

from trainer.data.decode import decode_stored
from trainer.data.manifest import Feature, Manifest, Split
from trainer.data.order import EpochPlan, WorkerShards, worker_shards
from trainer.errors import DatasetError

# Records held for shuffling, over all shards of the split. Shards are dealt at random by preprocessing, so
# that a window over each of them is enough.
_SHUFFLE_RECORDS = 16_384


@dataclass(frozen=True)
class Feed:
    """One split of a dataset, ready to be distributed.

    Attributes:
        directory: The dataset directory.
        manifest: Its manifest.
        split: Name of the split.
        plan: Steps and batch sizes of one epoch.
        shuffle_seed: Seed of the order in each epoch; None keeps the order of the shards.
    """

    directory: Path
    manifest: Manifest
    split: str
    plan: EpochPlan
    shuffle_seed: int | None = None

    def distribute(self, strategy: tf.distribute.Strategy, first_epoch: int, epochs: int) -> tf.data.Dataset:
        """Returns the distributed dataset over epochs first_epoch..epochs-1, `plan.steps` elements each.

        Elements are pairs per replica: images uint8 (batch, height, width, channels), labels int64 (batch).
        """

        def dataset(context: tf.distribute.InputContext) -> tf.data.Dataset:
            return self.worker_dataset(
                context.num_input_pipelines, context.input_pipeline_id, range(first_epoch, epochs)
            )

        return strategy.distribute_datasets_from_function(dataset)

    def worker_dataset(self, workers: int, worker: int, epochs: range) -> tf.data.Dataset:
        """Returns what one of `workers` input workers reads: its replicas' batches, step by step."""
        shards = worker_shards(shard_paths(self.directory, self.manifest.splits[self.split]), workers, worker)
        # Replicas worker, worker + workers, ... live on this worker and take its elements in turn.
        mine = range(worker, self.plan.replicas, workers)
        sizes = [size for step in zip(*map(self.plan.batch_sizes, mine), strict=True) for size in step]
        records = tf.data.Dataset.range(epochs.start, epochs.stop).flat_map(
            lambda epoch: self._records(shards, epoch)
        )
        batches = records.batch(self.plan.per_replica_batch_size).rebatch(sizes)
        image = self.manifest.image
        return batches.map(
            lambda serialized: parse_batch(serialized, image), num_parallel_calls=tf.data.AUTOTUNE
        ).prefetch(tf.data.AUTOTUNE)

    def _records(self, shards: WorkerShards, epoch: tf.Tensor) -> tf.data.Dataset:
        """Returns this worker's serialized examples of one epoch, in the order of `trainer.data.order`."""
        count = len(self.manifest.splits[self.split].shards)
        window = max(1, _SHUFFLE_RECORDS // count)

        def read(index: tf.Tensor, path: tf.Tensor) -> tf.data.Dataset:
            records = tf.data.TFRecordDataset(path, compression_type=self.manifest.compression.upper())
            if self.shuffle_seed is None:
                return records
            # By shard and epoch, so that the order is the same on any number of workers.
            seed = tf.constant(self.shuffle_seed, tf.int64) + epoch * count + index
            return records.shuffle(window, seed=seed, reshuffle_each_iteration=False)

        files = tf.data.Dataset.from_tensor_slices((list(map(int, shards.indices)), list(shards.files)))
        files = files.map(lambda index, path: (tf.cast(index, tf.int64), path))
        records = files.interleave(
            read, cycle_length=len(shards.files), block_length=1, num_parallel_calls=tf.data.AUTOTUNE
        )
        return records.shard(shards.keep_every, shards.keep_offset) if shards.keep_every > 1 else records


def shard_paths(directory: Path, split: Split) -> list[str]:
    """Returns the paths of a split's shards.

    Raises:
        DatasetError: When a shard is missing or its size is not the manifest's.
    """
    for shard in split.shards:
        path = directory / shard.file
        size = path.stat().st_size if path.is_file() else None
        if size != shard.bytes:
            found = "is missing" if size is None else f"has {size:,} bytes"
            raise DatasetError(
                f"shard {path} {found}, the manifest says {shard.bytes:,} bytes: the dataset is damaged; "
                "preprocess the data again"
            )
    return [str(directory / shard.file) for shard in split.shards]


def parse_batch(serialized: tf.Tensor, image: Feature) -> tuple[tf.Tensor, tf.Tensor]:
    """Parses a batch of serialized tf.train.Example.

    Args:
        serialized: String tensor of shape (batch,).
        image: The manifest's image feature.

    Returns:
        Images, uint8 (batch, height, width, channels), and labels, int64 (batch,).
    """
    parsed = tf.io.parse_example(
        serialized,
        {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)},
    )
    return decode_batch(parsed["image"], image), parsed["label"]


def decode_batch(stored: tf.Tensor, image: Feature) -> tf.Tensor:
    """Decodes a batch of stored images to uint8 (batch, height, width, channels)."""
    if image.encoding == "raw":
        return tf.reshape(tf.io.decode_raw(stored, tf.uint8), (-1, *image.shape))
    return tf.map_fn(
        lambda one: decode_stored(one, image),
        stored,
        fn_output_signature=tf.TensorSpec(image.shape, tf.uint8),
    )
