"""Replicas forked from a process that has loaded TensorFlow train as those that load it themselves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardline.pipelines.local.job import CustomJob, parse_injection, run_job
from shardline.pipelines.local.process import fork_server, processes
from shardline.pipelines.local.process.processes import Program, forkable_program
from tests.helpers.datasets import write_dataset
from tests.helpers.jobs import eventually, marked

pytestmark = [pytest.mark.multiworker, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[2]
_MODEL = """
import os
from pathlib import Path
import numpy as np
from shardline.trainer.models.zoo import build_mnist_cnn as original

draws = np.random.random()  # now: later on the trainer's seed decides

def build_model(dataset, **hparams):
    parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().replace(b"\\0", b" ").decode()
    print("parent", parent, "draws", draws, flush=True)
    return original(dataset, **hparams)
"""


def _lines(log: Path) -> list[str]:
    return [line for line in log.read_text().splitlines() if line.startswith("parent ")]


def _weights(path: Path) -> list[np.ndarray]:
    import keras

    return keras.saving.load_model(path / "model.keras", compile=False).get_weights()  # type: ignore[no-any-return]


def test_forked_replicas_train_restart_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = str(tmp_path)
    monkeypatch.setenv("TEST_MARK", mark)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    (tmp_path / "mine.py").write_text(_MODEL)
    write_dataset(tmp_path / "data")

    def train(out: Path, *injections: str) -> None:
        command = [sys.executable, "-m", "shardline.trainer.task", "--dataset", str(tmp_path / "data")]
        command += ["--model-dir", str(out), "--model", "mine:build_model", "--epochs", "1"]
        job = CustomJob.with_roles(command, 2, restart_job_on_worker_restart=True)
        run_job(job, out / "logs", injections=[parse_injection(text) for text in injections])

    train(tmp_path / "forked", "kill:worker@step=1")
    for name in ("chief-0", "worker-0"):
        lines = _lines(tmp_path / "forked" / "logs" / f"{name}.log")
        assert len(lines) == 2  # one for each start
        assert all("shardline.pipelines.local.process.fork_server" in line for line in lines)
        assert lines[0] != lines[1]  # each draws its own random numbers
    replicas = json.loads((tmp_path / "forked" / "logs" / "job.json").read_text())["replicas"]
    assert [item["starts"][0]["exit"] for item in replicas][1] == "SIGKILL"
    eventually(lambda: not marked(mark), 5)

    monkeypatch.setattr(processes, "forkable_program", lambda command: None)
    train(tmp_path / "plain")
    assert "guardian.py" in _lines(tmp_path / "plain" / "logs" / "chief-0.log")[0]
    for forked, plain in zip(_weights(tmp_path / "forked"), _weights(tmp_path / "plain"), strict=True):
        np.testing.assert_array_equal(forked, plain)
    eventually(lambda: not marked(mark), 5)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("moment", ["loading", "training"])
def test_no_forked_replica_outlives_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: int, moment: str
) -> None:
    mark, temporary = str(tmp_path), tmp_path / ("x" * 120)
    monkeypatch.setenv("TEST_MARK", mark)
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    write_dataset(tmp_path / "data")
    command = [str(Path(sys.executable).with_name("shardline")), "train"]
    command += [str(tmp_path / "data"), str(tmp_path / "out"), "--replicas", "2", "--epochs", "100000"]
    with (tmp_path / "output").open("w+") as output:
        with subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
            # The command, the server, and for each replica its guardian and itself.
            eventually(lambda: len(marked(mark)) >= (2 if moment == "loading" else 6), 60)
            if moment == "training":
                eventually(lambda: "epoch 1/100000" in (tmp_path / "output").read_text(), 60)
            process.send_signal(signum)
            assert process.wait(20) == (130 if signum == signal.SIGINT else -9)
        assert "Traceback" not in (tmp_path / "output").read_text()
    eventually(lambda: not marked(mark), 5)
    with processes.scratch_directory():  # removes what one that was killed has left
        pass
    assert list(temporary.iterdir()) == []


def test_importing_tensorflow_starts_no_thread() -> None:
    """Nor does it open a device: only so may the process be forked."""
    program = """
