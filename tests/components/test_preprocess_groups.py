"""Splits that do not leak: examples of one group stay together, and training comes before test."""

from __future__ import annotations

import csv
import dataclasses
import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from shardline.components.preprocess.inspect import verify
from shardline.trainer import manifest as manifests
from shardline.trainer.base.errors import SourceError
from tests.helpers.preprocessing import run, stored, write_images

PATIENTS = 60


def write(path: Path, visits: int = 7, patients: int = PATIENTS, broken: int = -1) -> str:
    """Writes a table with some visits of each patient, and returns the source."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["patient", "visit", "label"])
        for number in range(patients * visits):
            patient = "" if number == broken else f"p{number % patients}"
            writer.writerow([patient, number // patients, "ill" if number % 3 else "well"])
    return f"table:{path}"


def made(tmp_path: Path, name: str, **settings: object) -> Path:
    run(write(tmp_path / f"{name}.csv"), tmp_path / name, **settings)
    return tmp_path / name


def patients_by_split(directory: Path) -> dict[str, set[str]]:
    return {name: {one.decode() for one in found} for name, found in stored(directory, "patient").items()}


def test_all_visits_of_a_patient_are_in_one_split(tmp_path: Path) -> None:
    found = patients_by_split(made(tmp_path, "grouped", group="patient"))
    assert sum(map(len, found.values())) == PATIENTS
    assert set.union(*found.values()) == {f"p{number}" for number in range(PATIENTS)}
    manifest = manifests.load(tmp_path / "grouped")
    assert (manifest.group, list(manifest.inputs)) == ("patient", ["visit"])
    alone = patients_by_split(made(tmp_path, "alone"))
    assert sum(map(len, alone.values())) > PATIENTS


def test_a_patient_keeps_its_split_when_visits_come(tmp_path: Path) -> None:
    before = patients_by_split(made(tmp_path, "before", group="patient"))
    source = write(tmp_path / "more.csv", visits=9)
    run(source, tmp_path / "after", group="patient", processes=2)
    assert patients_by_split(tmp_path / "after") == before


def test_verify_names_the_groups_in_two_splits(tmp_path: Path) -> None:
    assert not verify(made(tmp_path, "sound", group="patient"), processes=1).damages
    leaking = made(tmp_path, "leaking")
    manifest = manifests.load(leaking)
    settings = {**manifest.settings, "group": "patient"}
    manifests.save(dataclasses.replace(manifest, settings=settings), leaking)
    (damage,) = verify(leaking, processes=1).damages
    assert "groups by 'patient', and groups are in several splits: 'p0' in " in str(damage)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"patients": 1}, "are of one group of 'patient'"),
        ({"broken": 3}, "row 4': has no value of 'patient'"),
    ],
)
def test_what_cannot_be_grouped_is_refused(tmp_path: Path, written: dict[str, int], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        run(write(tmp_path / "table.csv", **written), tmp_path / "out", group="patient")


def timed(path: Path, **more: list[str]) -> str:
    """Writes a table of 200 days, five rows each, and returns the source."""
    days = [datetime.date(2026, 1, 1) + datetime.timedelta(number % 200) for number in range(1000)]
    columns = {"day": days, "x": [float(d.toordinal()) for d in days], "label": ["a", "b"] * 500}
    write = pyarrow.csv.write_csv if path.suffix == ".csv" else pyarrow.parquet.write_table
    write(pa.table(columns | more), path)
    return f"table:{path}"


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_training_comes_before_validation_and_test(tmp_path: Path, suffix: str) -> None:
    source = timed(tmp_path / f"table.{suffix}")
    manifest = run(source, tmp_path / "out", split_by_time="day", split_gap="5d")
    assert [feature.name for feature in manifest.columns] == ["x", "split_time_us"]
    assert (manifest.time_feature, list(manifest.inputs)) == ("split_time_us", ["x"])
    ends = {name: (min(days), max(days)) for name, days in stored(tmp_path / "out", "x").items()}
    assert ends["validation"][0] - ends["train"][1] == 6
    assert ends["test"][0] - ends["validation"][1] == 6
    assert (manifest.settings["split_by_time"], manifest.settings["split_gap"]) == ("day", "5d")
    assert not verify(tmp_path / "out", processes=1).damages


def test_a_split_by_time_of_sorted_classes_is_reported_as_useless(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sorted_by_class = sorted("abcd"[number % 4] for number in range(1000))
    days = sorted(datetime.date(2026, 1, 1) + datetime.timedelta(number % 200) for number in range(1000))
    source = timed(tmp_path / "table.csv", label=sorted_by_class, day=days)
    run(source, tmp_path / "out", split_by_time="day")
    assert "warning: the test split has no class but 'd' that training has" in capsys.readouterr().out


def test_verify_names_what_is_not_before_the_next_split(tmp_path: Path) -> None:
    def damages(out: Path, splits: dict[str, str], **settings: str) -> list[str]:
        manifest = manifests.load(out)
        moved = {name: manifest.splits[other] for name, other in splits.items()}
        changed = {**manifest.settings, **settings}
        manifests.save(dataclasses.replace(manifest, splits=moved, settings=changed), out)
        found = [str(damage) for damage in verify(out, processes=1).damages]
        manifests.save(manifest, out)
        return [damage for damage in found if "splits by" in damage]

    out = tmp_path / "out"
    source = timed(tmp_path / "table.csv", key=[f"row {number}" for number in range(1000)])
    run(source, out, split_by_time="day", split_gap="2d")
    as_it_is = {name: name for name in ("train", "validation", "test")}
    assert not damages(out, as_it_is)
    (damage,) = damages(out, as_it_is | {"validation": "test", "test": "validation"})
    assert damage.startswith(
        "manifest.json: splits by 'day', and 'row 999' in validation, 2026-07-19T00:00:00"
    )
    assert "is not 2d before 'row 160' in test, 2026-06-10T00:00:00+00:00" in damage
    assert len(damages(out, as_it_is, split_gap="4d")) == 2


def test_an_image_without_a_group_moves_no_other_ones_content(tmp_path: Path) -> None:
    """With the key "content", whose hashes follow the examples that are left."""
    images = write_images(tmp_path / "images", each=6)
    names = sorted(path.relative_to(images).as_posix() for path in images.rglob("*.png"))
    keys = []
    for first in ("", "shop"):
        rows = [f"{name},{name[:3]},{f'g{i % 4}' if i else first}" for i, name in enumerate(names)]
        (tmp_path / "labels.csv").write_text("\n".join(["path,label,shop", *rows]))
        out = tmp_path / f"out{first}"
        settings: dict[str, Any] = {"labels": str(tmp_path / "labels.csv"), "group": "shop", "key": "content"}
        settings |= {"on_bad_record": "skip", "max_bad_fraction": 0.5, "split": {"train": 1.0}}
        run(f"images:{images}", out, **settings)
        found = (out / "examples.keys").read_bytes()
        keys.append({found[i : i + manifests.KEY_BYTES] for i in range(0, len(found), manifests.KEY_BYTES)})
    assert len(keys[0]) == len(names) - 1
    assert keys[0] < keys[1]
