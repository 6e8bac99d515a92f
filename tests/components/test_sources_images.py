"""Directories of images as a source: a folder per class, or a CSV file of labels."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from shardline.components.preprocess.plan.survey import check_labels
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources import open_source
from shardline.components.preprocess.sources.example import BadExample, Example, Source
from shardline.trainer.base.errors import SettingsError, SourceError
from shardline.trainer.manifest import Label
from tests.helpers.data import payload
from tests.helpers.preprocessing import run, write_images
from tests.helpers.sources import content


def opened(directory: Path | str, labels: Path | str = "", label: str = "") -> Source:
    return open_source(PreprocessSettings(source=f"images:{directory}", labels=str(labels), label=label))


def write(root: Path, *names: str) -> Path:
    """Writes files that hold their own names."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.fsencode(name))
    return root


ODD_NAMES = [
    "cat/with space.jpg",
    "cat/ä · 猫.jpg",
    "cat/two\nlines.jpg",
    "cat/\udcff\udcfe.jpg",
    f"cat/{'x' * 255}",
    "cat/ deep/er/1.jpg",
    "cat/a,b\"c'.jpg",
    "dog/-rf",
]


def test_a_folder_per_class(tmp_path: Path) -> None:
    root = write(
        tmp_path / "images", *ODD_NAMES, ".DS_Store", "cat/.hidden.jpg", "cat/.cache/1.jpg", ".git/x"
    )
    source = opened(root)
    assert source.class_names == ("cat", "dog")
    expected = {name: (name.partition("/")[0], os.fsencode(name)) for name in ODD_NAMES}
    assert content(source) == expected
    assert [example.key for example in source] == [example.key for example in source]  # type: ignore[union-attr]


def test_examples_come_in_the_order_in_which_a_bucket_lists_them(tmp_path: Path) -> None:
    names = ["cat-1/x-1/1.jpg", "cat-1/x.jpg", "cat-1/x/1.jpg", "cat.1/1.jpg", "cat/1.jpg"]
    source = opened(write(tmp_path / "images", *names))
    assert [example.key for example in source] == names  # type: ignore[union-attr]
    assert source.class_names == ("cat", "cat-1", "cat.1")


def test_links_to_files_are_followed_and_a_class_may_be_a_link(tmp_path: Path) -> None:
    root = write(tmp_path / "images", "cat/1.jpg")
    write(tmp_path / "elsewhere", "2.jpg")
    (root / "cat" / "2.jpg").symlink_to(tmp_path / "elsewhere" / "2.jpg")
    (root / "dog").symlink_to(tmp_path / "elsewhere")
    assert content(opened(root)) == {
        "cat/1.jpg": ("cat", b"cat/1.jpg"),
        "cat/2.jpg": ("cat", b"2.jpg"),
        "dog/2.jpg": ("dog", b"2.jpg"),
    }


def test_what_is_no_file_is_left_out_and_a_link_to_a_folder_is_no_loop(tmp_path: Path) -> None:
    root = write_images(tmp_path / "images", each=3)
    for name, target in {"absent": "nothing", "itself": "itself", "folder": ".."}.items():
        (root / "dog" / name).symlink_to(target)
    os.mkfifo(root / "dog" / "pipe")
    options: dict[str, Any] = {"on_bad_record": "skip", "max_bad_fraction": 1.0, "split": {"train": 1.0}}
    manifest = run(f"images:{root}", tmp_path / "out", **options)
    assert manifest.records == 6
    assert sum(manifest.rejected.values()) == 4


def test_names_that_are_not_utf8_are_read_and_a_directory_of_such_a_name_is_refused(tmp_path: Path) -> None:
    root = write_images(tmp_path / "images", each=3)
    (root / "dog" / "000.png").rename(root / "dog" / "0\udce8.png")
    manifest = run(f"images:{root}", tmp_path / "out", split={"train": 1.0})
    assert manifest.records == 6
    with pytest.raises(SettingsError, match=r"source is 'images:.*udce8', which is not UTF-8; rename"):
        opened(root.rename(tmp_path / "images\udce8"))


def test_directories_that_are_not_a_folder_per_class(tmp_path: Path) -> None:
    root = tmp_path / "images"
    write(root, "cat/1.jpg", "dog/.hidden")
    with pytest.raises(SourceError, match=r"class folder 'dog' of .* is empty; remove it or fill it"):
        list(opened(root))
    write(root, "dog/1.jpg", "notes.txt")
    with pytest.raises(SourceError, match=r"has 'notes.txt' next to the class folders; put every file"):
        opened(root)
    with pytest.raises(SourceError, match=r"cannot read the directory '.*notes.txt': Not a directory"):
        opened(root / "notes.txt")


@pytest.mark.parametrize(
    ("names", "inner"),
    [
        (("test/cat/1", "train/cat/2", "train/dog/1"), "train"),
        (("Test Set/cat/1", "Training Set/cat/2"), "Training Set"),
        (("dev/1", "test/1", "train/1"), "train"),
        (("train/a/1", "eval/a/1"), "train"),
        (("seg_test/a/1", "seg_test/b/1", "seg_train/a/1", "seg_train/b/1", "seg_pred/1"), "seg_train"),
        (("seg_test/seg_test/a/1", "seg_test/seg_test/b/1", "seg_train/a/1", "seg_train/b/1"), "seg_train"),
        (("train/1", "bus/1"), ""),
        (("test tube/1", "train station/1"), ""),
        (("latest/a/1", "oldest/a/1"), ""),
    ],
)
def test_folders_that_are_splits_are_no_classes(tmp_path: Path, names: tuple[str, ...], inner: str) -> None:
    root = write(tmp_path / "photos", *names)
    if inner:
        with pytest.raises(SourceError, match=rf"are splits, not classes; name .* as {root}/{inner}, or"):
            opened(root)
    else:
        assert opened(root).class_names == tuple(sorted({name.split("/")[0] for name in names}))


