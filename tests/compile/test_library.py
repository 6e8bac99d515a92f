"""The components for pipelines of one's own: flat inputs, given as constants and as parameters."""

import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Callable, Mapping
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
    export_validate,
    library,
    preprocess,
    register,
    rehearse,
    train,
    with_image,
)
from shardline.components.parameters import GateSettings, TrainingSettings
from shardline.components.preprocess.settings import PreprocessSettings
from tests.helpers.markdown import own_pipeline_cells, shown_files

#: What KFP has of a component's function beside the fields.
ARTIFACTS = ("dataset", "metrics", "card", "job", "exported", "confusion", "sliced", "report")
OTHERS = ("fingerprint", "job_name", "readers", "parameter_servers", "job_directory")
IMAGE = "europe-west4-docker.pkg.dev/acme/shardline/leafnet@sha256:" + 64 * "a"


def inputs(function: Callable[..., Any], *left_out: str) -> dict[str, Any]:
    """Returns a component's inputs that are fields of a dataclass, with their defaults."""
    return {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in (*ARTIFACTS, *left_out)
    }


def defaults(kind: type[Any]) -> dict[str, Any]:
    """Returns the fields of a dataclass with their defaults as KFP has them; None for one without."""
    found = {}
    for field in dataclasses.fields(kind):
        value = field.default
        if value is dataclasses.MISSING:
            value = None if field.default_factory is dataclasses.MISSING else field.default_factory()
        found[field.name] = list(value) if isinstance(value, tuple) else value
    return found


def test_every_field_is_an_input_with_its_default() -> None:
    data = defaults(PreprocessSettings) | {"source": "digits"}
    training = defaults(TrainingSettings)
    training = {"model_function": "mnist_cnn"} | {key: training[key] for key in training if key != "model"}
    gate = defaults(GateSettings)

    assert inputs(library.preprocess, "fingerprint") == data
    assert inputs(library.train, "model") == training
    assert inputs(library.export_validate, "model", *OTHERS) == gate
    assert inputs(library.rehearse, *OTHERS) == training | gate


def test_nothing_has_to_be_given_but_what_an_earlier_task_makes(tmp_path: Path) -> None:
    @dsl.pipeline(name="all-defaults")
    def pipeline() -> None:
        dataset = preprocess().outputs["dataset"]
        tried = rehearse(dataset=dataset)
        trained = train(dataset=dataset, base_output_directory=tried.outputs["base_output_directory"])
        judged = export_validate(dataset=dataset, model=trained.outputs["model"])
        register(exported=judged.outputs["exported"])

    spec = compiled(pipeline, tmp_path)

    assert list(spec["root"]["dag"]["tasks"]) == [
        "export-validate",
        "preprocess",
        "register",
        "rehearse",
        "train",
    ]


def test_constants_and_parameters_arrive_as_what_they_are(tmp_path: Path) -> None:
    """Both, and within an object too, where KFP would make text of parameters in a dict of constants."""

    @dsl.pipeline(name="mixed")
    def pipeline(epochs: int = 3, hparams: dict = {}, rules: list = [], least: float = 0.5) -> None:  # type: ignore[type-arg]  # noqa: B006
        dataset = preprocess(split={"train": 0.5, "test": 0.5}).outputs["dataset"]
        trained = train(dataset=dataset, epochs=epochs, hparams=hparams, train_options={"cache": "none"})
        export_validate(dataset=dataset, model=trained.outputs["model"], rules=rules, min_accuracy=least)

    tasks = compiled(pipeline, tmp_path)["root"]["dag"]["tasks"]

    def given(task: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = tasks[task]["inputs"]["parameters"]
        return found

    assert given("train")["epochs"] == {"componentInputParameter": "epochs"}
    assert given("train")["hparams"] == {"componentInputParameter": "hparams"}
    assert given("train")["train_options"] == {"runtimeValue": {"constant": {"cache": "none"}}}
    assert given("preprocess")["split"] == {"runtimeValue": {"constant": {"train": 0.5, "test": 0.5}}}
    assert given("export-validate")["rules"] == {"componentInputParameter": "rules"}
    assert given("export-validate")["min_accuracy"] == {"componentInputParameter": "least"}


def test_image_and_machines_are_those_that_were_given(tmp_path: Path) -> None:
    pool = WorkerPool(machine_type="n1-standard-4", replica_count=3)
    ours = with_image(IMAGE, CustomJobSettings(cluster=Cluster.of(pool)))

    @dsl.pipeline(name="in-image")
    def pipeline() -> None:
        ours.train(dataset=ours.preprocess().outputs["dataset"])

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

    assert again is shardline.components.train is library.default().train
    assert replica.__name__ == "shardline.components.train.replica"
    with pytest.raises(ImportError, match="cannot import name 'replica'"):
        exec("import shardline.components.train.replica as r")


def test_importing_the_package_loads_no_kfp() -> None:
    code = "import sys, shardline.components.champions; assert 'kfp' not in sys.modules, 'kfp'"

    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_own_mistake_names_the_input() -> None:
    with pytest.raises(TypeError, match="epoch"):
        train(dataset=None, epoch=3)


def compiled(pipeline: Any, tmp_path: Path) -> dict[str, Any]:
    compiler.Compiler().compile(pipeline, str(tmp_path / "own.yaml"))
    spec: dict[str, Any] = yaml.safe_load((tmp_path / "own.yaml").read_text())
    return spec


def test_the_page_and_the_notebook_have_the_same_pipeline() -> None:
    (page,) = [text for name, text in shown_files() if name == "leaves.py"]
    cells = own_pipeline_cells()

    assert page.partition('if __name__ == "__main__":')[0].strip() == "\n\n\n".join(cells[:3])
