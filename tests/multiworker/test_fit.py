"""`shardline.fit` on several processes: the same result, exact resume, and errors that end all of them."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardline.trainer.base.errors import EXIT_BAD_INPUT
from tests.helpers import replicas
from tests.helpers.datasets import write_dataset
from tests.helpers.replicas import finish

pytestmark = [pytest.mark.multiworker, pytest.mark.timeout(240)]

NAMES = ("chief-0", "worker-0")


def start(
    out: Path, case: str, count: int = 2, *, environ: Mapping[str, str] | None = None, **options: Any
) -> Any:
    given = [f"{name}={json.dumps(value)}" for name, value in options.items()]
    return replicas.start(
        ["-m", "tests.helpers.fit_programs", case, str(out), *given], count, environ=environ
    )


def results(out: Path, *names: str) -> list[dict[str, Any]]:
    return [json.loads((out / f"{name}.json").read_text()) for name in names]


def run(out: Path, case: str, count: int = 2, **options: Any) -> list[dict[str, Any]]:
    """Runs the processes to their end, and returns what each has seen."""
    codes, outputs = finish(start(out, case, count, **options))
    assert not any(codes), "\n".join(output[-3000:] for output in outputs)
    return results(out, *(NAMES if count > 1 else ("alone",)))


def assert_close(one: Any, other: Any, path: str = "", tolerance: float = 1e-5) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for name in one:
            assert_close(one[name], other[name], f"{path}/{name}", tolerance)
    elif isinstance(one, list) and one and isinstance(one[0], dict | list):
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_close(*pair, f"{path}/{index}", tolerance)
    else:
        np.testing.assert_allclose(one, other, atol=tolerance, err_msg=path)


def test_two_processes_do_what_one_does(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", records={"train": 45, "validation": 13, "test": 11}, shape=(4, 4, 1))
    (one,) = run(tmp_path, "all_kinds", 1)
    chief, worker = run(tmp_path, "all_kinds")
    assert chief == worker
    assert_close(chief, one)


@pytest.mark.parametrize(
    "names",
    [
        ["function", "unreduced", "ByHand"],
        pytest.param(
            ["sum", "statistics_of_all", "ByCompile", "Mixed", "Computing"], marks=pytest.mark.matrix
        ),
    ],
    ids=" ".join,
)
def test_a_loss_of_any_form_counts_the_same_on_two_processes(tmp_path: Path, names: list[str]) -> None:
    (one,) = run(tmp_path, "losses", 1, names=names)
    codes, outputs = finish(start(tmp_path, "losses", names=names))
    assert codes == [0, 0], "\n".join(output[-3000:] for output in outputs)
    assert_close(results(tmp_path, "chief-0")[0], one)
    # The contrastive one; all others, of one number or not, are means over examples, and say nothing.
    assert outputs[0].count("a loss is computed of a batch as a whole") == 1
    assert "synchronized" not in outputs[0]


@pytest.mark.parametrize(
    "names",
    [
        ["wgan_gp", "diffusion"],
        pytest.param(["vae", "metric_learning", "distillation"], marks=pytest.mark.matrix),
    ],
    ids=" ".join,
)
def test_programs_with_a_step_of_their_own_train_alike_on_two_processes(
    tmp_path: Path, names: list[str]
) -> None:
    (one,) = run(tmp_path, "steps", 1, names=names)
    chief, worker = run(tmp_path, "steps", names=names)
    assert chief == worker
    assert_close(chief, one)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory.mktemp("undisturbed"), "killed")


@pytest.mark.parametrize("victim", ["chief-0", pytest.param("worker-0", marks=pytest.mark.matrix)])
def test_a_killed_run_resumes_bit_for_bit(
    tmp_path: Path, undisturbed: list[dict[str, Any]], victim: str
) -> None:
    codes, outputs = finish(start(tmp_path, "killed", kill=victim))
    survivor = 1 - NAMES.index(victim)
    assert codes[1 - survivor] == -signal.SIGKILL
    assert codes[survivor] == 1
    assert f"lost {victim} (127.0.0.1:" in outputs[survivor]
    assert run(tmp_path, "killed") == undisturbed


def test_a_call_after_a_lost_replica_says_why_it_cannot_train(tmp_path: Path) -> None:
    codes, outputs = finish(start(tmp_path, "lost"))
    assert codes == [1, -signal.SIGKILL]
    first, second = (line for line in outputs[0].splitlines() if line.startswith("RunError: "))
    assert "lost worker-0" in first
    assert "lost worker-0" in second
    assert "start all processes again" in second


def test_each_process_reads_a_part_of_its_own_of_a_function(tmp_path: Path) -> None:
    chief, worker = run(tmp_path, "own_part")
    assert chief["history"] == worker["history"]
    assert not set(chief["seen"]) & set(worker["seen"])
    assert sorted(chief["seen"] + worker["seen"]) == list(range(40))


def test_callbacks_mean_the_same_on_every_replica(tmp_path: Path) -> None:
    chief, worker = run(tmp_path, "callbacks")
    assert chief["history"] == worker["history"]
    assert len(chief["history"]["loss"]) == 3  # the worker has asked for it
    # Halved by the one callback before each epoch, and by the other after all but the first.
    assert chief["rate"] == worker["rate"] == pytest.approx(0.01 / 2**5)
    assert chief["calls"] == worker["calls"] == [f"{step} ['accuracy', 'loss']" for step in range(4)] * 3
    assert chief["files"] == ["1.keras", "2.keras", "3.keras", "board", "log.csv"]
    assert worker["files"] == []
    # Before the second callback's turn, by each way of reading; then the optimizer's steps.
    reads = [[0.01 / halves, 0.01 / halves, steps] for halves, steps in ((2, 4), (4, 8), (16, 12))]
    assert np.array(chief["reads"]) == pytest.approx(np.array(reads))
    assert worker["reads"] == []
    for method in ("evaluate", "test_on_batch"):
        assert chief[method] == pytest.approx(chief["all"], rel=1e-5), method
    for method in ("predict", "predict_on_batch"):
        assert chief[method] == pytest.approx(chief["all_predict"], abs=1e-6), method
    for name in ("fit", "train_on_batch"):
        assert "shardline.fit" in chief[name]
        assert chief[name] == worker[name]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("epochs", "chief-0 has epochs 2, worker-0 has 3"),
        ("data", ": all processes make the same data; seed what draws it"),
        ("callback", "callback Failing failed in on_train_batch_end: ZeroDivisionError"),
    ],
)
def test_a_mistake_of_one_process_ends_all(tmp_path: Path, argument: str, message: str) -> None:
    codes, outputs = finish(start(tmp_path, "different", argument=argument), seconds=40)
    assert message in outputs[1], outputs[1][-2000:]
    assert codes[1] == EXIT_BAD_INPUT
    assert codes[0]


def test_workers_alone_and_parameter_servers(tmp_path: Path) -> None:
    """A cluster as Ray has it, whose worker 0 is the chief; and one in which workers take whole steps."""
    hosts = [f"127.0.0.1:{port}" for port in replicas.free_ports(5)]
    clusters = [
        ({"worker": hosts[:2]}, ("worker-0", "worker-1")),
        ({"chief": hosts[2:3], "worker": hosts[3:4], "ps": hosts[4:]}, ("chief-0", "worker-0", "ps-0")),
    ]
    weights = []
    for number, (cluster, names) in enumerate(clusters):
        out = tmp_path / str(number)
        out.mkdir()
        tasks = [dict(zip(("type", "index"), (name[:-2], int(name[-1])), strict=True)) for name in names]
        codes, outputs = finish(
            [
                replicas.start_one(
                    ["-m", "tests.helpers.fit_programs", "plain", str(out)],
                    {"cluster": cluster, "task": task},
                )
                for task in tasks
            ]
        )
        assert not any(codes), outputs
        weights.append(results(out, names[0])[0]["weights"])
    assert_close(*weights)
