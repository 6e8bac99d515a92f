"""The champion in the model registry of a real MLflow server, and models that mlflow loads by itself."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from shardline.components.model_store import Export, champions
from shardline.components.model_store.mlflow_registry import log_model, mirror_champion
from shardline.components.register.registration import register_model
from shardline.pipelines.cli.models import champion
from shardline.trainer.base import tracking
from shardline.trainer.base.errors import ModelError
from tests.helpers.exports import export_small_model, judge_again, publish_next, write_export
from tests.helpers.mlflow_server import VARIABLE, MlflowServer
from tests.helpers.replicas import free_ports

pytestmark = pytest.mark.timeout(180)

#: Predicts with the input example of a model: TensorFlow of these tests, pandas of the server's environment.
_PREDICT = """
import json, sys
sys.path.extend(sys.argv[2:])
sys.modules["shardline"] = None
import mlflow, numpy
model = mlflow.pyfunc.load_model(sys.argv[1])
answers = model.predict(model.input_example)
print(json.dumps({name: numpy.array(list(answers[name])).tolist() for name in answers}, default=bytes.decode))
"""


@pytest.fixture
def server(mlflow_server: MlflowServer, monkeypatch: pytest.MonkeyPatch) -> MlflowServer:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server.uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "registry")
    return mlflow_server


def _predict(server: MlflowServer, model: str) -> dict[str, Any]:
    """Returns what a process without Shardline predicts with a model's own input example."""
    import mlflow
    import tensorflow as tf

    directories = {str(Path(module.__file__).parents[1]) for module in (mlflow, np, tf)}
    others = Path(os.environ[VARIABLE]).parents[1].glob("lib/python*/site-packages")
    command = [sys.executable, "-I", "-S", "-c", _PREDICT, model, *directories, *map(str, others)]
    environ = {**os.environ, "MLFLOW_TRACKING_URI": server.uri, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _assert_golden(answers: dict[str, Any], exported: Path) -> None:
    golden = (Export.read(exported).golden or {})["predictions"]
    assert set(answers) == set(golden[0])
    for name, values in answers.items():
        wanted = [row[name] for row in golden]
        if isinstance(wanted[0], str):
            assert values == wanted
        else:
            np.testing.assert_allclose(np.array(values, float), np.array(wanted, float), atol=1e-5)


def _versions(server: MlflowServer, name: str) -> list[dict[str, str]]:
    """Returns the tags of the registered versions, the oldest first."""
    found = server.ask("model-versions/search", filter=f"name = '{name}'").get("model_versions", [])
    found.sort(key=lambda item: int(item["version"]))
    return [{tag["key"]: tag.get("value", "") for tag in item.get("tags", [])} for item in found]


def _champion(server: MlflowServer, name: str) -> str:
    """Returns the version of the model store that has the alias."""
    found = server.ask("registered-models/alias", name=name, alias="champion")["model_version"]
    return {tag["key"]: tag["value"] for tag in found["tags"] if tag.get("value")}["shardline.version"]


def _store(tmp_path: Path, name: str) -> Path:
    (tmp_path / name).mkdir()
    return tmp_path / name


def test_mlflow_loads_a_run_s_model_and_the_champion_without_shardline(
    server: MlflowServer, tmp_path: Path
) -> None:
    exported, store = export_small_model(tmp_path), _store(tmp_path, "images")
    verdict = {"blessed": True, "reason": "", "headline": "better: blessed", "champion": ""}
    (exported / "blessing.json").write_text(json.dumps(verdict))
    log_model(exported, "images-job")
    log_model(exported, "images-job")  # a second attempt of the task
    register_model(exported, "accuracy 0.9", str(store), "images-job")

    (run,) = [run for run in server.runs("registry") if run["info"]["run_name"] == "images-job"]
    assert len(run["outputs"]["model_outputs"]) == 1  # uploaded once
    _assert_golden(_predict(server, "models:/images@champion"), exported)
    _assert_golden(_predict(server, f"runs:/{run['info']['run_id']}/model"), exported)
    assert _versions(server, "images") == [
        {
            "shardline.version": champions.require_current(store).version,
            "quality": "accuracy 0.9",
            "fingerprint": Export.read(exported).fingerprint,
            "verdict": "better",
            "override": "",
        }
    ]


def test_mlflow_loads_a_model_of_texts_and_numbers(server: MlflowServer, tmp_path: Path) -> None:
    from shardline.components.validate.export.export import export_model, take_samples
    from tests.helpers.datasets import write_labelled
    from tests.helpers.label_models import list_of_outputs

    manifest = write_labelled(tmp_path / "dataset", "two")
    samples, out = take_samples(manifest, tmp_path / "dataset"), tmp_path / "out"
    export_model(list_of_outputs(manifest.info()), manifest, out, samples=samples)
    log_model(out, "table-job")
    (run,) = [run for run in server.runs("registry") if run["info"]["run_name"] == "table-job"]
    _assert_golden(_predict(server, f"runs:/{run['info']['run_id']}/model"), out)


def test_the_alias_follows_the_store(
    server: MlflowServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = _store(tmp_path, "mirrored")
    first = publish_next(write_export(tmp_path / "1", weights=b"1"), store)
    mirror_champion(str(store))
    exported = judge_again(write_export(tmp_path / "2", weights=b"2"), store)
    (exported / "export.json").write_text('{"fingerprint": "sha256:def"}')
    register_model(exported, "accuracy 0.98", str(store), "job-2")
    second = champions.require_current(store)
    assert _champion(server, "mirrored") == second.version != first.version

    settings = tmp_path / "settings.toml"
    settings.write_text(f'[tracking]\nmlflow_uri = "{server.uri}"\nexperiment = "registry"\n')
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    command = CliRunner().invoke(champion, ["rollback", str(store), "--json", "--settings", str(settings)])
    assert (command.exit_code, json.loads(command.stdout)["version"]) == (0, first.version)
    assert _champion(server, "mirrored") == first.version

    # What the gate blocks is not there, until it is promoted with a reason.
    blocked = write_export(tmp_path / "3", blessed=False, weights=b"3")
    with pytest.raises(ModelError, match="not blessed"):
        register_model(blocked, "accuracy 0.5", str(store), "job-3")
    assert _champion(server, "mirrored") == first.version
    measured = {"fingerprint": "sha256:abc", "split": "test", "examples": 9, "metrics": {"accuracy": 0.5}}
    (blocked / "evaluation.json").write_text(json.dumps(measured))
    command = CliRunner().invoke(champion, ["promote", str(store), f"{blocked}/", "--override", "the law"])
    assert command.exit_code == 0, command.output
    third = champions.require_current(store)
    assert _champion(server, "mirrored") == third.version
    found = _versions(server, "mirrored")
    assert [tags["shardline.version"] for tags in found] == [each.version for each in (first, second, third)]
    assert [tags["override"] for tags in found] == ["", "", "the law"]


def test_concurrent_publishers_and_the_registry_end_equal(server: MlflowServer, tmp_path: Path) -> None:
    store = _store(tmp_path, "contended")

    def publish(publisher: int) -> None:
        for number in range(4):
            exported = write_export(tmp_path / f"{publisher}-{number}", weights=bytes([publisher, number]))
            for _ in range(20):
                with contextlib.suppress(ModelError):  # the other one has published meanwhile
                    register_model(
                        judge_again(exported, store), "rmse 1", str(store), f"job-{publisher}-{number}"
                    )
                    break
            else:
                pytest.fail("nothing was published")

    with ThreadPoolExecutor(2) as publishers:
        list(publishers.map(publish, range(2)))
    assert _champion(server, "contended") == champions.require_current(store).version


def test_a_server_that_is_away_costs_no_champion_and_the_next_change_repairs_the_alias(
    server: MlflowServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = _store(tmp_path, "away")
    first = publish_next(write_export(tmp_path / "1", weights=b"1"), store)
    mirror_champion(str(store))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_ports(1)[0]}")
    monkeypatch.setattr(tracking, "_PATIENCE_S", 0.0)
    capsys.readouterr()
    register_model(
        judge_again(write_export(tmp_path / "2", weights=b"2"), store), "rmse 1", str(store), "job"
    )
    second = champions.require_current(store)
    said = capsys.readouterr().out.splitlines()[-2:]
    assert said[0].startswith("tracking: warning: cannot log to MLflow at http://127.0.0.1:")
    assert said[1] == "register: MLflow's registry does not follow the champion, until its next change"
    assert second.version != first.version == _champion(server, "away")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    champions.rollback(store)
    champions.rollback(store, second.version)
    mirror_champion(str(store))
    assert _champion(server, "away") == second.version


def test_two_stores_of_one_name_do_not_fight_for_the_alias(
    server: MlflowServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        store = tmp_path / name / "shared"
        store.mkdir(parents=True)
        version = publish_next(write_export(tmp_path / f"{name}-1"), store)
        mirror_champion(str(store))
        if name == "a":
            first = version
    assert "shared is of " in capsys.readouterr().out
    assert _champion(server, "shared") == first.version
