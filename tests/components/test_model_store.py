"""The champion changes only from the one that was judged against: on a disk and in a bucket."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardline.components.model_store import champions
from shardline.components.model_store.champions import (
    current,
    open_store,
    promote,
    publish,
    rollback,
    versions,
)
from shardline.components.storage import Storage, TextFile, storage
from shardline.trainer.base.errors import ModelError, PlatformError, RunError, SettingsError
from tests.helpers.exports import contents, judge_again, publish_next, write_export
from tests.helpers.fake_storage import fake_storage

NEXT = {"run": "next"}


@pytest.fixture(params=["disk", "bucket"])
def store_uri(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    if request.param == "disk":
        yield str(tmp_path / "model_store")
        return
    with fake_storage("bucket", {}) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        yield "gs://bucket/champions/digits"


def chain(store_uri: str) -> list[str]:
    """Returns the names of the champion and of those before it."""
    return list(champions.require_current(store_uri)[0].champions)


def whole(store_uri: str, version: champions.Version, exported: Path) -> bool:
    """Whether a version in the store has the files of an export."""
    with open_store(store_uri).fetched(version.path) as copy:
        return contents(copy) == contents(exported)


def test_what_was_judged_against_another_champion_is_refused_and_kept(store_uri: str, tmp_path: Path) -> None:
    first = publish_next(write_export(tmp_path / "first"), store_uri)
    late, fast = (judge_again(write_export(tmp_path / name), store_uri) for name in ("late", "fast"))
    second = publish(fast, store_uri)

    with pytest.raises(ModelError, match=f"judged against {first.version}, the champion is {second.version}"):
        publish(late, store_uri, run="late")

    assert current(store_uri) == second
    (kept,) = (item for item in versions(store_uri) if item.run == "late")
    promoted = promote(store_uri, kept.version)
    assert promoted == kept == current(store_uri)
    assert chain(store_uri) == [kept.version, second.version, first.version]
    assert whole(store_uri, promoted, late)


def test_the_loser_is_refused_before_it_is_served(store_uri: str, tmp_path: Path) -> None:
    late, fast = (judge_again(write_export(tmp_path / name), store_uri) for name in ("late", "fast"))
    champions.check_judged(late, store_uri, "late")
    publish(fast, store_uri, run="fast")

    with pytest.raises(ModelError, match=f"judged against no champion, .* promote {store_uri} {late}"):
        champions.check_judged(late, store_uri, "late")
    champions.check_judged(fast, store_uri, "fast")  # the task is repeated after this run has published
    champions.check_judged(late, "", "late")


def test_the_last_champions_are_those_that_led_to_the_present_one(store_uri: str, tmp_path: Path) -> None:
    def last() -> list[str]:
        return [item.version for item in champions.last_champions(store_uri)]

    def next_version(run: str) -> str:
        return publish_next(exported, store_uri, run=run).version

    assert last() == []
    exported = write_export(tmp_path / "model")
    first, second = next_version("first"), next_version("second")
    next_version("rolled back")
    rollback(store_uri)
    third = next_version("third")
    assert last() == [third, second, first]

    blocked = write_export(tmp_path / "blocked", blessed=False)
    overridden = promote(store_uri, str(blocked), override="the labels were wrong").version
    fourth, fifth = next_version("fourth"), next_version("fifth")
    assert last() == [fifth, fourth, overridden], "what came before an override was given up"

    again = promote(store_uri, fourth).version
    assert last() == [again, fifth, overridden], "each once"
    rollback(store_uri)
    assert last() == [fifth, fourth, overridden]


def test_a_run_that_repeats_itself_publishes_once_and_undoes_no_rollback(
    store_uri: str, tmp_path: Path
) -> None:
    first = publish_next(write_export(tmp_path / "first"), store_uri)
    second = publish_next(write_export(tmp_path / "second"), store_uri, run="today")
    rollback(store_uri)

    assert publish(tmp_path / "second", store_uri, run="today") == second
    assert current(store_uri) == first
    assert champions.published_by(tmp_path / "second", store_uri, "today") == second.version
    assert champions.published_by(tmp_path / "second", store_uri, "tomorrow") == ""


def interrupt(monkeypatch: pytest.MonkeyPatch, method: str, action: Callable[[], Any]) -> None:
    """Does something else, once, when a method of the store is called, before it does anything."""
    original = getattr(Storage, method)

    def first(*arguments: Any) -> Any:
        monkeypatch.setattr(Storage, method, original)
        action()
        return original(*arguments)

    monkeypatch.setattr(Storage, method, first)


@pytest.mark.parametrize("method", ["put", "replace"])
def test_two_attempts_of_a_run_at_the_same_moment_publish_one_whole_version(
    method: str, store_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_next(write_export(tmp_path / "first"), store_uri)
    exported = judge_again(write_export(tmp_path / "model"), store_uri)
    interrupt(monkeypatch, method, lambda: publish(exported, store_uri, **NEXT))

    done = publish(exported, store_uri, **NEXT)

    assert current(store_uri) == done
    assert len(chain(store_uri)) == 2
    assert whole(store_uri, done, exported)
    assert publish(exported, store_uri, **NEXT) == done


@pytest.mark.parametrize("content", [None, "{", '{"version": "1", "path": "versions/1", "accuracy": 0.9}'])
def test_a_record_that_is_gone_damaged_or_of_an_earlier_release_is_no_first_run(
    content: str | None, store_uri: str, tmp_path: Path
) -> None:
    exported = write_export(tmp_path / "model")
    first, store = publish_next(exported, store_uri), open_store(store_uri)
    store.replace("champion.json", content or "", store.read("champion.json"))
    if content is None:
        store.remove(["champion.json"])

    actions = (current, lambda of: publish(exported, of, **NEXT), lambda of: promote(of, first.version))
    for use in (*actions, rollback, champions.check_champion):
        with pytest.raises(
            ModelError, match=f"champion promote ANOTHER {store.location('versions')}/VERSION/"
        ):
            use(store_uri)
    other = tmp_path / "other"
    other.mkdir()
    assert promote(other, store.location(first.path) + "/").fingerprint == first.fingerprint


def test_a_commit_whose_answer_was_lost_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported, losing = write_export(tmp_path / "model"), False

    def fate(_: int) -> str:
        nonlocal losing
        lost, losing = losing, False
        return "lost" if lost else ""

    replace = Storage.replace

    def lose_the_answer(self: Storage, name: str, text: str, seen: TextFile | None = None) -> bool:
        nonlocal losing
        losing = True
        return replace(self, name, text, seen)

    monkeypatch.setattr(Storage, "replace", lose_the_answer)
    with fake_storage("bucket", {}, fate) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        for _ in range(2):
            published = publish_next(exported, "gs://bucket/champion")
            assert current("gs://bucket/champion") == published
            assert len(chain("gs://bucket/champion")) == len(versions("gs://bucket/champion"))


PUBLISHER = """
import os, pathlib, sys
from shardline.trainer.base.errors import ModelError
from tests.helpers.exports import publish_next, write_export

