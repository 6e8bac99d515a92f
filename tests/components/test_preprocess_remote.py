"""Preprocessing where the source, the dataset or both are in a mounted bucket."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from shardline.components.preprocess import work_directory
from shardline.components.preprocess.run import finish, plan_dataset, write_shards
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.tfrecord.example import serialize
from shardline.components.storage import prefetch
from shardline.trainer.base import progress
from shardline.trainer.base.errors import RunError, SourceError
from shardline.trainer.data import manifest as manifests
from shardline.trainer.data.manifest import Manifest
from tests.helpers.mounted import Mount, mounted
from tests.helpers.preprocessing import run, write_images

EACH = 100


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("remote") / "photos", each=EACH)


@pytest.fixture(scope="module")
def near(photos: Path) -> Path:
    """The dataset as it is on a disk."""
    run(f"images:{photos}", photos.parent / "near", shards=40)
    return photos.parent / "near"


@pytest.fixture
def bucket(photos: Path, tmp_path: Path) -> Iterator[Mount]:
    shutil.copytree(photos, tmp_path / "behind" / "photos")
    with mounted(tmp_path / "behind") as mount:
        yield mount


def same(out: Path, near: Path) -> bool:
    """Whether the same files are in two datasets, but for the path of the source in their manifests."""
    mine, theirs = (
        {path.name: path.read_bytes() for path in each.glob("*.*") if path.is_file()} for each in (out, near)
    )
    del mine["manifest.json"], theirs["manifest.json"]
    return mine == theirs and manifests.load(out).fingerprint == manifests.load(near).fingerprint


def test_a_dataset_in_a_bucket_is_the_same_and_each_thing_is_written_once(
    bucket: Mount, near: Path, photos: Path
) -> None:
    run(f"images:{photos}", bucket.path / "out", shards=40, processes=2)
    bucket.unmount()
    assert same(bucket.behind / "out", near)
    shards = manifests.load(near).shards
    assert bucket.requests["put"] - len(shards) < 20
    # To write one, its name is asked for and the lock is read.
    assert sum(bucket.requests.values()) - 3 * len(shards) < 70
    written = sum(shard.bytes for shard in shards)
    assert sum(bucket.bytes.values()) - written < 60_000  # marks, manifest and keys


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"key": "content"}, marks=pytest.mark.matrix),
        pytest.param({"on_bad_record": "skip"}, marks=pytest.mark.matrix),
        pytest.param({"shards": 0}, marks=pytest.mark.matrix),
        {"processes": 2},
    ],
    ids=repr,
)
def test_photos_in_a_bucket_are_read_once(
    bucket: Mount, photos: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    run(f"images:{bucket.path / 'photos'}", tmp_path / "out", **settings)
    run(f"images:{photos}", tmp_path / "near", **settings)
    assert same(tmp_path / "out", tmp_path / "near")
    bucket.unmount()
    assert bucket.requests["get"] == 2 * EACH
    assert bucket.requests["stat"] < 10


@pytest.mark.parametrize("compression", ["", "GZIP"])
def test_files_of_records_in_a_bucket_are_read_once(bucket: Mount, tmp_path: Path, compression: str) -> None:
    (bucket.behind / "records").mkdir()
    for number in range(3):
        path = bucket.behind / "records" / f"{number}.tfrecord"
        with tf.io.TFRecordWriter(str(path), options=compression) as writer:
            for index in range(40):
                image = tf.io.encode_png(tf.fill([8, 8, 1], tf.cast(index, tf.uint8))).numpy()
                writer.write(
                    serialize({"image": image, "label": ["a", "b"][index % 2], "key": f"{number} {index}"})
                )
    run(f"tfrecord:{bucket.path}/records/*", tmp_path / "out", features={"key": "key"})
    run(f"tfrecord:{bucket.behind}/records/*", tmp_path / "near", features={"key": "key"})
    assert same(tmp_path / "out", tmp_path / "near")
    bucket.unmount()
    assert bucket.requests["get"] == 3


def test_a_missing_photo_is_one_line(bucket: Mount, tmp_path: Path) -> None:
    labels = "path,label\n" + "".join(f"cat/{i:03d}.png,{'ab'[i % 2]}\n" for i in range(EACH + 1))
    (bucket.behind / "labels.csv").write_text(labels)
    source, csv = f"images:{bucket.path / 'photos'}", str(bucket.path / "labels.csv")
    with pytest.raises(SourceError, match=r"'cat/100\.png': there is no such file"):
        run(source, tmp_path / "out", labels=csv)
    manifest = run(source, tmp_path / "out", labels=csv, on_bad_record="skip")
    assert manifest.rejected == {"there is no such file (any more)": 1}


@pytest.mark.parametrize("processes", [1, 2])
def test_a_bucket_that_takes_nothing_is_one_line_of_whichever_process(
    bucket: Mount, photos: Path, processes: int
) -> None:
    out = bucket.path / "out"
    plan_dataset(PreprocessSettings(source=f"images:{photos}", shards=40, processes=processes), out)
    for name in ("train", "validation", "test"):  # where a shard should be is something else
        for number in range(40):
            for count in (40, 4):
                (bucket.behind / "out" / f"{name}-{number:05d}-of-{count:05d}.tfrecord").mkdir()
    with pytest.raises(RunError, match=r"cannot write .*\.tfrecord: Is a directory; make room and run again"):
        write_shards(out, 0, 1)


@pytest.mark.parametrize("machines", [pytest.param(1, marks=pytest.mark.matrix), 2])
def test_parts_on_several_machines_write_a_dataset_some_of_them_twice_at_once(
    bucket: Mount, photos: Path, near: Path, machines: int
) -> None:
    """Each machine has a mount of its own, which learns late what the others have written."""
    with mounted(bucket.behind) if machines == 2 else contextlib.nullcontext(bucket) as second:
        plan = plan_dataset(PreprocessSettings(source=f"images:{photos}", shards=40), bucket.path / "out")
        with ThreadPoolExecutor(3) as pool:
            started = [
                pool.submit(write_shards, mount.path / "out", part, 2)
                for mount, part in ((bucket, 0), (second, 0), (second, 1))
            ]
            twice, again, other = (each.result() for each in started)
        assert write_shards(second.path / "out", 1, 2) == 0
        finish(second.path / "out")
    assert same(bucket.behind / "out", near)
    assert plan.records - other <= twice + again <= 2 * (plan.records - other)


def test_a_part_that_fails_says_why_and_the_others_do_not(
    bucket: Mount, photos: Path, tmp_path: Path
) -> None:
    shutil.copytree(photos, tmp_path / "bad")
    (tmp_path / "bad" / "cat" / "007.png").write_bytes(b"no image")
    plan_dataset(PreprocessSettings(source=f"images:{tmp_path / 'bad'}", shards=40), bucket.path / "out")
    failed = []
    for part in range(4):
        try:
            write_shards(bucket.path / "out", part, 4)
        except SourceError as error:
            failed.append(str(error))
    assert len(failed) == 1
    assert "cat/007.png" in failed[0]


def test_a_shard_that_was_cut_off_is_not_done_despite_its_marker(bucket: Mount, photos: Path) -> None:
    plan_dataset(PreprocessSettings(source=f"images:{photos}", shards=40), bucket.path / "out")
    write_shards(bucket.path / "out", 0, 1)
    (bucket.behind / "out" / "train-00002-of-00040.tfrecord").write_bytes(b"cut")
    with pytest.raises(RunError, match=r"1 of 48 shards of .* are not written, train-00002-of-00040"):
        finish(bucket.path / "out")


def test_shards_whose_markers_were_cut_off_are_written_again(bucket: Mount, photos: Path) -> None:
    out = bucket.path / "out"
    plan = plan_dataset(PreprocessSettings(source=f"images:{photos}", shards=40, processes=1), out)
    write_shards(out, 0, 2)
    write_shards(out, 1, 2)
    for mark, size in zip(sorted((out / ".shardline").glob("*.mark")), (0, 100), strict=True):
        mark.write_bytes(mark.read_bytes()[:size])
    assert write_shards(out, 0, 1) == plan.records
    finish(out)


WRITES = """
import json, socket, sys
from pathlib import Path
socket.gethostname = lambda: sys.argv[1]
from shardline.components.preprocess.run import preprocess
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.trainer.base.errors import ShardlineError
try:
    settings = PreprocessSettings(**json.loads(sys.argv[3]))
    preprocess(settings, Path(sys.argv[2]), take_over="heir" in sys.argv[1])
