"""What was published is listed, and an earlier version comes back."""

import json
import os
import shutil

import pytest
from click.testing import CliRunner

from shardline.components.model_store import catalog, champions
from shardline.components.model_store.backends import TextFile
from shardline.components.model_store.catalog import open_store
from shardline.components.model_store.champions import complete_versions, current, directory_name, rollback
from shardline.pipelines.cli import main as cli
from shardline.trainer.base.errors import ModelError, RunError, SettingsError
from tests.helpers.evaluations import EVALUATION
from tests.helpers.exports import contents, judge_again, publish_next, write_export
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
def shelf(request, tmp_path):
    """A champion's directory, and one in a bucket that is not mounted."""
    if request.param == "disk":
        return str(tmp_path / "shelf")
    request.getfixturevalue("storage")
    return "gs://bucket/champions/digits"


def invoke(*arguments):
    return CliRunner().invoke(cli.main, ["champion", *map(str, arguments)])


def test_one_goes_back_step_by_step_and_forward_by_name(champion, versions):
    first, second, third = versions

    assert rollback(champion) == second == current(champion)
    assert rollback(champion) == first == current(champion)
    assert rollback(champion, third.version) == third == current(champion)
    assert set(complete_versions(champion)) == {first, second, third}


def test_what_is_published_after_a_rollback_goes_back_to_what_it_replaced(champion, versions, tmp_path):
    rollback(champion)
    fourth = publish_next(write_export(tmp_path / "fourth"), champion, accuracy=0.98)

    assert fourth.previous == versions[1].version
    assert rollback(champion) == versions[1]


def test_the_first_version_has_none_to_go_back_to(champion, tmp_path):
    first = publish_next(write_export(tmp_path / "model"), champion, accuracy=0.9)

    with pytest.raises(ModelError, match=f"{first.version} replaced no version; name the one to go to"):
        rollback(champion)
    with pytest.raises(ModelError, match=f"{first.version} is the champion already"):
        rollback(champion, first.version)
    assert current(champion) == first


def test_a_version_that_is_not_there_is_refused_with_those_that_are(champion, versions):
    with pytest.raises(ModelError, match=f"no version other in .*; there are {versions[0].version}, "):
        rollback(champion, "other")
    shutil.rmtree(champion / versions[1].path)
    with pytest.raises(ModelError, match=f"the files of {versions[1].version} are gone"):
        rollback(champion)
    assert current(champion) == versions[2]


def test_a_rollback_that_cannot_be_written_leaves_the_champion(champion, versions, monkeypatch):
    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shardline.trainer.base.files.sync", full)
    with pytest.raises(RunError, match="No space left on device; the champion is unchanged"):
        rollback(champion)
    assert current(champion) == versions[2]


def test_each_source_has_a_champion_of_its_own():
    sources = [
        "a/b",
        "a-b",
        "a--b",
        "a:b",
        "images:/data/a",
        "images:/data-a",
        "x" * 100,
        "x" * 101,
        "x" * 300,
    ]

    names = [directory_name(source) for source in sources]

    assert len(set(names)) == len(names)
    assert (directory_name("digits"), directory_name("a-b")) == ("digits", "a-b")
    assert all("/" not in name and len(name) < 120 for name in names)


def test_show_says_what_is_in_use_and_what_one_can_go_back_to(champion, versions):
    rollback(champion)
    done = invoke("show", champion)

    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0] == f"champion    {versions[1].version}"
    assert f"path        {champion / versions[1].path}" in lines
    assert f"replaced    {versions[0].version}" in lines
    marked = {line[2:].split()[0]: line[0] for line in lines[lines.index("") + 1 :]}
    assert marked == {version.version: " *"[version == versions[1]] for version in versions}


def test_show_takes_the_models_facts_from_its_export(champion, versions):
    export = {
        "fingerprint": "sha256:abc",
        "parameters": 1234,
        "bytes": 2_500_000,
        "versions": {"keras": "3.15.1"},
        "git_revision": "abc123",
    }
    (champion / versions[2].path / "export.json").write_text(json.dumps(export))

    lines = invoke("show", champion).output.splitlines()

    assert {
        "parameters  1,234",
        "size        2.5 MB",
        "revision    abc123",
        "made with   keras 3.15.1",
    } <= set(lines)


def test_rollback_says_which_version_is_the_champion_now(champion, versions):
    done = invoke("rollback", champion)

    assert (done.exit_code, current(champion)) == (0, versions[1])
    assert done.output == f"version {versions[1].version} is the champion (accuracy 0.9600)\n"

    done = invoke("rollback", champion, "--to", versions[2].version)

    assert (done.exit_code, current(champion)) == (0, versions[2])


