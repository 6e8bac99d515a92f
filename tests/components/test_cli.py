"""The command line: one clear line and exit code 2 for bad input, and nothing written."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardline.components.preprocess.settings import PreprocessSettings
from shardline.pipelines.cli import main as cli
from shardline.pipelines.cli.data import OTHERS
from shardline.trainer.base.errors import EXIT_INTERRUPTED
from tests.helpers.datasets import write_dataset
from tests.helpers.preprocessing import run
from tests.helpers.small_disk import small_disk

ROOT = Path(__file__).resolve().parents[2]
PIPELINE = str(ROOT / "compiled" / "retrain.yaml")


def invoke(*arguments):
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments])


def assert_refused(result, message):
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert "Traceback" not in result.output
    assert len([line for line in result.output.splitlines() if line.startswith("Error: ")]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--split", "train=0.8"], "shares of split must be above 0 and add up to 1"),
        (["--split", "train=0.8,dev=0.2"], "split must give shares of train, validation, test"),
        (["--feature", "image=a,image=b"], "--feature image is set twice: 'a' and 'b'"),
        (["--option", "split_slat=3"], "unknown key --option split_slat; did you mean --option split_salt?"),
        (["--option", "max_pixels=many"], "--option max_pixels is declared as int, got 'many'"),
        (["--processes", 100_000], "processes must be 0 to 1,024, got 100000"),
    ],
)
def test_preprocess_refuses_options_before_it_starts(tmp_path, options, message):
    assert_refused(invoke("preprocess", "digits", tmp_path / "out", *options), message)
    assert not (tmp_path / "out").exists()


def test_preprocess_passes_its_options_on(tmp_path):
    options = ["--split", "train=0.5,test=0.5", "--seed", 3, "--readers", 2, "--shards", 4, "--json"]
    result = invoke("preprocess", "digits", tmp_path / "out", *options)

    assert result.exit_code == 0, result.output
    described = json.loads(result.stdout)
    assert described["records"] == described["records_in"] == 1797
    assert {name: split["shards"] for name, split in described["splits"].items()} == {"train": 4, "test": 4}
    assert described["settings"]["seed"] == 3
    shown = json.loads(invoke("dataset", "stats", tmp_path / "out", "--json").stdout)
    assert described.items() <= shown.items()
    assert invoke("dataset", "verify", tmp_path / "out", "--deep").exit_code == 0
    assert_refused(invoke("preprocess", "digits", tmp_path / "out"), "holds a dataset already")
    assert invoke("preprocess", "digits", tmp_path / "out", "--overwrite").exit_code == 0


def test_every_setting_of_preprocessing_is_an_option():
    options = {option.name for option in cli.main.commands["preprocess"].params}

    assert {field.name for field in dataclasses.fields(PreprocessSettings)} == (options | set(OTHERS)) - {
        "out", "others", "overwrite", "dry_run", "as_json"
    }  # fmt: skip


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    out = tmp_path_factory.mktemp("digits") / "data"
    run("digits", out)
    return out


def test_dataset_commands(digits):
    shown = invoke("dataset", "stats", digits).stdout
    assert "1,797 of 1,797 in the source" in shown
    assert "8 x 8 x 1" in shown
    found = json.loads(invoke("dataset", "stats", digits, "--json").stdout)["profile"]["numbers"]
    assert found["image height"]["spread"]["largest"] == 8
    sound = invoke("dataset", "verify", digits)
    assert (sound.exit_code, sound.stdout.splitlines()[-1][:21]) == (0, "sound: 1,797 records ")


def test_verify_exits_with_1_and_names_the_damage(digits, tmp_path):
    shutil.copytree(digits, tmp_path / "data")
    shard = min((tmp_path / "data").glob("train-*"))
    shard.write_bytes(shard.read_bytes()[:-3])

    result = invoke("dataset", "verify", tmp_path / "data")

    assert result.exit_code == 1
    assert f"{shard.name}, record 1" in result.stdout
    assert result.stdout.splitlines()[-1].startswith(f"damaged: {shard.name}; ")
    found = json.loads(invoke("dataset", "verify", tmp_path / "data", "--json").stdout)
    assert not found["sound"]
    assert {damage["file"] for damage in found["damages"]} == {shard.name}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Directory with data/ and with model/, which was trained on it."""
    place = tmp_path_factory.mktemp("trained")
    write_dataset(place / "data")
    done = invoke("train", place / "data", place / "model", "--epochs", 4)
    assert done.exit_code == 0, done.output
    return place


def test_train_and_validate_are_faces_of_the_same_functions(trained, tmp_path):
    arguments = ["validate", trained / "model" / "model.keras", trained / "data", tmp_path / "out"]
    assert invoke(*arguments, "--rule", "accuracy >= 0.5").exit_code == 0
    assert (tmp_path / "out" / "report.html").is_file()
    assert_refused(invoke(*arguments, "--rule", "accuracy >= 2"), "within 0..1")


@pytest.mark.parametrize(
    ("command", "kib"),
    [
        pytest.param("compile", 8, marks=pytest.mark.matrix),
        pytest.param("train", 60, marks=pytest.mark.matrix),
        *(("validate", 700), ("run", 4), ("new", 12)),
    ],
)
def test_a_full_disk_is_one_line_and_may_be_tried_again(trained, tmp_path, command, kib):
    with small_disk(tmp_path / "small", kib) as disk:
        arguments = {
            "compile": ("--settings", ROOT / "settings" / "local.toml", "--output", disk / "pipeline.yaml"),
            "train": (trained / "data", disk / "out", "--epochs", 1),
            "validate": (trained / "model" / "model.keras", trained / "data", disk / "out"),
            "run": (PIPELINE, "--runs-dir", disk / "runs"),
            "new": (disk / "project",),
        }
        done = invoke(command, *arguments[command])
        left = {path.name for path in disk.rglob("*")}

    assert done.exit_code == 1, done.output
    assert done.output.splitlines()[-1].startswith("Error: ")
    assert re.search(r"No space left on device \([\d,.]+ kB free", done.output.splitlines()[-1])
    assert str(disk) in done.output.splitlines()[-1]
    assert "Traceback" not in done.output
    if command in ("new", "run", "compile"):  # the others continue from what they have, or replace it
        assert left <= {"runs", "project"}


def test_ctrl_c_ends_a_command_as_a_shell_expects(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("shardline.trainer.manifest.load", interrupted)
    done = invoke("dataset", "stats", tmp_path)
    assert (done.exit_code, done.output) == (EXIT_INTERRUPTED, "Aborted!\n")
