"""Source strings: which source they open, what is refused, and files behind URLs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources import open_source
from shardline.components.preprocess.sources.example import BadExample, Source, prefetched
from shardline.components.storage import as_source_error, resolve
from shardline.trainer.base import files
from shardline.trainer.base.errors import PlatformError, SettingsError, SourceError
from tests.helpers.datasets import serialize
from tests.helpers.fake_storage import fake_storage
from tests.helpers.preprocessing import REPOSITORY
from tests.helpers.sources import content


def opened(source: str, **settings: Any) -> Source:
    return open_source(PreprocessSettings(source=source, **settings))


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A directory in a bucket that is not mounted, on a server on this machine."""
    OBJECTS.clear()
    with fake_storage("bucket", OBJECTS) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        yield "gs://bucket/data"


OBJECTS: dict[str, bytes] = {}


def put(url: str, data: bytes) -> None:
    OBJECTS[url.removeprefix("gs://bucket/")] = data


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("table:", r"known: digits, tfds:NAME\[:CONFIG\], images:DIR, text:DIR, tfrecord:GLOB, table:PATH"),
        ("image:photos", r"did you mean images:photos\?$"),
        ("photos", r"did you mean images:photos\?$"),
        ("rows.csv", r"did you mean table:rows.csv\?$"),
        ("csv:rows.csv", r"did you mean table:rows.csv\?$"),
    ],
)
def test_an_unknown_source_is_told_what_may_be_meant(
    source: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "photos").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match=wanted):
        opened(source)


def test_settings_that_a_source_has_no_use_for() -> None:
    with pytest.raises(SettingsError, match="labels is for images:DIR and text:DIR, the source is 'digits'"):
        opened("digits", labels="labels.csv")
    with pytest.raises(SettingsError, match="features is for tfrecord:GLOB, table:PATH and"):
        opened("images:photos", features={"image": "x"})


def test_a_folder_per_class_behind_a_url(bucket: str) -> None:
    expected = {}
    for index in range(150):  # more than are fetched at a time
        name = ("cat", "dog")[index % 2]
        expected[f"{name}/{index:03d} é#?.jpg"] = name, bytes([index])
        put(f"{bucket}/{name}/{index:03d} é#?.jpg", bytes([index]))
    put(f"{bucket}/.hidden", b"")
    put(f"{bucket}/cat/.hidden/x.jpg", b"")
    assert content(opened(f"images:{bucket}")) == expected


def test_labels_behind_a_url(bucket: str) -> None:
    put(f"{bucket}/images/1.jpg", b"one")
    put(f"{bucket}/images/2.jpg", b"two")
    put(f"{bucket}/labels.csv", b"path,label\n1.jpg,dog\nabsent.jpg,dog\n2.jpg,cat\n")
    source = opened(f"images:{bucket}/images", labels=f"{bucket}/labels.csv")
    found = [batch for batch in prefetched(source.batches()) if batch.keys]
    (absent,) = (batch.bad for batch in found)
    assert absent == [BadExample("absent.jpg", "there is no such file (any more)")]
    assert (found[0].keys, found[0].images) == (["1.jpg", "2.jpg"], [b"one", b"two"])
    assert found[0].columns["label"].to_pylist() == [1, 0]


def test_records_behind_a_url(tmp_path: Path, bucket: str) -> None:
    pixels = os.urandom(1 << 20)  # more than one range
    records = [serialize({"image": pixels + bytes([i]), "label": i % 3, "key": f"k{i}"}) for i in range(9)]
    for index, (compression, half) in enumerate([("", records[:4]), ("GZIP", records[4:])]):
        with tf.io.TFRecordWriter(str(tmp_path / "half"), options=compression) as writer:
            for record in half:
                writer.write(record)
        put(f"{bucket}/a-{index}", (tmp_path / "half").read_bytes())
    put(f"{bucket}/b-0", b"not records")
    source = opened(f"tfrecord:{bucket}/a-*", features={"key": "key"})
    assert content(source) == {f"k{i}": (str(i % 3), pixels + bytes([i])) for i in range(9)}
    with pytest.raises(SourceError, match="b-0' is not a TFRecord file"):
        opened(f"tfrecord:{bucket}/*")
    with pytest.raises(SourceError, match="no file matches 'gs://bucket/data/c"):
        opened(f"tfrecord:{bucket}/c-*")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("images:gs://bucket/absent", "cannot read the directory 'gs://bucket/absent': there is no file"),
        ("tfrecord:gs://absent/x*", r"cannot list gs://absent/x\*: not found"),
        ("table:gs://bucket/absent.csv", "cannot read 'gs://bucket/absent.csv': No such file"),
        ("tfrecord:s3://bucket/x", "cannot read 's3://bucket/x': the only URLs are gs://BUCKET/PATH"),
    ],
)
def test_urls_that_cannot_be_read(bucket: str, source: str, message: str) -> None:
    with pytest.raises(SourceError if "list" not in message else PlatformError, match=message):
        opened(source)


def test_any_failure_behind_a_url_is_one_line() -> None:
    """Of HTTP, of Google's client and of its credentials."""
    message = r"^cannot read 'gs://bucket/x': Internal error$"
    with pytest.raises(SourceError, match=message), as_source_error("gs://bucket/x"):
        raise RuntimeError("Internal error\nand its page")
    with pytest.raises(RuntimeError), as_source_error("local/x"):
        raise RuntimeError("our own mistake keeps its traceback")


def test_a_directory_in_the_place_of_a_bucket_is_read_as_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(files.GCS_ROOT_VARIABLE, str(tmp_path))
    (tmp_path / "bucket" / "data").mkdir(parents=True)
    for prefix in ("gs://", "/gcs/"):
        assert resolve(f"{prefix}bucket/data/x") == f"{tmp_path}/bucket/data/x"
        assert resolve(f"{prefix}another/data/x") == "gs://another/data/x"


def test_no_source_loads_more_than_it_needs(tmp_path: Path) -> None:
    with tf.io.TFRecordWriter(str(tmp_path / "records")) as writer:
        writer.write(serialize({"image": b"x", "label": 0}))
    (tmp_path / "table.csv").write_text("label,x\na,1\n")
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    (tmp_path / "photos" / "cat" / "1.jpg").touch()
    program = (
        "import sys\n"
        "from shardline.components.preprocess.settings import PreprocessSettings\n"
        "from shardline.components.preprocess.sources import open_source\n"
        "heavy = {'tensorflow', 'keras', 'tensorflow_datasets', 'kfp', 'numpy', 'google.auth', 'pyarrow'}\n"
        "for source in ('images:photos', 'tfrecord:records', 'table:table.csv'):\n"
        "    (example,) = open_source(PreprocessSettings(source=source))\n"
        "    print(source, *sorted(heavy & set(sys.modules)))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    found = subprocess.check_output([sys.executable, "-c", program], cwd=tmp_path, env=environment, text=True)
    assert found.splitlines() == [
        "images:photos",
        "tfrecord:records numpy pyarrow",
        "table:table.csv numpy pyarrow",
    ]