@pytest.mark.parametrize("command", ["show", "list", "rollback", "prune --keep 0"])
@pytest.mark.parametrize(
    ("place", "code", "message"),
    [
        ("nothing-here", 2, "nothing has been published in"),
        ("gs://", 2, "'gs://' names no bucket"),
        ("gs://bucket/nothing-here", 2, "nothing has been published in gs://bucket/nothing-here;"),
        ("gs://no-such-bucket/x", 3, "cannot list gs://no-such-bucket/x/: not found"),
    ],
)
def test_a_place_without_a_champion_is_one_line(command, place, code, message, storage, tmp_path):
    name, *options = command.split()
    done = invoke(name, place if place.startswith("gs:") else tmp_path / place, *options)

    assert done.exit_code == code
    assert message in done.output
    assert len(done.output.splitlines()) == 1


def answer(*arguments):
    """Returns what a command prints as JSON, and checks that it has succeeded."""
    done = invoke(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_shelf_is_listed_with_who_when_from_which_run_and_the_metrics(shelf, tmp_path):
    exported = write_export(tmp_path / "model")
    (exported / "evaluation.json").write_text(json.dumps(EVALUATION))
    first = publish_next(exported, shelf, accuracy=0.97, run="monday")
    second = publish_next(write_export(tmp_path / "next"), shelf, accuracy=0.98, run="tuesday")
    answer("rollback", shelf)

    listed = answer("list", shelf)
    lines = invoke("list", shelf).output.splitlines()

    assert listed["champion"] == first.version
    assert [item["run"] for item in listed["versions"]] == ["tuesday", "monday"]
    assert all(item["by"].count("@") == 1 for item in listed["versions"])
    assert listed["versions"][1]["metrics"] == EVALUATION["metrics"]
    commit = listed["versions"][1]["commit"]
    assert (commit["how"], commit["serial"], commit["replaced"]) == ("rolled back", 3, second.version)
    assert [line[0] for line in lines] == [" ", " ", "*"]
    assert all(word in lines[2] for word in (first.version, "0.9700", first.by, "monday"))

    shown = answer("show", shelf, second.version)
    assert (shown["version"], shown["run"], shown["replaced"]) == (second.version, "tuesday", first.version)
    assert "metrics     accuracy 0.9, log_loss 0.25\n" in invoke("show", shelf).output


def test_a_blessed_run_that_was_not_registered_is_promoted_by_hand(shelf, tmp_path):
    first = publish_next(write_export(tmp_path / "first"), shelf)
    exported = write_export(tmp_path / "unregistered", weights=b"unregistered")
    (exported / "evaluation.json").write_text(json.dumps(EVALUATION))

    promoted = answer("promote", shelf, exported)

    assert current(shelf).version == promoted["version"]
    assert (promoted["previous"], promoted["source"]) == (first.version, str(exported))
    assert promoted["quality"] == f"accuracy {EVALUATION['accuracy']:.4f}"
    with champions.fetched(shelf, current(shelf)) as copy:
        assert contents(copy) == contents(exported)
    assert "is the champion already; name another" in invoke("promote", shelf, exported).output
    assert answer("rollback", shelf)["version"] == first.version
    assert answer("promote", shelf, promoted["version"])["version"] == promoted["version"]


def test_a_directory_in_a_bucket_is_promoted_without_a_mount(champion, storage, tmp_path):
    exported = write_export(tmp_path / "model")
    (exported / "evaluation.json").write_text(json.dumps(EVALUATION))
    place = open_store("gs://bucket/runs/7")
    place.put(exported, "exported")
    champion.mkdir(parents=True)

    answer("promote", champion, place.location("exported"))

    assert contents(champion / current(champion).path) == contents(exported)


def test_a_blocked_model_needs_a_reason_which_is_kept_and_shown(shelf, tmp_path):
    first = publish_next(write_export(tmp_path / "first"), shelf)
    blocked = write_export(tmp_path / "blocked", blessed=False)
    (blocked / "evaluation.json").write_text(json.dumps(EVALUATION))

    for override in ([], ["--override", " "]):
        done = invoke("promote", shelf, blocked, *override)
        assert done.exit_code == 2
        assert (
            "is not blessed (accuracy 0.9 is not >= 0.95); to make it the champion anyway, give"
            in done.output
        )
    assert (current(shelf), len(complete_versions(shelf))) == (first, 1)

    promoted = answer("promote", shelf, blocked, "--override", "the labels were wrong")

    assert current(shelf).override == promoted["override"] == "the labels were wrong"
    assert "the labels were wrong" in invoke("list", shelf).output
    assert "override    the labels were wrong\n" in invoke("show", shelf).output
    answer("rollback", shelf)
    assert "the labels were wrong" in invoke("list", shelf).output
    assert invoke("promote", shelf, promoted["version"]).exit_code == 2


def test_a_version_that_never_was_the_champion_is_shown_as_such(shelf, tmp_path):
    late = judge_again(write_export(tmp_path / "late"), shelf)
    first = publish_next(write_export(tmp_path / "first"), shelf)
    with pytest.raises(ModelError, match="since; validate it again"):
        champions.publish(late, shelf, quality="accuracy 0.5000", run="late")
    (never,) = (item for item in complete_versions(shelf) if item.run == "late")

    lines = invoke("show", shelf, never.version).output.splitlines()

    assert f"stored      {never.created} by {never.by}" in lines
    assert "committed   never the champion" in lines
    assert not any(line.startswith(("replaced", "published")) for line in lines)
    assert "replaced    nothing" in invoke("show", shelf, first.version).output.splitlines()


def test_nothing_is_promoted_on_a_disk_that_is_not_mounted(champion, tmp_path):
    exported = write_export(tmp_path / "model")
    (exported / "evaluation.json").write_text(json.dumps(EVALUATION))

    done = invoke("promote", champion, exported)

    assert (done.exit_code, f"there is no directory {champion}" in done.output) == (2, True), done.output
    assert not champion.exists()


@pytest.fixture
def put(shelf, tmp_path):
    """Writes files beside the champions, on the disk or into the bucket."""

    def write(*names):
        for name in names:
            if "://" not in shelf:
                (tmp_path / "shelf" / name).parent.mkdir(parents=True, exist_ok=True)
            open_store(shelf).replace(name, "{}", TextFile(None))

    return write


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (
            ("export.json", "saved_model/saved_model.pb"),
            "but export.json, saved_model; give the directory of champions, or a new one",
        ),
        (("manifest.json",), "but manifest.json; give the directory of champions, or a new one"),
        (("digits/versions/1/version.json",), "but digits; give"),
    ],
)
def test_what_holds_something_else_is_no_place_for_champions(shelf, put, names, words, tmp_path):
    """It is no place without a champion yet, in which the first model would be blessed."""
    put(*names)

    for refused in (
        lambda: catalog.require_store(shelf),
        lambda: champions.check_champion(shelf),
        lambda: champions.publish(write_export(tmp_path / "model"), shelf, quality="0.9"),
    ):
        with pytest.raises(SettingsError) as caught:
            refused()
        assert "holds no champions (champion.json, versions/), " + words in str(caught.value)


