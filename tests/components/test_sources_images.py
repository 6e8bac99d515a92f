"""Directories of images as a source: a folder per class, or a CSV file of labels."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardline.components.preprocess.checks import check_labels
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources import BadExample, Example, Source, open_source
from shardline.trainer.data.features import Label
from shardline.trainer.errors import SettingsError, SourceError
from tests.helpers.data import payload, real_data


def opened(directory: Path | str, labels: Path | str = "", label: str = "") -> Source:
    return open_source(PreprocessSettings(source=f"images:{directory}", labels=str(labels), label=label))


def content(source: Source) -> dict[str, tuple[str, bytes]]:
    """Returns class and content of all images by key; none may be bad."""
    found = {}
    for example in source:
        assert isinstance(example, Example), example
        found[example.key] = source.class_names[example.label], payload(example.image)
    return found


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


def test_photos() -> None:
    photos = content(opened(real_data() / "photos"))
    assert len(photos) == 39
    assert {name for name, _ in photos.values()} == {"ants", "bees"}


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


@pytest.mark.parametrize("target", [".", "..", "../cat", "/"])
def test_a_link_to_a_folder_is_refused_and_no_loop(tmp_path: Path, target: str) -> None:
    root = write(tmp_path / "images", "cat/1.jpg", "dog/1.jpg")
    (root / "dog" / "more").symlink_to(target)
    with pytest.raises(SourceError, match="dog/more' is a link to a folder; put the folder itself there"):
        list(opened(root))


def test_entries_that_are_no_file_are_bad_examples(tmp_path: Path) -> None:
    root = write(tmp_path / "images", "cat/1.jpg", "dog/1.jpg")
    (root / "dog" / "absent").symlink_to("nothing")
    (root / "dog" / "loop").symlink_to("loop")
    os.mkfifo(root / "dog" / "pipe")
    assert [example for example in opened(root) if isinstance(example, BadExample)] == [
        BadExample("dog/absent", "is neither a file nor a folder"),
        BadExample("dog/loop", "cannot be read: Too many levels of symbolic links"),
        BadExample("dog/pipe", "is neither a file nor a folder"),
    ]


def test_directories_that_are_not_a_folder_per_class(tmp_path: Path) -> None:
    root = tmp_path / "images"
    with pytest.raises(SourceError, match=r"cannot read the directory '.*images': No such file"):
        opened(root)
    write(root, "cat/1.jpg", "dog/.hidden")
    with pytest.raises(SourceError, match=r"class folder 'dog' of .* is empty; remove it or fill it"):
        opened(root)
    write(root, "dog/1.jpg", "notes.txt")
    with pytest.raises(SourceError, match=r"has 'notes.txt' beside the class folders; put every file"):
        opened(root)
    with pytest.raises(SourceError, match=r"cannot read the directory '.*notes.txt': Not a directory"):
        opened(root / "notes.txt")


def write_csv(path: Path, text: str) -> Path:
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    return path


def test_labels_of_a_csv_file(tmp_path: Path) -> None:
    root = write(tmp_path / "images", *ODD_NAMES, "not listed.jpg")
    quoted = ['"' + name.replace('"', '""') + '"' for name in ODD_NAMES]
    labels = [f"class {i % 3}" for i in range(len(ODD_NAMES))]
    rows = [f"{label},{name},more" for label, name in zip(labels, quoted, strict=True)]
    csv = write_csv(tmp_path / "labels.csv", "\ufefflabel, path,else\r\n" + "\r\n".join(rows) + "\r\n")
    source = opened(root, csv)
    assert source.class_names == ("class 0", "class 1", "class 2")
    expected = dict(zip(ODD_NAMES, labels, strict=True))
    assert content(source) == {name: (expected[name], os.fsencode(name)) for name in ODD_NAMES}


def test_rows_that_cannot_be_used(tmp_path: Path) -> None:
    root = write(tmp_path / "images", "1.jpg", "2.jpg", "folder/3.jpg")
    write(tmp_path, "outside.jpg")
    csv = write_csv(
        tmp_path / "labels.csv",
        f"path,label\n1.jpg,cat\nabsent.jpg,cat\n./folder/../1.jpg,dog\n2.jpg,\n2.jpg\n,dog\n"
        f"../outside.jpg,cat\n{tmp_path}/outside.jpg,cat\nfolder,cat\nfolder/3.jpg,dog\n2.jpg,cat,dog\n",
    )
    found = list(opened(root, csv))
    assert [example.key for example in found if isinstance(example, Example)] == ["1.jpg", "folder/3.jpg"]
    assert [example for example in found if isinstance(example, BadExample)] == [
        BadExample(f"{csv} line 3: absent.jpg", "there is no such file"),
        BadExample(f"{csv} line 4: ./folder/../1.jpg", "is listed before"),
        BadExample(f"{csv} line 5: 2.jpg", "has no label"),
        BadExample(f"{csv} line 6: 2.jpg", "has no label"),
        BadExample(f"{csv} line 7: ", "has no path"),
        BadExample(f"{csv} line 8: ../outside.jpg", "lies outside the directory of images"),
        BadExample(f"{csv} line 9: {tmp_path}/outside.jpg", "lies outside the directory of images"),
        BadExample(f"{csv} line 10: folder", "there is no such file"),
        BadExample(f"{csv} line 12: 2.jpg", "has not as many cells as the first line"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "file,label\n1.jpg,cat\n",
            "has the columns file, label; a first line with path and label is needed",
        ),
        ("path;label\n1.jpg;cat\n", "has the columns path;label; a first line with"),
        ("", "has no line; a first line with path and label is needed"),
        ('path,label\n1.jpg,"cat\n', "cannot read .*labels.csv' after line 1: unexpected end of data"),
        (
            "path,label\n" + "".join(f"{i}.jpg,class {i}\n" for i in range(20)),
            "column 'label' has 20 different texts in 20 rows, .* label=class:label",
        ),
        (f"path,label\n{'x' * 200_000},cat\n", "cannot read .*labels.csv' after line 1: field larger than"),
    ],
)
def test_csv_files_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    root = write(tmp_path / "images", "1.jpg")
    with pytest.raises(SourceError, match=message):
        opened(root, write_csv(tmp_path / "labels.csv", text))


def test_missing_files(tmp_path: Path) -> None:
    write(tmp_path / "images", "1.jpg")
    with pytest.raises(SourceError, match=r"cannot read '.*absent.csv': No such file"):
        opened(tmp_path / "images", tmp_path / "absent.csv")
    csv = write_csv(tmp_path / "labels.csv", "path,label\n1.jpg,cat\n")
    with pytest.raises(SourceError, match=r"cannot read the directory '.*absent': it is not there"):
        opened(tmp_path / "absent", csv)
    with pytest.raises(
        SourceError, match=r"labels.csv' has no column 'size' for the label, it has path, label"
    ):
        opened(tmp_path / "images", csv, "size")
    other = write_csv(tmp_path / "other.csv", "path,size\n1.jpg,2\n")
    with pytest.raises(SourceError, match=r"has no column 'label', it has path, size; .* label=size"):
        opened(tmp_path / "images", other)
    with pytest.raises(SettingsError, match="whose labels are in no table: name one with labels"):
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
        "z,3.jpg,cat,4,1,false,in\n"
        "z,a/1.jpg,cat,4,1,false,in\n"
        "z,absent.jpg,cat,4,1,false,in\n"
        "z,../outside.jpg,cat,4,1,false,in\n"
        "z,,cat,4,1,false,in\n",
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
    assert {key: payload(example.image) for key, example in good.items()} == {
        "a/1.jpg": b"a/1.jpg",
        "a/2.jpg": b"a/2.jpg",
        "3.jpg": b"3.jpg",
    }
    assert good["a/1.jpg"].label == {"kind": 0, "size": 1.5, "wet": [0, 1], "tags": ["in", "out"]}
    assert good["a/2.jpg"].label == {"kind": 1, "size": 2.0, "wet": [1, 0], "tags": []}
    assert not good["a/1.jpg"].features
    assert [example for example in found if isinstance(example, BadExample)] == [
        BadExample(f"{csv} 3.jpg", "has no value in column 'size'"),
        BadExample(f"{csv} a/1.jpg", "is listed before"),
        BadExample(f"{csv} absent.jpg", "there is no such file"),
        BadExample(f"{csv} ../outside.jpg", "lies outside the directory of images"),
        BadExample(f"{csv} row 8", "has no value in column 'path'"),
    ]
    assert [example.key for example in source if isinstance(example, Example)] == [*good]
