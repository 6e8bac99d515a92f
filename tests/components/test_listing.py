"""Listings: by a bucket's API, through its mount, behind a URL; and what they cost."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from shardline.components.configure import fingerprint as fingerprints
from shardline.components.configure.fingerprint import Fingerprint
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources import open_source
from shardline.components.preprocess.sources.directories import ClassFolders
from shardline.components.preprocess.sources.example import Example
from shardline.components.storage import bucket as objects
from shardline.components.storage import listing
from shardline.trainer.base import files
from shardline.trainer.base.errors import SourceError
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


class Mounted(NamedTuple):
    """A bucket that is mounted, and has an API.

    Attributes:
        root: Its directory.
        objects: What its API tells of, by name.
        requests: Numbers of the requests to the API that were counted.
        fates: What becomes of the coming requests, the last first; the first stays.
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
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mounted]:
    """An empty mounted bucket, whose name nothing else has."""
    mounted = Mounted(tmp_path / tmp_path.name, {}, [], [""])
    mounted.root.mkdir()
    monkeypatch.setenv(files.GCS_ROOT_VARIABLE, str(tmp_path))
    monkeypatch.setattr(files, "_mounts", lambda: iter([("/", "ext4"), (str(mounted.root), "fuse.gcsfuse")]))
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)

    def fate(number: int) -> str:
        mounted.requests.append(number)
        return mounted.fates.pop() if len(mounted.fates) > 1 else mounted.fates[0]

    with fake_storage(mounted.root.name, mounted.objects, fate) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        yield mounted


