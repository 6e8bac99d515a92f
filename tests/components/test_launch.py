"""`shardline launch` and `shardline.launch`: programs as clusters of real processes, without TensorFlow."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner

import shardline
from shardline.pipelines.cli.main import main
from shardline.pipelines.local.job import CustomJob, supervisor
from shardline.pipelines.local.process import ProcessFailedError
from shardline.trainer.base.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_RESTART,
    PipelineError,
    RunError,
    SettingsError,
)
from tests.helpers import programs
from tests.helpers.jobs import eventually, marked

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("no_orphans")]

_HEAD = """
import json, os, sys, time
from pathlib import Path
config = json.loads(os.environ.get("TF_CONFIG", "{}"))
task = config.get("task", {"type": "chief", "index": 0})
name = f"{task['type']}-{task['index']}"
def wait_for_the_end_of_the_chief():
    pid = Path(os.environ["MARKS"], "pid")
    if name == "chief-0":
        pid.with_name("new").write_text(str(os.getpid()))
        pid.with_name("new").rename(pid)
        sys.exit()
    while not pid.exists() or Path("/proc", pid.read_text()).exists():
        time.sleep(0.01)
def start_number():
    with Path(os.environ["MARKS"], name).open("a+") as file:
        file.write("x")
        return file.tell()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with one for what replicas leave behind and one for temporary files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "marks").mkdir()
    monkeypatch.setenv("MARKS", str(tmp_path / "marks"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def _write(body: str, file: str = "program.py") -> str:
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text(_HEAD + textwrap.dedent(body))
    return file


def _shown(text: str, name: str) -> list[str]:
    return [line.removeprefix(f"{name} | ") for line in text.splitlines() if line.startswith(f"{name} | ")]


@pytest.mark.parametrize("replicas", [1, 3])
def test_every_replica_runs_the_program_as_python_does(
    here: Path, capsys: pytest.CaptureFixture[str], replicas: int
) -> None:
    Path("neighbour.py").write_text("word = 'near'")
    program = _write("""
        import neighbour
        print(json.dumps([config, sys.argv, __name__, __file__, neighbour.word]))
    """)
    shardline.launch(program, replicas=replicas, arguments=["--epochs", "3"], logs="logs")
    names = ["chief-0", *(f"worker-{index}" for index in range(replicas - 1))]
    assert sorted(path.stem for path in Path("logs").glob("*.log")) == names
    shown = capsys.readouterr().out
    for name in names:
        (line,) = _shown(shown, name)
        assert line == Path("logs", f"{name}.log").read_text().strip()
        config, argv, main_name, file, word = json.loads(line)
        assert (argv, main_name) == ([program, "--epochs", "3"], "__main__")
        assert (file, word) == (str(here / program), "near")
        if replicas == 1:
            assert config == {}
        else:
            hosts = {kind: len(hosts) for kind, hosts in config["cluster"].items()}
            assert hosts == {"chief": 1, "worker": 2}
            assert f"{config['task']['type']}-{config['task']['index']}" == name


@pytest.mark.parametrize(
    "line", [["2", "-m", "--", "package.tool", "-x"], ["2", "--", "-m", "package.tool", "-x"]]
)
def test_a_module_runs_by_its_name(here: Path, line: list[str]) -> None:
    _write("print(sys.argv[1:], __name__)", "package/tool.py")
    done = CliRunner().invoke(main, ["launch", *line])
    assert done.exit_code == 0, done.output
    assert _shown(done.output, "worker-0") == ["['-x'] __main__"]


def test_a_module_is_found_without_importing_its_package(here: Path) -> None:
    Path("package").mkdir()
    Path("package/__init__.py").write_text("open('imported', 'w')")
    with pytest.raises(SettingsError, match=r"there is no module 'package\.tool' here"):
        shardline.launch("package.tool", module=True, replicas=2)
    assert not Path("imported").exists()


@pytest.mark.parametrize(("code", "exit_code"), [(5, EXIT_FAILED), (2, EXIT_BAD_INPUT)])
def test_a_replica_that_fails_ends_all(here: Path, code: int, exit_code: int) -> None:
    program = _write(f"if name == 'worker-1': sys.exit({code})\ntime.sleep(600)")
    done = CliRunner().invoke(main, ["launch", "3", "--logs", "logs", program])
    assert done.exit_code == exit_code
    assert re.search(
        rf"\nError: worker-1 ended with exit code {code} after \d+ s \(its log: logs/worker-1.log\)",
        done.output,
    )
    state = json.loads(Path("logs/job.json").read_text())
    assert state["state"] == "failed"
    assert [item["restarts"] for item in state["replicas"]] == [0, 0, 0]


def test_all_replicas_start_again_as_often_as_they_may(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = _write("""
        number = start_number()
        if name == "chief-0":
            time.sleep(600 if number < 3 else 0)
            sys.exit()
        chief = Path(os.environ["MARKS"], "chief-0")
        while not chief.exists() or chief.stat().st_size < number: time.sleep(0.01)
        sys.exit(number < 3)
    """)
    shardline.launch(program, replicas=2, restarts=2, logs="logs")
    assert [path.read_text() for path in Path("marks").iterdir()] == ["xxx", "xxx"]
    assert "all replicas restart (restart 2 of 2)" in capsys.readouterr().out
    with pytest.raises(ProcessFailedError):
        shardline.launch(_write("sys.exit(start_number())"), replicas=1, restarts=1)


def test_a_replica_may_ask_to_be_started_again(here: Path) -> None:
    program = _write(f"if start_number() < 3: sys.exit({EXIT_RESTART})")
    shardline.launch(program, replicas=1)
    assert Path("marks/chief-0").read_text() == "xxx"
    (logs,) = Path("temporary").iterdir()
    assert sorted(path.name for path in logs.iterdir()) == ["chief-0.log", "job.json"]


def test_workers_are_waited_for_when_the_chief_has_ended(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_WORKERS_END_S", 0)
    program = _write("wait_for_the_end_of_the_chief(); start_number()")
    shardline.launch(program, replicas=2)
    assert Path("marks/worker-0").exists()


def test_a_worker_that_fails_after_the_chief_is_a_failure(here: Path) -> None:
    program = _write("wait_for_the_end_of_the_chief(); sys.exit(3)")
    with pytest.raises(ProcessFailedError, match="worker-0 ended with exit code 3"):
        shardline.launch(program, replicas=2)


def test_parameter_servers_are_stopped_when_the_chief_has_ended(here: Path) -> None:
    program = _write("""
        start_number()
        marks = Path(os.environ["MARKS"])
        while name != "chief-0" or len(list(marks.iterdir())) < 3: time.sleep(0.01)
    """)
    shardline.launch(program, replicas=2, ps=1)
    assert {path.name for path in Path("marks").iterdir()} == {"chief-0", "worker-0", "ps-0"}


def test_a_launch_of_nothing_is_refused_and_one_that_takes_too_long_ends(here: Path) -> None:
    with pytest.raises(PipelineError, match="a job needs at least 1 replica, not 0"):
        shardline.launch(_write(""), replicas=0)
    with pytest.raises(RunError, match=r"its timeout of 0\.2 s has passed"):
        shardline.launch(_write("time.sleep(600)"), replicas=2, timeout=0.2)


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_nothing_outlives_the_command(here: Path, no_orphans: str, signum: int, code: int) -> None:
    program = _write("""
        import subprocess
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        start_number()
        time.sleep(600)
    """)
    command = "from shardline.pipelines.cli.main import main; main()"
    launcher = subprocess.Popen([sys.executable, "-c", command, "launch", "2", program])
    eventually(lambda: len(list(Path("marks").iterdir())) == 2)
    assert len(marked(no_orphans)) >= 7  # with two guardians, two programs, and what each has started
    launcher.send_signal(signum)
    assert launcher.wait(10) == code
    eventually(lambda: not marked(no_orphans))


def _as_shardlines(body: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a program as `launch` has a replica run one that imports Shardline."""
    command = [sys.executable, "-m", "shardline.trainer.program", _write(body), *arguments]
    return programs.run(command, capture_output=True, text=True)


def test_a_program_of_shardlines_is_run_as_python_runs_it(forks: None, here: Path) -> None:
    Path("neighbour.py").write_text("word = 'near'")
    body = """
        import neighbour
        print(json.dumps([sys.argv[1:], __name__, __file__, neighbour.word, sys.path[0]]))
    """
    found = json.loads(_as_shardlines(body, "-x").stdout)
    assert found == [["-x"], "__main__", str(here / "program.py"), "near", str(here)]


def test_an_error_of_shardlines_is_one_line(here: Path) -> None:
    program = _write(
        "from shardline.trainer.base.errors import SettingsError\n"
        "raise SettingsError('epochs must be 1, ...')"
    )
    with pytest.raises(ProcessFailedError, match=r"^epochs must be 1, \.\.\.$") as caught:
        shardline.launch(program, replicas=1, strategy=True, logs="logs")
    assert caught.value.exit_code == EXIT_BAD_INPUT
    assert Path("logs/chief-0.log").read_text() == "train: error: epochs must be 1, ...\n"


def test_any_other_error_has_the_traceback_of_the_program(forks: None, here: Path) -> None:
    done = _as_shardlines("def fail(): raise LookupError('mine')\nfail()")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    files = [line.split('"')[1] for line in lines if line.startswith('  File "')]
    assert files == [str(here / "program.py")] * 2
    assert lines[-1] == "LookupError: mine"


def test_a_program_of_shardlines_that_is_told_to_stop_asks_to_be_started_again(
    forks: None, here: Path
) -> None:
    done = _as_shardlines("os.kill(os.getpid(), 15); time.sleep(600)")
    assert done.returncode == EXIT_RESTART


@pytest.mark.parametrize(
    ("text", "strategy", "made"),
    [
        ("import tensorflow as tf", None, False),
        ("import tensorflow as tf", True, True),
        ("import shardline", None, True),
        ("import shardline", False, False),
        ("def train():\n    from shardline.trainer.base.errors import ShardlineError", None, True),
        ("# import shardline\nfrom . import shardline, shardlines", None, False),
        ("def", None, False),
        ("import os, helper.training", None, True),
        ("def train():\n    from helper import training", None, True),
        ("from helper import other", None, False),
    ],
)
def test_whose_strategy_is_made_first(
    here: Path, monkeypatch: pytest.MonkeyPatch, text: str, strategy: bool | None, made: bool
) -> None:
    jobs: list[CustomJob] = []
    monkeypatch.setattr("shardline.pipelines.local.program.run_job", lambda job, *_, **__: jobs.append(job))
    Path("program.py").write_text(text)
    Path("helper").mkdir()
    Path("helper/__init__.py").touch()
    Path("helper/other.py").write_text("from .other import nothing")
    Path("helper/training.py").write_text("from . import later")
    Path("helper/later.py").write_text("import program\nimport shardline.trainer.base.errors")
    shardline.launch("program.py", replicas=2, strategy=strategy)
    command = jobs[0].worker_pools[1].argv
    assert command == [sys.executable, *(["-m", "shardline.trainer.program"] if made else []), "program.py"]
