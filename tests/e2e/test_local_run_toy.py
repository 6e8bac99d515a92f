"""A compiled pipeline of the real shape runs on this machine, and leaves no process behind."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from kfp import compiler

from shardline.components.runs import RunDirectory
from shardline.pipelines.local import run_pipeline
from shardline.pipelines.local.process import ProcessFailedError
from shardline.trainer.base.errors import EXIT_BAD_INPUT, EXIT_FAILED, PipelineError, RunError, SettingsError
from tests.helpers.execution import without_tensorflow
from tests.helpers.small_disk import small_disk
from tests.helpers.third_party_pipeline import MODEL, loops, third_party, usual, values, write_pipeline
from tests.helpers.toy_pipeline import free_text, loop, write_toy

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

ROOT = Path(__file__).resolve().parents[2]
NOTE = 'it\'s "q" \\ \\n {x} {{y}} $HOME `id` python3\nnew line é 数'


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy") / "toy.yaml")


def _of_run(runs: Path) -> list[psutil.Process]:
    """All live processes of runs in a directory, however they are related to this one."""
    found = []
    for process in psutil.process_iter():
        try:
            mark = process.environ().get("SHARDLINE_RUN", "")
            if mark.startswith(str(runs)) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for runs, of which no process and no temporary file must be left after the test."""
    directory = tmp_path / "runs"
    temporary = Path(tempfile.mkdtemp(prefix="x" * 120))  # longer than the address of a socket may be
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield directory
    deadline = time.monotonic() + 10
    while (left := _of_run(directory)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []
    assert list(temporary.iterdir()) == []
    temporary.rmdir()


@pytest.fixture
def by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no fork server: nothing is forked from it in these tests, and it takes seconds to load."""
    monkeypatch.setenv("PYTHONPATH", without_tensorflow(tmp_path))


def _only(runs: Path) -> Path:
    (directory,) = (path for path in runs.iterdir() if not path.is_symlink())
    return directory


def _record(runs: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((_only(runs) / "run.json").read_text())
    return content


def test_a_run_from_end_to_end(toy: Path, runs: Path) -> None:
    stream = io.StringIO()
    result = run_pipeline(toy, {"note": NOTE, "count": "7"}, runs_dir=runs, stream=stream)

    assert result.blessed is True
    assert result.directory == _only(runs)
    assert list(result.facts) == ["replicas", "blessed", "champion"]
    model = Path(str(result.facts["champion"]))
    for name, role in (("chief-0", "chief"), ("worker-0", "worker")):
        seen = json.loads((model / f"{name}.json").read_text())
        assert seen["note"] == NOTE
        assert seen["count"] == [7, "int"]
        assert seen["source"] == "digits"
        assert seen["task"] == {"type": role, "index": 0}
        assert seen["cwd"] == os.getcwd()
        assert seen["tf_config"]["cluster"].keys() == {"chief", "worker"}
        assert seen["cluster_spec"]["cluster"].keys() == {"workerpool0", "workerpool1"}

    assert (result.directory / "pipeline.yaml").read_bytes() == toy.read_bytes()
    record = _record(runs)
    assert record["sha256"] == hashlib.sha256(toy.read_bytes()).hexdigest()
    assert record["state"] == "succeeded"
    assert record["parameters"]["note"] == NOTE
    assert record["parameters"]["source"] == "digits"  # a default counts as a setting
    assert record["versions"]["kfp"]
    assert record["facts"] == dict(result.facts)

    shown = stream.getvalue()
    assert "preprocess: 3/3 records" in shown
    assert "\nworker-0 | a plain line\n" in shown
    assert "executor_input" not in shown  # KFP's own words, of a replica as well
    assert f"\npipeline       sha256:{record['sha256'][:12]}\n" in shown
    # What a person copies from the terminal is short.
    assert (runs / "latest").readlink() == Path(result.directory.name)
    assert f"champion       {result.directory}/model\n" in shown
    assert (runs / "latest" / "model").resolve() == model
    assert "KFP" not in shown
    log = (result.directory / "run.log").read_text()
    assert "chief-0 | a plain line" in log
    assert "worker-0 | a plain line" in log
    assert "preprocess: greeting None" in log
    assert "a plain line\n" in (result.directory / "replicas" / "train" / "worker-0.log").read_text()


@pytest.mark.usefixtures("by_themselves")
def test_a_pipeline_without_shardline_components_runs(tmp_path: Path, runs: Path) -> None:
    """Lightweight components, one with packages, a container's command, and an importer; nothing of ours."""
    (tmp_path / "data.txt").write_text("imported")
    path = write_pipeline(third_party, tmp_path / "third_party.yaml")
    stream = io.StringIO()

    result = run_pipeline(path, {"uri": str(tmp_path / "data.txt")}, runs_dir=runs, stream=stream)

    log = (result.directory / "run.log").read_text()
    assert "9 hello you python3 hi imported" in log
    assert "container: runs sh of this machine, without an image" in stream.getvalue()


@pytest.mark.usefixtures("by_themselves")
def test_an_importer_finds_what_a_job_has_written_and_a_task_is_tried_again(
    tmp_path: Path, runs: Path
) -> None:
    """Google's usual job, importer and upload, in a file whose second document asks for a workspace."""
    path = write_pipeline(usual, tmp_path / "usual.yaml")
    assert "\n---\nplatforms:\n" in path.read_text()
    stream = io.StringIO()

    result = run_pipeline(path, {}, runs_dir=runs, stream=stream)

    assert (result.directory / "gcs" / MODEL.removeprefix("gs://") / "weights").read_text() == "trained"
    log = (result.directory / "run.log").read_text()
    assert "read: trained" in log
    assert log.count("Executing task 'look'") == 2
    assert "leaves out UploadModel of 'model'" in stream.getvalue()


@pytest.mark.usefixtures("by_themselves")
def test_values_arrive_as_on_the_platform(tmp_path: Path, runs: Path) -> None:
    """Whole numbers, null, unset inputs, a loop over nothing, placeholders inside a job's worker pools."""
    path = write_pipeline(values, tmp_path / "values.yaml")

    log = (run_pipeline(path, {}, runs_dir=runs, stream=io.StringIO()).directory / "run.log").read_text()

    seen = json.loads(re.search(r"got (\[.*)", log)[1])
    mapping, nested = (
        {"a": None, "b": [1, None, 2.5], "q": 'say "hi"'},
        {"n": "3", "t": '3 a "q"', "in": {"one": 1}},
    )
    assert json.dumps(seen) == json.dumps(
        [mapping, dict(sorted(nested.items())), [], "3 epochs", 2.0, None, 4]
    )
    assert """args ['--epochs', '3', '--note=3-a "q"', '3'] 2""" in log


@pytest.mark.usefixtures("by_themselves")
def test_a_loop_s_item_takes_no_other_s_place(tmp_path: Path, runs: Path) -> None:
    path = write_pipeline(loops, tmp_path / "loops.yaml")

    log = (run_pipeline(path, {}, runs_dir=runs, stream=io.StringIO()).directory / "run.log").read_text()

    assert sorted(re.findall("told .*", log)) == ["told 2 a 9", "told 2 b 9", "told 2 c 9"]


@pytest.mark.usefixtures("by_themselves")
def test_a_mistake_in_a_foreign_pipeline_is_not_tried_again(tmp_path: Path, runs: Path) -> None:
    path = write_pipeline(values, tmp_path / "values.yaml")

    with pytest.raises(RunError, match="mistaken"):
        run_pipeline(path, {"mistake": True, "items": [1, 2]}, runs_dir=runs, stream=io.StringIO())

    log = (_only(runs) / "run.log").read_text()
    assert log.count("Executing task 'mistaken'") == 1
    assert '"t": "3 a \\"q\\""}, [1, 2], "3 epochs"' in log


@pytest.mark.usefixtures("by_themselves")
def test_what_a_model_function_prints_decides_nothing(toy: Path, runs: Path) -> None:
    """Neither forged events, nor an event of its own, nor a line in the words of kfp.local."""
    with pytest.raises(RunError, match="not blessed: no: too bad"):
        run_pipeline(
            toy,
            {"way": "forge", "bless": "false"},
            runs_dir=runs,
            require_blessing=True,
            stream=io.StringIO(),
        )

    assert (_record(runs)["state"], _record(runs)["facts"]["blessed"]) == ("succeeded", False)
    here = RunDirectory(_only(runs))
    failure = here.explanation(here.read())
    assert (failure.failed, failure.error) == ("judge", "")


@pytest.mark.usefixtures("by_themselves")
def test_not_blessed_is_no_failure_where_no_blessing_is_required(toy: Path, runs: Path) -> None:
    stream = io.StringIO()
    result = run_pipeline(toy, {"bless": "false", "greeting": "hello"}, runs_dir=runs, stream=stream)
    assert (result.blessed, "champion" in result.facts) == (False, False)
    table = stream.getvalue().rpartition("\n\n")[2]
    assert table.startswith("verdict        not published: no: too bad\n")
    assert "succeeded" not in table
    assert "greeting 'hello'" in stream.getvalue()


@pytest.mark.usefixtures("by_themselves")
@pytest.mark.parametrize(
    "free", [pytest.param(32, marks=pytest.mark.matrix), 100], ids=["at its start", "in its course"]
)
def test_a_full_disk_ends_a_run_with_one_line(toy: Path, tmp_path: Path, free: int) -> None:
    stream = io.StringIO()
    with small_disk(tmp_path / "small", 200) as disk:
        (disk / "all").write_bytes(bytes((200 - free) << 10))
        with pytest.raises(RunError, match=r"^No space left on device") as caught:
            run_pipeline(toy, {}, runs_dir=disk / "runs", stream=stream)
        assert "\n" not in str(caught.value)
        assert RunDirectory(_only(disk / "runs")).record().state == "failed"


@pytest.mark.usefixtures("by_themselves")
@pytest.mark.parametrize(
    ("way", "message", "code"),
    [
        ("mistake", "^no such model 'nosuch'; there are: toy$", EXIT_BAD_INPUT),
        pytest.param("crash", "^worker-0 ended with exit code 1 ", EXIT_FAILED, marks=pytest.mark.matrix),
        ("kill", "^worker-0 was killed by SIGKILL ", EXIT_FAILED),
    ],
)
def test_a_replica_that_fails(toy: Path, runs: Path, way: str, message: str, code: int) -> None:
    stream = io.StringIO()
    with pytest.raises(ProcessFailedError, match=message) as caught:
        run_pipeline(toy, {"way": way}, runs_dir=runs, stream=stream)
    assert caught.value.exit_code == code
    assert ("ValueError: a bug in the trainer" in stream.getvalue()) == (way == "crash")
    assert ("Traceback" in stream.getvalue()) <= (way == "crash")
    record = _record(runs)
    assert record["state"] == "failed"
    assert record["error"] == str(caught.value)


@pytest.mark.usefixtures("by_themselves")
@pytest.mark.parametrize(
    ("tasks", "facts"), [(1, {}), (3, {"parts": "[0, 1, 2] ['part-0', 'part-1', 'part-2']"})]
)
def test_loops_conditions_and_pipelines_inside_pipelines(
    tmp_path: Path, runs: Path, tasks: int, facts: dict[str, str]
) -> None:
    compiler.Compiler().compile(loop, str(tmp_path / "loop.yaml"))
    result = run_pipeline(tmp_path / "loop.yaml", {"tasks": tasks}, runs_dir=runs, stream=io.StringIO())
    assert result.facts == facts


@pytest.mark.usefixtures("by_themselves")
def test_a_condition_that_cannot_be_evaluated_is_no_success(tmp_path: Path, runs: Path) -> None:
    compiler.Compiler().compile(free_text, str(tmp_path / "free-text.yaml"))
    with pytest.raises(RunError, match="could not evaluate a condition and skipped its tasks") as error:
        run_pipeline(tmp_path / "free-text.yaml", {}, runs_dir=runs, stream=io.StringIO())
    assert error.value.exit_code == EXIT_FAILED
    assert _record(runs)["state"] == "failed"


@pytest.mark.usefixtures("by_themselves")
def test_a_task_without_an_error_of_its_own_is_named(toy: Path, runs: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text(toy.read_text().replace("Path(out.path).write_text(source)", "print(1/0)"))
    stream = io.StringIO()
    with pytest.raises(ProcessFailedError, match=r"the task 'prepare' failed \(log: .*run\.log\)") as caught:
        run_pipeline(broken, {}, runs_dir=runs, stream=stream)
    assert caught.value.exit_code == EXIT_FAILED
    assert "ZeroDivisionError" in stream.getvalue()


def test_bad_input_starts_nothing(toy: Path, runs: Path, tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="did you mean count"):
        run_pipeline(toy, {"cuont": "1"}, runs_dir=runs)
    with pytest.raises(PipelineError, match="cannot be resolved on this machine"):
        run_pipeline(toy, {"note": "{{$.nonsense}}"}, runs_dir=runs)
    assert not runs.exists()
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="cannot write the run directory"):
        run_pipeline(toy, {}, runs_dir=tmp_path / "file" / "runs")


def _start_hanging(toy: Path, runs: Path) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """Starts a run as the command line does, and waits until both replicas hang."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.helpers.toy_pipeline",
        str(toy),
        str(runs),
        "way=hang",
    ]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline
        assert process.poll() is None
        logs = [path.read_text() for path in runs.glob("latest/replicas/train/*.log")]
        if len([log for log in logs if "hanging\n" in log]) == 2:
            return process, _of_run(runs)
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("signum", "code"),
    [pytest.param(signal.SIGINT, 130, marks=pytest.mark.matrix), (signal.SIGTERM, 143), (signal.SIGKILL, -9)],
)
def test_a_signal_to_the_command_stops_everything(toy: Path, runs: Path, signum: int, code: int) -> None:
    process, started = _start_hanging(toy, runs)
    # Executor and its guardian, fork server, the guardian and the process of the task; and for
    # each replica guardian, shell, program and a child in a session of its own.
    assert len(started) == 13
    process.send_signal(signum)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == code
    assert "Traceback" not in output
    state = "failed" if signum == signal.SIGKILL else "cancelled"
    assert RunDirectory(_only(runs)).record().state == state


@pytest.mark.parametrize(
    "victim",
    [
        pytest.param("shardline.pipelines.local.execute", marks=pytest.mark.matrix),
        "shardline.pipelines.local.process.fork_server",
        pytest.param("guardian.py", marks=pytest.mark.matrix),
    ],
)
def test_a_killed_process_of_the_run_ends_it(toy: Path, runs: Path, victim: str) -> None:
    process, started = _start_hanging(toy, runs)
    # The shell's command line holds the text, too: its name is "sh".
    next(item for item in started if item.name() != "sh" and victim in " ".join(item.cmdline()[:5])).kill()
    output, _ = process.communicate(timeout=20)
    assert process.returncode == EXIT_FAILED
    assert "run: error: " in output
    assert "Traceback" not in output
    assert _record(runs)["state"] == "failed"


def test_an_injection_is_checked_before_anything_starts(toy: Path, runs: Path, tmp_path: Path) -> None:
    compiler.Compiler().compile(loop, str(tmp_path / "loop.yaml"))
    with pytest.raises(PipelineError, match="--inject needs a custom job"):
        run_pipeline(tmp_path / "loop.yaml", {}, runs_dir=runs, injections=["kill:chief@t=1s"])
    with pytest.raises(SettingsError, match="--inject takes"):
        run_pipeline(toy, {}, runs_dir=runs, injections=["kill"])
    assert not runs.exists()