except ShardlineError as error:
    sys.exit(str(error))
"""


@contextlib.contextmanager
def writer(machine: str, out: Path, photos: Path, **settings: Any) -> Iterator[subprocess.Popen[str]]:
    """A run on a machine of this name; of which "heir" is told that what was there before has ended."""
    settings = {"source": f"images:{photos}", "shards": 40, "processes": 1} | settings
    command = [sys.executable, "-c", WRITES, machine, str(out), json.dumps(settings)]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def wait_for(there: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not there():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_scratch_of_a_run_that_was_killed_is_removed_by_the_next_one(
    bucket: Mount, photos: Path, near: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with writer(socket.gethostname(), bucket.path / "out", photos):
        wait_for(lambda: list(tmp_path.glob("shardline-*/plan.json")))
    assert list(tmp_path.glob("shardline-*"))
    run(f"images:{photos}", bucket.path / "out", shards=40)
    assert same(bucket.behind / "out", near)
    assert not list(tmp_path.glob("shardline-*"))


@pytest.mark.matrix
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bytes(
    photos: Path, near: Path, tmp_path: Path
) -> None:
    random.seed(0)
    out, killed = tmp_path / "out", 0
    with mounted(tmp_path, LAT_PUT="0.1") as bucket:
        while not (out / "manifest.json").exists() or (out / ".shardline").exists():
            with writer(socket.gethostname(), bucket.path / "out", photos, processes=2) as process:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(random.uniform(0.3, 0.8 + killed / 5))
                assert not process.returncode, process.communicate()[1]
                killed += process.returncode is None
            assert not (out / "manifest.json").exists() or same(out, near)
    assert killed >= 2
    assert same(out, near)


def test_a_bucket_that_fails_now_and_then_costs_time_and_nothing_else(
    photos: Path, near: Path, tmp_path: Path, events: list[progress.Event]
) -> None:
    shutil.copytree(photos, tmp_path / "photos")
    with mounted(tmp_path, FAULTS="0.05") as bucket:
        run(f"images:{bucket.path / 'photos'}", bucket.path / "out", shards=40, processes=2)
    assert same(tmp_path / "out", near)
    repeated = next(event.text for event in events if "retried" in event.text)
    assert int(repeated.split()[0]) > 10


def test_a_manifest_that_gets_through_at_the_second_try_has_all_that_it_names(
    bucket: Mount, photos: Path, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, failures = manifests.save, [OSError(errno.EIO, "injected")]

    def save_later(manifest: Manifest, out: Path) -> None:
        if failures:
            raise failures.pop()
        save(manifest, out)

    monkeypatch.setattr(manifests, "save", save_later)
    run(f"images:{photos}", bucket.path / "out", shards=40)
    assert not failures
    assert same(bucket.behind / "out", near)


def test_a_bucket_that_never_answers_is_one_line(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "RETRY_S", 0.5)
    shutil.copytree(photos, tmp_path / "photos")
    with (
        mounted(tmp_path, FAULTS="1") as bucket,
        pytest.raises(SourceError, match="after several tries: Input/output error"),
    ):
        run(f"images:{bucket.path / 'photos'}", tmp_path / "out", on_bad_record="skip")


def test_a_second_writer_is_refused_while_the_first_one_lives(
    photos: Path, near: Path, tmp_path: Path
) -> None:
    with (
        mounted(tmp_path, LAT_PUT="0.3", STAT_TTL="0.1", FAULTS="0") as bucket,
        mounted(tmp_path, STAT_TTL="0.1", FAULTS="0") as another,
        writer("one", bucket.path / "out", photos) as first,
    ):
        wait_for((tmp_path / "out" / ".shardline" / "lock").exists)
        with writer("two", another.path / "out", photos, seed=1) as second:
            assert f"(process {first.pid} on one)" in second.communicate()[1]
            assert second.returncode == 1
        assert first.communicate()[1] == ""
    assert same(tmp_path / "out", near)


def test_a_writer_that_was_taken_over_changes_nothing_when_it_wakes(
    photos: Path, near: Path, tmp_path: Path
) -> None:
    """It would write other bytes into the shards of the one that took over, and its own manifest."""
    out = tmp_path / "out"
    with (
        mounted(tmp_path, LAT_PUT="0.1", STAT_TTL="0.1", FAULTS="0") as bucket,
        mounted(tmp_path, LAT_PUT="0.1", STAT_TTL="0.1", FAULTS="0") as another,
        writer("one", bucket.path / "out", photos, seed=1) as paused,
    ):
        wait_for(lambda: list(out.glob("train-*")))
        os.killpg(paused.pid, signal.SIGSTOP)
        with writer("heir", another.path / "out", photos) as heir:
            wait_for(lambda: work_directory.read_small(out / ".shardline" / "lock").startswith("heir"))
            wait_for(lambda: len(list(out.glob("train-*"))) > 12)
            os.killpg(paused.pid, signal.SIGCONT)
            assert "another run has taken over" in paused.communicate()[1]
            assert paused.returncode == 1
            assert heir.communicate()[1] == ""
    assert same(out, near)
    assert not (out / ".shardline").exists()
