"""A dataset that is remote is looked at in few requests, and what is found is what is found on a disk."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from shardline.components.preprocess.inspect import verify
from shardline.components.preprocess.inspect.card import render_card
from shardline.components.preprocess.inspect.profile import make_profile
from shardline.components.storage import remote_files
from shardline.trainer.base import files
from shardline.trainer.data import manifest as manifests
from tests.helpers.preprocessing import run, write_images

_SHARDS = 40


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("remote")
    run(f"images:{write_images(root / 'photos', each=60)}", root / "dataset", shards=_SHARDS)
    return root / "dataset"


@pytest.fixture
def remote(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The dataset is remote; returns how often each of its files was opened, by name."""
    opened = Counter[str]()
    monkeypatch.setattr(files, "is_mounted", lambda path: str(path).startswith(str(dataset)))
    made = remote_files.RangeReader.__init__

    def count(self: remote_files.RangeReader, path: str) -> None:
        opened[Path(path).name] += 1
        made(self, path)

    monkeypatch.setattr(remote_files.RangeReader, "__init__", count)
    return opened


def test_each_shard_is_brought_once_to_be_verified(dataset: Path, remote: Counter[str]) -> None:
    manifest = manifests.load(dataset)
    shard = manifest.shards[0]
    assert verify.verify(dataset, processes=1).damages == ()
    assert remote == {shard.file: 1 for shard in manifest.shards}
    content = (dataset / shard.file).read_bytes()
    (dataset / shard.file).write_bytes(content[:-1] + b"x")
    wrong = verify.verify(dataset, processes=1).damages
    (dataset / shard.file).write_bytes(content)
    assert [each.file for each in wrong] == [shard.file, shard.file]


def test_the_card_and_the_profile_are_of_a_few_shards(dataset: Path, remote: Counter[str]) -> None:
    manifest = manifests.load(dataset)
    assert len(manifest.shards) > _SHARDS
    page = render_card(dataset, manifest)
    assert 8 <= remote.total() <= 16
    remote.clear()
    profile = make_profile(dataset, manifest)
    assert 8 <= remote.total() <= 16
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "is_mounted", lambda _: False)
        assert render_card(dataset, manifest) == page
        assert make_profile(dataset, manifest) == profile


def test_of_the_beginning_of_a_file_one_range_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges = list[int]()
    read = remote_files.RangeReader._range
    monkeypatch.setattr(remote_files, "_RANGE_BYTES", 1000)
    monkeypatch.setattr(files, "is_mounted", lambda _: True)
    monkeypatch.setattr(
        remote_files.RangeReader,
        "_range",
        lambda self, start, end=0: ranges.append(start) or read(self, start, end),
    )
    content = bytes(range(250)) * 40
    (tmp_path / "file").write_bytes(content)

    with remote_files.open_read(str(tmp_path / "file")) as file:
        assert file.read(100) == content[:100]
        assert ranges == [0]
        assert file.read() == content[100:]
    assert sorted(ranges) == list(range(0, 10_000, 1000))
