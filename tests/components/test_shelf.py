"""The champion changes only from the one that was judged against: on a disk and in a bucket."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardline.components import champions
from shardline.components.champions import complete_versions, current, promote, prune, publish, rollback
from shardline.components.shelf import contents as contents_of_shelf
from shardline.components.shelf.bucket import Bucket
from shardline.trainer.errors import ModelError, PlatformError, SettingsError
from tests.helpers.evaluations import EVALUATION
from tests.helpers.exports import contents, judge_again, publish_next, write_export
from tests.helpers.fake_storage import fake_storage


@pytest.fixture(params=["disk", "bucket"])
def shelf(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "disk":
        yield str(tmp_path / "shelf")
        return
    with fake_storage("bucket", {}) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        yield "gs://bucket/champions/digits"


def chain(shelf: str) -> list[str]:
    """Returns the names of the champion and of those before it."""
    known = {item.version: item for item in complete_versions(shelf)}
    found, names = current(shelf), []
    while found:
        names.append(found.version)
        found = known.get(found.previous)
    return names


def test_what_was_judged_against_another_champion_is_refused_and_kept(shelf: str, tmp_path: Path) -> None:
    first = publish_next(write_export(tmp_path / "first"), shelf)
    late, fast = (judge_again(write_export(tmp_path / name), shelf) for name in ("late", "fast"))
    second = publish(fast, shelf, quality="accuracy 0.9800")

    with pytest.raises(ModelError, match=f"judged against {first.version}, the champion is {second.version}"):
        publish(late, shelf, quality="accuracy 0.9900", run="late")

    assert current(shelf) == second
    (kept,) = (item for item in complete_versions(shelf) if item.run == "late")
    promoted = promote(shelf, kept.version)
    assert (promoted.version, promoted.previous) == (kept.version, second.version)
    assert chain(shelf) == [kept.version, second.version, first.version]
    with champions.fetched(shelf, promoted) as copy:
        assert contents(copy) == contents(late)


def test_the_loser_is_refused_before_it_is_served(shelf: str, tmp_path: Path) -> None:
    late, fast = (judge_again(write_export(tmp_path / name), shelf) for name in ("late", "fast"))
    champions.check_judged(late, shelf, "late")
    publish(fast, shelf, quality="accuracy 0.9800", run="fast")

    with pytest.raises(ModelError, match=f"judged against no champion, .* promote {shelf} {late}"):
        champions.check_judged(late, shelf, "late")
    champions.check_judged(fast, shelf, "fast")  # the task is repeated after this run has published
    champions.check_judged(late, "", "late")


def test_a_run_that_repeats_itself_publishes_once_and_undoes_no_rollback(shelf: str, tmp_path: Path) -> None:
    first = publish_next(write_export(tmp_path / "first"), shelf)
    second = publish_next(write_export(tmp_path / "second"), shelf, run="today")
    rollback(shelf)

    assert publish(tmp_path / "second", shelf, quality="accuracy 0.9700", run="today") == second
    assert current(shelf) == first
    assert champions.published_by(shelf, "today") == second
    assert champions.published_by(shelf, "tomorrow") is None


def test_two_attempts_of_a_run_at_the_same_moment_publish_one_whole_version(
    shelf: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one publishes when this one has copied its files, but not written its record."""
    exported, place = write_export(tmp_path / "model"), type(champions.open_shelf(shelf))
    put, attempts = place.put, [1]

    def put_while_another_does(self: Any, source: Path, directory: str) -> None:
        put(self, source, directory)
        if attempts:
            attempts.pop()
            publish(exported, shelf, quality="accuracy 0.9700", run="today")

    monkeypatch.setattr(place, "put", put_while_another_does)
    done = publish(exported, shelf, quality="accuracy 0.9700", run="today")

    assert current(shelf) == done
    assert [item.commit.serial for item in complete_versions(shelf) if item.commit.serial] == [1]
    assert len(set(champions.open_shelf(shelf).names("versions"))) == 2
    with champions.fetched(shelf, done) as copy:
        assert contents(copy) == contents(exported)
    assert publish(exported, shelf, quality="accuracy 0.9700", run="today") == done
    assert len(complete_versions(shelf)) == 2


