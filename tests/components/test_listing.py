"""Listings: of a bucket and of a disk, and what they cost."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from google.cloud.storage import Client

from shardline.components.changes import detection as fingerprints
from shardline.components.changes.detection import Fingerprint
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources import open_source
from shardline.components.preprocess.sources.directories import ClassFolders
from shardline.components.preprocess.sources.example import Example
from shardline.components.storage import File, Storage, files_below, match_files, open_read, read_object
from shardline.trainer.base.errors import SourceError
from tests.contract.fake.certificates import write_certificates
from tests.contract.fake.proxy import Tunnels, serve_proxy
from tests.helpers.fake_storage import fake_storage

NAMES = (
    "cat-big/1.jpg",  # "-" and "." come before "/"
    "cat.old/1.jpg",
    "cat/1.jpg",
    "cat/deep/er/1 2.jpg",
    "cat/deeper.jpg",
    "cat/é[1]·猫.jpg",
    "dog/#?1.jpg",
    "dog/1.jpeg",
)
HIDDEN = (".git/x", "cat/.hidden.jpg", "dog/.cache/1.jpg")


class Bucket(NamedTuple):
    """A bucket and a directory with the same files, the requests that were counted, and what becomes of more.

    Of the fates the last comes first, and the first stays.
    """

    root: Path
    objects: dict[str, bytes]
    requests: list[int]
    fates: list[str]

    def write(self, *names: str) -> None:
        """Writes files that hold their own names."""
        for name in names:
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(name.encode())
            self.objects[name] = name.encode()


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """An empty bucket, gs://bucket."""
    bucket = Bucket(tmp_path / "bucket", {}, [], [""])
    bucket.root.mkdir()

    def fate(number: int) -> str:
        bucket.requests.append(number)
        return bucket.fates.pop() if len(bucket.fates) > 1 else bucket.fates[0]

    with fake_storage("bucket", bucket.objects, fate) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        yield bucket


def facts(found: Iterator[File]) -> list[tuple[str, int, bool]]:
    return [(file.name, file.size, file.is_generation) for file in found]


def known(source: str, **settings: str) -> Fingerprint:
    return fingerprints.fingerprint(PreprocessSettings(source=source, **settings))  # type: ignore[arg-type]


def test_a_bucket_and_a_disk_are_listed_in_the_same_order(bucket: Bucket) -> None:
    bucket.write(*(f"data/{name}" for name in (*NAMES, *HIDDEN)), "database/x", "data.txt")
    bucket.objects.update({"data/": b"", "data/bird/": b""})

    expected = [(name, len(f"data/{name}".encode())) for name in NAMES]
    assert facts(files_below(f"{bucket.root}/data")) == [(*each, False) for each in expected]
    for root in ("gs://bucket/data", "/gcs/bucket/data"):
        assert facts(files_below(root)) == [(*each, True) for each in expected]


