"""A working directory with files that are called as modules are: only plug-ins are imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kfp import compiler, dsl

from shardline.pipelines.local import run_pipeline
from shardline.pipelines.local.job import CustomJob, run_job
from shardline.pipelines.local.process.processes import with_safe_path
from tests.helpers.datasets import write_dataset
from tests.helpers.jobs import pool

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

SHARDLINE = str(Path(sys.executable).with_name("shardline"))
HOSTILE = ("tarfile", "json", "random", "shardline", "keras", "kfp", "sitecustomize", "trainer/task", "task")
SOURCE = """
import helpers  # beside it
from shardline import Example

class Source:
    class_names = ("a", "b")

    def __iter__(self):
        for index in range(20):
            yield Example(key=str(index), label=index % 2, image=helpers.image(index))
"""
HELPERS = """
import io
from PIL import Image

def image(index):
    file = io.BytesIO()
    Image.new("L", (28, 28), index).save(file, "PNG")
    return file.getvalue()
"""
MODEL = """
import tarfile
from shardline.trainer.models.zoo import build_mnist_cnn

def build(dataset, **hparams):
    assert "TarFile" in dir(tarfile)
    return build_mnist_cnn(dataset, **hparams)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, whose modules say so when they are imported."""
    directory = tmp_path / "here"
    for name in HOSTILE:
        file = directory / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write(__file__)\nraise SystemExit(9)\n")
    for name, text in (("mysource", SOURCE), ("helpers", HELPERS), ("mymodel", MODEL)):
        (directory / f"{name}.py").write_text(text)
    monkeypatch.chdir(directory)
    return directory


def run(*command: str) -> None:
    done = subprocess.run([SHARDLINE, *command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_preprocessing_imports_the_source_alone(here: Path, tmp_path: Path) -> None:
    run("preprocess", "mysource:Source", str(tmp_path / "data"), "--processes", "3")
    assert not (tmp_path / "imported").exists()
    assert (tmp_path / "data" / "manifest.json").exists()


def test_replicas_import_the_model_alone(here: Path, tmp_path: Path) -> None:
    write_dataset(tmp_path / "data")
    options = ["--model", "mymodel:build", "--replicas", "2", "--epochs", "1"]
    run("train", str(tmp_path / "data"), str(tmp_path / "out"), *options)
    assert not (tmp_path / "imported").exists()
    assert (tmp_path / "out" / "model.keras").exists()


@pytest.mark.parametrize("command", [["python3", "-m", "mymodule"], ["python3", "linked.py"]])
def test_a_pool_with_a_path_of_its_own_finds_the_working_directory_last(
    here: Path, tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "beside").mkdir()
    for name, text in (("script", "import neighbour"), ("neighbour", "")):
        (tmp_path / "beside" / f"{name}.py").write_text(text)
    (here / "linked.py").symlink_to(tmp_path / "beside" / "script.py")
    (here / "mymodule.py").write_text("import json, random, helpers\nassert '/x' in __import__('sys').path\n")
    (here / "-m").touch()
    job = CustomJob((pool(*command, env=[{"name": "PYTHONPATH", "value": "/x"}]),))
    run_job(job, tmp_path / "logs")
    assert not (tmp_path / "imported").exists()


def test_a_working_directory_that_is_gone_is_no_error(here: Path) -> None:
    program = "import os, subprocess, sys; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')"
    ask = f"{program}; subprocess.run([sys.executable, '-c', 'print(1)'], check=True)"
    env = with_safe_path({"PATH": os.environ["PATH"]})
    done = subprocess.run([sys.executable, "-c", ask], env=env, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("1\n", "")


@dsl.component(base_image="python:3.11")
def look() -> str:
    """Imports what a task of anybody's pipeline may."""
    import json
    import tarfile

    import helpers  # type: ignore[import-not-found]

    return f"{json.__file__} {tarfile.__file__} {helpers.__file__}"


@dsl.pipeline(name="look")
def looking() -> None:
    look()


def test_tasks_of_any_pipeline_find_the_working_directory_last(here: Path, tmp_path: Path) -> None:
    compiler.Compiler().compile(looking, str(tmp_path / "look.yaml"))
    result = run_pipeline(tmp_path / "look.yaml", {}, runs_dir=tmp_path / "runs")
    assert not (tmp_path / "imported").exists()
    (output,) = result.directory.glob("outputs/**/executor_output.json")
    assert f"{here}/helpers.py" in output.read_text()
