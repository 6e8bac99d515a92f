"""A study: what is accepted, what the API gets of it, and how a trial's parameters reach the trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hypertune
import pytest
from google.cloud.aiplatform_v1.types import StudySpec
from google.protobuf import json_format
from google_cloud_pipeline_components.container.v1.gcp_launcher.utils import json_util
from kfp import dsl

from shardline.components.custom_job import REDUCTION_SERVER_IMAGE
from shardline.components.train import read_training, with_tuned
from shardline.components.tune.study import (
    STOPPING,
    StudyParameter,
    parse_study,
    plan_tuning_job,
    read_flags,
    read_study,
    read_value,
)
from shardline.pipelines.parameters import load_study
from shardline.trainer.base.errors import SettingsError, ShardlineError
from shardline.trainer.base.progress import Measurements, read_measurements

RATE = {"name": "learning_rate", "type": "double", "min": 1e-4, "max": 0.1, "scale": "log"}
UNITS = {"name": "units", "type": "integer", "min": 0, "max": 4}
BATCH = {"name": "per_replica_batch_size", "type": "discrete", "values": [0.5, 16, 32]}
KIND = {"name": "kind", "type": "categorical", "values": ["a", "true"]}


def study(**changes: Any) -> dict[str, Any]:
    return {"metric": "val_accuracy", "parameter": [RATE, UNITS, BATCH, KIND], **changes}


@pytest.mark.parametrize("stopping", STOPPING)
def test_the_api_gets_the_study_through_the_launcher(stopping: str) -> None:
    """What the launcher drops of the study is what the API takes for granted."""
    spec = read_study(study(stopping=stopping, goal="minimize", algorithm="RANDOM_SEARCH")).spec
    whole, sent = (
        json_format.ParseDict(content, StudySpec.pb(StudySpec()))
        for content in (spec, json_util.recursive_remove_empty(spec))
    )

    assert sent == whole
    read = StudySpec(sent)
    assert read.metrics[0].goal == StudySpec.MetricSpec.GoalType.MINIMIZE
    assert read.algorithm == StudySpec.Algorithm.RANDOM_SEARCH
    rate, units, batch, kind = read.parameters
    assert rate.scale_type == StudySpec.ParameterSpec.ScaleType.UNIT_LOG_SCALE
    assert (units.integer_value_spec.min_value, units.integer_value_spec.max_value) == (0, 4)
    assert list(batch.discrete_value_spec.values) == [0.5, 16, 32]
    assert list(kind.categorical_value_spec.values) == ["a", "true"]
    assert (sent.WhichOneof("automated_stopping_spec") or "").startswith(stopping)
    assert bool(sent.WhichOneof("automated_stopping_spec")) == bool(stopping)


def test_a_run_may_ask_for_fewer_trials() -> None:
    fewer = read_study(study(max_trial_count=9, parallel_trial_count=3), max_trial_count=2)

    assert (fewer.max_trial_count, fewer.parallel_trial_count) == (2, 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"metrik": 1}, "unknown key metrik; did you mean metric?"),
        ({"metric": "val loss"}, "metric must be a metric of the trainer"),
        ({"goal": "max"}, "goal must be 'maximize' or 'minimize', got 'max'"),
        ({"algorithm": "GRID_SEARCH"}, "GRID_SEARCH takes no parameter of type double: learning_rate"),
        ({"max_trial_count": 0}, "max_trial_count must be at least 1, got 0"),
        ({"parallel_trial_count": 11}, "parallel_trial_count 11 is more than max_trial_count 10"),
        ({"parameter": []}, "a study needs at least one"),
        ({"parameter": {"name": "x"}}, "parameter must be a list of mappings"),
        ({"parameter": [RATE, RATE]}, "got twice: learning_rate"),
        ({"parameter": [{"type": "double"}]}, "parameter[0].name is missing"),
        ({"parameter": [{**RATE, "step": 1}]}, "unknown key parameter[0].step"),
        ({"parameter": [{**RATE, "name": "learning-rate"}]}, "name must be a word as in learning_rate"),
        ({"parameter": [{**RATE, "type": "float"}]}, "parameter[0].type must be 'double', 'integer'"),
        ({"parameter": [{**RATE, "min": 1}]}, "min must be below max, got 1 and 0.1"),
        ({"parameter": [{**RATE, "min": 0}]}, "scale log needs values above 0, got 0"),
        ({"parameter": [{**RATE, "values": [1]}]}, "takes min and max, two numbers, and no values"),
        ({"parameter": [{**UNITS, "max": 2.5}]}, "min and max of an integer are whole numbers"),
        ({"parameter": [{**BATCH, "values": [32, 16]}]}, "numbers in increasing order, got [32, 16]"),
        ({"parameter": [{**KIND, "values": [1]}]}, "values of a categorical are different texts"),
        ({"parameter": [{**KIND, "scale": "log"}]}, "a categorical has no scale"),
    ],
)
def test_what_is_no_study_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError) as error:
        read_study(study(**changes))
    assert words in str(error.value)


def test_the_example_is_a_study_and_a_broken_file_is_named(tmp_path: Path) -> None:
    assert read_study(parse_study(load_study(Path("settings/tune.toml")))).metric == "val_accuracy"
    (tmp_path / "study.toml").write_text('metric = "val_loss"\n[[parameter]]\nname = "model_dir"\n')
    with pytest.raises(SettingsError, match=r"study\.toml: parameter\[0\]\.type is missing"):
        load_study(tmp_path / "study.toml")
    with pytest.raises(SettingsError, match="no study file"):
        load_study(tmp_path / "none.toml")


def planned(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "study": json.dumps(study()),
        "worker_pool_specs": [
            {"replica_count": 1.0, "container_spec": {"image_uri": "image:1", "env": []}},
            {"replica_count": "0"},
            {"replica_count": 2.0, "container_spec": {"image_uri": REDUCTION_SERVER_IMAGE}},
        ],
        "trials": dsl.Artifact(uri="gs://bucket/trials"),
        "job_labels": {"team": "vision"},
        "max_trial_count": 0,
        "trial_epochs": 3,
        "dataset": dsl.Dataset(uri="/gcs/bucket/data"),
        "model_function": "mlp",
        "hparams": {"note": 'a "quote" {{ x }}', "units": 8},
        "epochs": 2,
        "seed": 7,
        "options": {"early_stopping": "val_loss"},
    }
    return plan_tuning_job(**{**values, **changes})


def test_a_trial_reads_back_what_was_planned() -> None:
    made = planned()
    pool, empty, reduction = json.loads(made.worker_pool_specs)
    argument = json.loads(pool["container_spec"]["args"][0])

    assert pool["container_spec"]["command"] == ["python3", "-m", "shardline.components.tune.study"]
    assert (pool["container_spec"]["image_uri"], pool["replica_count"]) == ("image:1", 1)
    assert type(pool["replica_count"]) is int  # numbers travel as doubles
    assert (empty, "args" in reduction["container_spec"]) == ({"replica_count": "0"}, False)
    # As the platform adds them, in whatever form it writes numbers.
    flags = ["--learning_rate=0.001", "--units=3", "--per_replica_batch_size=16.0", "--kind=true"]
    training = read_training(argument["training"])
    assert training.epochs == 3
    merged = with_tuned(training, read_flags(flags, argument["parameters"]))
    assert merged.learning_rate == 0.001
    assert merged.per_replica_batch_size == 16
    assert type(merged.per_replica_batch_size) is int
    assert merged.hparams == {"note": 'a "quote" {{ x }}', "units": 3, "kind": True}
    assert (merged.early_stopping, merged.tuning_metric) == ("val_loss", "val_accuracy")
    assert made.base_output_directory == "gs://bucket/trials"
    assert json.loads(made.labels) == {"team": "vision", "seed": "7"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"study": json.dumps(study(parameter=[RATE | {"name": "model_dir"}]))}, "model_dir cannot be tuned"),
        ({"study": json.dumps(study(parameter=[RATE | {"name": "tuning_metric"}]))}, "tuning_metric is the"),
        ({"options": {"tuning_metric": "loss"}}, "tuning_metric is the study's metric"),
        ({"study": "{"}, "study is not JSON"),
        ({"study": "[]"}, "study must be a JSON object"),
        ({"options": {"epochs": 3}}, "options has epochs, which has a value of its own"),
        ({"hparams": {"x": "{{$.inputs}}"}}, "begins a placeholder"),
    ],
)
def test_what_cannot_be_tuned_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError) as error:
        planned(**changes)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--units=3", "--unit=4"], "the study has no parameter 'unit'"),
        ([], "no value for units"),
        (["--units=x"], "'x' where a number was expected"),
    ],
)
def test_flags_that_are_not_the_studys(flags: list[str], words: str) -> None:
    with pytest.raises(ShardlineError) as error:
        read_flags(flags, {"units": "integer"})
    assert words in str(error.value)


def test_a_text_stays_a_text() -> None:
    assert [read_value("categorical", text) for text in ("64", "true", "a=b")] == ["64", True, "a=b"]
    assert StudyParameter(name="x", type="categorical", values=("1",)).spec["categorical_value_spec"]


def test_the_metric_file_is_that_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {name: tmp_path / name / "output.metrics" for name in ("ours", "theirs")}
    monkeypatch.setenv("CLOUD_ML_TRIAL_ID", "3")
    monkeypatch.setenv("CLOUD_ML_HP_METRIC_FILE", str(files["theirs"]))
    theirs = hypertune.HyperTune()
    ours = Measurements({"CLOUD_ML_TRIAL_ID": "3", "CLOUD_ML_HP_METRIC_FILE": str(files["ours"])})
    for step in range(1, 121):
        theirs.report_hyperparameter_tuning_metric("val_loss", 0.1 * step, step)
        ours.add("val_loss", 0.1 * step, step)

    def lines(path: Path) -> list[dict[str, Any]]:
        return [{**json.loads(line), "timestamp": 0} for line in path.read_text().splitlines()]

    assert lines(files["ours"]) == lines(files["theirs"])
    assert files["ours"].read_text().count("\n") == files["theirs"].read_text().count("\n") == 100


def test_a_restarted_trial_goes_on_and_the_last_report_of_a_step_counts(tmp_path: Path) -> None:
    path = tmp_path / "output.metrics"
    environ = {"CLOUD_ML_HP_METRIC_FILE": str(path)}
    assert read_measurements(path, "loss") == []
    first = Measurements(environ)
    first.add("loss", 3.0, 10)
    first.add("loss", 2.0, 20)
    again = Measurements(environ)
    again.add("loss", 2.5, 20)
    with path.open("a") as file:
        file.write('{"loss": "nan", "global_step": "30", "timestamp": 1}\n')
        file.write("[" * 100_000 + '\n{"loss": "1.')  # damage, and a line that is being written
    path.write_bytes(path.read_bytes() + b"\xff")

    assert [measured[:2] for measured in read_measurements(path, "loss")] == [(10, 3.0), (20, 2.5)]
    assert read_measurements(path, "val_loss") == []


def test_a_trial_that_cannot_report_ends_before_it_is_paid(tmp_path):
    """As in an image whose user is not root: the platform's /var/hypertune is root's."""
    (tmp_path / "hypertune").write_text("in the way")
    with pytest.raises(SettingsError, match=r"/hypertune/output.metrics cannot be written .*image as root"):
        Measurements({"CLOUD_ML_HP_METRIC_FILE": str(tmp_path / "hypertune/output.metrics")})
