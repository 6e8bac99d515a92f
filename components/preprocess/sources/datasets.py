"""Datasets of libraries: the digits of scikit-learn, and images of TensorFlow Datasets.

TensorFlow is loaded only when a TFDS dataset is opened.
"""

from __future__ import annotations

import difflib
import importlib.util
import itertools
import textwrap
from collections.abc import Iterator
from typing import Any

from shardline.components.preprocess.sources.example import Example
from shardline.trainer.base import progress
from shardline.trainer.base.errors import SourceError
from shardline.trainer.data.manifest import SPLITS
from shardline.trainer.keras_compat import tensorflow_internals

# Large photos: a whole batch is in memory.
_BATCH = 32


class Digits:
    """The 1,797 handwritten digits inside scikit-learn: grey images of 8 x 8 pixels in ten classes."""

    class_names = tuple(str(digit) for digit in range(10))

    def __init__(self) -> None:
        if importlib.util.find_spec("sklearn") is None:
            raise SourceError("source 'digits' needs scikit-learn: pip install 'shardline[preprocess]'")

    def __len__(self) -> int:
        return 1797

    def __iter__(self) -> Iterator[Example]:
        # Imported late: it takes a second, and a check of the source does not need it.
        import numpy as np
        from sklearn.datasets import load_digits

        loaded = load_digits()
        # Ink per pixel is 0..16.
        images = np.rint(loaded.images * (255.0 / 16.0)).astype(np.uint8)[..., np.newaxis]
        for index, (pixels, label) in enumerate(zip(images, loaded.target, strict=True)):
            yield Example(key=f"digits/{index:04d}", label=int(label), image=pixels)


class Tfds:
    """One prepared dataset: encoded images unchanged, its own splits, and its own ids as keys.

    Args:
        name: NAME or NAME:CONFIG, such as "mnist" or "cifar10_corrupted:fog_1".
        data_dir: Directory of prepared datasets; nothing is downloaded to it. Empty for TFDS's default
            directory, to which a missing dataset is downloaded.

    Raises:
        SourceError: The dataset is unknown, not prepared, cannot be downloaded, or is not one of images
            with a class label.
    """

    def __init__(self, name: str, *, data_dir: str = "") -> None:
        try:
            tensorflow_internals.import_tensorflow()
            import tensorflow_datasets as tfds
        except ImportError:
            raise SourceError(f"source 'tfds:{name}' needs: pip install 'shardline[local]'") from None
        self._tfds = tfds
        self._builder = _prepared_builder(tfds, name, data_dir)
        self._image, self._label = _image_and_label(tfds, name, self._builder.info)
        self.class_names = tuple(self._builder.info.features[self._label].names)
        splits = self._builder.info.splits
        self._splits = [split for split in SPLITS if split in splits]
        if others := [f"{split} ({splits[split].num_examples:,})" for split in splits if split not in SPLITS]:
            left_out = f"only {', '.join(SPLITS)} are read, not {', '.join(others)}"
            progress.report("preprocess", f"tfds:{name}: {left_out}")

    def __len__(self) -> int:
        return sum(self._builder.info.splits[split].num_examples for split in self._splits)

    def __iter__(self) -> Iterator[Example]:
        decode = self._tfds.decode
        decoders = decode.PartialDecoding(
            {self._image: True, self._label: True}, decoders={self._image: decode.SkipDecoding()}
        )
        config = self._tfds.ReadConfig(add_tfds_id=True, try_autocache=False)
        for split in self._splits:
            found = self._builder.as_dataset(
                split=split, shuffle_files=False, decoders=decoders, read_config=config
            )
            # One by one, passing records from TensorFlow to Python takes twice as long.
            for batch in found.batch(_BATCH).prefetch(1).as_numpy_iterator():
                rows = zip(batch["tfds_id"], batch[self._label], batch[self._image], strict=True)
                for key, label, image in rows:
                    yield Example(key=key.decode(), label=int(label), image=image, split=split)


def _prepared_builder(tfds: Any, name: str, data_dir: str) -> Any:
    """Returns the builder of a dataset, which is downloaded if the user names no directory of datasets."""
    try:
        builder = tfds.builder(name.replace(":", "/", 1), data_dir=data_dir or None)
    except tfds.core.DatasetNotFoundError:
        similar = difflib.get_close_matches(name, tfds.list_builders(with_community_datasets=False))
        hint = f"; similar: {', '.join(similar)}" if similar else ""
        raise SourceError(f"TensorFlow Datasets has no {name!r}{hint}") from None
    except Exception as failure:  # a wrong name, config or version: ValueError, AssertionError and more
        raise SourceError(f"cannot open 'tfds:{name}': {_summary(failure)}") from failure
    if builder.is_prepared():
        return builder
    if data_dir:
        raise SourceError(
            f"'tfds:{name}' is not prepared in {data_dir}; prepare it with 'tfds build {builder.name} "
            f"--data_dir {data_dir}', or leave data_dir empty to download it"
        )
    progress.report("preprocess", f"downloading tfds:{name} to {builder.data_dir}")
    try:
        builder.download_and_prepare()
    except Exception as failure:  # of the network, the disk, or the dataset's own code
        raise SourceError(
            f"cannot download 'tfds:{name}': {_summary(failure)}; give a data_dir in which it is prepared"
        ) from failure
    return builder


def _image_and_label(tfds: Any, name: str, info: Any) -> tuple[str, str]:
    kinds = tfds.features
    features = dict(info.features) if isinstance(info.features, kinds.FeaturesDict) else {}
    images = [
        key
        for key, value in features.items()  # a LabeledImage is an Image too: a segmentation mask
        if isinstance(value, kinds.Image) and not isinstance(value, kinds.LabeledImage)
    ]
    labels = [key for key, value in features.items() if isinstance(value, kinds.ClassLabel)]
    if info.supervised_keys in itertools.product(images, labels):
        images, labels = ([key] for key in info.supervised_keys)
    if len(images) == len(labels) == 1:
        return images[0], labels[0]
    found = [f"{key} ({type(value).__name__})" for key, value in features.items()]
    raise SourceError(
        f"'tfds:{name}' is not an image classification dataset: it has {', '.join(found) or info.features}; "
        "one Image and one ClassLabel are needed"
    )


def _summary(failure: Exception) -> str:
    return textwrap.shorten(str(failure) or type(failure).__name__, 300, placeholder=" ...")
