"""Packages of a user as one text: the same everywhere, without what must not travel, and unpacked first."""

from __future__ import annotations

import base64
import bz2
import importlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from kfp import dsl

from shardline.components.changes.detection import code_versions
from shardline.components.code import files_of, is_own, left_out, pack, with_imported
from shardline.components.tune import study
from shardline.pipelines.settings import load_settings
from shardline.trainer.base import code, plugins
from shardline.trainer.base.errors import PipelineError, SettingsError

ROOT = Path(__file__).parents[2]
SOURCES = {"leafnet/model.py": "def build():\n    return 'packed'\n", "leafnet/words/de.txt": "Grün\n"}
#: What they are packed as, on every machine.
TEXT = (
    "QlpoOTFBWSZTWbr4U8EAADtfzEAAUOWAEACAAAS/L97qCAAABBgAIAB0IRGTRp6ho0Bppk0NBqaT1NDTQaaGgyAAgHrROEuNUnESMckD"
    "wSTJhdm9exCVDSsayhTkxWivU5JW/piBecCGlVYwJD0dWiT7DB7wKY96QBsGRbJgrMqTsTODzOc57fi7kinChIXXwp4I"
)


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a package."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    write(SOURCES)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "leafnet"]:
        del sys.modules[name]


def write(files: dict[str, str]) -> None:
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")


def test_equal_files_give_the_same_text(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = pack(["leafnet"])
    for path in project.rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(0o700)
    (project / "other").mkdir()
    monkeypatch.chdir(project / "other")
    write(dict(reversed(SOURCES.items())))
    assert pack(["leafnet"]) == first == TEXT
    assert {name: each.decode() for name, each in code.read_files(first).items()} == {
        "leafnet/__init__.py": "",
        **SOURCES,
    }


def test_some_files_never_travel(project: Path) -> None:
    write(dict.fromkeys(("leafnet/.env", "leafnet/.git/config", "leafnet/.cache/a.py"), "x"))
    write(dict.fromkeys(("leafnet/__pycache__/a.pyc", "leafnet/b.pyc", "outside.txt"), "x"))
    write(
        {
            "leafnet/data.csv": 100_001 * "x",
            "leafnet/small.csv": 100_000 * "x",
            "leafnet/long.py": 120_000 * "#",
        }
    )
    (project / "leafnet" / "stolen.txt").symlink_to(project / "outside.txt")
    (project / "leafnet" / "alias.txt").symlink_to("small.csv")
    taken = {f"leafnet/{name}" for name in ("__init__.py", "small.csv", "long.py", "alias.txt")}
    assert set(files_of("leafnet")) == {*SOURCES, *taken}
    assert left_out("leafnet") == ["leafnet/data.csv (100.0 kB)"]


def test_a_module_is_packed_alone(project: Path) -> None:
    write({"net.py": "a = 1\n", "other.py": ""})
    assert files_of("net") == {"net.py": b"a = 1\n"}


@pytest.mark.parametrize("name", ["leefnet", "leafnet.model", "../leafnet", "sys"])
def test_there_is_no_such_package(name: str) -> None:
    with pytest.raises(SettingsError, match="no package or module"):
        pack([name])


def test_packages_are_found_with_what_they_import() -> None:
    write(
        {"leafnet/data.py": "import os, click, leaf.io as io\nfrom . import model\nimport keras, shardline\n"}
    )
    write(
        {
            "leaf/io.py": "def read():\n    from pixels import grey\n",
            "pixels.py": "import leafnet",
            "else.py": "",
        }
    )
    write({"leafnet/broken.py": "import (", "keras/__init__.py": ""})
    assert with_imported(["leafnet", "click", "none"]) == ["leaf", "leafnet", "pixels"]


def test_installed_distributions_are_not_the_users_own() -> None:
    assert [name for name in ("leafnet", "click", "none", "json") if is_own(name)] == ["leafnet"]


def test_too_much_code_is_refused_with_its_size() -> None:
    write({"leafnet/weights.py": base64.b85encode(random.Random(1).randbytes(80_000)).decode()})
    reason = r"leafnet has 1\d\d\.\d kB when packed, and a pipeline takes 90.0 kB: leafnet/weights.py \(100"
    with pytest.raises(SettingsError, match=reason):
        pack(["leafnet"])


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"../x": "a"}, r"'\.\./x', outside of its directory"),
        ({"/x": "a"}, "'/x', outside"),
        ({"x": 1}, "damaged"),
        ({"x": 40_000_000 * "a"}, "damaged"),
        ([], "damaged"),
    ],
)
def test_a_text_that_nobody_has_packed_is_refused(files: object, reason: str) -> None:
    text = base64.b64encode(bz2.compress(json.dumps(files).encode())).decode()
    with pytest.raises(PipelineError, match=reason):
        code.read_files(text)