@pytest.mark.parametrize(
    "names",
    [
        ("runs/run-1.json", "latest.json", "datasets/1.json"),
        (".gitkeep", "lost+found/x"),
    ],
)
def test_a_place_for_champions_may_hold_what_a_run_or_the_disk_has_put_there(shelf, put, names, tmp_path):
    put(*names)

    champions.check_champion(shelf)
    publish_next(write_export(tmp_path / "model"), shelf, accuracy=0.9)
    put("README.md")

    champions.check_champion(shelf)


def test_a_directory_whose_name_is_not_utf_8_is_promoted(champion, tmp_path):
    exported = write_export(tmp_path / os.fsdecode(b"\xff"))
    (exported / "evaluation.json").write_text(json.dumps(EVALUATION))
    champion.mkdir(parents=True)

    promoted = champions.promote(champion, str(exported))

    assert promoted.source.endswith("/\\udcff")
    with pytest.raises(ModelError, match="is the champion already"):
        champions.promote(champion, str(exported))


def test_a_prefix_is_the_same_however_its_slashes_are_written(storage, tmp_path):
    first = publish_next(write_export(tmp_path / "model"), "gs://bucket//a/./b//")

    assert current("gs://bucket/a/b") == first == current("/gcs/bucket/a//b")


def test_prune_keeps_the_champion_what_it_replaced_and_the_newest(shelf, tmp_path):
    exported = write_export(tmp_path / "model")
    names = [publish_next(exported, shelf, run=f"run-{number}").version for number in range(6)]
    answer("rollback", shelf, "--to", names[1])  # which replaced names[0], and now names[5]

    others = names[2:5]
    assert answer("prune", shelf, "--keep", 2)["removed"] == others[:1]
    assert invoke("prune", shelf, "--keep", 1).output == f"removed {others[1]}\n"
    assert invoke("prune", shelf, "--keep", 1).output == "nothing to remove\n"

    left = {item.version for item in complete_versions(shelf)}
    assert left == {names[0], names[1], names[5], others[2]}
    assert current(shelf).version == names[1]
    assert set(open_store(shelf).names("versions")) == left
    assert answer("rollback", shelf)["version"] == names[0]
