"""What runs log to a real MLflow server, as its UI's own API shows it."""

from __future__ import annotations

import pytest

from shardline.trainer.base.tracking import open_run
from tests.helpers.mlflow_server import MlflowServer, pairs

pytestmark = pytest.mark.timeout(180)


def test_a_run_of_a_name_is_found_again_with_its_children(mlflow_server: MlflowServer) -> None:
    environ = {"MLFLOW_TRACKING_URI": mlflow_server.uri, "MLFLOW_EXPERIMENT_NAME": "names"}
    run, child = open_run("o'run", environ=environ), open_run("o'run", child="trial 1", environ=environ)
    assert run
    assert child
    run.parameters({"epochs": 3})
    run.metrics({"loss": 0.5}, 1)
    run.close("FINISHED")
    child.close("FAILED")
    again = open_run("o'run", environ=environ)
    fresh = open_run("o'run", fresh=True, environ=environ)
    assert again
    assert fresh
    assert again.id == run.id != fresh.id
    shown, nested, other = mlflow_server.runs("names")
    assert [nested] == mlflow_server.runs("names", parent=run.id)
    assert (shown["info"]["run_name"], nested["info"]["run_name"]) == ("o'run", "trial 1")
    assert [each["info"]["status"] for each in (shown, nested, other)] == ["FINISHED", "FAILED", "RUNNING"]
    assert (pairs(shown, "params"), pairs(shown, "metrics")) == ({"epochs": "3"}, {"loss": 0.5})
