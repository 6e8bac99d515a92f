"""Preprocessing of a source in a bucket, and into one, against a server on this machine."""

from __future__ import annotations

import random
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from google.cloud.storage import Client

from shardline.components import vertex
from shardline.components.preprocess.run import finish, plan_dataset, write_shards
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.work_directory import WorkDirectory
from shardline.components.storage import as_source_error, open_read
from shardline.trainer import manifest as manifests
from shardline.trainer.base import progress
from shardline.trainer.base.errors import PlatformError, RunError, SettingsError, SourceError
from tests.helpers.datasets import serialize
from tests.helpers.fake_storage import fake_storage
from tests.helpers.preprocessing import run, write_images

EACH = 100
PHOTOS = "images:gs://bucket/photos"


class Bucket(dict[str, bytes]):
    """Objects of the bucket, and what becomes of the coming requests."""

    fate: Callable[[int], str] = staticmethod(lambda number: "")

    def write(self, name: str, data: bytes) -> None:
        """Writes an object anew."""
        Client().bucket("bucket").blob(name).upload_from_string(data)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("gs") / "photos", each=EACH)


@pytest.fixture
def bucket(photos: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    objects = Bucket(
        (f"photos/{path.relative_to(photos)}", path.read_bytes()) for path in photos.rglob("*.png")
    )
    with fake_storage("bucket", objects, lambda number: objects.fate(number)) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        yield objects


def same(out: Path, near: Path) -> bool:
    return manifests.load(out).fingerprint == manifests.load(near).fingerprint


@pytest.mark.parametrize("settings", [{"key": "content"}, {"on_bad_record": "skip"}], ids=repr)
def test_a_bucket_that_fails_now_and_then_costs_time_and_nothing_else(
    bucket: Bucket, photos: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    run(f"images:{photos}", tmp_path / "near", **settings)
    dice, lock = random.Random(0), threading.Lock()

    def fate(number: int) -> str:
        with lock:  # not of the listing, whose client has retries of its own
            faults = ("429", "503", "reset", "cut", "short")
            return dice.choice(faults) if number > 10 and dice.random() < 0.1 else ""

    bucket.fate = fate
    manifest = run(PHOTOS, tmp_path / "out", **settings)
    assert same(tmp_path / "out", tmp_path / "near")
    assert not manifest.rejected


@pytest.mark.parametrize("fault", ["503", "reset"])
def test_a_bucket_that_stops_to_answer_is_one_line(
    bucket: Bucket, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No photo is left out for that."""
    monkeypatch.setattr(vertex, "READ_RETRY_S", 0.5)
    bucket.fate = lambda number: fault if number > 30 else ""  # the listing is over
    with pytest.raises(SourceError, match=r"^cannot read 'gs://bucket/photos/.*' after several tries"):
        run(PHOTOS, tmp_path / "out", on_bad_record="skip", max_bad_fraction=1.0)


def test_less_than_was_listed_is_never_stored(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vertex, "READ_RETRY_S", 0.5)
    bucket.fate = lambda number: "short" if number > 10 else ""
    with pytest.raises(SourceError, match=r"after several tries: \d+ of \d+ bytes were read"):
        run(PHOTOS, tmp_path / "out", on_bad_record="skip", max_bad_fraction=1.0)


def test_a_photo_that_changes_while_it_is_read_is_refused_by_name(bucket: Bucket, tmp_path: Path) -> None:
    plan_dataset(PreprocessSettings(source=PHOTOS), tmp_path / "out")
    bucket.write("photos/cat/001.png", bucket["photos/dog/001.png"])
    with pytest.raises(SourceError, match=r"'cat/001\.png' was replaced or removed while it was read"):
        write_shards(tmp_path / "out", 0, 1)


def test_what_is_done_stays_unless_its_photos_changed(
    bucket: Bucket, tmp_path: Path, events: list[progress.Event]
) -> None:
    done = len(plan_dataset(PreprocessSettings(source=PHOTOS), tmp_path / "out").shards[::2])
    write_shards(tmp_path / "out", 0, 2)
    bucket.write("photos/cat/001.png", bucket["photos/dog/001.png"])
    run(PHOTOS, tmp_path / "out")
    run(PHOTOS, tmp_path / "fresh")
    assert same(tmp_path / "out", tmp_path / "fresh")
    before = next(event.text for event in events if "already done" in event.text)
    assert int(before.split()[0]) in (done - 1, done)


def test_records_that_change_between_two_machines_are_refused_by_name(bucket: Bucket, tmp_path: Path) -> None:
    """Each machine copies them for itself; in this file every photo is where another one was."""
    photos = [data for name, data in sorted(bucket.items())]
    size = min(map(len, photos))

    def records(order: int) -> bytes:
        with tf.io.TFRecordWriter(str(tmp_path / "records")) as writer:
            for index, data in enumerate(photos[::order]):
                writer.write(serialize({"image": data[:size], "label": index % 2, "key": str(index)}))
        return (tmp_path / "records").read_bytes()

    bucket["records"] = records(1)
    settings = PreprocessSettings(
        source="tfrecord:gs://bucket/records*", features={"key": "key"}, check_images="header"
    )
    plan_dataset(settings, tmp_path / "out")
    bucket.write("records", records(-1))
    with pytest.raises(SourceError, match=r"'gs://bucket/records' changed while it was read"):
        write_shards(tmp_path / "out", 0, 1)


OUT = Path("/gcs/bucket/out")


def stored(bucket: Bucket) -> dict[str, bytes]:
    """The dataset in the bucket, but for its manifest."""
    found = {name.removeprefix("out/"): data for name, data in bucket.items() if name.startswith("out/")}
    assert found.pop("manifest.json")
    found.pop("", None)  # the folder
    return found


def files_of(dataset: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in dataset.iterdir() if path.name != "manifest.json"}


def test_a_dataset_in_a_bucket_is_the_same_in_few_requests(
    bucket: Bucket, photos: Path, tmp_path: Path
) -> None:
    requests = list[int]()
    bucket.fate = lambda number: requests.append(number) or ""  # type: ignore[func-returns-value]
    run(f"images:{photos}", OUT, shards=40, processes=2)
    shards = run(f"images:{photos}", tmp_path / "near", shards=40).shards
    assert stored(bucket) == files_of(tmp_path / "near")
    assert len(requests) <= 3 * len(shards) + 25
    with pytest.raises(SettingsError, match="holds a dataset already"):
        run(f"images:{photos}", OUT)
    run(f"images:{photos}", OUT, overwrite=True, seed=1)
    run(f"images:{photos}", tmp_path / "other", seed=1)
    assert stored(bucket) == files_of(tmp_path / "other")


def test_parts_on_several_machines_write_a_dataset_in_a_bucket(
    bucket: Bucket, photos: Path, tmp_path: Path
) -> None:
    plan = plan_dataset(PreprocessSettings(source=f"images:{photos}", shards=40), OUT)
    with pytest.raises(RunError, match=r"48 of 48 shards of .* are not written"):
        finish(OUT)
    assert sum(write_shards(OUT, part, 3) for part in (0, 1)) < plan.records
    write_shards(OUT, 2, 3)
    del bucket[f"out/{plan.shards[4].file}"]
    assert write_shards(OUT, 1, 3) == plan.shards[4].records
    finish(OUT)
    run(f"images:{photos}", tmp_path / "near", shards=40)
    assert stored(bucket) == files_of(tmp_path / "near")


@pytest.mark.parametrize("shards", [1, 15])
def test_a_run_that_ended_early_is_continued_in_a_bucket(
    bucket: Bucket, photos: Path, tmp_path: Path, events: list[progress.Event], shards: int
) -> None:
    bucket["out/"] = b""  # as the console creates a folder
    run("digits", OUT)
    bucket["out/rejected.jsonl"] = b"{}"
    bucket.fate = lambda number: "before" if sum("-of-00040" in name for name in bucket) >= shards else ""
    with pytest.raises(PlatformError, match="cannot write gs://bucket/out/"):
        run(f"images:{photos}", OUT, shards=40, overwrite=True)
    bucket.fate = lambda number: ""
    with pytest.raises(SourceError):
        run(f"images:{tmp_path}", OUT)
    run(f"images:{photos}", OUT, shards=40)
    assert any("shards already done" in event.text for event in events) or shards == 1
    run(f"images:{photos}", tmp_path / "near", shards=40)
    assert stored(bucket) == files_of(tmp_path / "near")


def test_a_dataset_that_was_not_tidied_up_is_not_replaced_unasked(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(WorkDirectory, "remove", lambda self: None)
        run("digits", OUT)
    with pytest.raises(SettingsError, match="overwrite it with --overwrite"):
        run("digits", OUT, seed=1)
    assert not any(".shardline" in name for name in bucket)


def test_a_bucket_that_cannot_be_written_is_refused_at_once(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingsError, match="is inside the source"):
        run(PHOTOS, Path("/gcs/bucket/photos/out"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"shardline-{socket.gethostname()}@99999999-killed").mkdir()
    bucket.fate = lambda number: "before" if number > 4 else ""  # two runs have listed
    with pytest.raises(PlatformError, match="cannot write gs://bucket/out/"):
        run("digits", OUT)
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_replaced_while_it_is_read_is_one_line(bucket: Bucket) -> None:
    path = "gs://bucket/photos/cat/001.png"
    with open_read(path) as file:
        bucket.write("photos/cat/001.png", b"other")
        with pytest.raises(SourceError, match="it was replaced while"), as_source_error(path):
            file.read()
