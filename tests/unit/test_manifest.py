"""Manifest, plan and completion markers: any content of their files is read, or is an error of one line."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from shardline.components.preprocess.plan.image_locations import ImageLocation
from shardline.components.preprocess.plan.plan import Plan, PlannedShard
from shardline.components.preprocess.plan.records import HASH_BYTES
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.work_directory import WorkDirectory
from shardline.components.preprocess.write import Images, Marker, load_markers, write_marker
from shardline.trainer import manifest as manifests
from shardline.trainer.base.errors import DatasetError, ShardlineError
from shardline.trainer.manifest import Duplicates, Feature, Manifest, Shard, Split
from tests.helpers.labels import class_label, counted
from tests.helpers.mutations import damaged

SHARD = Shard("train-00000-of-00001.tfrecord", 10, 100, "0000abcd")
MANIFEST = Manifest(
    fingerprint="sha256:0",
    source="images:photos",
    settings={"seed": 0, "split": {"train": 1.0}},
    labels=(class_label("ab"),),
    features=(
        Feature("image", "uint8", (8, None, 3), "png", "crop"),
        Feature("label", "int64"),
        Feature("key", "string"),
        Feature("weight", "float32"),
    ),
    splits={"train": Split((SHARD,), counted((4, 6)))},
    records_in=11,
    rejected={"empty file": 1},
    converted={"alpha": 2},
    duplicates=Duplicates(1, 0, (("train: x", "train: y"),)),
)
PLAN = Plan(
    settings=PreprocessSettings(source="images:photos"),
    labels=(class_label("ab"),),
    features=(Feature("weight", "float32"),),
    places=(ImageLocation("none"), ImageLocation("directory", "photos/\udcff/")),
    surveyed=1,
    records_in=11,
    rejected={"empty file": 1},
    shards=(PlannedShard(SHARD.file, "train", 10, "hash"),),
)
MARKER = Marker("identity", 1, SHARD, counted((4, 6)), Images(8, 8, 3, ("png",), {"alpha": 2}))
HASHES = bytes(range(HASH_BYTES)) * SHARD.records

tries = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def write(directory: Path, content: Any) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (directory / manifests.MANIFEST_FILE).write_text(text, encoding="utf-8", errors="replace")
    return directory


def refusal(read: Callable[[], object], error: type[ShardlineError]) -> str:
    """Reads and returns what it is refused with; "" where it is not."""
    try:
        read()
    except error as failure:
        return str(failure)
    return ""


def is_one_line(text: str) -> bool:
    return "\n" not in text and len(text) < 1000


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(dataclasses.asdict(value)))


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    manifests.save(MANIFEST, tmp_path)
    assert manifests.load(tmp_path) == MANIFEST


@pytest.mark.parametrize("file", [SHARD.file, manifests.KEYS_FILE])
def test_a_dataset_is_whole_with_every_file_in_its_size(tmp_path: Path, file: str) -> None:
    keys = Shard(manifests.KEYS_FILE, 10, 80, "0000abcd")
    manifests.save(dataclasses.replace(MANIFEST, keys=keys), tmp_path)
    for named in (SHARD, keys):
        (tmp_path / named.file).write_bytes(bytes(named.bytes))
    assert manifests.load_whole(tmp_path).keys == keys

    (tmp_path / file).write_bytes(b"short")
    with pytest.raises(DatasetError, match=f"{file} has 5 bytes, the manifest says .*0: the dataset is dam"):
        manifests.load_whole(tmp_path)
    (tmp_path / file).unlink()
    with pytest.raises(DatasetError, match=f"cannot read .*{file}: No such file.*; preprocess the data"):
        manifests.load_whole(tmp_path)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Manifest)])
def test_a_manifest_that_was_changed_is_refused(tmp_path: Path, field: str) -> None:
    manifests.save(MANIFEST, tmp_path)
    path = tmp_path / manifests.MANIFEST_FILE
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content, sort_keys=True))
    assert manifests.load(tmp_path) == MANIFEST
    for changed in ({**content, field: [content[field]]}, {k: v for k, v in content.items() if k != field}):
        path.write_text(json.dumps(changed))
        with pytest.raises(DatasetError, match=r"was changed after it was written.*; preprocess the data ag"):
            manifests.load(tmp_path)


@tries
@given(content=damaged(as_json(PLAN)))
def test_any_plan_is_read_or_is_one_line(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(content))

    def read() -> None:
        plan = Plan.load(path)
        for shard in plan.shards:
            plan.identity(shard)

    assert is_one_line(refusal(read, ShardlineError))


@tries
@given(content=damaged(as_json(MARKER)))
def test_any_marker_is_read_or_is_none(tmp_path: Path, content: Any) -> None:
    work = WorkDirectory(tmp_path)
    work.done.mkdir(parents=True, exist_ok=True)
    (work.done / "a.mark").write_bytes(json.dumps(content).encode() + b"\n" + HASHES)
    for found in load_markers(work).values():
        assert Images.merge([found.marker.images, MARKER.images])


def test_plan_and_marker_are_read_as_they_were_written(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLAN
    work = WorkDirectory(tmp_path)
    work.done.mkdir(parents=True)
    write_marker(work, MARKER, HASHES)
    (found,) = load_markers(work).values()
    assert (found.marker, b"".join(found.hashes())) == (MARKER, HASHES)
    found.path.write_bytes(found.path.read_bytes()[:-1])
    assert not load_markers(work)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not JSON"),
        ("[]", "holds no JSON object"),
        ("[" * 100_000, "is nested too deeply"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ({}, "is not a Shardline manifest"),
        ({"format": "shardline.dataset", "format_version": 1}, "has format_version 1"),
    ],
)
def test_a_file_that_is_no_manifest_says_what_is_wrong(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(DatasetError) as error:
        manifests.load(write(tmp_path, content))
    assert message in str(error.value)
    assert is_one_line(str(error.value))


@pytest.mark.parametrize("file", ["../x", "..", "", "/x"])
def test_a_shard_outside_the_directory_is_refused(tmp_path: Path, file: str) -> None:
    shard = dataclasses.replace(SHARD, file=file)
    manifests.save(dataclasses.replace(MANIFEST, splits={"train": Split((shard,), {})}), tmp_path)
    with pytest.raises(DatasetError, match="names a shard outside the directory: "):
        manifests.load(tmp_path)


def test_a_manifest_without_end_is_not_read_to_it(tmp_path: Path) -> None:
    path = tmp_path / manifests.MANIFEST_FILE
    path.touch()
    os.truncate(path, 100 << 20)
    with pytest.raises(DatasetError, match="has more than 64 MiB"):
        manifests.load(tmp_path)
    for make in (lambda: path.symlink_to("/dev/zero"), lambda: os.mkfifo(path)):
        path.unlink()
        make()
        with pytest.raises(DatasetError, match="is not a file"):
            manifests.load(tmp_path)
