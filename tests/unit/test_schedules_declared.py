"""How schedules.toml is read."""

from __future__ import annotations

import datetime
import shutil
from pathlib import Path

import pytest

from shardline.pipelines.remote.schedules.declared import Declared, load_schedules
from shardline.trainer.errors import SettingsError

RIGHT = """
[schedules."every morning"]
cron = "TZ=Europe/Vienna 0 6 * * *"
pipeline = "../compiled/retrain.yaml"
max_run_count = 5
start_time = 2027-01-01T00:00:00+01:00
paused = true
[schedules."every morning".parameters]
epochs = 3
train_options = { callbacks = ["my.module:log"], max_time = 2.5 }
[schedules.registry]
cron = "TZ=UTC @daily"
pipeline = "https://europe-west4-kfp.pkg.dev/p/r/retrain/latest"
"""


def write(path: Path, text: str) -> Path:
    file = path / "schedules.toml"
    file.write_text(text)
    return file


def test_schedules_are_read(tmp_path: Path) -> None:
    found = load_schedules(write(tmp_path, RIGHT))

    assert list(found) == ["every morning", "registry"]
    assert found["every morning"] == Declared(
        display_name="every morning",
        cron="TZ=Europe/Vienna 0 6 * * *",
        pipeline=str(tmp_path / "../compiled/retrain.yaml"),
        parameters={"epochs": 3, "train_options": {"callbacks": ["my.module:log"], "max_time": 2.5}},
        max_run_count=5,
        start_time=datetime.datetime(2026, 12, 31, 23, tzinfo=datetime.UTC),
        paused=True,
    )
    assert found["registry"].pipeline.startswith("https://")
    assert found["registry"].max_concurrent_active_run_count == 1
    assert found["registry"].paused is None


def test_the_example_is_right(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "settings" / "schedules.toml.example"
    (declared,) = load_schedules(Path(shutil.copy(example, tmp_path))).values()

    assert declared.paused is None
    # Every key is shown.
    text = example.read_text()
    assert [key for key in vars(declared) if key != "display_name" and key not in text] == []


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('cron = "TZ=UTC 0 6 * *"', "it has 4 fields, not 5"),
        ('cron = "0 6 * * *"', "has no time zone; write it in front: TZ=Europe/Vienna"),
        ('cron = "TZ=Europe/Wien 0 6 * * *"', "there is no time zone 'Europe/Wien'"),
        ('cron = "TZ=UTC 0 6 31 2 *"', "names no day of any year"),
        ("max_concurrent_active_run_count = 0", "max_concurrent_active_run_count is 0"),
        ("max_run_count = 0", "max_run_count is 0; give whole numbers of 1 or more"),
        ('max_run_count = "3"', "schedules.nightly.max_run_count must be a whole number, got '3'"),
        ("allow_queuing = true", "did you mean schedules.nightly.allow_queueing?"),
        ("start_time = 2027-01-01T00:00:00", "start_time 2027-01-01T00:00:00 has no offset"),
        ("start_time = 2027-01-01", "start_time must be a date and time"),
        (
            "start_time = 2027-01-02T00:00:00Z\nend_time = 2027-01-01T00:00:00Z",
            "end_time 2027-01-01T00:00:00+00:00 is not after start_time",
        ),
        ("parameters = { day = 2027-01-01 }", "parameters must be JSON values"),
        ("parameters = { rate = nan }", "parameters must be JSON values"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, lines: str, message: str) -> None:
    right = {"cron": 'cron = "TZ=UTC 0 6 * * *"', "pipeline": 'pipeline = "a.yaml"'}
    rest = [text for key, text in right.items() if not lines.startswith(key)]
    file = write(tmp_path, "\n".join(["[schedules.nightly]", *rest, lines]))

    with pytest.raises(SettingsError) as raised:
        load_schedules(file)
    assert message in str(raised.value)
    assert str(file) in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[schedules.nightly]\ncron = "TZ=UTC 0 6 * * *"', "schedules.nightly.pipeline is missing"),
        ("schedules = 3", "schedules must be tables: [schedules.NAME]"),
        ("[schedules]\nnightly = 3", "schedules must be tables: [schedules.NAME]"),
        ("[schedule.nightly]", "unknown key schedule; write tables [schedules.NAME]"),
        ("[schedules.a]\n[schedules.a]", "is not TOML"),
        ("[schedules.'a\"b']\ncron='TZ=UTC 0 6 * * *'\npipeline='a'", "must be a text without quotes"),
    ],
)
def test_what_is_no_file_of_schedules(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError) as raised:
        load_schedules(write(tmp_path, text))
    assert message in str(raised.value)
