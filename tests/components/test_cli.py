"""The command line: one clear line and exit code 2 for bad input, and nothing written."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from pipelines import cli
from tests.helpers.datasets import write_dataset

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
    ("param", "message"),
    [
        ("source=digit", "unknown source 'digit'; known: digits, tfds:NAME[:CONFIG], images:DIR"),
        ("source=images:/nowhere", "/nowhere"),
        ("model=resnet", "unknown model 'resnet'; built in are mnist_cnn, resnet50"),
        ("min_accuracy=1.5", "min_accuracy must be"),
        ("epochs=0", "epochs must be at least 1, got 0"),
        ("per_replica_batch_size=0", "per_replica_batch_size must be at least 1"),
        ("image_size=2", "image_size must be 4..4096"),
        ("seed=-1", "seed must not be negative"),
        ("epochs=many", "epochs"),
        ("epoch=3", "epochs"),  # the nearest declared name
        ("hparams=[1]", "hparams"),
        ("epochs", "NAME=VALUE"),
    ],
)
def test_a_wrong_parameter_is_refused_before_anything_runs(tmp_path, param, message):
    runs = tmp_path / "runs"

    assert_refused(invoke("run", PIPELINE, "--runs-dir", runs, "--param", param), message)
    assert not runs.exists()


def test_a_parameter_given_twice_is_refused(tmp_path):
    result = invoke("run", PIPELINE, "--runs-dir", tmp_path, "-p", "epochs=1", "-p", "epochs=2")

    assert_refused(result, "epochs is given twice: '1' and '2'")


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: 1", "not a compiled pipeline"), ("a: [", "not YAML"), (None, "no pipeline")],
)
def test_a_file_that_is_no_pipeline_is_refused(tmp_path, text, message):
    path = tmp_path / "pipeline.yaml"
    if text is not None:
        path.write_text(text)

    assert_refused(invoke("run", path, "--runs-dir", tmp_path / "runs"), message)


def test_a_run_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")

    assert_refused(invoke("run", PIPELINE, "--runs-dir", tmp_path / "file" / "runs"), "run directory")


def test_preprocess_says_what_is_wrong(tmp_path):
    assert_refused(invoke("preprocess", "nothing", tmp_path / "out"), "unknown source 'nothing'")
    assert_refused(
        invoke("preprocess", "digits", tmp_path / "out", "--readers", 0), "readers must be at least 1"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--replicas", "0"], "at least 1 replica, not 0"),
        (["--epochs", "0"], "epochs must be at least 1"),
        (["--hparams", "{"], "not JSON"),
        (["--learning-rat", "1"], "unrecognized arguments"),
    ],
)
def test_train_refuses_options_before_a_replica_starts(tmp_path, options, message):
    result = invoke("train", tmp_path / "data", tmp_path / "out", *options)

    assert_refused(result, message)
    assert not (tmp_path / "out").exists()


def test_train_and_validate_are_faces_of_the_same_functions(tmp_path):
    write_dataset(tmp_path / "data")
    trained = invoke("train", tmp_path / "data", tmp_path / "model", "--epochs", 4)
    assert trained.exit_code == 0, trained.output

    arguments = ["validate", tmp_path / "model" / "model.keras", tmp_path / "data", tmp_path / "out"]
    assert invoke(*arguments, "--min-accuracy", 0.5).exit_code == 0
    assert (tmp_path / "out" / "report.html").is_file()
    assert_refused(invoke(*arguments, "--min-accuracy", 2), "min_accuracy")


def test_train_names_the_mistake_that_a_replica_finds(tmp_path):
    result = invoke("train", tmp_path, tmp_path / "out")

    assert_refused(result, "no manifest.json")
