"""The preprocessing component. KFP embeds the source text of the function alone, so it imports inside."""

from kfp import dsl


def preprocess(
    dataset: dsl.Output[dsl.Dataset],
    metrics: dsl.Output[dsl.Metrics],
    source: str,
    data_dir: str,
    image_size: int,
    readers: int,
    seed: int,
) -> None:
    """Turns a source of labelled images into balanced TFRecord shards and a manifest.

    Args:
        dataset: Dataset directory; its metadata gets the fingerprint, the number of classes and the
            records of each split.
        metrics: Records of each split.
        source: "digits", "tfds:NAME[:CONFIG]", "images:DIR" or "pkg.module:Source".
        data_dir: Directory with prepared TensorFlow Datasets; "" for their default directory.
        image_size: Side of the stored square images in pixels; 0 stores images as they are.
        readers: Input workers that will read the dataset; shards per split are a multiple of it.
        seed: Salt of the hashes that choose the split and the order of the examples.
    """
    from components.preprocess.run import preprocess_artifact

    preprocess_artifact(
        dataset,
        metrics,
        source=source,
        data_dir=data_dir,
        image_size=image_size,
        readers=readers,
        seed=seed,
    )
