"""TensorFlow Datasets as a source, on small datasets that TFDS itself prepares here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import tensorflow_datasets as tfds

from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources import open_source
from shardline.components.preprocess.sources.example import Source
from shardline.trainer.base import progress
from shardline.trainer.base.errors import SourceError
from tests.helpers.data import real_data

# Its own code uses what protobuf, importlib and numpy have deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class TinyFlowers(tfds.core.GeneratorBasedBuilder):
    """Two classes, two features that are images, two that are labels, and a split of another name."""

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS: ClassVar = [
        tfds.core.BuilderConfig(name=name, version="1.0.0") for name in ("small", "large")
    ]

    def _info(self) -> tfds.core.DatasetInfo:
        size = {"small": 8, "large": 16}[self.builder_config.name]
        features = {
            "photo": tfds.features.Image(shape=(size, size, 3), encoding_format="png"),
            "thumbnail": tfds.features.Image(shape=(4, 4, 3), encoding_format="png"),
            "kind": tfds.features.ClassLabel(names=["daisy", "rose"]),
            "season": tfds.features.ClassLabel(names=["spring", "summer"]),
        }
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict(features), supervised_keys=("photo", "kind")
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {name: self._generate_examples(name) for name in ("train", "test", "extra")}

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
        size = self.info.features["photo"].shape[0]
        for index in range(6):
            photo = np.full((size, size, 3), index, np.uint8)
            yield index, {"photo": photo, "thumbnail": photo[:4, :4], "kind": index % 2, "season": 0}


class TinyMasks(tfds.core.GeneratorBasedBuilder):
    """Images without a class."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        mask = tfds.features.LabeledImage(labels=2, shape=(8, 8, 1))
        features = {"image": tfds.features.Image(shape=(8, 8, 3)), "mask": mask}
        return self.dataset_info_from_configs(features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {"train": self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict[str, Any]]]:
        yield 0, {"image": np.zeros((8, 8, 3), np.uint8), "mask": np.zeros((8, 8, 1), np.uint8)}


class TinyOffline(TinyMasks):
    """A dataset whose server cannot be reached."""

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        raise ConnectionError("no route to host")


@pytest.fixture(autouse=True)
def default_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """TFDS's default data_dir, for the time of a test."""
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(tmp_path / "default"))
    return tmp_path / "default"


def opened(name: str, data_dir: str = "") -> Source:
    return open_source(PreprocessSettings(source=f"tfds:{name}", data_dir=data_dir))


def test_a_dataset_is_prepared_in_the_default_directory_and_read_with_its_splits(
    default_directory: Path,
) -> None:
    lines: list[str] = []
    with progress.sink(lambda event: lines.append(event.text)):
        source = opened("tiny_flowers:large")
    assert lines == [
        f"downloading tfds:tiny_flowers:large to {default_directory}/tiny_flowers/large/1.0.0",
        "tfds:tiny_flowers:large: only train, validation, test are read, not extra (6)",
    ]
    assert source.class_names == ("daisy", "rose")
    examples = list(source)
    assert [example.split for example in examples] == ["train"] * 6 + ["test"] * 6
    assert len({example.key for example in examples}) == 12
    for example in examples:
        pixels = np.asarray(tfds.features.Image(shape=(16, 16, 3)).decode_example(example.image))
        assert pixels.shape == (16, 16, 3)
        assert pixels[0, 0, 0] % 2 == example.label


def test_a_prepared_dataset_is_read_from_data_dir_alone(tmp_path: Path, default_directory: Path) -> None:
    tfds.builder("tiny_flowers/small", data_dir=tmp_path / "mine").download_and_prepare()
    assert len(list(opened("tiny_flowers:small", data_dir=str(tmp_path / "mine")))) == 12
    assert not default_directory.exists()


def test_nothing_is_downloaded_into_a_data_dir(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(SourceError, match=r"'tfds:tiny_flowers:small' is not prepared in"):
        opened("tiny_flowers:small", data_dir=str(tmp_path / "mine"))
    assert list((tmp_path / "mine").iterdir()) == []


def test_the_error_of_a_dataset_without_classes_names_its_features() -> None:
    found = r"it has image \(Image\), mask \(LabeledImage\); one Image and one"
    with pytest.raises(SourceError, match=found):
        opened("tiny_masks")


def test_a_download_that_fails_is_one_line() -> None:
    with pytest.raises(SourceError, match="'tfds:tiny_offline': no route to host; give a data_dir"):
        opened("tiny_offline")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mnsit", "TensorFlow Datasets has no 'mnsit'; similar: mnist"),
        ("mnist:blue", "cannot open 'tfds:mnist:blue': .*BuilderConfig blue not found"),
    ],
)
def test_datasets_that_cannot_be_read(name: str, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        opened(name, data_dir=str(real_data() / "tfds"))
