"""Text files as a source: a folder per class, or a table of labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardline.components.changes import fingerprint
from shardline.components.preprocess.inspect import verify
from shardline.components.preprocess.plan.survey import check_labels
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources import directories, open_source
from shardline.components.preprocess.sources.example import BadExample, Example, Source
from shardline.trainer.base.errors import SettingsError
from shardline.trainer.manifest import Feature, Label
from tests.helpers.fake_storage import fake_storage
from tests.helpers.preprocessing import run


def opened(directory: Path | str, **settings: str) -> Source:
    return open_source(PreprocessSettings(source=f"text:{directory}", **settings))  # type: ignore[arg-type]


def write(root: Path, contents: dict[str, bytes]) -> Path:
    for name, data in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def test_a_folder_per_class(tmp_path: Path) -> None:
    root = write(tmp_path / "in", {"bad/1.txt": b"so so\n", "good/deep/2.md": "\ufeffgr\u00fcn".encode()})
    source = opened(root)
    assert check_labels(source) == (Label("label", "class", ("bad", "good")),)
    assert source.features == (Feature("text", "string"),)  # type: ignore[attr-defined]
    assert list(source) == [
        Example("bad/1.txt", 0, features={"text": "so so\n"}),
        Example("good/deep/2.md", 1, features={"text": "grün"}),
    ]


def test_files_that_are_no_text_are_bad_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directories, "LARGEST_BYTES", 20)
    contents = {"a/1.txt": b"fits", "a/2.txt": b" \n", "a/3.txt": b"\xff\xfe", "b/4.txt": b"x" * 21}
    found = list(opened(write(tmp_path / "in", contents)))
    assert found[1:] == [
        BadExample("a/2.txt", "is empty"),
        BadExample("a/3.txt", "is no text in UTF-8"),
        BadExample("b/4.txt", "has more than 1 MiB"),
    ]


def test_texts_in_a_bucket_that_is_not_mounted(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("bad/1.txt", "good/2.txt")
    with fake_storage("bucket", {f"in/{name}": name.encode() for name in names}) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        found = [example.features for example in opened("gs://bucket/in") if isinstance(example, Example)]
    assert found == [{"text": name} for name in names]


def test_a_table_labels_texts(tmp_path: Path) -> None:
    root = write(tmp_path / "in", {f"{index}.txt": f"text {index}".encode() for index in range(90)})
    table = tmp_path / "labels.csv"
    table.write_text("path,stars,kind\n" + "".join(f"{i}.txt,{i / 8},{'ab'[i % 2]}\n" for i in range(90)))
    settings: dict[str, Any] = {"source": f"text:{root}", "labels": str(table), "label": "stars;kind"}
    manifest = run(out=tmp_path / "out", **settings)
    found = [(label.name, label.kind) for label in manifest.labels]
    assert found == [("stars", "regression"), ("kind", "class")]
    assert [column.name for column in manifest.columns] == ["text"]
    assert verify(tmp_path / "out", processes=1).damages == ()
    before = fingerprint(PreprocessSettings(**settings)).digest
    (root / "7.txt").write_text("another")
    assert fingerprint(PreprocessSettings(**settings)).digest != before


def test_what_cannot_be_text_files(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"label is for .* with labels"):
        opened(tmp_path, label="stars")
    root = write(tmp_path / "in", {"a/1.txt": b"one", "b/1.txt": b"two"})
    with pytest.raises(SettingsError, match="is inside the source text:"):
        run(f"text:{root}", root / "out")