def unmount(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(files.GCS_ROOT_VARIABLE, str(tmp_path / "nothing"))


def facts(found: Iterator[listing.File]) -> list[tuple[str, int, bool]]:
    return [(file.name, file.size, file.is_generation) for file in found]


def known(source: str, **settings: str) -> Fingerprint:
    return fingerprints.fingerprint(PreprocessSettings(source=source, **settings))  # type: ignore[arg-type]


def test_every_way_finds_the_same_in_the_same_order(
    bucket: Mounted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.write(*(f"data/{name}" for name in (*NAMES, *HIDDEN)), "database/x", "data.txt")
    bucket.objects.update({"data/": b"", "data/bird/": b"", "data/cat//2.jpg": b"never shown by a mount"})

    by_api = list(listing.files_below(f"{bucket.root}/data"))

    expected = [(name, len(f"data/{name}".encode())) for name in NAMES]
    assert facts(iter(by_api)) == [(*each, True) for each in expected]
    assert [Path(file.path).read_bytes() for file in by_api] == [f"data/{name}".encode() for name in NAMES]
    bucket.fates[0] = "before"
    assert facts(listing.files_below(f"{bucket.root}/data")) == [(*each, False) for each in expected]
    unmount(monkeypatch, tmp_path)
    bucket.fates[0] = ""
    there = [name for name, *_ in listing.files_below(f"gs://{bucket.root.name}/data")]
    assert there == sorted([*NAMES, "cat//2.jpg"])


def test_a_thousand_names_are_a_request(bucket: Mounted) -> None:
    names = [f"{folder}/{number:04}.jpg" for folder in ("a", "b", "c") for number in range(2500)]
    bucket.objects.update(dict.fromkeys(names, b"jpeg"))

    assert [file.name for file in listing.files_below(str(bucket.root))] == names
    assert len(bucket.requests) == 1 + 3 * 3


def test_ranges_are_listed_together_and_taken_in_order(bucket: Mounted) -> None:
    names = sorted(f"{folder:03}/{number}" for folder in range(100) for number in range(60))
    bucket.objects.update(dict.fromkeys(names, b""))

    assert [file.name for file in listing.files_below(str(bucket.root))] == names
    assert len(bucket.requests) <= 1 + 16


def test_a_page_that_is_lost_is_asked_for_again(bucket: Mounted) -> None:
    bucket.objects.update(dict.fromkeys((f"a/{number}" for number in range(1500)), b""))
    bucket.fates[:] = ["", "lost", "", ""]

    names = [file.name for file in listing.files_below(str(bucket.root))]

    assert names == sorted(bucket.objects)
    assert len(bucket.requests) == 1 + 2 + 1


def test_without_an_answer_the_mount_is_listed_and_that_is_reported(
    bucket: Mounted, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket.write(*NAMES)
    source = f"images:{bucket.root}"

    by_api = known(source)
    bucket.fates[0] = "before"
    by_mount, again = known(source), known(source)

    assert by_api.known_by == "names, sizes and generations"
    assert by_mount.known_by == "names, sizes and times"
    assert by_mount == again
    assert by_mount.text == by_api.text
    name = bucket.root.name
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "listed" in line]
    assert f"gs://{name} is listed through its mount, a request a file, as its API does not answer: " in line
    assert f"cannot list gs://{name}" in line


def test_what_the_fingerprint_sees_of_a_bucket(bucket: Mounted, tmp_path: Path) -> None:
    bucket.write(*NAMES)
    source = f"images:{bucket.root}"
    first = known(source)
    labels = tmp_path.parent / f"{tmp_path.name}.csv"
    labels.write_text("path,label\n")

    assert known(f"images:gs://{bucket.root.name}") == first
    assert known(source, labels=str(labels)).known_by == "names, sizes, times and generations"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            objects.Object, "__new__", lambda cls, name, size, _: tuple.__new__(cls, (name, size, 2))
        )
        assert known(source).digest != first.digest
    labels.unlink()


@pytest.mark.parametrize(
    "pattern",
    [
        "cat/*.jpg",
        "**/1.jp*g",
        "**",
        "cat/??????.jpg",
        "cat/é[1]·猫.jpg",
        "*/[!1]*",
    ],
)
def test_patterns_match_in_a_bucket_as_on_a_disk(pattern: str, bucket: Mounted) -> None:
    bucket.write(*NAMES, *HIDDEN)
    bucket.objects["cat/"] = b""
    wanted = f"{bucket.root}/{pattern}"
    on_disk = [path for path in glob.glob(wanted, recursive=True) if Path(path).is_file()] or [wanted]

    found = list(listing.match_files(f"gs://{bucket.root.name}/{pattern}"))

    assert [file.path for file in found] == sorted(on_disk)
    assert all(file.is_generation for file in found)
    assert listing.find_files(wanted) == sorted(on_disk)


def test_what_is_missing_has_the_usual_error(bucket: Mounted) -> None:
    bucket.write(*NAMES)
    for call, path, message in [
        (listing.match_files, "bird/*", "no file matches "),
        (listing.match_files, "cat", "is a directory; give a pattern such as "),
        (listing.files_below, "bird", "cannot read the directory .*No such file or directory"),
    ]:
        with pytest.raises(SourceError, match=message):
            list(call(f"{bucket.root}/{path}"))


def test_images_of_a_mounted_bucket_are_listed_by_its_api(
    bucket: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.write(*NAMES, *HIDDEN)
    for name in NAMES:
        (bucket.root / name).unlink()  # no one notices
    listed = list[str]()
    monkeypatch.setattr(listing, "warm_mount", listed.extend)

    source = open_source(PreprocessSettings(source=f"images:{bucket.root}"))
    examples = [example for example in source if isinstance(example, Example)]

    assert isinstance(source, ClassFolders)
    assert source.class_names == ("cat", "cat-big", "cat.old", "dog")
    assert [example.key for example in examples] == list(NAMES)
    assert [source.class_names[example.label] for example in examples] == [
        name.partition("/")[0] for name in NAMES
    ]
    assert {example.image for example in examples} == {
        (f"{bucket.root}/{name}", 1, ~len(name.encode())) for name in NAMES
    }
    assert sorted(listed) == [f"{bucket.root}/{name}" for name in source.class_names]
    assert len(bucket.requests) == 1 + 5  # the top, and once for each folder


def test_images_that_only_later_rows_of_a_table_name_are_seen_to_change(tmp_path: Path) -> None:
    table, photo = tmp_path / "rows.jsonl", tmp_path / "a.jpg"
    table.write_text('{"label": 0}\n{"label": 1, "image": "a.jpg"}\n')
    photo.write_bytes(b"photo")
    first = known(f"table:{table}")
    photo.write_bytes(b"another photo")
    assert known(f"table:{table}").digest != first.digest


def test_a_mount_lists_as_many_names_as_it_remembers(
    bucket: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.write(*NAMES)
    monkeypatch.setattr(listing, "_LISTED_NAMES", 2)
    counted = list[int]()
    monkeypatch.setattr(
        listing,
        "ordered_map",
        lambda read, folders, **_: (counted.append(read(each)) or counted[-1] for each in folders),
    )

    listing.warm_mount([f"{bucket.root}/{name}" for name in ("cat", "dog", "cat-big")])

    assert counted == [2]


def test_a_bucket_that_is_not_a_folder_per_class(bucket: Mounted) -> None:
    bucket.write("data/cat/1.jpg", "data/dog/1.jpg", "data/dog/.hidden")
    source = PreprocessSettings(source=f"images:{bucket.root}/data")
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
