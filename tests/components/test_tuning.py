"""The stub of the tuning launcher, with trials that are real processes and need no TensorFlow."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardline.components.tune.best_trial import (
    find_best_trial,
    read_job,
    read_trials,
    select_best_trial,
    trial_table,
)
from shardline.pipelines.local.job.tuning import Search
from shardline.trainer.base.errors import RunError
from tests.helpers import programs
from tests.helpers.jobs import PRELUDE

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("forks", "no_orphans")]

_TRIAL = (
    PRELUDE
    + """
from shardline.trainer.base.progress import Measurements
flags = dict(flag.removeprefix("--").split("=") for flag in sys.argv[1:])
seen = {name: os.environ.get(name) for name in ("AIP_MODEL_DIR", "CLOUD_ML_TRIAL_ID")}
Path(os.environ["SEEN"], f"{task['trial']}-{name}.json").write_text(json.dumps({**seen, **flags}))
if not chief:
    sys.exit()
report = Measurements(os.environ)
"""
)
_PARAMETERS = [
    {"parameter_id": "rate", "double_value_spec": {"min_value": 0, "max_value": 1}},
    {"parameter_id": "kind", "categorical_value_spec": {"values": ["a b", 'c"d']}},
]


def payload(
    program: str, seen: Path, *, trials: int = 3, replicas: int = 1, failed: int = 0, **study: Any
) -> str:
    env = [{"name": "SEEN", "value": str(seen)}]
    container = {"image_uri": "image:1", "command": [sys.executable, "-c"], "args": [program], "env": env}
    pools = [{"machine_spec": {"machine_type": "n1-standard-4"}, "container_spec": container}] * 2
    counted = [{**pool, "replica_count": count} for pool, count in zip(pools, (1, replicas - 1), strict=True)]
    spec = {"metrics": [{"metric_id": "score", "goal": "MAXIMIZE"}], "parameters": _PARAMETERS, **study}
    return json.dumps(
        {
            "display_name": "tune",
            "study_spec": spec,
            "max_trial_count": trials,
            "parallel_trial_count": 1,
            "max_failed_trial_count": failed,
            "trial_job_spec": {
                "worker_pool_specs": counted[: 2 if replicas > 1 else 1],
                "base_output_directory": {"output_uri_prefix": f"{seen}/out"},
            },
            "labels": {"seed": "5"},
        }
    )


def launch(text: str, directory: Path) -> tuple[subprocess.CompletedProcess[str], str]:
    resources = directory / "task" / "gcp_resources"
    where = ("--executor_input", "{}", "--gcp_resources", str(resources))
    command = [sys.executable, "-m", "shardline.pipelines.local.launcher_stubs", "HyperparameterTuningJob"]
    done = programs.run([*command, "--payload", text, *where], capture_output=True, text=True)
    return done, resources.read_text() if resources.is_file() else ""


def test_each_trial_is_a_job_with_its_parameters(tmp_path: Path) -> None:
    program = """
wait_for(Path(os.environ["SEEN"], f"{task['trial']}-worker-0.json"))
rate = float(flags["rate"])
report.add("score", rate, 10)
report.add("score", rate / 2, 20)
if task["trial"] == "2":
    with progress.exit_on_error("train"):
        raise ModelError("such units do not fit")
"""
    done, resources = launch(payload(_TRIAL + program, tmp_path, replicas=2), tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    job = read_job(resources)
    trials = read_trials(job)
    assert [trial.state for trial in trials] == ["SUCCEEDED", "INFEASIBLE", "SUCCEEDED"]
    assert trials[1].reason == "such units do not fit"
    assert "trial 2: failed: such units do not fit" in done.stdout
    for trial in trials:
        for replica in ("chief-0", "worker-0"):
            seen = json.loads((tmp_path / f"{trial.id}-{replica}.json").read_text())
            assert seen["CLOUD_ML_TRIAL_ID"] == trial.id
            assert seen["AIP_MODEL_DIR"] == f"{tmp_path}/out/{trial.id}/model/"
            assert (float(seen["rate"]), seen["kind"]) == (trial.parameters["rate"], trial.parameters["kind"])
    # The best measurement counts, and the best of these wins.
    best = find_best_trial(trials, job["studySpec"]["metrics"][0])
    assert best.value == max(trials[0].parameters["rate"], trials[2].parameters["rate"])
    assert best.step == 10
    assert [len(item["measurements"]) for item in job["trials"]] == [2, 2, 2]

    again, resources = launch(payload(_TRIAL + program, tmp_path, trials=2), tmp_path / "again")
    assert [trial.parameters for trial in read_trials(read_job(resources))] == [
        trial.parameters for trial in trials[:2]
    ], again.stdout


def test_the_steps_output_and_page(tmp_path: Path) -> None:
    program = "report.add('score', -float(flags['rate']), 7)"
    last = {"measurement_selection_type": "LAST_MEASUREMENT"}
    _, resources = launch(payload(_TRIAL + program, tmp_path, trials=2, **last), tmp_path)

    found = select_best_trial(resources, tmp_path / "trials", tmp_path / "report")

    best = read_trials(read_job(resources))[int(found.trial) - 1]
    assert found.value == best.value == -best.parameters["rate"]
    assert found.parameters == best.parameters
    page = (tmp_path / "report").read_text()
    assert page == (tmp_path / "trials" / "trials.html").read_text()
    assert f"Trial {best.id} of 2: score {best.value:.4f}" in page
    assert json.loads((tmp_path / "trials" / "trials.json").read_text()) == read_job(resources)


def test_as_many_failures_as_are_allowed_end_the_study(tmp_path: Path) -> None:
    done, resources = launch(payload(_TRIAL + "sys.exit(1)", tmp_path, trials=9, failed=2), tmp_path)

    assert done.returncode == 1
    assert "2 trials have failed, the limit of max_failed_trial_count" in done.stdout + done.stderr
    assert resources == ""
    assert "Traceback" not in done.stderr


def test_without_a_limit_all_trials_run_and_no_best_is_an_error(tmp_path: Path) -> None:
    done, resources = launch(payload(_TRIAL, tmp_path, trials=2), tmp_path)

    assert done.returncode == 0, done.stderr
    assert "trial 2: failed: score was not reported" in done.stdout
    job = read_job(resources)
    trials = read_trials(job)
    assert [trial.reason for trial in trials] == ["score was not reported"] * 2
    with pytest.raises(RunError, match="none of 2 trials has reported score: score was not reported"):
        find_best_trial(trials, job["studySpec"]["metrics"][0])


@pytest.mark.parametrize(
    ("study", "words"),
    [
        ({"metrics": []}, "study_spec has no metrics or no parameters"),
        # The launcher drops zeros.
        (
            {"parameters": [{"parameter_id": "a", "double_value_spec": {"min_value": 0, "max_value": 0}}]},
            "the parameter a of study_spec has no values but 0",
        ),
    ],
)
def test_a_study_that_lacks_something_is_a_mistake(tmp_path: Path, study: Any, words: str) -> None:
    done, _ = launch(payload(_TRIAL, tmp_path, **study), tmp_path)

    assert done.returncode == 2, done.stdout + done.stderr
    assert words in done.stdout + done.stderr


def test_a_trial_that_is_behind_is_stopped(tmp_path: Path) -> None:
    program = """
