"""The preprocessing component. KFP embeds the source text of the function alone, so it imports inside.

Preprocessing in many tasks: one plans, many write, one finishes; the bytes are those of a single task.

The planning task's Dataset artifact is a directory that all of them see; each writing task adds its shards.
KFP embeds the source text of each function alone, so they import inside.
"""

from kfp import dsl


def preprocess(
    dataset: dsl.Output[dsl.Dataset],
    metrics: dsl.Output[dsl.Metrics],
    card: dsl.Output[dsl.HTML],
    source: str,
    data_dir: str = "",
    labels: str = "",
    features: dict = {},  # type: ignore[type-arg]  # noqa: B006  # KFP reads type and default
    image_size: int = 0,
    resize_mode: str = "crop",
    encoding: str = "keep",
    split: dict = {},  # type: ignore[type-arg]  # noqa: B006
    key: str = "path",
    seed: int = 0,
    readers: int = 1,
    shards: int = 8,
    shard_size: int = 128,
    compression: str = "none",
    processes: int = 1,
    on_bad_record: str = "fail",
    max_bad_fraction: float = 0.01,
    max_pixels: int = 100_000_000,
    fingerprint: str = "",
) -> None:
    """Turns a source of labelled examples into balanced TFRecord shards and a manifest.

    Args:
        dataset: Dataset directory; its metadata gets the fingerprint, the number of classes and the
            records of each split.
        metrics: Records of each split, rejected examples and duplicates.
        card: The dataset card, a page to look at.
        source: "digits", "tfds:NAME[:CONFIG]", "images:DIR", "tfrecord:GLOB", "table:PATH" or
            "pkg.module:Source".
        data_dir: Directory with prepared TensorFlow Datasets; "" for their default directory.
        labels: For images:DIR, a CSV file with the columns path and label; "" for a folder per class.
        features: For tfrecord:GLOB and table:PATH, names of the source's features by ours.
        image_size: Side of the stored square images in pixels; 0 stores images as they are.
        resize_mode: "crop", "pad" or "stretch".
        encoding: "keep", "jpeg", "png" or "raw".
        split: Share of the examples by split; {} for 0.8 train, 0.1 validation, 0.1 test.
        key: "path", or "content" to keep exact duplicates in one split.
        seed: Salt of the hashes that choose the split and the order of the examples.
        readers: Input workers that will read the dataset; shards per split are a multiple of it.
        shards: About how many shards the training split gets; 0 follows from shard_size.
        shard_size: About how large a shard is, in MiB; used where shards is 0.
        compression: "none" or "gzip".
        processes: How many processes write; it has no effect on the bytes.
        on_bad_record: "fail" stops at the first example that cannot be used, "skip" leaves it out.
        max_bad_fraction: With "skip", the share of bad examples above which the run fails.
        max_pixels: An image with more pixels is refused.
        fingerprint: What the source's content is known by; not read. KFP's cache compares inputs, and the
            source string does not change when the data does.
    """
    from shardline.components.preprocess.artifact import preprocess_artifact

    preprocess_artifact(
        dataset,
        metrics,
        card,
        source=source,
        data_dir=data_dir,
        labels=labels,
        features=features,
        image_size=image_size,
        resize_mode=resize_mode,
        encoding=encoding,
        split=split,
        key=key,
        seed=seed,
        readers=readers,
        shards=shards,
        shard_size=shard_size,
        compression=compression,
        processes=processes,
        on_bad_record=on_bad_record,
        max_bad_fraction=max_bad_fraction,
        max_pixels=max_pixels,
    )


def plan_shards(
    planned: dsl.Output[dsl.Dataset],
    tasks: int,
    source: str,
    data_dir: str = "",
    labels: str = "",
    features: dict = {},  # type: ignore[type-arg]  # noqa: B006  # KFP reads type and default
    image_size: int = 0,
    resize_mode: str = "crop",
    encoding: str = "keep",
    split: dict = {},  # type: ignore[type-arg]  # noqa: B006
    key: str = "path",
    seed: int = 0,
    readers: int = 1,
    shards: int = 8,
    shard_size: int = 128,
    compression: str = "none",
    processes: int = 1,
    on_bad_record: str = "fail",
    max_bad_fraction: float = 0.01,
    max_pixels: int = 100_000_000,
) -> list[int]:
    """Surveys a source and plans its shards.

    Args:
        planned: Directory in which the dataset comes into being.
        tasks: How many tasks write at the same time.
        source: "digits", "tfds:NAME[:CONFIG]", "images:DIR", "tfrecord:GLOB", "table:PATH" or
            "pkg.module:Source".
        data_dir: Directory with prepared TensorFlow Datasets; "" for their default directory.
        labels: For images:DIR, a CSV file with the columns path and label; "" for a folder per class.
        features: For tfrecord:GLOB and table:PATH, names of the source's features by ours.
        image_size: Side of the stored square images in pixels; 0 stores images as they are.
        resize_mode: "crop", "pad" or "stretch".
        encoding: "keep", "jpeg", "png" or "raw".
        split: Share of the examples by split; {} for 0.8 train, 0.1 validation, 0.1 test.
        key: "path", or "content" to keep exact duplicates in one split.
        seed: Salt of the hashes that choose the split and the order of the examples.
        readers: Input workers that will read the dataset; shards per split are a multiple of it.
        shards: About how many shards the training split gets; 0 follows from shard_size.
        shard_size: About how large a shard is, in MiB; used where shards is 0.
        compression: "none" or "gzip".
        processes: How many processes write; it has no effect on the bytes.
        on_bad_record: "fail" stops at the first example that cannot be used, "skip" leaves it out.
        max_bad_fraction: With "skip", the share of bad examples above which the run fails.
        max_pixels: An image with more pixels is refused.

    Returns:
        The numbers of the writing tasks: as many as were asked for, but not more than there are shards.
    """
    from shardline.components.preprocess.artifact import plan_artifact

    return plan_artifact(
        planned,
        tasks,
        source=source,
        data_dir=data_dir,
        labels=labels,
        features=features,
        image_size=image_size,
        resize_mode=resize_mode,
        encoding=encoding,
        split=split,
        key=key,
        seed=seed,
        readers=readers,
        shards=shards,
        shard_size=shard_size,
        compression=compression,
        processes=processes,
        on_bad_record=on_bad_record,
        max_bad_fraction=max_bad_fraction,
        max_pixels=max_pixels,
    )


def write_shards(planned: dsl.Input[dsl.Dataset], task: int, tasks: int) -> None:
    """Writes the shards of one task; those that are done already are left as they are.

    Args:
        planned: What `plan_shards` gave.
        task: Number of this task.
        tasks: As given to `plan_shards`.
    """
    from shardline.components.preprocess.artifact import write_artifact

    write_artifact(planned, task, tasks)


def finish_dataset(
    planned: dsl.Input[dsl.Dataset],
    dataset: dsl.Output[dsl.Dataset],
    metrics: dsl.Output[dsl.Metrics],
    card: dsl.Output[dsl.HTML],
) -> None:
    """Writes the manifest when all shards are there.

    Args:
        planned: What `plan_shards` gave.
        dataset: The same directory, now a dataset; its metadata gets the fingerprint, the number of classes
            and the records of each split.
        metrics: Records of each split, rejected examples and duplicates.
        card: The dataset card, a page to look at.
    """
    from shardline.components.preprocess.artifact import finish_artifact

    finish_artifact(planned, dataset, metrics, card)
