"""REST request of a Slurm job: the options of the script as fields, and its call against a fake."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from shardline.components.vertex.client import Rest
from shardline.pipelines.engines.slurm.rest import minutes, rest_request, send
from shardline.pipelines.engines.slurm.script import BatchJob, batch_script
from shardline.pipelines.engines.slurm.settings import SlurmSettings
from shardline.trainer.base.errors import PlatformError, SettingsError

EVERYTHING = SlurmSettings(
    partition="gpu",
    account="vision",
    qos="high",
    time="1-12:00:30",
    nodes="2",
    cpus_per_task=8,
    mem="32G",
    gres="gpu:a100:1",
    constraint="nvlink",
)


def job(*roles: str, **further: Any) -> BatchJob:
    tasks, command = dict.fromkeys(roles, 1), ("python", "train.py")
    return BatchJob(name="train", tasks=tasks, command=command, directory=Path("/runs/1"), **further)


def test_every_option_of_the_script_is_a_field() -> None:
    given = job("chief", "worker", after="12")
    request = rest_request(given, EVERYTHING, Path("/work"))
    assert request["script"] == batch_script(given, EVERYTHING)
    assert request["job"] == {
        "current_working_directory": "/work",
        "environment": ["PATH=/usr/local/bin:/usr/bin:/bin"],
        "name": "train",
        "standard_output": "/runs/1/slurm.log",
        "open_mode": ["APPEND"],
        "requeue": True,
        "kill_warning_signal": "TERM",
        "kill_warning_delay": {"set": True, "infinite": False, "number": 60},
        "dependency": "afterok:12",
        "flags": ["KILL_INVALID_DEPENDENCY"],
        "nodes": "2",
        "tasks": 2,
        "tasks_per_node": 1,
        "partition": "gpu",
        "account": "vision",
        "qos": "high",
        "time_limit": {"set": True, "infinite": False, "number": 36 * 60 + 1},
        "cpus_per_task": 8,
        "memory_per_node": {"set": True, "infinite": False, "number": 32 * 1024},
        "tres_per_node": "gres/gpu:a100:1",
        "constraints": "nvlink",
    }
    options = set(re.findall(r"^#SBATCH --([a-z-]+)", request["script"], re.MULTILINE))
    assert len(options) == 19 - 1  # all but that of an array


def test_an_array_and_a_heterogeneous_job() -> None:
    array = rest_request(job("chief", elements=3), SlurmSettings(), Path("/work"))
    assert array["job"]["array"] == "0-2"
    servers = rest_request(job("chief", "worker", "ps"), SlurmSettings(), Path("/work"))
    assert [part["tasks"] for part in servers["jobs"]] == [2, 1]
    assert "job" not in servers


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 90), ("30:00", 30), ("30:01", 31), ("1:30:00", 90), ("1-12", 2160), ("1-12:30", 2190)],
)
def test_times_are_minutes(text: str, expected: int) -> None:
    assert minutes(text) == expected


def test_a_line_for_sbatch_is_refused() -> None:
    with pytest.raises(SettingsError, match="--exclusive"):
        rest_request(job("chief"), SlurmSettings(options=("--exclusive",)), Path("/work"))


class FakeSession:
    """Answers one call of Google's API and records it."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer = answer
        self.calls: list[tuple[str, str, Any]] = []

    def request(self, verb: str, url: str, *, json: Any, **options: Any) -> FakeSession:
        self.calls.append((verb, url, json))
        return self

    def raise_for_status(self) -> None:
        """The status is 200."""

    def json(self) -> dict[str, Any]:
        return self.answer


def test_a_job_is_submitted_through_the_platform() -> None:
    session = FakeSession({"job_id": 12, "errors": []})
    body = rest_request(job("chief"), SlurmSettings(), Path("/work"))
    name = "projects/p/locations/l/clusters/c"
    assert send(Rest(session), name, body) == "12"  # type: ignore[arg-type]  # a fake
    ((verb, url, call),) = session.calls
    assert (verb, url) == ("POST", f"https://aiplatform.googleapis.com/v1beta1/{name}:callSlurmRestApi")
    assert call == {"method": "POST", "path": "/slurm/v0.0.42/job/submit", "body": body}


def test_a_refusal_of_slurm_is_reported() -> None:
    session = FakeSession({"errors": [{"error": "Invalid partition name"}]})
    with pytest.raises(PlatformError, match="Invalid partition name"):
        send(Rest(session), "projects/p", {})  # type: ignore[arg-type]  # a fake
