"""A file that cannot be read now is not missing, damaged or bad: the run ends, and a restart may go on."""

import os
from pathlib import Path

import pytest

from shardline.components.changes import detection as changes
from shardline.components.model_store import champions
from shardline.components.preprocess import write
from shardline.components.preprocess.plan.image_locations import ImageLocation, ImageReader
from shardline.components.preprocess.sources import directories
from shardline.components.preprocess.sources.example import WHOLE_FILE, Example, Span
from shardline.components.preprocess.work_directory import WorkDirectory
from shardline.components.storage import Storage
from shardline.components.validate.gate import champion
from shardline.trainer import manifest
from shardline.trainer.base import crash
from shardline.trainer.checkpoint import store as identity
from shardline.trainer.loop.evaluator import Evaluations


def read_image(path: Path) -> bytes:
    reader = ImageReader([ImageLocation("spool", "")], path, 0)
    return reader._read_spans([0], [0], [10], [b"key"])[0]


def read_text(path: Path) -> object:
    return directories._read_text(Example(path.name, 0, Span(str(path), 0, WHOLE_FILE)))


READERS = {
    "a run's identity": ("run.json", identity._read),
    "a manifest": ("manifest.json", lambda path: manifest.load(path.parent)),
    "the last run": (changes.LATEST, lambda path: changes.read_latest(Storage(path.parent))),
    "a cached dataset": (
        f"{changes.DATASETS}/k.json",
        lambda path: changes.dataset_key(Storage(path.parents[1]), "k"),
    ),
    "the champion": ("champion.json", lambda path: champions.current(path.parent)),
    "a result": ("evaluations/3.json", lambda path: Evaluations(path.parents[1]).read_metrics(3)),
    "a marker": (".shardline/done/a.mark", lambda path: write.load_markers(WorkDirectory(path.parents[2]))),
    "the mark of publishing": (
        ".shardline/publishing",
        lambda path: WorkDirectory(path.parents[1]).is_published(),
    ),
    "an initial model": ("model.keras", lambda path: changes.initial_model_digest(str(path))),
    "the keys of a model": ("training.keys", lambda path: champion.read_published(path.parent, None)),
    "an image": ("image", read_image),
    "a text": ("text", read_text),
}


@pytest.mark.parametrize(("name", "read"), READERS.values(), ids=READERS)
def test_what_cannot_be_read_now_is_not_missing(tmp_path, name, read):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to("/proc/self/mem")  # reading it is EIO

    with pytest.raises(Exception, match="Input/output error") as raised:
        read(path)
    assert crash.as_error(raised.value).exit_code == 1
    assert os.readlink(path) == "/proc/self/mem"
    assert len([each for each in tmp_path.rglob("*") if not each.is_dir()]) == 1