def test_a_bucket_behind_a_proxy_is_listed_and_read(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is its own proxy: the bucket's address is known to that alone."""
    bucket.write("data/1.jpg")
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", os.environ["STORAGE_EMULATOR_HOST"])
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://storage.invalid")
    behind = Storage("gs://bucket")

    assert [found.name for found in behind.objects("data/")] == ["data/1.jpg"]
    assert behind.read_bytes("data/1.jpg") == b"data/1.jpg"


def test_a_bucket_behind_a_proxy_of_https_is_listed_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Google's own address is: by CONNECT, and nobody else knows the way."""
    files = write_certificates(tmp_path, ["storage.invalid"])
    with (
        fake_storage("bucket", {"data/1.jpg": b"jpeg"}, files=files) as url,
        serve_proxy({"storage.invalid"}, 0, int(url.rpartition(":")[2]), Tunnels()) as (port, refused),
    ):
        for name in ("no_proxy", "NO_PROXY", "HTTPS_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(files.authority))
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", "https://storage.invalid")

        assert [found.name for found in files_below("gs://bucket/data")] == ["1.jpg"]
        assert read_object("gs://bucket/data/1.jpg") == b"jpeg"
        with open_read("gs://bucket/data/1.jpg") as file:
            assert file.read() == b"jpeg"
    assert not refused


def test_a_thousand_names_are_a_request(bucket: Bucket) -> None:
    names = [f"{folder}/{number:04}.jpg" for folder in ("a", "b", "c") for number in range(2500)]
    bucket.objects.update(dict.fromkeys(names, b"jpeg"))

    assert [file.name for file in files_below("gs://bucket")] == names
    assert len(bucket.requests) == 8


def test_a_page_that_is_lost_is_asked_for_again(bucket: Bucket) -> None:
    bucket.objects.update(dict.fromkeys((f"a/{number}" for number in range(1500)), b""))
    bucket.fates[:] = ["", "lost", ""]

    names = [file.name for file in files_below("gs://bucket")]

    assert names == sorted(bucket.objects)
    assert len(bucket.requests) == 3


def test_what_the_fingerprint_sees_of_a_bucket(bucket: Bucket, tmp_path: Path) -> None:
    bucket.write(*NAMES)
    source = "images:/gcs/bucket"
    first = known(source)
    labels = tmp_path / "labels.csv"
    labels.write_text("path,label\n")

    assert known("images:gs://bucket") == first
    assert known(source, labels=str(labels)).known_by == "names, sizes, times and generations"
    Client().bucket("bucket").blob(NAMES[0]).upload_from_string(NAMES[0])  # the same, in a new generation
    assert known(source).digest != first.digest


@pytest.mark.parametrize(
    "pattern", ["cat/*.jpg", "**/1.jp*g", "**", "cat/??????.jpg", "cat/é[1]·猫.jpg", "*/[!1]*"]
)
def test_patterns_match_in_a_bucket_as_on_a_disk(pattern: str, bucket: Bucket) -> None:
    bucket.write(*NAMES, *HIDDEN)
    bucket.objects["cat/"] = b""
    wanted = f"{bucket.root}/{pattern}"
    on_disk = [path for path in glob.glob(wanted, recursive=True) if Path(path).is_file()] or [wanted]

    found = list(match_files(f"gs://bucket/{pattern}"))

    assert [file.path.replace("gs://bucket", str(bucket.root)) for file in found] == sorted(on_disk)
    assert all(file.is_generation for file in found)
    assert [file.path for file in match_files(wanted)] == sorted(on_disk)


def test_images_of_a_bucket_are_not_asked_for_one_by_one(bucket: Bucket) -> None:
    bucket.write(*NAMES, *HIDDEN)

    source = open_source(PreprocessSettings(source="images:/gcs/bucket"))
    examples = [example for example in source if isinstance(example, Example)]

    assert isinstance(source, ClassFolders)
    assert source.class_names == ("cat", "cat-big", "cat.old", "dog")
    assert [example.key for example in examples] == list(NAMES)
    classes = [source.class_names[example.label] for example in examples]
    assert classes == [name.partition("/")[0] for name in NAMES]
    spans = {(f"gs://bucket/{name}", 1, ~len(name.encode())) for name in NAMES}
    assert {example.image for example in examples} == spans
    assert len(bucket.requests) == 2  # the top, and all


def test_images_that_only_later_rows_of_a_table_name_are_seen_to_change(tmp_path: Path) -> None:
    table, photo = tmp_path / "rows.jsonl", tmp_path / "a.jpg"
    table.write_text('{"label": 0}\n{"label": 1, "image": "a.jpg"}\n')
    photo.write_bytes(b"photo")
    first = known(f"table:{table}")
    photo.write_bytes(b"another photo")
    assert known(f"table:{table}").digest != first.digest


def test_a_bucket_that_is_not_a_folder_per_class(bucket: Bucket) -> None:
    bucket.write("data/cat/1.jpg", "data/dog/1.jpg", "data/dog/.hidden")
    source = PreprocessSettings(source="images:gs://bucket/data")
    bucket.objects["data/bird/"] = b""
    with pytest.raises(SourceError, match=r"class folder 'bird' of .* is empty; remove it or fill it"):
        list(open_source(source))
    bucket.write("data/readme.txt")
    with pytest.raises(SourceError, match=r"has 'readme\.txt' next to the class folders"):
        open_source(source)
    del bucket.objects["data/bird/"], bucket.objects["data/readme.txt"]
    found = open_source(source)
    bucket.write("data/bird/1.jpg")
    with pytest.raises(SourceError, match=r"bird/1\.jpg' appeared while the source was read"):
        list(found)
