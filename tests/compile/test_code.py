"""Pipelines that hold a user's packages: what their replicas run, and what is refused of them."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from kfp import compiler, dsl

from shardline.components import _FOLDERS as FOLDERS
from shardline.components import with_image
from shardline.components.code import files_of, pack, read_packed, with_code, with_imported
from shardline.components.custom_job import Cluster, CustomJobSettings, WorkerPool
from shardline.components.train.component import custom_job
from shardline.pipelines.check import Pipeline, Target, check_run
from shardline.pipelines.compile import compile_pipeline
from shardline.pipelines.local import run_pipeline
from shardline.pipelines.settings import load_settings
from shardline.trainer.base.errors import PipelineError
from tests.helpers.checks import check_spec, codes
from tests.helpers.markdown import ROOT

SMALL = WorkerPool(machine_type="n1-standard-4")
POOLS = CustomJobSettings(cluster=Cluster(chief=SMALL, workers=SMALL), num_retries=0)


def train(count: int) -> str:
    """Says what the user's package says."""
    from boxed.model import build  # type: ignore[import-not-found]

    return build(count)  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a package."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / "boxed").mkdir()
    write("return f'packed {count}'")
    return tmp_path / "boxed" / "model.py"


def write(line: str) -> None:
    Path("boxed", "model.py").write_text(f"def build(count):\n    {line}\n")


def compiled(make: Any) -> dict[str, Any]:
    """Returns a pipeline of one task of a component."""

    @dsl.pipeline(name="toy")
    def toy(count: int = 3) -> None:
        make(count=count)

    compiler.Compiler().compile(toy, "toy.yaml")
    spec: dict[str, Any] = yaml.safe_load(Path("toy.yaml").read_text())
    return spec


def component(text: str) -> Any:
    return with_code(dsl.component(train, base_image="image:1", install_kfp_package=False), text)


def test_a_local_run_takes_the_code_of_the_file(project: Path, tmp_path: Path) -> None:
    spec = compiled(component(pack(["boxed"])))
    project.unlink()
    project.parent.rmdir()
    run = run_pipeline(Path("toy.yaml"), {}, runs_dir=tmp_path / "runs")
    (output,) = run.directory.glob("outputs/**/executor_output.json")
    assert "packed 3" in output.read_text()
    assert Pipeline(spec).packages == ["boxed"]


def test_code_that_is_edited_and_not_compiled_is_refused(project: Path) -> None:
    spec = compiled(component(pack(["boxed"])))
    check_run(spec, {}, here=True)
    write("return 'edited'")
    (project.parent / "more.py").touch()
    for target in Target:
        assert "SL614" in codes(spec, target=target)
    for here in (True, False):
        with pytest.raises(PipelineError) as caught:
            check_run(spec, {}, here=here)
        why = "the code here is not that of the file: boxed/model.py, boxed/more.py; compile again"
        assert str(caught.value) == why
    assert "SL614" in {warning.code for warning in check_run(spec, {}, uri="https://registry/v1")[1]}


def test_a_secret_in_the_code_is_refused(project: Path) -> None:
    write("return 'AKIA" + 16 * "A" + "'")
    found = check_spec(compiled(component(pack(["boxed"]))))
    assert [(each.code, each.why) for each in found if each.code == "SL811"] == [
        ("SL811", "boxed/model.py holds an AWS access key")
    ]


def test_code_that_is_too_long_for_all_pools_of_a_job_is_refused(project: Path) -> None:
    project.write_bytes(b"# " + os.urandom(50_000).hex().encode())
    spec = compiled(custom_job(component(pack(["boxed"])), POOLS))
    (why,) = (each.why for each in check_spec(spec) if each.code == "SL310")
    assert "each of its 2 worker pools has your code: boxed/model.py (100.0 kB), boxed/__init" in why


def test_only_components_that_run_a_users_code_bring_it(project: Path) -> None:
    ours = with_image("image:1", packages=["boxed"])
    commands = {name: getattr(ours, name).component_spec.implementation.container.command for name in FOLDERS}
    without = {"finish_dataset", "register", "serving_model", "record_run", "exit_handler", "best_trial"}
    assert {name for name, command in commands.items() if not read_packed(command[-1])} == without
    assert set(read_packed(commands["train"][-1])) == {"boxed/__init__.py", "boxed/model.py"}


def test_a_project_compiles_to_the_same_file_from_anywhere(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside its directory, which has the name of the package in it."""
    shutil.copy(ROOT / "settings" / "local.toml", "settings.toml")
    Path("params.toml").write_text('model = "boxed.model:build"\n')
    here = compile_pipeline(load_settings(Path("settings.toml")))
    around = tmp_path.rename(tmp_path.with_name("boxed"))
    monkeypatch.chdir(around.parent)
    assert compile_pipeline(load_settings(Path("boxed", "settings.toml"))) == here
    assert "boxed" in Pipeline(yaml.safe_load(here)).packages


def test_a_package_of_packages_alone_is_packed(tmp_path: Path) -> None:
    (tmp_path / "company" / "vision").mkdir(parents=True)
    (tmp_path / "company" / "vision" / "model.py").write_text("def build(): ...\n")
    assert "company/vision/model.py" in files_of("company")
    assert with_imported(["company"]) == ["company"]