os.getpid = lambda: 7  # each in a container of its own
directory, store_uri, number = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
exported, left = write_export(directory), number
while left:
    try:
        publish_next(exported, store_uri, run=f"{directory.name}-{left}")
        left -= 1
    except ModelError as error:
        if " since; validate it again" not in str(error):
            raise
"""


def test_publishers_at_the_same_moment_lose_no_version_and_tear_no_record(
    store_uri: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    number = 12 if store_uri.startswith("/") else 4
    publishers = [
        subprocess.Popen(
            [sys.executable, "-c", PUBLISHER, str(tmp_path / f"process-{index}"), store_uri, str(number)],
            cwd=pytestconfig.rootpath,
        )
        for index in range(4)
    ]
    seen: set[str] = set()
    while any(publisher.poll() is None for publisher in publishers):
        if found := current(store_uri):
            seen.add(found.version)
    runs = [item.run for item in versions(store_uri) if item.version in chain(store_uri)]

    assert [publisher.returncode for publisher in publishers] == [0] * 4
    assert len(seen) > 4, "nothing was read while they published"
    assert sorted(runs) == sorted(f"process-{i}-{left + 1}" for i in range(4) for left in range(number))
    assert len(set(chain(store_uri))) == len(chain(store_uri)) == 4 * number


def killed_at(step: int, action: Callable[[], Any]) -> bool:
    """Runs an action in a child that is killed at its n-th operation on a file; False if it has fewer."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        child = os.fork()  # Python 3.12 warns of threads, of which this test has none that matter
    if child == 0:
        left = [step]

        def count(event: str, arguments: tuple[Any, ...]) -> None:
            if event in {"open", "os.link", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "fcntl.flock"}:
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(count)
            action()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.fixture
def prepared(tmp_path: Path) -> tuple[Path, Path]:
    """A store_uri with three versions, and a model that was judged against the champion."""
    store_uri = tmp_path / "prepared"
    for index in range(3):
        publish_next(write_export(tmp_path / f"model-{index}"), store_uri, run=f"run-{index}")
    return store_uri, judge_again(write_export(tmp_path / "better", weights=b"better"), store_uri)


