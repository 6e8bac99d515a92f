"""The components for pipelines of one's own, whose settings are constants and parameters."""

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from kfp import compiler, dsl, local
from kfp.dsl.base_component import BaseComponent

import shardline.components
import shardline.components.train.component
from shardline.components import (
    Cluster,
    CustomJobSettings,
    WorkerPool,
    export_validate,
    preprocess,
    register,
    rehearse,
    train,
    with_image,
)
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.train import OPTIONS
from shardline.components.validate.rules import Gate
from shardline.pipelines.retrain import retrain_pipeline
from shardline.pipelines.settings import load_settings
from shardline.pipelines.tune import tune_pipeline
from tests.helpers.markdown import own_pipeline_cells, shown_files

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "europe-west4-docker.pkg.dev/acme/shardline/leafnet@sha256:" + 64 * "a"
NAMES = [name for name in shardline.components.__all__ if not name[0].isupper() and name != "with_image"]


@pytest.mark.parametrize("kind", [PreprocessSettings, Gate])
def test_a_default_that_stands_twice_is_the_same(kind: Any) -> None:
    """In the dataclass, in each component that has a parameter of this name, and in the pipelines."""
    settings = load_settings(ROOT / "settings" / "local.toml")
    functions = [getattr(shardline.components, name).python_func for name in NAMES]
    functions += [retrain_pipeline(settings).pipeline_func, tune_pipeline(settings, "{}").pipeline_func]
    compared = 0
    for field in dataclasses.fields(kind):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        for function in functions:
            given = inspect.signature(function).parameters.get(field.name)
            # What a component requires has no default there; the pipelines start with the digits.
            if (
                given is not None
                and inspect.Parameter.empty not in (given.default,)
                and field.name != "source"
            ):
                assert given.default == (list(default) if isinstance(default, tuple) else default), function
                compared += 1
    assert compared >= 4


def test_an_option_has_one_place() -> None:
    """Given by its plain name on a command line, it could be meant for two steps."""
    kinds = [{field.name for field in dataclasses.fields(kind)} for kind in (PreprocessSettings, Gate)]

    assert not kinds[0] & kinds[1]
    assert not OPTIONS & (kinds[0] | kinds[1])


@pytest.mark.parametrize("name", NAMES)
def test_a_component_is_one_of_kfp_and_explained(name: str) -> None:
    component = getattr(shardline.components, name)

    assert isinstance(component, BaseComponent)
    assert component.python_func.__doc__
    assert component.description


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore:You may be attemping to run a task that uses custom:RuntimeWarning")
def test_an_own_pipeline_takes_eight_lines_and_runs_in_stock_kfp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With a component of one's own in the middle; without any other of ours before."""
    monkeypatch.chdir(tmp_path)

    @dsl.component(base_image="python:3.11", install_kfp_package=False)
    def passes(dataset: dsl.Input[dsl.Dataset], examples: int) -> int:
        return max(1, examples // int(dataset.metadata["train_records"]))

    @dsl.pipeline(name="leaves")
    def pipeline(champion_uri: str, rules: list = [], options: dict = {}) -> None:  # type: ignore[type-arg]  # noqa: B006
        data = preprocess(source="digits", options=options).outputs["dataset"]
        epochs = passes(dataset=data, examples=3000).output
        trained = train(dataset=data, model_function="mnist_cnn", epochs=epochs, options={"cache": "off"})
        judged = export_validate(dataset=data, model=trained.outputs["model"], rules=rules)
        with dsl.If(judged.outputs["Output"] == True):  # noqa: E712
            register(exported=judged.outputs["exported"], champion_uri=champion_uri)

    champion = tmp_path / "model store"
    champion.mkdir()
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=str(tmp_path / "out"))
    split = {"split": {"train": 0.7, "validation": 0.1, "test": 0.2}}
    pipeline(champion_uri=str(champion), rules=["accuracy >= 0.2"], options=split)

    assert "epoch 2/2" in capfd.readouterr().out
    assert (champion / "champion.json").is_file()


def test_image_and_machines_are_those_that_were_given(tmp_path: Path) -> None:
    pool = WorkerPool(machine_type="n1-standard-4", replica_count=3)
    ours = with_image(IMAGE, CustomJobSettings(cluster=Cluster.of(pool)))

    @dsl.pipeline(name="in-image")
    def pipeline(hparams: dict = {}) -> None:  # type: ignore[type-arg]  # noqa: B006
        dataset = ours.preprocess(source="digits", readers=3).outputs["dataset"]
        tried = ours.rehearse(dataset=dataset, model_function="mnist_cnn", hparams=hparams, readers=3)
        directory = tried.outputs["Output"]
        ours.train(
            dataset=dataset,
            model_function="mnist_cnn",
            hparams=hparams,
            base_output_directory=directory,
        )

    compiler.Compiler().compile(pipeline, str(tmp_path / "own.yaml"))
    spec = yaml.safe_load((tmp_path / "own.yaml").read_text())
    chief, workers = spec["components"]["comp-train"]["inputDefinitions"]["parameters"]["worker_pool_specs"][
        "defaultValue"
    ]

    assert spec["deploymentSpec"]["executors"]["exec-preprocess"]["container"]["image"] == IMAGE
    assert [pool["replica_count"] for pool in (chief, workers)] == [1, 2]
    assert {pool["container_spec"]["image_uri"] for pool in (chief, workers)} == {IMAGE}


def test_names_win_over_the_packages_that_are_called_alike() -> None:
    """Also after these have been imported, which makes them attributes."""
    from shardline.components import train as again
    from shardline.components.train import component

    assert again is shardline.components.train is shardline.components.default().train
    assert component.__name__ == "shardline.components.train.component"
    with pytest.raises(ImportError, match="cannot import name 'component'"):
        exec("import shardline.components.train.component as r")


def test_importing_the_package_loads_no_kfp() -> None:
    code = "import sys, shardline.components.model_store.champions; assert 'kfp' not in sys.modules, 'kfp'"

    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_own_mistake_names_the_input() -> None:
    with pytest.raises(TypeError, match="epoch"):
        rehearse(epoch=3)
    with pytest.raises(AttributeError, match="there is no component 'validate'"):
        with_image(IMAGE).validate  # noqa: B018


def test_the_page_and_the_notebook_have_the_same_pipeline() -> None:
    (page,) = [text for name, text in shown_files() if name == "leaves.py"]
    cells = own_pipeline_cells()

    assert page.partition('if __name__ == "__main__":')[0].strip() == "\n\n\n".join(cells[:3])
