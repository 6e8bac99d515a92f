"""Checkpoint files: written during training, whole or not at all, and read only when undamaged."""

import errno
import os
import signal
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

from shardline.trainer.base import progress
from shardline.trainer.base.errors import RunError
from shardline.trainer.checkpoint.state import Position, Snapshot
from tests.helpers import programs
from tests.helpers.replicas import ROOT
from tests.helpers.snapshots import checkpoints, save, snapshot

DATA = ".data-00000-of-00001"


def same(restored, expected):
    assert restored.position == expected.position
    assert restored.host == expected.host
    assert restored.arrays.keys() == expected.arrays.keys()
    for name, value in expected.arrays.items():
        assert restored.arrays[name].dtype == value.dtype
        np.testing.assert_array_equal(restored.arrays[name], value)


@pytest.fixture
def messages():
    lines = []
    with progress.sink(lambda event: lines.append(event.text)):
        yield lines


def in_a_child(script, directory):
    """Runs Python code that has `directory`, `checkpoints` and `snapshot`."""
    head = (
        "import os, sys, resource, signal\nfrom pathlib import Path\n"
        "from shardline.trainer.base.errors import RunError\n"
        "from tests.helpers.snapshots import checkpoints, save, snapshot\n"
        "from shardline.trainer.checkpoint import store as checkpoint\n"
        "directory = Path(sys.argv[1])\n"
    )
    return programs.run(
        [sys.executable, "-c", head + script, str(directory)],
        cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_checkpoints_are_read_back_and_the_oldest_are_removed(tmp_path):
    written = save(tmp_path, 1, 2, 10, keep=2)

    assert written.steps() == [2, 10]
    same(written.restore(), snapshot(10))
    same(written.read_snapshot(2), snapshot(2))
    assert sorted(os.listdir(tmp_path)) == sorted(
        ["run.json", "lock", *(f"ckpt-{steps}{suffix}" for steps in (2, 10) for suffix in (DATA, ".index"))]
    )


def test_a_directory_with_the_name_of_a_pattern_is_resumed_from(tmp_path):
    directory = tmp_path / "run [1] *"

    same(save(directory, 5).restore(), snapshot(5))


def test_only_the_chief_writes(tmp_path):
    reader = save(tmp_path, 5, write=False)
    assert os.listdir(tmp_path) == []
    assert reader.restore() is None

    save(tmp_path, 5)
    same(reader.restore(), snapshot(5))


def test_the_same_step_can_be_saved_again(tmp_path):
    written = save(tmp_path, 5)
    later = Snapshot(Position(2, 0, 5), snapshot(5).arrays, {"history": "end of epoch"})
    written.save(later)
    written.wait()

    assert written.steps() == [5]
    same(written.restore(), later)


def truncate(prefix):
    path = prefix.with_name(prefix.name + DATA)
    path.write_bytes(path.read_bytes()[:-3])


def flipped(content, at):
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


DAMAGE = {
    "cut": (DATA, lambda content: content[:-3]),
    "a byte flipped": (DATA, lambda content: flipped(content, len(content) // 2)),
    "a byte of the index flipped": (".index", lambda content: flipped(content, 10)),
    "an empty index": (".index", lambda content: b""),
    "no data": (DATA, None),
}


@pytest.mark.parametrize(("suffix", "damage"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path, messages, suffix, damage):
    save(tmp_path, 1, 2)
    path = tmp_path / f"ckpt-2{suffix}"
    path.write_bytes(damage(path.read_bytes())) if damage else path.unlink()
    written = checkpoints(tmp_path, keep=1)

    same(written.restore(), snapshot(1))
    assert (messages, written.steps()) == ([], [1, 2])  # other processes may still be reading
    written.set_aside()
    (line,) = messages
    assert line.startswith(f"warning: cannot read checkpoint {tmp_path}/ckpt-2: ")
    assert "damaged-ckpt-2" in line
    assert written.steps() == [1]
    assert (tmp_path / f"damaged-ckpt-2{suffix}").exists() == bool(damage)
    # A damaged one counts for nothing when it is decided which are kept.
    written.save(snapshot(2))
    written.wait()
    same(written.restore(), snapshot(2))


def test_of_damaged_checkpoints_the_newest_are_kept(tmp_path, messages):
    damaged = range(2, 9)
    save(tmp_path, 1, *damaged, keep=9)
    for steps in damaged:
        truncate(tmp_path / f"ckpt-{steps}")
    written = checkpoints(tmp_path, keep=9)
    written.restore()
    written.set_aside()

    aside = {path.stem for path in tmp_path.glob("damaged-*.index")}
    assert aside == {"damaged-ckpt-6", "damaged-ckpt-7", "damaged-ckpt-8"}
    assert len(messages) == len(damaged)


def failing(module, name, error):
    """Has a function raise an error."""

    def fail(*_, **__):
        raise error

    return lambda monkeypatch, _: monkeypatch.setattr(module, name, fail)


def replaced(suffix, make):
    """Has something else in place of a file of the newest checkpoint."""

    def replace(_, directory):
        path = directory / f"ckpt-20{suffix}"
        path.rename(directory.with_name("real"))
        make(path)

    return replace


TENSORFLOW_ERRORS = (
    *(tf.errors.UnavailableError, tf.errors.PermissionDeniedError, tf.errors.ResourceExhaustedError),
    *(tf.errors.UnknownError, tf.errors.DeadlineExceededError, tf.errors.FailedPreconditionError),
)
UNREADABLE = {
    **{
        kind.__name__: failing(tf.train, "load_checkpoint", kind(None, None, "not now"))
        for kind in TENSORFLOW_ERRORS
    },
    "an OSError": failing(tf.train, "load_checkpoint", OSError(errno.EIO, os.strerror(errno.EIO))),
    "the listing": failing(os, "listdir", OSError(errno.EIO, os.strerror(errno.EIO))),
    "the data": replaced(DATA, lambda path: path.symlink_to("/proc/self/mem")),  # EIO
    "the data's name": replaced(DATA, lambda path: path.symlink_to(path)),  # ELOOP
    "the index's name": replaced(".index", lambda path: path.symlink_to(path)),
    "a directory": replaced(DATA, lambda path: path.mkdir()),
}


@pytest.mark.parametrize("make_unreadable", UNREADABLE.values(), ids=UNREADABLE)
def test_a_checkpoint_that_cannot_be_read_now_is_an_error_and_stays(tmp_path, make_unreadable):
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    save(directory, 1, 20)
    written, before = checkpoints(directory), sorted(os.listdir(directory))
    with pytest.MonkeyPatch.context() as patch:
        make_unreadable(patch, directory)
        with pytest.raises(RunError, match=rf"{directory}.*nothing was removed") as raised:
            written.restore()

    assert raised.value.exit_code == 1
    written.set_aside()
    assert sorted(os.listdir(directory)) == before


def test_a_later_checkpoint_that_was_not_seen_when_the_run_began_is_kept(tmp_path):
    save(tmp_path, 1, 20)

    assert save(tmp_path, 2, 3, keep=2).steps() == [2, 3, 20]


def test_without_its_index_a_checkpoint_does_not_exist(tmp_path, messages):
    save(tmp_path, 1, 2)
    (tmp_path / "ckpt-2.index").unlink()
    (tmp_path / f".tmp-ckpt-3{DATA}.tempstate77").write_bytes(b"half")

    same(checkpoints(tmp_path, write=False).restore(), snapshot(1))
    assert (tmp_path / f"ckpt-2{DATA}").exists()  # a reader removes nothing
    same(checkpoints(tmp_path).restore(), snapshot(1))
    save(tmp_path, 3, 4, keep=2)  # what was left over goes when it is older than all that are kept
    kept = [f"ckpt-{steps}{suffix}" for steps in (3, 4) for suffix in (DATA, ".index")]
    assert sorted(os.listdir(tmp_path)) == [*kept, "lock", "run.json"]
    assert messages == []


def test_when_all_are_damaged_the_user_decides(tmp_path):
    save(tmp_path, 1, 2)
    for steps in (1, 2):
        truncate(tmp_path / f"ckpt-{steps}")
    written, before = checkpoints(tmp_path), sorted(os.listdir(tmp_path))

    with pytest.raises(RunError, match=r"none of the 2 checkpoints .* is whole") as raised:
        written.restore()
    assert raised.value.exit_code == 2
    assert sorted(os.listdir(tmp_path)) == before
    for path in tmp_path.glob("ckpt-*"):
        path.unlink()
    assert written.restore() is None


@pytest.mark.parametrize(
    "deadly", ["checkpoint.files.sync = die", "Path.replace = die", "Path.replace = die_at_the_second"]
)
def test_a_process_killed_while_it_writes_leaves_the_one_before(tmp_path, deadly):
    child = in_a_child(
        f"""
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

replace = Path.replace
calls = []
def die_at_the_second(path, target):
    calls.append(path)
    return replace(path, target) if len(calls) == 1 else die()

written = checkpoints(directory)
written.save(snapshot(1))
written.wait()
{deadly}
written.save(snapshot(2))
written.wait()
""",
        tmp_path,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr

    assert len(os.listdir(tmp_path)) > 3  # something was under way
    same(checkpoints(tmp_path).restore(), snapshot(1))
    assert not list(tmp_path.glob(".tmp-*"))
    save(tmp_path, 3, 4, 5)
    assert not list(tmp_path.glob("ckpt-[12]*"))


def test_a_full_disk_is_an_error_that_leaves_the_one_before(tmp_path):
    child = in_a_child(
        """
written = checkpoints(directory)
written.save(snapshot(1))
written.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
written.save(snapshot(2, size=1_000_000))
try:
    written.save(snapshot(3))
except RunError as error:
    print(error)
print(sorted(os.listdir(directory)), written.restore().position.steps)
""",
        tmp_path,
    )
    error, rest = child.stdout.splitlines()
    assert error == (
        f"cannot write checkpoint {tmp_path}/ckpt-2: File too large; make room there and start the run "
        "again: it continues from the previous checkpoint"
    )
    assert rest == f"{['ckpt-1' + DATA, 'ckpt-1.index', 'lock', 'run.json']} 1"


def test_a_directory_that_vanishes_is_an_error(tmp_path):
    written = save(tmp_path / "c", 1)
    for path in (tmp_path / "c").iterdir():
        path.unlink()
    (tmp_path / "c").rmdir()
    (tmp_path / "c").write_text("a file")

    written.save(snapshot(2))
    with pytest.raises(RunError, match=r"cannot write checkpoint .*/c/ckpt-2: .*; make room there"):
        written.wait()
    written.wait()  # said once


def test_a_checkpoint_that_was_pruned_meanwhile_cannot_be_read(tmp_path):
    with pytest.raises(RunError, match=r"cannot read checkpoint .*ckpt-9: "):
        save(tmp_path, 1).read_snapshot(9)


def test_on_new_data_a_run_goes_back_to_the_start_of_its_epoch(tmp_path):
    save(tmp_path, 7)

    restored = checkpoints(tmp_path, dataset="d2", allow_new_data=True).restore()
    assert restored.position == Position(epoch=1, examples=0, steps=7)
    # Killed before it saved anything, it does so again: the checkpoint knows its data.
    assert checkpoints(tmp_path, dataset="d2").restore().position.examples == 0
    assert save(tmp_path, 8, dataset="d2").restore().position.examples == 10


def test_a_file_system_without_locks_has_none(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", flock)
    assert save(tmp_path, 1).steps() == [1]


def test_the_end_waits_for_the_writing(tmp_path, monkeypatch):
    written = checkpoints(tmp_path)
    write = written._write_files
    monkeypatch.setattr(written, "_write_files", lambda snapshot: (time.sleep(0.3), write(snapshot)))
    written.save(snapshot(1))
    written.close()
    assert written.steps() == [1]


def test_of_two_processes_that_write_the_second_is_refused(tmp_path):
    written = save(tmp_path, 1)
    done = in_a_child("save(directory, 2)", tmp_path)
    assert f"another process trains in {tmp_path}; wait for it, or choose another one" in done.stderr
    written.close()
    assert in_a_child("save(directory, 2)", tmp_path).returncode == 0
    assert written.steps() == [1, 2]
