"""What was published is listed, and an earlier version comes back."""

import json
import os
import shutil

import pytest
from click.testing import CliRunner

from shardline.components.model_store import champions
from shardline.components.model_store.champions import current, open_store, promote, rollback
from shardline.components.model_store.champions import versions as all_versions
from shardline.components.storage import TextFile
from shardline.pipelines.cli import main as cli
from shardline.pipelines.cli.runs import _directory_name
from shardline.trainer.base.errors import ModelError, RunError, SettingsError
from tests.helpers.exports import METRICS, contents, judge_again, publish_next, write_export
from tests.helpers.fake_storage import fake_storage


@pytest.fixture
def champion(tmp_path):
    return tmp_path / "store" / "champion"


@pytest.fixture
def versions(champion, tmp_path):
    """Three versions, the last of which is the champion."""
    return [
        publish_next(write_export(tmp_path / f"model-{index}"), champion, accuracy=accuracy)
        for index, accuracy in enumerate((0.95, 0.96, 0.97))
    ]


@pytest.fixture
def storage(monkeypatch):
    """Cloud Storage on this machine, with an empty bucket named bucket."""
    with fake_storage("bucket", {}) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        yield


@pytest.fixture(params=["disk", "bucket"])
def store_uri(request, tmp_path):
    """URIs of a model store on a disk, and of one in a bucket that is not mounted."""
    if request.param == "disk":
        return str(tmp_path / "model_store")
    request.getfixturevalue("storage")
    return "gs://bucket/champions/digits"


def invoke(*arguments):
    return CliRunner().invoke(cli.main, ["champion", *map(str, arguments)])


def test_rollback_goes_back_step_by_step_and_promote_forward(champion, versions, tmp_path):
    first, second, third = versions

    assert rollback(champion) == second == current(champion)
    fourth = publish_next(write_export(tmp_path / "fourth"), champion, accuracy=0.98)
    assert rollback(champion) == second == current(champion)
    assert rollback(champion) == first == current(champion)
    assert promote(champion, third.version) == third == current(champion)
    assert rollback(champion) == first
    assert set(all_versions(champion)) == {first, second, third, fourth}


def test_a_version_whose_files_are_gone_does_not_come_back(champion, versions):
    with pytest.raises(ModelError, match=f"no version other in .*; there are {versions[0].version}, "):
        promote(champion, "other")
    shutil.rmtree(champion / versions[1].path)
    with pytest.raises(ModelError, match=r"version\.json: the version is damaged"):
        rollback(champion)
    assert current(champion) == versions[2]
    assert champions.last_champions(champion) == (versions[2], versions[0])


def test_the_first_version_has_none_to_go_back_to(champion, tmp_path):
    first = publish_next(write_export(tmp_path / "model"), champion, accuracy=0.9)

    with pytest.raises(ModelError, match=f"{first.version} replaced no version; promote another one"):
        rollback(champion)
    assert current(champion) == first


def test_a_rollback_that_cannot_be_written_leaves_the_champion(champion, versions, monkeypatch):
    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shardline.trainer.base.files.sync", full)
    with pytest.raises(RunError, match=r"No space left on device \(.*free, .*\); the champion is unchanged"):
        rollback(champion)
    assert current(champion) == versions[2]


def test_each_source_has_a_champion_of_its_own():
    sources = ["a/b", "a-b", "a--b", "a:b", "images:/a", "images:-a", "x" * 100, "x" * 101, "x" * 300]

    names = [_directory_name(source) for source in sources]

    assert len(set(names)) == len(names)
    assert (_directory_name("digits"), _directory_name("a-b")) == ("digits", "a-b")
    assert all("/" not in name and len(name) < 120 for name in names)


@pytest.mark.parametrize("command", ["show", "list", "rollback"])
@pytest.mark.parametrize(
    ("directory", "code", "message"),
    [
        ("gs://bucket/nothing-here", 2, "nothing has been published in gs://bucket/nothing-here;"),
        ("gs://no-such-bucket/x", 3, "cannot list gs://no-such-bucket/x/: not found"),
    ],
)
def test_a_bucket_without_a_champion_is_one_line(command, directory, code, message, storage):
    done = invoke(command, directory)

    assert (done.exit_code, len(done.output.splitlines())) == (code, 1)
    assert message in done.output


