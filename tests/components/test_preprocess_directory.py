"""The directory that becomes the dataset: what may be in it, and what is refused and left alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import shardline
from shardline.components.preprocess import work_directory
from shardline.components.preprocess.run import finish, plan_dataset, write_shards
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.trainer.base import files
from shardline.trainer.base.errors import RunError, SettingsError, SourceError
from tests.helpers.preprocessing import contents, run, write_images


def test_a_directory_may_be_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = PreprocessSettings(source="digits", processes=1)
    whole = shardline.preprocess(settings, "whole")
    plan_dataset(settings, "parts")
    write_shards("parts", 0, 1)
    assert finish("parts") == whole
    assert contents(tmp_path / "whole") == contents(tmp_path / "parts")


def test_a_dataset_is_replaced_by_a_new_one(tmp_path: Path) -> None:
    run("digits", tmp_path / "out", shards=16)
    run("digits", tmp_path / "out", shards=2, seed=1, overwrite=True)
    run("digits", tmp_path / "fresh", shards=2, seed=1)
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


@pytest.mark.parametrize("name", ["notes.txt", "train-00000-of-00001.tfrecord", "manifest.json"])
def test_a_directory_with_something_else_is_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(SettingsError, match="holds something that is not a complete Shardline dataset"):
        run("digits", tmp_path)
    assert contents(tmp_path) == {name: b"{}"}


def test_files_next_to_a_dataset_are_left_alone(tmp_path: Path) -> None:
    run("digits", tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    before = contents(tmp_path / "out")
    with pytest.raises(SettingsError, match=r"holds 'notes\.txt' next to a Shardline dataset"):
        run("digits", tmp_path / "out", seed=1, overwrite=True)
    assert contents(tmp_path / "out") == before


def test_a_dataset_is_not_replaced_unless_asked(tmp_path: Path) -> None:
    run("digits", tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(SettingsError, match=r"holds a dataset already \(digits, sha256:.*--overwrite"):
        run("digits", tmp_path / "out", seed=1)
    assert contents(tmp_path / "out") == before


def test_a_failure_while_writing_leaves_the_old_dataset(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images")
    run("digits", tmp_path / "out")
    before = contents(tmp_path / "out")
    (images / "dog" / "007.png").write_bytes(b"no image")
    with pytest.raises(SourceError, match=r"'dog/007\.png': not an image"):
        run(f"images:{images}", tmp_path / "out", overwrite=True)
    shutil.rmtree(tmp_path / "out" / ".shardline")
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("source", "out"),
    [
        ("images:{}", "photos"),
        ("images:{}", "photos/cat/deep/out"),
        ("images:{}/../photos", "link/out"),
        ("tfrecord:{}/**/*.tfrecord", "photos/cat/out"),
    ],
)
def test_a_directory_inside_the_source_is_refused(tmp_path: Path, source: str, out: str) -> None:
    photos = write_images(tmp_path / "photos")
    (tmp_path / "link").symlink_to(photos)
    before = sorted(photos.rglob("*"))
    with pytest.raises(SettingsError, match=r"is inside the source|holds something that is not a complete"):
        run(source.format(photos), tmp_path / out)
    assert sorted(photos.rglob("*")) == before


def test_a_directory_next_to_the_source_is_accepted(tmp_path: Path) -> None:
    photos = write_images(tmp_path / "photos")
    run(f"images:{photos}", tmp_path / "photos-out")
    run(f"tfrecord:{tmp_path}/photos-out/*.tfrecord", tmp_path / "photos-out" / "again")


def test_unfinished_files_of_killed_processes_are_swept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for directory in (out, out / ".shardline", out / ".shardline" / "done"):
        directory.mkdir()
        files.temporary_name(directory / "manifest.json").write_text("{")
        files.temporary_name(directory / "train-00000-of-00008.tfrecord").write_text("half")
    assert not work_directory.WorkDirectory(out).shard_sizes()
    run("digits", out)
    assert not list(tmp_path.rglob(".tmp-*"))


def test_two_runs_at_once(tmp_path: Path) -> None:
    with work_directory.hold(tmp_path / "out"):
        with pytest.raises(RunError, match=r"another run is writing .*out \(process \d+ on .+\); wait"):
            run("digits", tmp_path / "out")
        with pytest.raises(RunError, match="another run"), work_directory.hold(tmp_path / "out", shared=True):
            pass
    shared = (work_directory.hold(tmp_path / "out", shared=True) for _ in range(2))
    with next(shared), next(shared), pytest.raises(RunError, match="another run"):
        run("digits", tmp_path / "out")
    run("digits", tmp_path / "out")
    (tmp_path / "new" / ".shardline").mkdir(parents=True)
    (tmp_path / "new" / ".shardline" / "lock").symlink_to(tmp_path / "nowhere" / "lock")
    with pytest.raises(RunError, match="another run"):
        run("digits", tmp_path / "new")


def test_an_interrupted_publication_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("digits", tmp_path / "fresh")
    run("digits", tmp_path / "out", shards=3)
    moved = 0

    def replace(self: Path, target: Path) -> Path:
        nonlocal moved
        if self.suffix == ".tfrecord" and target.parent == tmp_path / "out":
            moved += 1
            if moved == 3:
                raise KeyboardInterrupt
        return replace_really(self, target)

    replace_really = Path.replace
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            run("digits", tmp_path / "out", overwrite=True)
    assert moved == 3
    assert not (tmp_path / "out" / "manifest.json").exists()
    run("digits", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def test_a_run_that_ended_before_it_had_tidied_up_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(work_directory.WorkDirectory, "remove", lambda self: None)
        manifest = run("digits", tmp_path / "out")
    assert (tmp_path / "out" / ".shardline").exists()
    assert run("digits", tmp_path / "out") == manifest
    assert not (tmp_path / "out" / ".shardline").exists()