import os
from shardline.trainer.keras_compat import tensorflow_internals
tensorflow_internals.import_tensorflow()
import shardline.trainer.train, kfp.dsl.executor, shardline.pipelines.local.job.supervisor
import shardline.components.validate.validation, shardline.components.rehearse.rehearsal
print(len(os.listdir("/proc/self/task")))
"""
    # BLAS starts threads, and stops them before a fork.
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "_KFP_RUNTIME": "true"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=env, cwd=ROOT, check=True
    )
    assert done.stdout == "1\n"


_TASK = """
import os, sys
from pathlib import Path

def task(code: int):
    parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().replace(b"\\0", b" ").decode()
    print("parent", parent, "loaded", "tensorflow" in sys.modules, flush=True)
    os._exit(code)
    import tensorflow
"""


def _run_task(code: int) -> tuple[int, str]:
    """Runs a task of a pipeline as a local run does; returns its exit status and output."""
    executor_input = {"inputs": {"parameterValues": {"code": code}}, "outputs": {"outputFile": os.devnull}}
    arguments = ["--executor_input", json.dumps(executor_input), "--function_to_execute", "task"]
    printed: list[str] = []
    launch = processes.Launch(["sh", "-ec", _script(), _TASK, *arguments], dict(os.environ))
    ended = processes.GuardedProcess(launch, printed.append, grace=7).run_to_end()
    return ended, "\n".join(printed)


def test_a_task_is_forked_from_the_process_that_loads_tensorflow_for_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = str(tmp_path)
    monkeypatch.setenv("TEST_MARK", mark)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    with processes.start_fork_server(["shardline.trainer.train"]):
        code, printed = _run_task(7)  # at once: it waits for the process to be ready
        assert code == 7
        assert "shardline.pipelines.local.process.fork_server" in printed
        assert "loaded True" in printed
        assert _run_task(0)[0] == 0
        # Started by itself where the process has gone: here one that does not listen any more.
        Path(os.environ["SHARDLINE_FORK_SERVER"]).unlink()
        code, printed = _run_task(3)
        assert code == 3
        assert "loaded False" in printed
    eventually(lambda: not marked(mark), 5)


def test_what_is_forked() -> None:
    script = _script()
    trains = "from shardline.components.train.replica import run"
    assert forkable_program([sys.executable, "-m", "shardline.trainer.task", "--x"]) == Program(
        "shardline.trainer.task", ["--x"]
    )
    bootstrap = "shardline.trainer.program"
    assert forkable_program([sys.executable, "-m", bootstrap, "x.py"]) == Program(bootstrap, ["x.py"])
    assert forkable_program(["sh", "-ec", script, trains, "--x"]) == Program(
        "kfp.dsl.executor_main", ["--x"], trains
    )
    assert forkable_program(["sh", "-ec", script, "import torch", "--x"]) is None
    assert forkable_program(["sh", "-ec", f"pip install x\n{script}", trains, "--x"]) is None
    assert forkable_program([sys.executable, "-c", "import tensorflow"]) is None
    stub = ["python3", "-u", "-m", "shardline.pipelines.local.launcher_stubs"]
    assert forkable_program([*stub, "CustomJob", "--x"]) == Program(stub[3], ["CustomJob", "--x"])
    assert forkable_program([*stub, "UploadModel"]) is None


def test_no_variable_of_a_compiled_pipeline_keeps_its_tasks_from_being_forked() -> None:
    containers = [one["container"] for one in _compiled()["deploymentSpec"]["executors"].values()]
    env = {item["name"]: item["value"] for one in containers for item in one.get("env", [])}
    assert "SHARDLINE_TIMEOUT" in env
    assert fork_server.import_environment(env) == {}
    assert fork_server.import_environment({"TF_XLA_FLAGS": "--x"}) == {"TF_XLA_FLAGS": "--x"}


def _script() -> str:
    return next(
        executor["container"]["command"][2]
        for executor in _compiled()["deploymentSpec"]["executors"].values()
        if executor["container"]["command"][0] == "sh"
    )


def _compiled() -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    import yaml

    return next(yaml.safe_load_all((ROOT / "compiled" / "retrain.yaml").read_text()))  # type: ignore[no-any-return]


def test_a_long_directory_for_temporary_files_does_not_keep_a_server_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (long := tmp_path / ("long" * 25)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))

    with processes.start_fork_server(["json"]):
        server = Path(os.environ["SHARDLINE_FORK_SERVER"])
        assert server.is_socket()
    assert not server.exists()
