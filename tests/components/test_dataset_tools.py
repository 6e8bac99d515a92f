"""Looking at a dataset directory: what verify names, what stats counts, what the card shows."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from PIL import Image

from shardline.components.preprocess import tfrecord
from shardline.components.preprocess.inspect import profile, render_card, verify
from shardline.components.preprocess.run import preprocess
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.trainer import manifest as manifests
from shardline.trainer.base import deserialize
from shardline.trainer.base.errors import DatasetError
from shardline.trainer.manifest import Duplicates, Manifest
from tests.helpers.datasets import serialize, write_dataset, write_shard
from tests.helpers.labels import class_label, counted
from tests.helpers.pages import Page

REPOSITORY = Path(__file__).parents[2]
SHARD, OTHER = "train-00001-of-00004.tfrecord", "train-00002-of-00004.tfrecord"


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A sound dataset: 60 training examples in 4 shards, 20 test examples in 4."""
    manifest = write_dataset(tmp_path / "data", records={"train": 60, "test": 20}, shards=4)
    manifests.save(dataclasses.replace(manifest, records_in=80), tmp_path / "data")
    return tmp_path / "data"


def edit(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the content of manifest.json."""
    path = directory / manifests.MANIFEST_FILE
    content = json.loads(path.read_text())
    change(content)
    manifests.save(deserialize.restore(manifests.Manifest, content, "", DatasetError), directory)


def record_starts(path: Path) -> list[int]:
    """Returns where each record of a TFRecord file starts."""
    content, starts, position = path.read_bytes(), [], 0
    while position < len(content):
        starts.append(position)
        position += struct.unpack_from("<Q", content, position)[0] + 16
    return starts


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


def found(directory: Path, **options: Any) -> list[str]:
    return [str(damage) for damage in verify(directory, processes=1, **options).damages]


def rewrite(directory: Path, name: str, records: list[bytes]) -> None:
    """Replaces a shard by another whose file, size and checksums the manifest confirms."""
    written = dataclasses.asdict(write_shard(directory / name, records))

    def change(content: dict[str, Any]) -> None:
        for split in content["splits"].values():
            for shard in split["shards"]:
                if shard["file"] == name:
                    shard |= written

    edit(directory, change)


def records_of(path: Path) -> list[bytes]:
    return [record.numpy() for record in tf.data.TFRecordDataset(str(path))]


# verify


@pytest.mark.parametrize("processes", [1, 2])
def test_a_sound_dataset(dataset: Path, processes: int) -> None:
    result = verify(dataset, processes=processes)
    assert result.damages == ()
    assert (result.shards, result.records) == (8, 80)
    assert result.bytes == sum(path.stat().st_size for path in dataset.glob("*.tfrecord"))


@pytest.mark.parametrize(
    ("record", "at", "message"),
    [
        (7, 0, "its length does not match its checksum"),
        (14, 40, "the data do not match their checksum"),
        (7, -2, "the data do not match their checksum"),  # its own CRC
    ],
)
@pytest.mark.parametrize(("name", "most"), [("_ROWS", 256), ("_ROWS", 5), ("_ROWS_BYTES", 1)])
def test_a_flipped_bit_is_found(
    dataset: Path, record: int, at: int, message: str, name: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tfrecord, name, most)
    starts = record_starts(dataset / SHARD)
    flip(dataset / SHARD, starts[record] + at if at >= 0 else starts[record + 1] + at)
    file, in_record, *others = found(dataset)
    assert file.startswith(f"{SHARD}: has the CRC-32C ")
    assert in_record.startswith(f"{SHARD}, record {record}: {message}")
    assert others == []


def test_every_damaged_record_and_shard_is_listed(dataset: Path) -> None:
    for record in (2, 5):
        flip(dataset / SHARD, record_starts(dataset / SHARD)[record] + 40)
    flip(dataset / OTHER, 0)
    result = verify(dataset, processes=2)
    wanted = [(SHARD, None), (SHARD, 2), (SHARD, 5), (OTHER, None), (OTHER, 0)]
    assert [(damage.file, damage.record) for damage in result.damages] == wanted
    assert result.summary().startswith(f"damaged: {SHARD}, {OTHER}; 63 records")
    assert result.records == 80 - 2 - 15


def test_a_shard_that_is_damaged_all_over_is_not_listed_record_by_record(dataset: Path) -> None:
    for start in record_starts(dataset / SHARD):
        flip(dataset / SHARD, start + 40)
    lines = found(dataset)
    assert len(lines) == 1 + 10 + 1
    assert lines[-1] == f"{SHARD}: has 5 more damaged records"


def cut(path: Path, behind: int) -> None:
    path.write_bytes(path.read_bytes()[: record_starts(path)[9] + behind])


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("spoil", "messages"),
    [
        (lambda path: cut(path, 30), ("bytes, the", "CRC-32C", "record 9: the file ends in the")),
        (lambda path: cut(path, 0), ("bytes, the", "CRC-32C", "holds 9 records, the manifest says 15")),
        (
            lambda path: path.write_bytes(path.read_bytes() + bytes(20)),
            ("bytes, the", "CRC-32C", "record 15: its length does not match"),
        ),
        (lambda path: path.rename(path.with_name("0.tfrecord")), ("is missing", "is not named in the mani")),
        (as_folder, ("is not a file",)),
    ],
)
def test_a_shard_that_is_not_as_it_was_written(
    dataset: Path, spoil: Callable[[Path], None], messages: tuple[str, ...]
) -> None:
    spoil(dataset / SHARD)
    lines = found(dataset)
    assert len(lines) == len(messages)
    assert all(message in line for line, message in zip(lines, messages, strict=True))


def test_other_settings_than_those_it_was_made_with_are_no_sound_dataset(dataset: Path) -> None:
    path = dataset / manifests.MANIFEST_FILE
    content = json.loads(path.read_text())
    content["settings"]["seed"] = 1
    path.write_text(json.dumps(content))
    with pytest.raises(DatasetError, match="was changed after it was written"):
        verify(dataset)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda content: content["splits"]["train"]["shards"][1].update(records=16),
            f"{SHARD}: holds 15 records, the manifest says 16",
        ),
        (
            lambda content: content.update(records_in=81, rejected={"empty": 1}),
            "rejected.jsonl: is missing; the manifest says 1 were rejected",
        ),
    ],
)
def test_a_manifest_that_was_edited(
    dataset: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    edit(dataset, change)
    assert message in found(dataset)


def png(side: int = 12) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (side, side)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"image": png(), "label": 0}, "has no feature 'key'"),
        ({"image": png(), "label": 0, "key": b""}, "has an empty key"),
        ({"image": png(), "label": 3, "key": b"a"}, "label is 3, not the number of a class"),
        ({"image": png(), "label": b"cat", "key": b"a"}, "feature 'label' is bytes, not int64"),
        ({"image": png(), "label": 0, "key": b"a", "more": 1}, "has a feature 'more' that the manifest does"),
        ({}, "not a tf.train.Example"),
    ],
)
def test_an_example_that_contradicts_the_manifest(
    dataset: Path, record: dict[str, Any], message: str
) -> None:
    """Its checksums are right: a writer with a fault wrote it."""
    records = records_of(dataset / SHARD)
    records[4] = serialize(record) if record else b"no protobuf"
    rewrite(dataset, SHARD, records)
    (line,) = found(dataset)
    assert line.startswith(f"{SHARD}, record 4: {message}")


@pytest.mark.timeout(60)
def test_a_pipe_instead_of_a_shard_does_not_block(dataset: Path) -> None:
    (dataset / SHARD).unlink()
    os.mkfifo(dataset / SHARD)
    assert found(dataset) == [f"{SHARD}: is not a file"]
    with pytest.raises(DatasetError, match=f"cannot read {SHARD}: .*: it is not a file but a pipe"):
        profile.make_profile(dataset, manifests.load(dataset))


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (png()[:-30], "image cannot be decoded as png"),
        (png(13), "image has 13 x 13 pixels, the manifest says 12 x 12"),
        (b"GIF89a", "image cannot be decoded as png: it begins as another file"),
    ],
)
def test_an_image_that_cannot_be_decoded_is_found(dataset: Path, image: bytes, message: str) -> None:
    records = records_of(dataset / SHARD)
    label = tf.train.Example.FromString(records[4]).features.feature["label"].int64_list.value[0]
    records[4] = serialize({"image": image, "label": label, "key": b"a"})
    rewrite(dataset, SHARD, records)
    for deep in (False, True):
        (line,) = found(dataset, deep=deep)
        assert line.startswith(f"{SHARD}, record 4: {message}")
    html = render_card(dataset, manifests.load(dataset))  # which draws a box for it
    assert html.count("<img ") == 18


# stats


def test_stats_show_the_manifest_and_a_profile(dataset: Path) -> None:
    manifest = manifests.load(dataset)
    described = profile.describe(manifest)
    assert described["splits"]["train"]["records"] == 60
    assert json.loads(json.dumps(described)) == described
    labels = (class_label(("a\x1b[2J", "b\n", "猫")),)
    shown = profile.render(
        dataclasses.replace(manifest, labels=labels), profile.make_profile(dataset, manifest)
    )
    assert manifest.fingerprint in shown
    assert "image 12 x 12 x 3 png, label int64, key string" in shown
    assert re.search(r"^train +60 +4 ", shown, re.MULTILINE)
    assert re.search(r"^image height +12 ", shown, re.MULTILINE)
    assert r"3: a\x1b[2J, b\n, 猫" in shown


def test_nothing_here_loads_tensorflow(dataset: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from shardline.components.preprocess.inspect import profile, render_card, verify\n"
        "from shardline.trainer import manifest\n"
        f"data = Path({str(dataset)!r})\n"
        "assert not verify(data, deep=True, processes=1).damages\n"
        "profile.make_profile(data, manifest.load(data)); profile.describe(manifest.load(data))\n"
        "render_card(data, manifest.load(data))\n"
        "print(sorted({'tensorflow', 'keras', 'matplotlib', 'kfp'} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# Readable by anybody


@pytest.fixture(scope="module", params=[{}, {"encoding": "raw"}], ids=str)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset as preprocessing writes it."""
    out = tmp_path_factory.mktemp("made") / "out"
    preprocess(PreprocessSettings(source="digits", readers=2, **request.param), out)
    return out


def test_what_preprocessing_writes_is_sound(made: Path) -> None:
    result = verify(made, deep=True)
    assert result.damages == ()
    assert result.records == 1797
    assert set(profile.make_profile(made, manifests.load(made)).numbers["image height"].values) == {8.0}
    assert render_card(made, manifests.load(made)).count("<img ") == 60


def test_damage_of_raw_images_and_of_the_file_of_keys_is_found(made: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(made, tmp_path / "copy")
    manifest = manifests.load(copy)
    name = manifest.shards[0].file
    if manifest.features[0].encoding == "raw":
        records = records_of(copy / name)
        whole = records[3]
        records[3] = serialize({"image": b"\0" * 71, "label": 1, "key": "k"})
        rewrite(copy, name, records)
        assert f"{name}, record 3: image has 71 bytes, not 8 x 8" in "\n".join(found(copy))
        rewrite(copy, name, [*records[:3], whole, *records[4:]])
    flip(copy / "examples.keys", 17)
    assert [line.partition(" CRC-32C ")[0] for line in found(copy)] == ["examples.keys: has the"]
    (copy / "examples.keys").unlink()
    assert found(copy) == ["examples.keys: is missing"]


def test_the_code_in_the_docs_reads_the_shards(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (REPOSITORY / "docs" / "dataset.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "OUT").symlink_to(made)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code, names)
    assert sum(1 for _ in names["examples"]) == manifests.load(made).splits["train"].records


def test_the_docs_explain_every_key_of_the_manifest(made: Path) -> None:
    text = (REPOSITORY / "docs" / "dataset.md").read_text()
    for key in json.loads((made / "manifest.json").read_text()):
        assert re.search(rf"^\|.*`{key}`", text, re.MULTILINE), key


# The card


def test_the_card_needs_nothing_but_itself(dataset: Path) -> None:
    manifest = manifests.load(dataset)
    html = render_card(dataset, manifest)
    page = Page(html)
    assert not {"script", "link", "iframe", "object", "base"} & page.tags
    assert len(page.references) == 18
    assert all(reference.startswith("data:image/png;base64,") for reference in page.references)
    assert re.findall(r"@import|url\(", html) == []
    assert all(picture.get("alt") or picture.get("aria-label") for picture in page.pictures)
    assert manifest.fingerprint in "".join(page.text)
    assert render_card(dataset, manifest) == html


def card_of_rows(directory: Path, rows: list[dict[str, Any]], **settings: Any) -> str:
    """Preprocesses a table; returns the card of the dataset."""
    (directory / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    wanted = PreprocessSettings(source=f"table:{directory / 'rows.jsonl'}", **settings)
    return render_card(directory / "out", preprocess(wanted, directory / "out"))


def test_the_card_writes_out_what_a_terminal_would_obey(tmp_path: Path) -> None:
    obeyed = "\x1b[2J\x9b red\n\tend"
    html = card_of_rows(tmp_path, [{"label": "ab"[n % 2], "text": f"{n} {obeyed}"} for n in range(60)])
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", html)
    assert r"\x1b[2J\x9b red" in html


def test_the_card_tells_of_rejections_conversions_and_leakage(dataset: Path) -> None:
    manifest = dataclasses.replace(
        manifests.load(dataset),
        records_in=83,
        rejected={"the file is empty": 3},
        converted={"cmyk": 4},
        duplicates=Duplicates(5, 1, (("train: a<b>.png", "test: c.png"),)),
    )
    text = "".join(Page(render_card(dataset, manifest)).text)
    assert re.search(r"the file is empty\s*3", text)
    assert re.search(r"cmyk\s*4", text)
    assert "5 examples have the same content as an earlier one" in text
    assert "Leakage: 1 group of equal examples is in more than one split" in text
    assert "train: a<b>.png = test: c.png" in text


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", 'a"b', "a&amp;b"])
def test_the_card_shows_names_as_they_are(dataset: Path, name: str) -> None:
    manifest = dataclasses.replace(
        manifests.load(dataset), labels=(class_label((name, "b", "c")),), source=name
    )
    page = Page(render_card(dataset, manifest))
    assert "script" not in page.tags
    assert name in "".join(page.text)
    assert any(str(picture.get("alt")).startswith(name) for picture in page.pictures)


def test_the_card_of_a_thousand_classes(dataset: Path) -> None:
    manifest = manifests.load(dataset)
    splits = {
        name: dataclasses.replace(split, labels=counted((*split.labels["label"].counts, *range(1, 998))))
        for name, split in manifest.splits.items()
    }
    names = (*manifest.class_names, *(f"class {i}" for i in range(997)))
    html = render_card(dataset, dataclasses.replace(manifest, splits=splits, labels=(class_label(names),)))
    page = Page(html)
    assert len(html) < 150_000
    assert "The 10 largest and 10 smallest of 1,000 classes" in "".join(page.text)
    assert "Not met among the 80 examples" in "".join(page.text)


@pytest.mark.parametrize("show", [profile.make_profile, render_card])
def test_of_a_damaged_dataset_the_shard_is_named(
    dataset: Path, show: Callable[[Path, Manifest], Any]
) -> None:
    flip(dataset / SHARD, 0)
    with pytest.raises(DatasetError, match=f"cannot read {SHARD}: .*'shardline dataset verify .*'"):
        show(dataset, manifests.load(dataset))


def test_the_card_of_a_wide_table_names_every_column_and_no_directory(tmp_path: Path) -> None:
    numbers, texts = [f"number_{i}" for i in range(30)], [f"text_{i}" for i in range(30)]
    rows = [
        {"label": "ab"[n % 2], "year": 2000 + n}
        | dict.fromkeys(numbers, n / 2)
        | dict.fromkeys(texts, f"t{n}")
        for n in range(60)
    ]
    html = card_of_rows(tmp_path, rows, split_by_time="year")

    assert str(tmp_path) not in html
    assert "table:…/rows.jsonl" in html
    columns, samples = (
        html.partition(f"<h2>{title}</h2>")[2].partition("</section>")[0] for title in ("Columns", "Samples")
    )
    for name in (*numbers, *texts):
        assert f">{name}<" in columns
        assert f">{name}<" in samples
    assert "Not in these tables, but under Features below: split_number" in columns
    assert len(re.findall("<tr>", samples)) == 62  # key, class, and a row for each column