def test_nothing_is_put_where_something_is(shelf: str, tmp_path: Path) -> None:
    first = publish_next(write_export(tmp_path / "model"), shelf, run="today")
    champions.open_shelf(shelf).remove(f"{first.path}/version.json")
    if shelf.startswith("/"):
        with pytest.raises(SettingsError, match="File exists"):
            champions.open_shelf(shelf).put(tmp_path / "model", first.path)
    champions.open_shelf(shelf).remove("champion.json")
    champions.open_shelf(shelf).remove("commits")

    again = publish_next(tmp_path / "model", shelf, run="today")

    assert again.version != first.version
    assert champions.open_shelf(shelf).names("versions") == sorted([first.version, again.version])


def test_prune_removes_what_was_begun_a_day_ago_and_never_finished(shelf: str, tmp_path: Path) -> None:
    exported, place = write_export(tmp_path / "model"), champions.open_shelf(shelf)
    place.put(exported, "versions/20260101T000000-0123456789ab-012345")
    place.put(exported, "versions/20990101T000000-0123456789ab-012345")
    place.put(exported, "versions/mine")
    found = publish_next(exported, shelf)

    assert prune(shelf, 0) == ["20260101T000000-0123456789ab-012345"]
    assert set(place.names("versions")) == {"20990101T000000-0123456789ab-012345", "mine", found.version}


def test_a_version_of_another_shelf_gets_a_record_of_its_own(shelf: str, tmp_path: Path) -> None:
    staging, exported = str(tmp_path / "staging"), write_export(tmp_path / "model")
    (exported / "evaluation.json").write_text(json.dumps(EVALUATION))
    other = publish_next(exported, staging)
    first = publish_next(write_export(tmp_path / "first"), shelf)
    place = champions.open_shelf(shelf)
    place.put(tmp_path / "staging" / other.path, "versions/copied")
    assert place.read("versions/copied/version.json") is None

    promoted = promote(shelf, f"{staging}/{other.path}")
    assert (promoted.previous, promoted.source) == (first.version, f"{staging}/{other.path}")

    text = place.read(f"{first.path}/version.json")
    assert text is not None
    place.write(f"{promoted.path}/version.json", text)
    message = f"{promoted.version}/version.json is the record of {first.version}"
    for use in (lambda: champions.require_version(shelf, promoted.version), lambda: complete_versions(shelf)):
        with pytest.raises(ModelError, match=message):
            use()


def test_no_rollback_leads_to_a_version_that_never_was_the_champion(shelf: str, tmp_path: Path) -> None:
    first = publish_next(write_export(tmp_path / "first"), shelf)
    late = judge_again(write_export(tmp_path / "late"), shelf)
    second = publish_next(write_export(tmp_path / "second"), shelf)
    with pytest.raises(ModelError, match="since; validate it again"):
        publish(late, shelf, quality="accuracy 0.5000", run="late")
    (never,) = (item for item in complete_versions(shelf) if item.run == "late")

    with pytest.raises(
        ModelError, match=f"{never.version} never was the champion; .* promote {shelf} {never.version}"
    ):
        rollback(shelf, never.version)
    assert rollback(shelf, first.version).version == first.version
    assert rollback(shelf, second.version).previous == first.version


def test_a_record_that_is_gone_is_no_first_run(shelf: str, tmp_path: Path) -> None:
    first = publish_next(write_export(tmp_path / "first"), shelf)
    second = publish_next(write_export(tmp_path / "second"), shelf)
    champions.open_shelf(shelf).remove("champion.json")

    if shelf.startswith("gs://"):
        for use in (current, lambda shelf: publish(tmp_path / "first", shelf, quality="accuracy 0.9700")):
            with pytest.raises(ModelError, match=f"champion.json is gone, but {second.version} has been the"):
                use(shelf)
        assert promote(shelf, second.version).version == second.version
    assert current(shelf) == second
    assert rollback(shelf) == first


def test_another_version_is_promoted_in_the_place_of_one_that_is_damaged(shelf: str, tmp_path: Path) -> None:
    names = [publish_next(write_export(tmp_path / name), shelf).version for name in ("first", "second")]
    champions.open_shelf(shelf).remove(f"versions/{names[1]}")

    with pytest.raises(
        ModelError, match=f"names {names[1]}, which is no complete version; .* promote {shelf} V"
    ):
        current(shelf)
    assert promote(shelf, names[0]).version == names[0]
    assert chain(shelf) == [names[0]]