def answer(*arguments):
    """Returns what a command prints as JSON, and checks that it has succeeded."""
    done = invoke(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_store_is_listed_with_who_when_from_which_run_and_the_metrics(store_uri, tmp_path):
    first = publish_next(write_export(tmp_path / "model"), store_uri, accuracy=0.97, run="monday")
    second = publish_next(write_export(tmp_path / "next"), store_uri, accuracy=0.98, run="tuesday")
    answer("rollback", store_uri)

    listed = answer("list", store_uri)
    lines = invoke("list", store_uri).output.splitlines()

    assert listed["champion"] == first.version
    assert [item["run"] for item in listed["versions"]] == ["tuesday", "monday"]
    assert all(item["by"].count("@") == 1 for item in listed["versions"])
    assert listed["versions"][1]["metrics"] == {**METRICS, "accuracy": 0.97}
    assert (listed["champions"], listed["rolled_back"]) == ([first.version], [second.version])
    assert [line[0] for line in lines] == [" ", " ", "*"]
    assert all(word in lines[2] for word in (first.version, "0.9700", first.by, "monday"))

    shown = answer("show", store_uri, second.version)
    assert (shown["version"], shown["run"]) == (second.version, "tuesday")
    lines = invoke("show", store_uri).output.splitlines()
    shown = {" ".join(line.split()) for line in lines}
    assert {"metrics accuracy 0.97, log_loss 0.25", "replaced nothing"} <= shown
    assert f"path {open_store(store_uri).location(first.path)}" in shown


def test_a_blessed_run_that_was_not_registered_is_promoted_by_hand(store_uri, tmp_path):
    first = publish_next(write_export(tmp_path / "first"), store_uri)
    exported = write_export(tmp_path / "unregistered", weights=b"unregistered")

    promoted = answer("promote", store_uri, exported)

    assert current(store_uri).version == promoted["version"]
    assert answer("show", store_uri)["replaced"] == first.version
    assert promoted["source"] == str(exported)
    assert promoted["quality"] == "accuracy 0.9000"
    with open_store(store_uri).fetched(current(store_uri).path) as copy:
        assert contents(copy) == contents(exported)
    assert "is the champion already; name another" in invoke("promote", store_uri, exported).output
    assert answer("rollback", store_uri)["version"] == first.version
    assert answer("promote", store_uri, promoted["version"])["version"] == promoted["version"]


def test_a_directory_in_a_bucket_is_promoted_without_a_mount(champion, storage, tmp_path):
    exported, store = write_export(tmp_path / "model"), open_store("gs://bucket/runs/7")
    names = [path.relative_to(exported).as_posix() for path in exported.rglob("*") if path.is_file()]
    store.put(exported, names, "exported/")
    champion.mkdir(parents=True)

    answer("promote", champion, store.location("exported"))

    assert contents(champion / current(champion).path) == contents(exported)


def test_a_blocked_model_needs_a_reason_which_is_kept_and_shown(store_uri, tmp_path):
    first = publish_next(write_export(tmp_path / "first"), store_uri)
    blocked = write_export(tmp_path / "blocked", blessed=False)

    for override in ([], ["--override", " "]):
        done = invoke("promote", store_uri, blocked, *override)
        assert done.exit_code == 2
        assert (
            "is not blessed (accuracy 0.9 is below 0.95); to make it the champion anyway, give" in done.output
        )
    assert (current(store_uri), len(all_versions(store_uri))) == (first, 1)

    promoted = answer("promote", store_uri, blocked, "--override", "the labels were wrong")

    assert "the labels were wrong" in invoke("list", store_uri).output
    assert answer("show", store_uri)["override"] == "the labels were wrong"
    answer("rollback", store_uri)
    assert "the labels were wrong" in invoke("list", store_uri).output
    assert invoke("promote", store_uri, promoted["version"]).exit_code == 2


def test_a_version_that_never_was_the_champion_is_shown_as_such(store_uri, tmp_path):
    late = judge_again(write_export(tmp_path / "late"), store_uri)
    first = publish_next(write_export(tmp_path / "first"), store_uri)
    with pytest.raises(ModelError, match="since; validate it again"):
        champions.publish(late, store_uri, run="late")
    (never,) = (item for item in all_versions(store_uri) if item.run == "late")

    shown = answer("show", store_uri, never.version)

    assert (shown["champion"], "replaced" in shown) == ("never", False)
    assert "never the champion" in invoke("list", store_uri).output.splitlines()[-2]
    assert invoke("show", store_uri, first.version).output == invoke("show", store_uri).output


def test_nothing_is_promoted_on_a_disk_that_is_not_mounted(champion, tmp_path):
    exported = write_export(tmp_path / "model")

    done = invoke("promote", champion, exported)

    assert (done.exit_code, f"there is no directory {champion}" in done.output) == (2, True), done.output
    assert not champion.exists()


@pytest.fixture
def put(store_uri, tmp_path):
    """Writes files next to the champions, on the disk or into the bucket."""

    def write(*names):
        for name in names:
            if "://" not in store_uri:
                (tmp_path / "model_store" / name).parent.mkdir(parents=True, exist_ok=True)
            open_store(store_uri).replace(name, "{}", TextFile(None))

    return write


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("manifest.json",), "but manifest.json; give the directory of champions, or an empty one"),
        (("digits/versions/1/version.json",), "but digits; give"),
        (("versions/v1/export.json", "export.json"), "but export.json, versions; give"),
        # The directory of the history.
        (("datasets/1.json", "latest.json", "runs/run-1/run.json"), "but datasets, latest.json, runs; give"),
    ],
)
def test_a_directory_with_other_content_is_no_model_store(store_uri, put, names, message, tmp_path):
    """It is not taken for an empty store, in which the first model would be blessed."""
    put(*names)
    exported = write_export(tmp_path / "model")

    for refused in (
        lambda: champions.require_store(store_uri),
        lambda: champions.check_champion(store_uri),
        lambda: champions.publish(exported, store_uri),
        lambda: champions.promote(store_uri, f"{exported}/"),
    ):
        with pytest.raises(SettingsError) as caught:
            refused()
        assert "holds no champions (no champion.json), " + message in str(caught.value)