ASK = """
import os, subprocess, sys
from shardline.trainer.base.code import unpack
unpack(sys.argv[1])
from shardline.trainer.base import plugins
from shardline.components.preprocess.process_pool import Processes
from tests.unit.test_code import ask
print(plugins.load("leafnet.model:build", "model")(), flush=True)
subprocess.run([sys.executable, "-c", "import leafnet.model as m; print(m.build())"])
with Processes(2, ask) as both:
    answers = both.run_job(ask, {}, ["a", "b"], lambda *_: None)
print(*{built for built, _ in answers.values()}, len({process for _, process in answers.values()}))
print(os.environ["SHARDLINE_CODE"])
"""


def ask(_: Mapping[str, Any], items: Iterable[str], report: Callable[[int, int], None]) -> dict[str, Any]:
    """A job of two processes, each with one item: who has built the model, and where."""
    answers = {}
    for item in items:
        Path(f"{os.getpid()}.seen").touch()
        while len(list(Path().glob("*.seen"))) < 2:
            time.sleep(0.01)
        answers[item] = plugins.load("leafnet.model:build", "model")(), os.getpid()
    return answers


def test_unpacked_code_comes_first_in_a_process_and_its_children(project: Path) -> None:
    text = pack(["leafnet"])
    write({"leafnet/model.py": "def build():\n    return 'of the working directory'\n"})
    done = subprocess.run(
        [sys.executable, "-c", ASK, text],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    *built, directory = done.stdout.split()
    assert built == ["packed", "packed", "packed", "2"]
    assert not Path(directory).exists()


SETTINGS = 'image = "i:1"\n[train]\nreplica_count = 1\nmachine_type = "n1-standard-4"\n'


def test_settings_name_the_packages_or_the_parameters_of_the_project_do(project: Path) -> None:
    write(
        {
            "settings.toml": SETTINGS,
            "pixels.py": "",
            "leaf/augment.py": "",
            "leafnet/data.py": "import pixels",
        }
    )
    assert load_settings(project / "settings.toml").code.packages == ()
    write({"params.toml": 'model = "leafnet.model:build"\nsource = "images:photos"\n'})
    write({"params/vertex.toml": 'source = "click.none:Source"\naugment = "leaf.augment:flip"\n'})
    assert load_settings(project / "settings.toml").code.packages == ("leaf", "leafnet", "pixels")
    write({"settings.toml": f"{SETTINGS}[code]\npackages = []\n"})
    assert load_settings(project / "settings.toml").code.packages == ()


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> str:
    """A text that this process has unpacked."""
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv(code.VARIABLE, "")
    text = pack(["leafnet"])
    code.unpack(text)
    return text


def test_a_change_of_any_unpacked_file_is_a_change_of_the_code(unpacked: str) -> None:
    write({"leafnet/model.py": "this is not what runs"})
    before = code_versions({"model": "leafnet.model:build"})
    assert before["leafnet"] == "sha256:10abb289b67aabef"
    (Path(os.environ[code.VARIABLE]) / "leafnet" / "words" / "de.txt").write_text("Rot\n")
    after = code_versions({"model": "mlp"})
    assert {name for name in before if before[name] != after[name]} == {"leafnet"}


def test_trials_unpack_the_code_of_the_task_that_has_planned_them(
    unpacked: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = {"metric": "loss", "parameter": [{"name": "units", "type": "integer", "min": 1, "max": 2}]}
    job = study.plan_tuning_job(
        json.dumps(tuned),
        [{"container_spec": {"image_uri": "image:1"}}],
        dataset=dsl.Dataset(uri="data"),
        trials=dsl.Artifact(uri=str(project / "trials")),
        job_labels={},
        max_trial_count=1,
        trial_epochs=1,
        model_function="leafnet.model:build",
        options={},
    )
    (argument,) = json.loads(job.worker_pool_specs)[0]["container_spec"]["args"]
    monkeypatch.setenv(code.VARIABLE, "")
    sys.path[:] = [path for path in sys.path if "shardline-code-" not in path]
    built: list[str] = []

    def run(*, model_function: str, **_: Any) -> None:
        built.append(plugins.load(model_function, "model")())

    monkeypatch.setattr(importlib.import_module("shardline.components.train"), "train_replica", run)
    write({"leafnet/model.py": "def build():\n    return 'of the working directory'\n"})
    study.main(argument, ["--units=1"])
    assert built == ["packed"]