report.add("score", -int(task["trial"]), 10)
progress.report("train", "epoch 1")
if task["trial"] != "1":
    wait_for("/nowhere/ever")
"""
    rule = {"median_automated_stopping_spec": {"use_elapsed_duration": True}}
    done, resources = launch(payload(_TRIAL + program, tmp_path, trials=2, **rule), tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "trial 2: stopped early: score -2.0000 is behind the other trials" in done.stdout
    assert [(trial.state, trial.value) for trial in read_trials(read_job(resources))] == [
        ("SUCCEEDED", -1.0),
        ("SUCCEEDED", -2.0),
    ]


def test_a_grid_ends_when_it_is_through(tmp_path: Path) -> None:
    parameters = [
        {"parameter_id": "n", "integer_value_spec": {"min_value": 0, "max_value": 1}},
        {"parameter_id": "kind", "discrete_value_spec": {"values": [8, 16]}},
    ]
    spec = {"metrics": [{"metric_id": "score", "goal": "MINIMIZE"}], "parameters": parameters}
    search = Search({**spec, "algorithm": "GRID_SEARCH"}, seed=1)
    tried = []
    while chosen := search.ask():
        tried.append((chosen["n"], chosen["kind"]))
        search.tell(1.0)

    assert sorted(tried) == [(0, 8), (0, 16), (1, 8), (1, 16)]


@pytest.mark.parametrize(("scale", "below"), [("UNIT_LOG_SCALE", True), ("UNIT_REVERSE_LOG_SCALE", False)])
def test_a_logarithmic_search_is_dense_at_its_end(scale: str, below: bool) -> None:
    bounds = {"double_value_spec": {"min_value": 0.001, "max_value": 1.0}}
    parameters = [{"parameter_id": "x", "scale_type": scale, **bounds}]
    metrics = [{"metric_id": "score"}]
    search = Search({"metrics": metrics, "parameters": parameters, "algorithm": "RANDOM_SEARCH"}, seed=0)
    values = []
    for _ in range(60):
        chosen = search.ask()
        assert chosen
        values.append(float(chosen["x"]))
        search.tell(0.0)

    assert all(0.001 <= value <= 1 for value in values)
    assert (sum(value < 0.5 for value in values) > 45) is below


def test_a_metric_of_0_is_a_default_and_a_time_may_be_missing() -> None:
    def trial(number: str, n: float, *, ended: str = "", **loss: float) -> dict[str, Any]:
        measured = {"stepCount": "20", "metrics": [{"metricId": "loss", **loss}]}
        times = {"startTime": "2026-01-01T00:00:00Z", "endTime": ended} if ended else {}
        parameters = [{"parameterId": "n", "value": n}]
        found = {"id": number, "state": "SUCCEEDED", "parameters": parameters, "finalMeasurement": measured}
        return found | times

    metric = {"metricId": "loss", "goal": "MINIMIZE"}
    parameters = [{"parameterId": "n", "integerValueSpec": {"minValue": "1", "maxValue": "9"}}]
    found = [trial("10", 4.0), trial("9", 3.0, value=0.5, ended="2026-01-01T00:01:30.500Z")]
    job = {"studySpec": {"metrics": [metric], "parameters": parameters}, "trials": found}
    trials = read_trials(job)
    best = find_best_trial(trials, metric)

    assert [(trial.id, trial.value, trial.parameters) for trial in trials] == [
        ("9", 0.5, {"n": 3}),
        ("10", 0.0, {"n": 4}),
    ]
    assert (best.id, [(trial.step, trial.seconds) for trial in trials]) == ("10", [(20, 90.5), (20, None)])
    assert trial_table(trials, "loss", best) == [
        "trial  n    loss  step  time  state",
        "    9  3  0.5000    20  90 s  succeeded",
        "   10  4  0.0000    20     -  succeeded  <- best",
    ]

    job["trials"] = [
        trial("1", 1.0, value=math.nan),
        trial("2", 2.0, value=-math.inf),
        trial("3", 3.0, value=9.0),
    ]
    assert find_best_trial(read_trials(job), metric).id == "3"