def test_a_model_store_may_hold_files_of_the_disk_and_later_others(store_uri, put, tmp_path):
    put(".gitkeep", "lost+found/x")

    champions.check_champion(store_uri)
    publish_next(write_export(tmp_path / "model"), store_uri, accuracy=0.9)
    put("README.md", "runs/run-1.json", "latest.json")

    champions.check_champion(store_uri)


def test_a_directory_whose_name_is_not_utf_8_is_promoted(champion, tmp_path):
    exported = write_export(tmp_path / os.fsdecode(b"\xff"))
    champion.mkdir(parents=True)

    promoted = champions.promote(champion, str(exported))

    assert promoted.source.endswith("/\\udcff")
    with pytest.raises(ModelError, match="is the champion already"):
        champions.promote(champion, str(exported))


def test_a_prefix_is_the_same_however_its_slashes_are_written(storage, tmp_path):
    first = publish_next(write_export(tmp_path / "model"), "gs://bucket//a/./b//")

    assert current("gs://bucket/a/b") == first == current("/gcs/bucket/a//b")


def test_latest_is_the_newest_version(champion, versions):
    rollback(champion)

    assert invoke("show", champion, "latest").output == invoke("show", champion, versions[2].version).output
    assert invoke("promote", champion, "latest").output == (
        f"version {versions[2].version} is the champion (accuracy 0.9700)\n"
    )
    again = invoke("promote", champion, "latest")
    assert (again.exit_code, current(champion)) == (2, versions[2])
    assert versions[2].version in again.output