def test_a_version_that_was_pruned_meanwhile_is_not_promoted(
    shelf: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [publish_next(write_export(tmp_path / name), shelf).version for name in ("a", "b", "c")]
    commit = contents_of_shelf.commit

    def prune_first(*arguments: Any) -> Any:
        monkeypatch.setattr(contents_of_shelf, "commit", commit)
        assert prune(shelf, 0) == [names[0]]
        return commit(*arguments)

    monkeypatch.setattr(contents_of_shelf, "commit", prune_first)
    with pytest.raises(ModelError, match=f"no version {names[0]} in"):
        promote(shelf, names[0])
    assert [item.version for item in complete_versions(shelf)] == sorted(names[1:])
    assert chain(shelf) == [names[2], names[1]]


def test_a_commit_whose_answer_was_lost_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported, losing = write_export(tmp_path / "model"), False

    def fate(_: int) -> str:
        nonlocal losing
        lost, losing = losing, False
        return "lost" if lost else ""

    upload = Bucket._upload

    def lose_the_answer(self: Bucket, name: str, text: str, **conditions: int) -> None:
        nonlocal losing
        losing = name == "champion.json"
        upload(self, name, text, **conditions)

    monkeypatch.setattr(Bucket, "_upload", lose_the_answer)
    with fake_storage("bucket", {}, fate) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        for _ in range(2):
            published = publish_next(exported, "gs://bucket/champion")
            assert current("gs://bucket/champion") == published
    assert published.commit.serial == 2


def test_a_version_says_which_service_account_has_published_it() -> None:
    account = "training@project.iam.gserviceaccount.com"
    shelf = Bucket("gs://bucket/champion")
    for email, expected in ((account, account), ("default", f"@{socket.gethostname()}")):
        credentials = SimpleNamespace(service_account_email=email)
        shelf.__dict__["_client"] = SimpleNamespace(_credentials=credentials)
        assert shelf.who().endswith(expected)


PUBLISHER = """
import os, pathlib, sys
from shardline.trainer.errors import ModelError
from tests.helpers.exports import publish_next, write_export

os.getpid = lambda: 7  # each in a container of its own
directory, shelf, number = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
exported, left = write_export(directory), number
while left:
    try:
        publish_next(exported, shelf, run=f"{directory.name}-{left}")
        left -= 1
    except ModelError as error:
        if " since; validate it again" not in str(error):
            raise
"""


def test_publishers_at_the_same_moment_lose_no_version_and_tear_no_record(
    shelf: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    number = 12 if shelf.startswith("/") else 4
    publishers = [
        subprocess.Popen(
            [sys.executable, "-c", PUBLISHER, str(tmp_path / f"process-{index}"), shelf, str(number)],
            cwd=pytestconfig.rootpath,
        )
        for index in range(4)
    ]
    seen: set[str] = set()
    while any(publisher.poll() is None for publisher in publishers):
        if found := current(shelf):
            seen.add(found.version)
    runs = [item.run for item in complete_versions(shelf) if item.commit.serial]

    assert [publisher.returncode for publisher in publishers] == [0] * 4
    assert len(seen) > 4, "nothing was read while they published"
    assert sorted(runs) == sorted(f"process-{i}-{left + 1}" for i in range(4) for left in range(number))
    assert len(set(chain(shelf))) == len(chain(shelf)) == 4 * number
    assert current(shelf).commit.serial == 4 * number


def killed_at(step: int, action: Callable[[], Any]) -> bool:
    """Runs an action in a child that is killed at its n-th operation on a file; False if it has fewer."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        child = os.fork()  # Python 3.12 warns of threads, of which this test has none that matter
    if child == 0:
        left = [step]

        def count(event: str, arguments: tuple[Any, ...]) -> None:
            if event in {"open", "os.link", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}:
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
    """A shelf with three versions, and a model that was judged against the champion."""
    shelf = tmp_path / "prepared"
    for index in range(3):
        publish_next(write_export(tmp_path / f"model-{index}"), shelf, run=f"run-{index}")
    return shelf, judge_again(write_export(tmp_path / "better", weights=b"better"), shelf)


ACTIONS: dict[str, Callable[[str, Path], Any]] = {
    "publish": lambda shelf, exported: publish(exported, shelf, quality="accuracy 0.9900", run="next"),
    "rollback": lambda shelf, _: rollback(shelf),
    "prune": lambda shelf, _: prune(shelf, 0),
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
        shelf = str(shutil.copytree(original, tmp_path / str(step)))
        before = current(shelf)
        assert before is not None
        killed = killed_at(step, functools.partial(do, shelf, exported))
        found = current(shelf)
        assert found is not None
        after.add(found.version != before.version)
        check_whole(shelf, exported)
        if found.version == before.version:
            do(shelf, exported)
        check_whole(shelf, exported)
        done = current(shelf)
        assert done is not None
        if action == "publish":
            assert (done.run, done.previous) == ("next", before.version)
            assert publish(exported, shelf, quality="accuracy 0.9900", run="next") == done
            assert len(chain(shelf)) == len(complete_versions(shelf)) == 4
        elif action == "prune":
            assert chain(shelf) == [before.version, before.previous]
            assert len(list((Path(shelf) / "versions").iterdir())) == 2
        else:
            assert done.version == before.previous
    assert step > 8
    assert after == ({False} if action == "prune" else {False, True})


def check_whole(shelf: str, exported: Path) -> None:
    """Checks that every version that can be seen has all of its files, and all see the same champion."""
    for item in complete_versions(shelf):
        files = contents(Path(shelf) / item.path)
        expected = contents(exported)
        assert files.keys() == expected.keys()
        assert files["saved_model/variables/variables.index"] == (
            b"better" if item.run == "next" else b"weights"
        )
    found = current(shelf)
    assert found is not None
    # Whoever reads champion.json alone, as the trainer does, sees the same.
    assert json.loads((Path(shelf) / "champion.json").read_text())["version"] == found.version


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_publisher_cut_off_from_the_bucket_at_any_request_leaves_a_champion(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a bucket sees of a process that is killed: it asks for nothing more."""
    cut, asked, outcomes = sys.maxsize, 0, set()

    def fate(number: int) -> str:
        nonlocal asked
        asked = number
        return "" if number < cut else moment if number == cut else "before"

    shelf, exported = "gs://bucket/champion", write_export(tmp_path / "model")
    with fake_storage("bucket", {}, fate) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        for step in itertools.count(1):
            before = publish_next(exported, shelf)
            judge_again(exported, shelf)
            cut = asked + step
            with contextlib.suppress(PlatformError):
                publish(exported, shelf, quality="accuracy 0.9700", run=f"run-{step}")
            was_cut, cut = asked >= cut, sys.maxsize
            found = current(shelf)
            assert found is not None
            outcomes.add(found != before)
            done = publish(exported, shelf, quality="accuracy 0.9700", run=f"run-{step}")
            assert (current(shelf), done.previous) == (done, before.version)
            with champions.fetched(shelf, done) as copy:
                assert contents(copy) == contents(exported)
            if not was_cut:
                break
    assert step > 8
    assert outcomes == {False, True}


def test_a_shelf_of_an_earlier_release_goes_on(tmp_path: Path) -> None:
    shelf = tmp_path / "shelf"
    names = ["20260101T000000-aaaaaaaa", "20260102T000000-bbbbbbbb"]
    for name, previous in zip(names, ["", names[0]], strict=True):
        write_export(shelf / "versions" / name)
        record = {"version": name, "path": f"versions/{name}", "accuracy": 0.9, "fingerprint": "sha256:abc"}
        record |= {"created": "2026-01-01T00:00:00+00:00", "previous": previous, "run": ""}
        for file in (shelf / "versions" / name / "version.json", shelf / "champion.json"):
            file.write_text(json.dumps(record))

    champion = (shelf / "champion.json").read_text()
    (shelf / "champion.json").unlink()
    with pytest.raises(ModelError, match=f"champion.json is gone, but {names[1]} has been the champion"):
        current(shelf)
    (shelf / "champion.json").write_text(champion)
    third = publish_next(write_export(tmp_path / "third"), shelf)

    assert chain(str(shelf)) == [third.version, *reversed(names)]
    assert [rollback(shelf).version, rollback(shelf).version] == [names[1], names[0]]
    assert promote(shelf, third.version).commit.serial == 4


def test_a_file_system_without_hard_links_is_refused_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: str, target: str) -> None:
        raise OSError(errno.EPERM, "Operation not permitted", source, None, target)

    exported = write_export(tmp_path / "model")
    monkeypatch.setattr(os, "link", refuse)
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    for use in (lambda: champions.check_champion(str(shelf)), lambda: publish_next(exported, shelf)):
        with pytest.raises(SettingsError, match=r"without hard links, .* or a bucket by its name, gs://"):
            use()


def test_a_bucket_that_is_not_there_is_no_empty_shelf(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_storage("bucket", {}) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        with pytest.raises(PlatformError, match="cannot list gs://elsewhere/champion: not found"):
            current("gs://elsewhere/champion")
