"""The components for pipelines of one's own, whose settings are constants and parameters."""

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from kfp import compiler, dsl

import shardline.components
import shardline.components.train.replica
from shardline.components import (
    Cluster,
    CustomJobSettings,
    WorkerPool,
    configure,
    export_validate,
    preprocess,
    register,
    rehearse,
    train,
    with_image,
)
from shardline.components.changes.component import OBJECTS
from shardline.components.changes.component import configure as configure_function
from tests.helpers.markdown import own_pipeline_cells, shown_files

IMAGE = "europe-west4-docker.pkg.dev/acme/shardline/leafnet@sha256:" + 64 * "a"


def test_every_field_of_a_runs_objects_is_an_input_with_its_default() -> None:
    found = {
        name: parameter.default
        for name, parameter in inspect.signature(configure_function).parameters.items()
        if name not in ("source", "model")
    }

    for kind in OBJECTS:
        for field in dataclasses.fields(kind):
            if field.name in (*found, "processes"):
                value = field.default
                if field.default_factory is not dataclasses.MISSING:
                    value = field.default_factory()
                expected = list(value) if isinstance(value, tuple) else value
                assert field.name == "processes" or found[field.name] == expected
            else:
                assert field.name in ("source", "model")


def test_constants_and_parameters_arrive_as_what_they_are(tmp_path: Path) -> None:
    """Both, and within an object too, where KFP would make text of parameters in a dict of constants."""

    @dsl.pipeline(name="mixed")
    def pipeline(epochs: int = 3, hparams: dict = {}, rules: list = [], least: float = 0.5) -> None:  # type: ignore[type-arg]  # noqa: B006
        run = configure(
            split={"train": 0.5, "test": 0.5},
            epochs=epochs,
            hparams=hparams,
            train_options={"cache": "none"},
            rules=rules,
            min_accuracy=least,
        ).outputs
        dataset = preprocess(data=run["data"]).outputs["dataset"]
        tried = rehearse(dataset=dataset, training=run["training"], gate=run["gate"])
        trained = train(
            dataset=dataset, training=run["training"], base_output_directory=tried.outputs["Output"]
        )
        judged = export_validate(dataset=dataset, model=trained.outputs["model"], gate=run["gate"]).outputs
        register(exported=judged["exported"], gate=run["gate"])

    tasks = compiled(pipeline, tmp_path)["root"]["dag"]["tasks"]
    given = tasks["configure"]["inputs"]["parameters"]

    assert given["epochs"] == {"componentInputParameter": "epochs"}
    assert given["hparams"] == {"componentInputParameter": "hparams"}
    assert given["train_options"] == {"runtimeValue": {"constant": {"cache": "none"}}}
    assert given["split"] == {"runtimeValue": {"constant": {"train": 0.5, "test": 0.5}}}
    assert given["rules"] == {"componentInputParameter": "rules"}
    assert given["min_accuracy"] == {"componentInputParameter": "least"}
    for task in ("rehearse", "train"):
        assert tasks[task]["inputs"]["parameters"]["training"]["taskOutputParameter"] == {
            "outputParameterKey": "training",
            "producerTask": "configure",
        }


def test_image_and_machines_are_those_that_were_given(tmp_path: Path) -> None:
    pool = WorkerPool(machine_type="n1-standard-4", replica_count=3)
    ours = with_image(IMAGE, CustomJobSettings(cluster=Cluster.of(pool)))

    @dsl.pipeline(name="in-image")
    def pipeline() -> None:
        run = ours.configure().outputs
        dataset = ours.preprocess(data=run["data"]).outputs["dataset"]
        ours.train(dataset=dataset, training=run["training"])

    spec = compiled(pipeline, tmp_path)
    chief, workers = spec["components"]["comp-train"]["inputDefinitions"]["parameters"]["worker_pool_specs"][
        "defaultValue"
    ]

    assert spec["deploymentSpec"]["executors"]["exec-preprocess"]["container"]["image"] == IMAGE
    assert [pool["replica_count"] for pool in (chief, workers)] == [1, 2]
    assert {pool["container_spec"]["image_uri"] for pool in (chief, workers)} == {IMAGE}


def test_names_win_over_the_packages_that_are_called_alike() -> None:
    """Also after these have been imported, which makes them attributes."""
    from shardline.components import train as again
    from shardline.components.train import replica

    assert again is shardline.components.train is shardline.components.default().train
    assert replica.__name__ == "shardline.components.train.replica"
    with pytest.raises(ImportError, match="cannot import name 'replica'"):
        exec("import shardline.components.train.replica as r")


def test_importing_the_package_loads_no_kfp() -> None:
    code = "import sys, shardline.components.model_store.champions; assert 'kfp' not in sys.modules, 'kfp'"

    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_own_mistake_names_the_input() -> None:
    with pytest.raises(TypeError, match="epoch"):
        configure(epoch=3)


def compiled(pipeline: Any, tmp_path: Path) -> dict[str, Any]:
    compiler.Compiler().compile(pipeline, str(tmp_path / "own.yaml"))
    spec: dict[str, Any] = yaml.safe_load((tmp_path / "own.yaml").read_text())
    return spec


def test_the_page_and_the_notebook_have_the_same_pipeline() -> None:
    (page,) = [text for name, text in shown_files() if name == "leaves.py"]
    cells = own_pipeline_cells()

    assert page.partition('if __name__ == "__main__":')[0].strip() == "\n\n\n".join(cells[:3])
