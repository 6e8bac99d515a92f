"""Claims: who writes, where several machines see the same directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardline.components.preprocess import claims
from shardline.components.preprocess.claims import Claim, Claims, Pulse
from shardline.trainer.errors import RunError

HOLDS = """
import sys
from pathlib import Path
from shardline.components.preprocess.claims import Claims
claim = Claims(Path(sys.argv[1])).take("claim")
print("taken" if claim else "", flush=True)
sys.stdin.read()
"""


def in_use() -> RunError:
    return RunError("somebody writes here")


def by_another_machine(path: Path, beats: int) -> None:
    path.write_text(json.dumps({"holder": "elsewhere/boot 17 99 abc", "beats": beats}))


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of this machine that holds a claim."""
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "taken\n"
        yield process
        process.kill()


def test_a_claim_is_held_by_one_and_given_back(tmp_path: Path) -> None:
    first = Claims(tmp_path).take("claim")
    assert first
    assert Claims(tmp_path).take("claim") is None
    assert Claims(tmp_path).take("another")
    first.release()
    assert Claims(tmp_path).take("claim")


def test_a_process_of_this_machine_that_lives_is_told_from_one_that_does_not(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    with pytest.raises(RunError, match="somebody writes here"):
        Claims(tmp_path).wait_for("claim", in_use)
    other.kill()
    other.wait()
    claim = Claims(tmp_path).wait_for("claim", in_use)
    assert claim.path.name == "claim.2"
    claim.release()
    assert not list(tmp_path.iterdir())


def test_another_machine_that_gives_signs_of_life_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "claim.1"
    by_another_machine(path, 1)
    monkeypatch.setattr(claims.time, "sleep", lambda seconds: by_another_machine(path, 2))
    with pytest.raises(RunError, match="somebody writes here"):
        Claims(tmp_path).wait_for("claim", in_use)


def test_another_machine_that_is_silent_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10_000, 50))
    by_another_machine(tmp_path / "claim.1", 1)
    monkeypatch.setattr(claims.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(claims.time, "monotonic", lambda: next(clock))
    assert Claims(tmp_path).wait_for("claim", in_use).path.name == "claim.2"
    assert next(clock) >= claims.SILENCE


def test_whoever_takes_over_leaves_the_file_of_the_one_before(tmp_path: Path) -> None:
    claim = Claims(tmp_path).take("claim")
    assert claim
    claim.check()
    by_another_machine(tmp_path / "claim.2", 1)
    with pytest.raises(RunError, match="another run took over"):
        claim.check()
    claim.release()
    assert (tmp_path / "claim.2").exists()


def test_a_claim_that_was_taken_over_is_noticed_and_left_alone(tmp_path: Path) -> None:
    claim = Claims(tmp_path).take("claim")
    assert claim
    claim.check()
    by_another_machine(claim.path, 1)
    with pytest.raises(RunError, match="another run took over"):
        claim.check()


def test_a_holder_gives_signs_of_life_until_it_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "BEAT", 0.01)
    claim = Claims(tmp_path).take("claim")
    assert claim
    with claim:
        before = claim.path.read_text()
        while not claim.path.read_text() or claim.path.read_text() == before:
            os.sched_yield()
    assert not claim.path.exists()


def test_nothing_is_written_after_a_stop_until_the_claim_is_seen_to_be_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulse, waits = Pulse(tmp_path / "pulse"), [1, 2, 3]
    pulse.wait()  # nobody else may write here
    pulse.beat(time.time())
    pulse.wait()
    os.utime(tmp_path / "pulse", (0, 0))
    monkeypatch.setattr(claims.time, "sleep", lambda seconds: waits.pop() == 1 and pulse.beat(time.time()))
    pulse.wait()
    assert not waits
    os.utime(tmp_path / "pulse", (0, 0))
    clock = iter(range(0, 10_000, 50))
    monkeypatch.setattr(claims.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(claims.time, "monotonic", lambda: next(clock))
    with pytest.raises(RunError, match="gave no sign of life for 225 s"):
        pulse.wait()


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", '{"holder": 3}', "\0", "x" * 10_000])
def test_a_damaged_claim_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "claim.1").write_text(text)
    monkeypatch.setattr(claims, "SILENCE", 0.0)
    assert isinstance(Claims(tmp_path).wait_for("claim", in_use), Claim)
