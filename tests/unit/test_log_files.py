"""The logs of a local run, as `shardline logs` shows them."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shardline.components.runs import RunDirectory
from shardline.pipelines.cli.main import main
from shardline.trainer.base import files
from shardline.trainer.base.errors import SettingsError

LOG = """\
12:00:00.000 - INFO - Running pipeline: 'toy'
12:00:00.001 - INFO - Executing task 'prepare'
    [KFP Executor 2026-11-20 12:00:00,100 INFO]: Got executor_input:
    {
        "inputs": {}
    }
prepare: 3 records
12:00:01.000 - INFO - Task 'prepare' finished with status SUCCESS
12:00:01.001 - INFO - Task 'prepare' outputs:
    dataset: Dataset( name='dataset' )
12:00:01.002 - INFO - Executing task 'train'
    chief-0 | epoch 1
"""
MORE = """\
    worker-0 | epoch 1
12:00:02.000 - INFO - Task 'train' finished with status SUCCESS
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "runs" / "today"
    logs = directory / "replicas" / "train"
    logs.mkdir(parents=True)
    record(directory, "running")
    (directory / "run.log").write_text(LOG)
    (logs / "chief-0.log").write_text("epoch 1\n\nevery line\n")
    return directory


def record(directory: Path, state: str, *, host: str = "", **facts: Any) -> None:
    content = {"pipeline": "toy", "state": state, "error": None, "host": host or socket.gethostname()}
    files.write_json(directory / "run.json", content | facts)


def logs(run: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["logs", run.name, "--runs-dir", str(run.parent), *arguments])


def test_lines_of_tasks_are_shown_without_kfp_s_own(run: Path) -> None:
    assert logs(run).stdout.splitlines() == ["prepare | prepare: 3 records", "train | chief-0 | epoch 1"]
    assert logs(run, "--task", "train").stdout == "train | chief-0 | epoch 1\n"


def test_a_replica_s_own_log_is_whole(run: Path) -> None:
    assert logs(run, "--replica", "chief-0").stdout.splitlines() == ["epoch 1", "every line"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "tran"], "no task 'tran' has run; these have: prepare, train"),
        (["--task", "tran", "--follow"], "no task 'tran' has run; these have: prepare, train"),
        (["--replica", "worker-9"], "no replica 'worker-9' has run; these have: chief-0 of train"),
        (["--replica", "chief-0", "--task", "prepare"], "no replica 'chief-0' has run in 'prepare'; these"),
        (["--replica", "chief-0", "--task", "/etc"], "no replica 'chief-0' has run in '/etc'; these have"),
    ],
)
def test_what_is_not_there_is_named_with_what_is(run: Path, arguments: list[str], message: str) -> None:
    record(run, "succeeded")

    result = logs(run, *arguments)

    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_following_ends_with_the_run_and_misses_nothing(run: Path) -> None:
    lines = RunDirectory(run).read_log(follow=True)
    seen = [next(lines), next(lines)]

    def go_on() -> None:
        with (run / "run.log").open("a") as log:
            log.write(MORE[:10])
            log.flush()
            log.write(MORE[10:])
        record(run, "succeeded")

    writer = threading.Thread(target=go_on)
    writer.start()
    seen += lines
    writer.join()

    assert seen == ["prepare | prepare: 3 records", "train | chief-0 | epoch 1", "train | worker-0 | epoch 1"]


def test_a_run_whose_process_is_gone_has_failed_and_is_followed_no_longer(run: Path) -> None:
    record(run, "running", locked=True)
    with RunDirectory(run).lock() as is_held:
        assert is_held
        assert RunDirectory(run).record().state == "running"

    followed = logs(run, "--follow")
    assert followed.stdout.endswith("train | chief-0 | epoch 1\n")
    assert "no longer following today: its process ended without a record" in followed.stderr
    done = CliRunner().invoke(main, ["explain", run.name, "--runs-dir", str(run.parent)])
    assert done.exit_code == 1
    assert "error        its process ended without a record" in done.output
    assert RunDirectory(run).record().state == "failed"


def test_a_run_on_another_host_is_not_judged_by_locks_of_this_one(run: Path) -> None:
    """On a mount without locks between hosts nobody here can know whether its process is there."""
    record(run, "running", locked=True, host="another")

    assert RunDirectory(run).record().state == "running"


def test_a_name_that_is_no_run_says_what_a_run_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VERTEX_PROJECT", raising=False)

    result = CliRunner().invoke(main, ["logs", "yesterday", "--runs-dir", str(tmp_path)])

    assert result.exit_code == 2
    assert "yesterday is not a run directory; for a run on the platform project is missing" in result.output


def test_explain_ends_as_the_run_did(run: Path) -> None:
    def ended(state: str) -> int:
        record(run, state)
        return CliRunner().invoke(main, ["explain", str(run)]).exit_code

    assert [ended(state) for state in ("succeeded", "failed", "cancelled", "running")] == [0, 1, 4, 0]


def test_a_task_that_only_prints_the_name_of_another_is_not_taken_for_it(run: Path) -> None:
    with (run / "run.log").open("a") as log:
        log.write("    12:00:01.500 - INFO - Executing task 'other'\n")

    with pytest.raises(SettingsError, match="no task 'other' has run"):
        list(RunDirectory(run).read_log("other"))
