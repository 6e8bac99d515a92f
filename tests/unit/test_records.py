"""Any JSON in place of a record is a result or one line, never a traceback."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardline.components.changes.detection import describe_changes, read_latest
from shardline.components.model_store import Export, champions
from shardline.components.model_store.champions import Pointer, Version
from shardline.components.preprocess.inspect.profile import summarize
from shardline.components.runs import Run, RunDirectory
from shardline.components.storage import Storage
from shardline.components.tune.best_trial import select_best_trial
from shardline.components.tune.study import parse_study, read_study
from shardline.components.validate.gate import read_training
from shardline.components.validate.metrics.drift import compare_profiles, drift_table, read_profile
from shardline.components.validate.report.report import setting_rows
from shardline.components.validate.rules import Gate
from shardline.trainer.base.errors import EXIT_FAILED, ShardlineError
from tests.helpers.exports import write_export
from tests.helpers.mutations import damaged

NAME = "20261122T020105-dfbfc13e"
VERSION = asdict(Version(version=NAME, quality="0.9", fingerprint="sha256:a", created="2026"))
POINTER = asdict(Pointer((NAME,), path=f"versions/{NAME}"))
STATE = {
    "data": {"known_by": "content", "digest": "1", "text": "1 file"},
    "settings": {"epochs": 1, "champion_uri": ""},
    "code": {"keras": "3"},
}
RUN = {
    **{"run": "r-1", "finished": "2026", "reason": "force", "blessed": True},
    **{"verdict": "accuracy", "metrics": {"accuracy": 0.9, "roc_auc": None}, "champion": "", "state": STATE},
}
OUTPUTS = {
    "parameterValues": {"changed": True, "accuracy": 0.9},
    "artifacts": {
        "exported": {"artifacts": [{"uri": "/x", "metadata": {"blessed": True}}]},
        "metrics": {"artifacts": [{"uri": "/m", "metadata": {"accuracy": 0.9}}]},
    },
}
START = {"start_s": 0.1, "end_s": 2.0, "exit": "SIGKILL", "stopped": False, "peak_memory_bytes": 1}
JOB = {"error": "train failed", "replicas": [{"name": "worker-0", "restarts": 0, "starts": [START]}]}
PROFILE = summarize(
    [{"price": pa.array([1.5, 2.5]), "city": pa.array(["Ulm", "Ulm"])}],
    {"label": {"healthy": 3, "sick": 1}},
)
RECORD = Run(name="r", pipeline="retrain", state="failed", created="2026").record() | {
    "explanation": {
        **{"failed": "train", "exit": "1", "error": "e", "cause": "c", "next_step": "n", "lines": ["l"]}
    },
    "metrics": {"accuracy": 0.9},
    "facts": {"blessed": True},
}
FAILED_LOG = (
    "00:00:00.1 - INFO - Executing task 'train'\n"
    "    train: error: no\n"
    "00:00:00.2 - ERROR - Task 'train' finished with status FAILURE\n"
)
STUDY = {
    "metric": "val_loss",
    "goal": "minimize",
    "max_trial_count": 4,
    "parameter": [
        {"name": "learning_rate", "type": "double", "min": 0.1, "max": 1.0, "scale": "log"},
        {"name": "units", "type": "discrete", "values": [1, 2]},
    ],
}
TUNING = {
    "name": "projects/p/locations/l/hyperparameterTuningJobs/1",
    "displayName": "tune",
    "labels": {"seed": "0"},
    "studySpec": {
        "metrics": [{"metricId": "val_loss", "goal": "MINIMIZE"}],
        "parameters": [{"parameterId": "units", "integerValueSpec": {"minValue": "1", "maxValue": "2"}}],
    },
    "trials": [
        {
            **{"id": "1", "state": "SUCCEEDED", "startTime": "2026-11-22T00:00:00Z"},
            "parameters": [{"parameterId": "units", "value": 1}],
            "finalMeasurement": {"stepCount": "3", "metrics": [{"metricId": "val_loss", "value": 0.5}]},
        }
    ],
}


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def read_champion(directory: Path, content: Any) -> Any:
    write(directory / "champion.json", content)
    write(directory / "versions" / NAME / "version.json", VERSION)
    pointer, found = champions.require_current(directory)
    return f"{found.quality} {', '.join(pointer.known)} {pointer.at}", pointer.overrides.get(NAME, "")


def read_version(directory: Path, content: Any) -> Any:
    write(directory / "champion.json", POINTER)
    write(directory / "versions" / NAME / "version.json", content)
    _, found = champions.require_current(directory)
    return f"{found.quality} {found.created} {found.run}", list(map(asdict, champions.versions(directory)))


def read_export(directory: Path, content: Any) -> Any:
    write(directory / "export.json", content)
    export = Export.read(directory)
    return f"{export.parameters:,} {export.bytes / 1e6:.1f} {', '.join(export.versions.values())}"


def publish(directory: Path, content: Any) -> Any:
    exported = directory / "exported"
    if not exported.exists():
        write_export(exported)
    write(exported / "blessing.json", content)
    return champions.publish(exported, directory / "champion")


def read_history(directory: Path, content: Any) -> Any:
    write(directory / "latest.json", content)
    found = read_latest(Storage(directory))
    assert found is not None
    return describe_changes(found.state, found.state), f"{found.metrics.get('accuracy') or 0.0:.4f}"


def read_run(directory: Path, content: Any) -> Any:
    write(directory / "run.json", content)
    here = RunDirectory(directory)
    here.log.write_text(FAILED_LOG)
    return here.explain(here.read()).headline()


def read_outputs(directory: Path, content: Any) -> Any:
    write(directory / "outputs" / "run" / "task" / "executor_output.json", content)
    return read_run(directory, {**RECORD, "state": "succeeded"})


def read_job(directory: Path, content: Any) -> Any:
    write(directory / "replicas" / "train" / "job.json", content)
    return read_run(directory, RECORD)


def read_settings(directory: Path, content: Any) -> Any:
    write(directory / "settings.json", content)
    return setting_rows(read_training(directory / "model.keras").settings.get("settings", {}))


def read_rules(directory: Path, content: Any) -> Any:
    write(directory / "gate.json", content)
    return Gate.read(directory / "gate.json")


def read_drift(directory: Path, content: Any) -> Any:
    write(directory / "profile.json", content)
    found = read_profile(directory, "v1")
    return found if isinstance(found, str) else drift_table(compare_profiles(found, PROFILE))


def study(directory: Path, content: Any) -> Any:
    return read_study(parse_study(json.dumps(content)), max_trial_count=2).spec


def tuning_job(directory: Path, content: Any) -> Any:
    write(directory / "job.json", content)
    resources = {"resources": [{"resourceUri": (directory / "job.json").as_uri()}]}
    return select_best_trial(json.dumps(resources), directory / "out", directory / "report.html")


#: How each record is read, and what is in a true one.
READERS: dict[str, tuple[Callable[[Path, Any], Any], Any]] = {
    "champion.json": (read_champion, POINTER),
    "version.json": (read_version, VERSION),
    "export.json": (read_export, {"parameters": 1, "bytes": 2, "versions": {"keras": "3"}}),
    "blessing.json": (publish, {"blessed": True, "reason": "accuracy", "metrics": {"accuracy": 0.9}}),
    "latest.json": (read_history, RUN),
    "run.json": (read_run, RECORD),
    "executor_output.json": (read_outputs, OUTPUTS),
    "job.json": (read_job, JOB),
    "settings.json": (read_settings, {"model": "mnist_cnn", "settings": {"epochs": 1, "hparams": {"a": 1}}}),
    "rules": (read_rules, {"rules": ["accuracy >= 0.9"], "min_slice": 3, "first_run": "block"}),
    "profile.json": (read_drift, asdict(PROFILE)),
    "study": (study, STUDY),
    "tuning job": (tuning_job, TUNING),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    return tmp_path_factory.mktemp("records")


@pytest.mark.parametrize("name", READERS)
def test_a_true_record_is_read(name: str, tmp_path: Path) -> None:
    read, record = READERS[name]

    read(tmp_path, record)


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_damaged_record_is_a_result_or_one_line(name: str, data: st.DataObject, directory: Path) -> None:
    read, record = READERS[name]
    content = data.draw(damaged(record))
    error: ShardlineError | None = None
    try:
        read(directory / name.split()[0], content)
    except ShardlineError as failure:
        error = failure
    if error:
        assert "\n" not in str(error)
        # A job would be tried again; one in which no trial was measured has really failed.
        assert error.exit_code != EXIT_FAILED or name == "tuning job", error


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"resources": [{}]}', '{"resources": "x"}', "[[[1]]]"]
)
def test_a_launchers_output_that_names_no_job_is_one_line(text: str, tmp_path: Path) -> None:
    with pytest.raises(ShardlineError, match="names no job"):
        select_best_trial(text, tmp_path, tmp_path / "report.html")


@pytest.mark.parametrize("number", [5e183, "", None, []])
def test_a_trial_whose_id_is_no_number_is_one_line(number: Any, tmp_path: Path) -> None:
    trial = {**TUNING["trials"][0], "id": number}

    with pytest.raises(ShardlineError, match="cannot be read"):
        tuning_job(tmp_path, {**TUNING, "trials": [trial]})