ACTIONS: dict[str, Callable[[str, Path], Any]] = {
    "publish": lambda store_uri, exported: publish(exported, store_uri, **NEXT),
    "rollback": lambda store_uri, _: rollback(store_uri),
}


@pytest.mark.parametrize("action", ACTIONS)
def test_a_process_killed_at_any_step_leaves_a_champion_and_the_next_one_finishes(
    action: str, prepared: tuple[Path, Path], tmp_path: Path
) -> None:
    do, step, after = ACTIONS[action], 0, set()
    original, exported = prepared
    killed = True
    while killed:
        step += 1
        store_uri = str(shutil.copytree(original, tmp_path / str(step)))
        before = current(store_uri)
        assert before is not None
        killed = killed_at(step, functools.partial(do, store_uri, exported))
        found = current(store_uri)
        assert found is not None
        after.add(found.version != before.version)
        check_whole(store_uri, exported)
        if found.version == before.version:
            do(store_uri, exported)
        check_whole(store_uri, exported)
        done = current(store_uri)
        assert done is not None
        if action == "publish":
            assert (done.run, chain(store_uri)[1]) == ("next", before.version)
            assert publish(exported, store_uri, **NEXT) == done
            assert len(chain(store_uri)) == len(versions(store_uri)) == 4
        else:
            assert len(chain(store_uri)) == 2
    assert step > 8
    assert after == {False, True}


def check_whole(store_uri: str, exported: Path) -> None:
    """Checks that every version that can be seen has all of its files, and all see the same champion."""
    for item in versions(store_uri):
        files = contents(Path(store_uri) / item.path)
        expected = contents(exported)
        assert files.keys() == expected.keys()
        assert files["saved_model/variables/variables.index"] == (
            b"better" if item.run == "next" else b"weights"
        )
    found = current(store_uri)
    assert found is not None
    # Whoever reads champion.json alone, as the trainer does, sees the same.
    assert json.loads((Path(store_uri) / "champion.json").read_text())["path"] == found.path


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_publisher_cut_off_from_the_bucket_at_any_request_leaves_a_champion(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a bucket sees of a process that is killed: it asks for nothing more."""
    cut, asked, outcomes = sys.maxsize, 0, set()

    def fate(number: int) -> str:
        nonlocal asked
        asked = number
        return "" if number < cut else when if number == cut else "before"

    store_uri, exported = "gs://bucket/champion", write_export(tmp_path / "model")
    with fake_storage("bucket", {}, fate) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        for step in itertools.count(1):
            before = publish_next(exported, store_uri)
            judge_again(exported, store_uri)
            cut = asked + step
            with contextlib.suppress(PlatformError):
                publish(exported, store_uri, run=f"run-{step}")
            was_cut, cut = asked >= cut, sys.maxsize
            found = current(store_uri)
            assert found is not None
            outcomes.add(found != before)
            done = publish(exported, store_uri, run=f"run-{step}")
            assert (current(store_uri), chain(store_uri)[1]) == (done, before.version)
            assert whole(store_uri, done, exported)
            if not was_cut:
                break
    assert step > 8
    assert outcomes == {False, True}


def test_a_bucket_that_is_not_there_is_no_empty_store(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_storage("bucket", {}) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        with pytest.raises(PlatformError, match="cannot list gs://elsewhere/champion/: not found"):
            current("gs://elsewhere/champion")


def test_a_file_of_a_relative_directory_is_replaced_unless_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = Storage("runs/champions")
    assert store.replace("champion.json", "{}", TextFile(None))
    seen = store.read("champion.json")
    assert store.replace("champion.json", "[]", seen)
    assert not store.replace("champion.json", "{}", seen)
    assert Path("runs/champions/champion.json").read_text() == "[]"


def test_a_lock_that_is_never_given_back_is_waited_for_no_longer_than_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_LOCK_TIMEOUT_S", 0.1)
    publish_next(write_export(tmp_path / "model"), tmp_path / "models")
    path = tmp_path / "models" / ".lock"
    assert path.stat().st_mode & 0o777 == 0o666  # other users publish, too
    with path.open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RunError, match="has been locked for 0 s; try again"):
            publish_next(tmp_path / "model", tmp_path / "models")


def test_a_file_system_without_locks_is_refused_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    for use in (
        open_store(tmp_path).check,
        lambda: publish_next(write_export(tmp_path / "m"), tmp_path / "s"),
    ):
        with pytest.raises(SettingsError, match="No locks available; choose another champion_uri"):
            use()
