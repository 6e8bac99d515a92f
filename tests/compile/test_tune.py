"""The tuning pipeline: what is in it, that it is up to date, and what it refuses."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from shardline.components.custom_job import CustomJobSettings
from shardline.pipelines import settings
from shardline.pipelines.check import Pipeline
from shardline.pipelines.check.pipeline import UNKNOWN_TEXT
from shardline.pipelines.cli import main as cli
from shardline.pipelines.compile import compile_pipeline
from shardline.pipelines.parameters import load_study
from tests.helpers.checks import check_spec

ROOT = Path(__file__).resolve().parents[2]
LOCAL, STUDY = ROOT / "settings" / "local.toml", ROOT / "settings" / "tune.toml"


def compiled(environment):
    return yaml.safe_load(compile_pipeline(environment, load_study(STUDY)))


def tasks(spec):
    """Returns the tasks inside the exit handler."""
    (name,) = [name for name in spec["components"] if re.fullmatch(r"comp-exit-handler-\d+", name)]
    return spec["components"][name]["dag"]["tasks"]


def constants(task):
    parameters = task["inputs"]["parameters"]
    return {
        name: item["runtimeValue"]["constant"] for name, item in parameters.items() if "runtimeValue" in item
    }


def test_the_committed_file_is_what_the_code_compiles_to():
    found = (ROOT / "compiled" / "tune.yaml").read_text()

    assert found == compile_pipeline(settings.load_settings(LOCAL), load_study(STUDY))


def test_the_best_trial_parametrizes_the_final_training():
    steps = tasks(compiled(settings.load_settings(LOCAL)))

    before = {"detect-changes", "preprocess", "rehearse", "plan-study"}
    final = {"best-trial", "train", "export-validate", "condition-2"}
    assert set(steps) == {*before, "hyperparameter-tuning-job", *final}
    producers = {
        name: item["taskOutputParameter"]["producerTask"]
        for name, item in steps["train"]["inputs"]["parameters"].items()
        if "taskOutputParameter" in item
    }
    assert producers == {"tuned": "best-trial", "base_output_directory": "rehearse"}
    # A plan that is cached names the directory of an earlier run.
    assert not steps["plan-study"]["cachingOptions"].get("enableCache")


def test_the_trials_are_the_training_jobs_of_the_settings():
    local = settings.load_settings(LOCAL)
    cluster = local.train.cluster
    train = CustomJobSettings(
        cluster=cluster,
        strategy="FLEX_START",
        extra={"scheduling": {"max_wait_duration": "3600s"}},
        tensorboard="projects/p/locations/l/tensorboards/1",
        base_output_directory="gs://bucket/{{$.pipeline_job_name}}",
        tags={"team": "vision"},
    )
    spec = compiled(replace(local, train=train))

    job, _ = Pipeline(spec).jobs
    assert job.content["display_name"] == "tune"
    assert job.scheduling["restart_job_on_worker_restart"] is True
    assert (job.strategy, job.scheduling["max_wait_duration"]) == ("FLEX_START", "3600s")
    assert job.spec["service_account"] == "{{$.pipeline_service_account}}"
    # The directory is the run's own.
    assert job.spec["base_output_directory"] == {"output_uri_prefix": UNKNOWN_TEXT}
    plan = constants(tasks(spec)["plan-study"])
    assert plan["job_labels"] == {"component": "tune", "pipeline": "tune", "team": "vision"}
    assert [pool["replica_count"] for pool in plan["worker_pool_specs"]] == [1, 1]


def test_check_finds_nothing_and_the_study_is_the_default():
    spec = compiled(settings.load_settings(LOCAL))

    assert check_spec(spec) == []
    default = spec["root"]["inputDefinitions"]["parameters"]["study"]["defaultValue"]
    assert json.loads(default)["metric"] == "val_accuracy"


def test_the_command(tmp_path):
    study = tmp_path / "study.toml"
    study.write_text(STUDY.read_text().replace("val_accuracy", "val_loss"))
    output = tmp_path / "tune.yaml"
    given = ["compile", "--pipeline", "tune", "--settings", str(LOCAL), "--output", str(output)]

    assert CliRunner().invoke(cli.main, [*given, "--study", str(study)]).exit_code == 0
    assert "val_loss" in output.read_text()
    drift = CliRunner().invoke(cli.main, [*given, "--study", str(STUDY), "--check"])
    assert drift.exit_code == 2
    assert "differs from what the code compiles to" in drift.output
    missing = CliRunner().invoke(cli.main, [*given, "--study", str(tmp_path / "none.toml")])
    assert missing.exit_code == 2
    assert "docs/tuning.md shows one to start from" in missing.output


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"max_trial_count": "-1"}, "max_trial_count must not be negative"),
        ({"study": '{"metric": "val_loss"}'}, "a study needs at least one"),
        ({"rules": '["accuracy >= 2"]'}, "within 0..1"),
        ({"train_options": '{"tuning_metric": "loss"}'}, "tuning_metric is the study's metric"),
    ],
)
def test_a_mistake_is_found_before_anything_starts(tmp_path, parameters, words):
    given = [part for name, value in parameters.items() for part in ("--param", f"{name}={value}")]
    done = CliRunner().invoke(
        cli.main, ["run", str(ROOT / "compiled" / "tune.yaml"), "--runs-dir", str(tmp_path / "runs"), *given]
    )

    assert done.exit_code == 2
    assert words in done.output
    assert not (tmp_path / "runs").exists()
