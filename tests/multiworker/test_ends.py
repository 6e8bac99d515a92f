"""How a program ends that no launcher of Shardline has started: exit code and lines, at any moment."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from shardline.trainer.base.errors import EXIT_FAILED, EXIT_RESTART
from shardline.trainer.distribute.peers import accepts_connections
from tests.helpers import replicas
from tests.helpers.jobs import eventually
from tests.helpers.replicas import finish

pytestmark = [pytest.mark.multiworker, pytest.mark.timeout(120)]


def start(out: Path, *moments: str) -> list[Any]:
    """Starts a process for each moment, workers of one cluster without a chief."""
    configs = replicas.tf_configs(len(moments), chief=False)
    return [
        replicas.start_one(
            ["-m", "tests.helpers.ends", moment, str(out)], config if len(moments) > 1 else None
        )
        for moment, config in zip(moments, configs, strict=True)
    ]


def read_until(process: Any, text: str) -> str:
    output = ""
    for line in process.stdout:
        output += line
        if text in line:
            return output
    pytest.fail(f"ended before {text!r}:\n{output}")


ASKED = "train: error: asked to stop (SIGTERM)"


@pytest.mark.parametrize(
    ("moment", "code", "last"),
    [
        ("before", EXIT_RESTART, f"{ASKED} before training began; start the same"),
        ("step", EXIT_RESTART, f"{ASKED}: a checkpoint was saved at step 3;"),
        ("write", EXIT_RESTART, f"{ASKED}: a checkpoint was saved at step 4;"),
        ("evaluation", EXIT_RESTART, f"{ASKED}: a checkpoint was saved at step 4;"),
        ("last", 0, "done"),
        ("after", 0, "done"),
    ],
    ids=lambda value: str(value)[:10],
)
@pytest.mark.parametrize("count", [1, 2])
def test_a_program_ends_after_sigterm(tmp_path: Path, moment: str, code: int, last: str, count: int) -> None:
    processes = start(tmp_path, *[moment] * count)
    writers = processes[:1] if moment == "write" else processes
    for process in writers:
        read_until(process, "HERE")
    for process in processes:
        process.send_signal(signal.SIGTERM)
    codes, outputs = finish(processes)

    assert codes == [code] * count, outputs
    for output in outputs:
        assert output.splitlines()[-1].startswith(last)
        assert "Traceback" not in output


def test_a_program_that_waits_for_its_peers_ends_at_once(tmp_path: Path) -> None:
    config = replicas.tf_configs(2)[0]
    process = replicas.start_one(["-m", "tests.helpers.ends", "peers", str(tmp_path)], config)
    read_until(process, "waiting for worker-0")
    process.send_signal(signal.SIGTERM)

    assert finish([process])[0] == [EXIT_RESTART]


def test_a_program_that_tensorflow_connects_ends_at_once(tmp_path: Path) -> None:
    """TensorFlow waits for a lost peer without end, and handles SIGTERM itself meanwhile."""
    config = replicas.tf_configs(2)[0]
    process = replicas.start_one(["-m", "tests.helpers.ends", "connect", str(tmp_path)], config)
    chief, _ = config["cluster"].values()  # type: ignore[attr-defined]
    eventually(lambda: accepts_connections(chief[0], 1.0), 60)
    process.send_signal(signal.SIGTERM)
    codes, outputs = finish([process], 30)

    assert codes == [EXIT_RESTART]
    assert ASKED in outputs[0]


def test_in_a_thread_the_error_is_raised_and_the_process_lives(tmp_path: Path) -> None:
    processes = start(tmp_path, "step", "thread")
    read_until(processes[0], "HERE")
    processes[0].send_signal(signal.SIGTERM)
    codes, outputs = finish(processes)

    assert codes == [EXIT_RESTART, 0]
    assert "caught [RestartError('asked to stop (SIGTERM): a checkpoint was saved" in outputs[1]


@pytest.mark.parametrize("moment", ["step", "before"])
def test_the_peers_of_a_killed_process_end_with_an_error(tmp_path: Path, moment: str) -> None:
    """Before the first step, too, while the model is built: a lost peer is no mistake."""
    processes = start(tmp_path, moment, "none")
    read_until(processes[0], "HERE")
    processes[0].kill()
    codes, outputs = finish(processes)

    assert codes == [-signal.SIGKILL, EXIT_FAILED]
    assert "RunError: lost worker-0 (127.0.0.1:" in outputs[1]
