"""The preprocessing components: the whole in one task, or planned by one, written by many, finished by one.

The bytes are the same either way. The planning task's Dataset artifact is a directory that all tasks see;
each writing task adds its shards. KFP embeds the source text of each function alone, so they import inside.
"""

from kfp import dsl


def preprocess(
    dataset: dsl.Output[dsl.Dataset],
    metrics: dsl.Output[dsl.Metrics],
    card: dsl.Output[dsl.HTML],
    data: dict,  # type: ignore[type-arg]  # KFP reads the bare type as a JSON object
    processes: int = 0,
    fingerprint: str = "",
) -> None:
    """Turns a source of labelled examples into balanced TFRecord shards and a manifest.

    Args:
        dataset: Dataset directory; its metadata gets the fingerprint, the kinds of the labels and
            the records of each split.
        metrics: Records of each split, rejected examples and duplicates.
        card: The dataset card, a page to look at.
        data: What is read, and how it becomes shards: the fields of
            `shardline.components.preprocess.settings.PreprocessSettings`.
        processes: How many processes write; 0 for one per core. It has no effect on the bytes.
        fingerprint: What the source's content is known by; not read. KFP's cache compares inputs, and the
            source string does not change when the data does.
    """
    from shardline.components.preprocess.artifact import preprocess_artifact

    preprocess_artifact(data, processes, dataset, metrics, card)


def plan_shards(
    planned: dsl.Output[dsl.Dataset],
    tasks: int,
    data: dict,  # type: ignore[type-arg]
    processes: int = 0,
) -> list[int]:
    """Surveys a source and plans its shards.

    Args:
        planned: Directory in which the dataset comes into being.
        tasks: How many tasks write at the same time.
        data: What is read, and how it becomes shards, as for `preprocess`.
        processes: How many processes each of them has; 0 for one per core.

    Returns:
        The numbers of the writing tasks: as many as were asked for and have enough to do.
    """
    from shardline.components.preprocess.artifact import plan_artifact

    return plan_artifact(data, processes, planned, tasks)


def write_shards(planned: dsl.Input[dsl.Dataset], task: int, tasks: int) -> None:
    """Writes shards, a few at a time that no other task writes, until all are written.

    Args:
        planned: What `plan_shards` gave.
        task: Number of this task; it begins with its share.
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
        dataset: The same directory, now a dataset; its metadata gets the fingerprint, the kinds of the
            labels and the records of each split.
        metrics: Records of each split, rejected examples and duplicates.
        card: The dataset card, a page to look at.
    """
    from shardline.components.preprocess.artifact import finish_artifact

    finish_artifact(planned, dataset, metrics, card)
