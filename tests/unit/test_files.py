"""Files are written whole or not at all, whoever writes them, and read within limits."""

import json
import os
import stat
import threading
from pathlib import Path

import pytest

from shardline.trainer.base import files
from shardline.trainer.base.errors import DatasetError, SettingsError


def test_two_writers_with_one_process_number_never_tear_a_file(tmp_path: Path) -> None:
    """As in two containers that share a mount, where both programs are process 7."""
    path = tmp_path / "record.json"
    texts = [json.dumps([number] * 50_000) for number in (1, 2)]
    files.write_text(path, texts[0])
    done = threading.Event()

    def write(text: str) -> None:
        while not done.is_set():
            files.write_text(path, text)

    # Threads share a process number, and the system calls run side by side.
    writers = [threading.Thread(target=write, args=(text,)) for text in texts]
    for writer in writers:
        writer.start()
    try:
        assert all(path.read_text() in texts for _ in range(300))
    finally:
        done.set()
        for writer in writers:
            writer.join()
    assert os.listdir(tmp_path) == ["record.json"]


def test_a_file_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "model.keras"
    path.write_text("before")

    def write_half() -> None:
        with files.replacing(path) as temporary:
            assert temporary.suffix == ".keras"
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["model.keras"]


def test_file_and_directory_are_on_disk_in_the_right_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    replace, fsync = Path.replace, os.fsync

    def synced(descriptor: int) -> None:
        calls.append("directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        calls.append("rename")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    files.write_json(tmp_path / "manifest.json", {})
    assert calls == ["file", "rename", "directory"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link, target = tmp_path / "link", tmp_path / "there" / "file"
    link.symlink_to(Path("there", "file"))
    files.write_text(link, "content")
    assert link.is_symlink()
    assert target.read_text() == "content"


def test_devices_and_pipes_are_written_to_directly(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files.write_text(Path("/dev/stdout"), "to the terminal")
    files.write_text(Path("/dev/null"), "to nobody")
    assert capfd.readouterr().out == "to the terminal"
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON: Expecting value"),
        (b'{"a": NaN}', "is not JSON: NaN is not a JSON number"),
        (b"[1]", "holds no JSON object"),
        (b"[" * 200_000, "is nested too deeply"),
        (b"\xff\xfe{}", "is not UTF-8 text: invalid start byte at byte 0"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON: Exceeds the limit"),
        (b" " * 2_000, "has more than 0 MiB, which no such file needs"),
    ],
)
def test_files_that_hold_no_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, message: str
) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(content)
    if len(content) == 2_000:
        monkeypatch.setattr(files.read_text, "__kwdefaults__", {"limit": 1_000})
    with pytest.raises(DatasetError) as caught:
        files.read_json(path, DatasetError)
    assert str(caught.value).startswith(f"{path} {message}")


@pytest.mark.timeout(20)
def test_a_duplicate_key_among_many_is_found_quickly(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text("{" + ", ".join(f'"{number}": 0' for number in (*range(200_000), 199_999)) + "}")
    with pytest.raises(DatasetError, match="the key '199999' is there twice"):
        files.read_json(path, DatasetError)


@pytest.mark.timeout(20)
def test_a_pipe_without_a_reader_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SettingsError, match=r"pipe .*nothing reads this pipe; name a file"):
        files.write_text(tmp_path / "pipe", "x")
    with pytest.raises(IsADirectoryError):
        files.write_text(tmp_path, "x")


def test_paths_that_are_not_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    places = {
        "no file ": tmp_path / "missing",
        "is not a file": Path("/dev/zero"),
        "pipe is not a file": tmp_path / "pipe",
        "Is a directory": tmp_path,
        "embedded null": Path("a\0b"),
    }
    for message, path in places.items():
        with pytest.raises(SettingsError, match=message):
            files.read_toml(path, SettingsError)


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_bytes(b"\xef\xbb\xbfa = 1\n")
    assert files.read_toml(path, SettingsError) == {"a": 1}
    for text in ("a = [" * 10_000, "a" + ".a" * 5000 + " = 1"):  # dotted keys nest without brackets
        path.write_text(text)
        with pytest.raises(SettingsError, match=r"is nested too deeply|is not TOML"):
            files.read_toml(path, SettingsError)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1e400}', "record is not JSON: 1e400 is not a JSON number that can be held"),
        ("[" * 200 + "]" * 200, "record is nested too deeply"),
        ('{"a": 1, "b": 2, "a": 3}', "record is not JSON: the key 'a' is there twice"),
    ],
)
def test_ambiguous_or_too_deep_json_is_refused(text, message):
    with pytest.raises(SettingsError, match=message):
        files.parse_json(text, "record", SettingsError)


@pytest.mark.parametrize("uri", ["gs://../x", "gs://bucket/../../x", "/gcs/../etc"])
def test_a_path_that_leads_out_of_a_bucket_is_refused(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(files.GCS_ROOT_VARIABLE, "/run/gcs")

    with pytest.raises(SettingsError, match="leads out of its bucket"):
        files.local_path(uri)
    assert files.local_path("gs://bucket/a..b/c") == Path("/run/gcs/bucket/a..b/c")


def test_the_uri_of_a_path_in_a_bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(files.GCS_ROOT_VARIABLE, raising=False)
    for path in ("/gcs/bucket/x", Path("/gcs/bucket/x"), "gs://bucket/x"):
        assert files.bucket_uri(path) == "gs://bucket/x"
    assert [files.bucket_uri(path) for path in ("/gcs", "/gcsx/bucket", "bucket")] == [""] * 3
    monkeypatch.setenv(files.GCS_ROOT_VARIABLE, str(tmp_path))
    (tmp_path / "here").mkdir()
    assert files.bucket_uri("/gcs/here/x") == ""
    assert files.bucket_uri("/gcs/there/x") == "gs://there/x"


def test_a_json_file_that_no_reader_takes_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "evaluation.json"
    files.write_json(path, {"classes": ["ä"] * 100_000})
    assert files.read_json(path, DatasetError)["classes"][-1] == "ä"
    assert path.stat().st_size < 700_000, "indented, it has twice as much"

    monkeypatch.setattr(files, "MAX_TEXT_BYTES", 600_000)
    with pytest.raises(SettingsError, match=r"evaluation\.json would have 0 MiB, .* fewer classes"):
        files.write_json(path, {"classes": ["ä"] * 100_000})