def write_csv(path: Path, text: str) -> Path:
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    return path


def test_labels_of_a_csv_file(tmp_path: Path) -> None:
    names = [name for name in ODD_NAMES if name.isascii() or "猫" in name]
    root = write(tmp_path / "images", *names, "not listed.jpg")
    quoted = ['"' + name.replace('"', '""') + '"' for name in names]
    rows = [f"{number % 3 + 9},{name},more" for number, name in enumerate(quoted)]
    csv = write_csv(tmp_path / "labels.csv", "\ufefflabel,path,else\r\n" + "\r\n".join(rows) + "\r\n")
    source = opened(root, csv)
    (label,) = check_labels(source)
    assert label.class_names == ("10", "11", "9")  # names, though they be numbers
    found = {example.key: example for example in source if isinstance(example, Example)}
    assert {key: payload(example.image) for key, example in found.items()} == {
        name: os.fsencode(name) for name in names
    }
    classes = [label.class_names[found[name].label] for name in names]
    assert classes == [str(number % 3 + 9) for number in range(len(names))]


def test_rows_that_cannot_be_used(tmp_path: Path) -> None:
    root = write(tmp_path / "images", "1.jpg", "2.jpg", "folder/3.jpg")
    write(tmp_path, "outside.jpg")
    csv = write_csv(
        tmp_path / "labels.csv",
        f"path,label\n1.jpg,cat\nabsent.jpg,cat\n2.jpg,\n,dog\n../outside.jpg,cat\n"
        f"{tmp_path}/outside.jpg,cat\nfolder,cat\n./folder/../folder/3.jpg,dog\n",
    )
    found = list(opened(root, csv))
    assert [example.key for example in found if isinstance(example, Example)] == ["1.jpg", "folder/3.jpg"]
    assert [example for example in found if isinstance(example, BadExample)] == [
        BadExample(f"{csv} absent.jpg", "there is no such file"),
        BadExample(f"{csv} 2.jpg", "has no value in column 'label'"),
        BadExample(f"{csv} row 4", "has no value in column 'path'"),
        BadExample(f"{csv} ../outside.jpg", "is outside the directory of images"),
        BadExample(f"{csv} {tmp_path}/outside.jpg", "is outside the directory of images"),
        BadExample(f"{csv} folder", "there is no such file"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file,label\n1.jpg,cat\n", "has the columns file, label; one called path is needed"),
        ('path,label\n1.jpg,"cat\n', "quotes"),
        (
            "path,label\n" + "".join(f"{i}.jpg,class {i}\n" for i in range(20)),
            "column 'label' has 20 different texts in 20 rows, .* label=class:label",
        ),
    ],
)
def test_csv_files_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    root = write(tmp_path / "images", "1.jpg")
    with pytest.raises(SourceError, match=message):
        check_labels(opened(root, write_csv(tmp_path / "labels.csv", text)))


def test_missing_files(tmp_path: Path) -> None:
    write(tmp_path / "images", "1.jpg")
    csv = write_csv(tmp_path / "labels.csv", "path,label\n1.jpg,cat\n")
    with pytest.raises(SourceError, match=r"cannot read the directory '.*absent': it is not there"):
        opened(tmp_path / "absent", csv)

    other = write_csv(tmp_path / "other.csv", "path,size\n1.jpg,2\n")
    with pytest.raises(SourceError, match=r"has no column 'label', it has path, size; .* --label size, or"):
        opened(tmp_path / "images", other)
    with pytest.raises(SettingsError, match=r"label is for .* and images:DIR or text:DIR with labels"):
        opened(tmp_path / "images", label="size")


def test_a_table_gives_images_labels_of_every_kind(tmp_path: Path) -> None:
    root = write(tmp_path / "images", "a/1.jpg", "a/2.jpg", "3.jpg")
    write(tmp_path, "outside.jpg")
    csv = write_csv(
        tmp_path / "labels.csv",
        "note,path,kind,size,wet,cold,tags\n"
        "x,a/1.jpg,cat,1.5,0,true,in|out\n"
        "y,./a/2.jpg,dog,2,1,false,\n"
        "z,3.jpg,cat,,1,true,in\n"
        "z,3.jpg,cat,4,1,false,in\n",
    )
    source = opened(root, csv, "kind;regression:size [m];multilabel:wet,cold;multilabel:tags")
    assert check_labels(source) == (
        Label("kind", "class", ("cat", "dog")),
        Label("size", "regression", ("size",), ("m",)),
        Label("wet", "multilabel", ("wet", "cold")),
        Label("tags", "multilabel", ("in", "out")),
    )
    found = list(source)
    good = {example.key: example for example in found if isinstance(example, Example)}
    assert all(payload(example.image) == key.encode() for key, example in good.items())
    assert [*good] == ["a/1.jpg", "a/2.jpg", "3.jpg"]
    assert good["a/1.jpg"].label == {"kind": 0, "size": 1.5, "wet": [0, 1], "tags": [1, 1]}
    assert good["a/2.jpg"].label == {"kind": 1, "size": 2.0, "wet": [1, 0], "tags": [0, 0]}
    assert not good["a/1.jpg"].features
    assert [example for example in found if isinstance(example, BadExample)] == [
        BadExample(f"{csv} 3.jpg", "has no value in column 'size'")
    ]
    assert [example.key for example in source if isinstance(example, Example)] == [*good]
