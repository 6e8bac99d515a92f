"""The script of a job under a real Slurm: pools, the exit code that decides, and nodes of a range."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from shardline.pipelines.engines.slurm.engine import submit
from shardline.pipelines.engines.slurm.script import ARRAY_INDEX, BatchJob
from shardline.pipelines.engines.slurm.settings import SlurmSettings
from tests.helpers.jobs import eventually
from tests.helpers.slurm import Slurm

pytestmark = pytest.mark.timeout(180)

#: Prints what a replica is, then does what its argument says for its role.
_PROGRAM = """
import json, os, signal, sys, time
task = json.loads(os.environ["CLUSTER_SPEC"])["task"]
config = os.environ.get("TF_CONFIG")
print(json.dumps([task["type"], task["index"], config, os.getpid(), *sys.argv[2:]]), flush=True)
signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
for _ in range(int(json.loads(sys.argv[1]).get(task["type"], [0])[0] * 10)):
    time.sleep(0.1)
sys.exit(json.loads(sys.argv[1]).get(task["type"], [0, 0])[1])
"""


def job(directory: Path, deeds: dict[str, tuple[float, int]], *words: str, **tasks: int) -> BatchJob:
    """Returns a job whose tasks end after seconds and with a code, by worker pool."""
    command = (sys.executable, "-c", _PROGRAM, json.dumps(deeds), *words)
    return BatchJob(name="train", tasks=tasks, command=command, directory=directory)


def printed(directory: Path, name: str) -> list[list[object]]:
    path = directory / f"{name}.log"
    lines = path.read_text().splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines if line.startswith("[")]


def test_the_chief_ends_a_job_whose_servers_do_not(slurm: Slurm, tmp_path: Path) -> None:
    deeds = {"workerpool0": (1, 0), "workerpool1": (1, 0), "workerpool2": (600, 0)}
    number = submit(job(tmp_path, deeds, chief=1, worker=1, ps=1), SlurmSettings())
    assert slurm.wait(number) == "COMPLETED"
    assert (tmp_path / "exit").read_text() == "0\n"
    configs = [printed(tmp_path, name)[0][2] for name in ("chief-0", "worker-0", "ps-0")]
    clusters = [json.loads(str(text))["cluster"] for text in configs]
    assert clusters[0] == clusters[1] == clusters[2]
    assert {role: len(hosts) for role, hosts in clusters[0].items()} == {"chief": 1, "worker": 1, "ps": 1}


def test_a_lost_server_restarts_all_tasks(slurm: Slurm, tmp_path: Path) -> None:
    deeds = {"workerpool0": (5, 0), "workerpool1": (600, 0), "workerpool2": (600, 0)}
    number = submit(job(tmp_path, deeds, chief=1, worker=1, ps=1), SlurmSettings())
    eventually(lambda: printed(tmp_path, "chief-0"))
    os.kill(int(str(eventually(lambda: printed(tmp_path, "ps-0"))[0][3])), signal.SIGKILL)
    eventually(lambda: len(printed(tmp_path, "chief-0")) == 2, seconds=60)
    slurm.run("scancel", number)


@pytest.mark.parametrize(("code", "starts"), [(2, 1), (1, 2)])
def test_the_task_that_failed_first_decides(slurm: Slurm, tmp_path: Path, code: int, starts: int) -> None:
    deeds = {"workerpool0": (600, 0), "workerpool1": (0.5, code)}  # the chief then ends with 75
    number = submit(job(tmp_path, deeds, chief=1, worker=1), SlurmSettings())
    assert slurm.wait(number) == "FAILED"
    assert (tmp_path / "exit").read_text() == f"{code}\n"
    assert len(printed(tmp_path, "chief-0")) == starts


def test_a_range_of_nodes_has_a_replica_on_each(slurm: Slurm, tmp_path: Path) -> None:
    number = submit(job(tmp_path, {}, chief=1, worker=3), SlurmSettings(nodes="1-4"))
    assert slurm.wait(number) == "COMPLETED"
    assert sorted(path.name for path in tmp_path.glob("*-*.log")) == ["chief-0.log", "worker-0.log"]


def test_an_element_of_an_array_has_its_own_logs_and_exit_code(slurm: Slurm, tmp_path: Path) -> None:
    one = job(tmp_path, {}, ARRAY_INDEX, "$HOME", chief=1)
    array = BatchJob(name="parts", command=one.command, directory=tmp_path, elements=3)
    submit(array, SlurmSettings())
    eventually(lambda: len(list(tmp_path.glob("*/exit"))) == 3, seconds=60)
    assert [printed(tmp_path / str(n), "chief-0")[0][4:] for n in range(3)] == [
        [str(n), "$HOME"] for n in range(3)
    ]
