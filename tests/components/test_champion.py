"""What was published is listed, and an earlier version comes back."""

import json
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

from shardline.components.champions import (
    complete_versions,
    current,
    directory_name,
    of_source,
    publish,
    rollback,
)
from shardline.pipelines.cli import main as cli
from shardline.trainer.errors import ModelError, RunError, SettingsError
from tests.helpers.exports import write_export


@pytest.fixture
def champion(tmp_path):
    return tmp_path / "store" / "champion"


@pytest.fixture
def versions(champion, tmp_path):
    """Three versions, the last of which is the champion."""
    return [
        publish(write_export(tmp_path / f"model-{index}"), champion, accuracy=accuracy)
        for index, accuracy in enumerate((0.95, 0.96, 0.97))
    ]


def invoke(*arguments):
    return CliRunner().invoke(cli.main, ["champion", *map(str, arguments)])


def test_a_program_reads_the_same_as_a_person(champion, versions):
    shown = json.loads(invoke("show", champion, "--json").output)
    restored = json.loads(invoke("rollback", champion, "--json").output)

    assert shown["champion"]["champion"] == versions[2].version
    assert {item["version"] for item in shown["versions"]} == {one.version for one in versions}
    assert restored["version"] == versions[1].version == current(champion).version


def test_each_version_names_the_one_that_it_replaced(champion, versions):
    assert [version.previous for version in versions] == ["", versions[0].version, versions[1].version]
    assert complete_versions(champion) == sorted(versions, key=lambda version: version.version)


def test_one_goes_back_step_by_step_and_forward_by_name(champion, versions):
    first, second, third = versions

    assert rollback(champion) == second == current(champion)
    assert rollback(champion) == first == current(champion)
    assert rollback(champion, third.version) == third == current(champion)
    assert set(complete_versions(champion)) == {first, second, third}


def test_what_is_published_after_a_rollback_goes_back_to_what_it_replaced(champion, versions, tmp_path):
    rollback(champion)
    fourth = publish(write_export(tmp_path / "fourth"), champion, accuracy=0.98)

    assert fourth.previous == versions[1].version
    assert rollback(champion) == versions[1]


def test_the_first_version_has_none_to_go_back_to(champion, tmp_path):
    first = publish(write_export(tmp_path / "model"), champion, accuracy=0.9)

    with pytest.raises(ModelError, match=f"{first.version} replaced no version; name the one to go to"):
        rollback(champion)
    with pytest.raises(ModelError, match=f"{first.version} is the champion already"):
        rollback(champion, first.version)
    assert current(champion) == first


def test_a_version_that_is_not_there_is_refused_with_those_that_are(champion, versions):
    (champion / versions[1].path / "version.json").unlink()  # its publisher was killed

    with pytest.raises(ModelError, match=f"no version {versions[1].version} in .*; there are .*-"):
        rollback(champion)
    assert current(champion) == versions[2]


def test_a_rollback_that_cannot_be_written_leaves_the_champion(champion, versions, monkeypatch):
    def full(path, value):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shardline.components.champions.files.write_json", full)
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


EARLIER = "images-data-flowers"


def test_a_champion_under_the_name_of_earlier_releases_is_not_passed_over(tmp_path):
    publish(write_export(tmp_path / "model"), tmp_path / EARLIER, accuracy=0.9)
    own = tmp_path / directory_name("images:/data/flowers")

    with pytest.raises(SettingsError, match=f"an earlier champion is in .*/{EARLIER}, .*: move it to {own}"):
        of_source(tmp_path, "images:/data/flowers")
    assert of_source(tmp_path, "images:/data/other") == tmp_path / directory_name("images:/data/other")
    assert of_source(tmp_path, "x" * 300).parent == tmp_path

    (tmp_path / EARLIER).rename(own)
    assert current(of_source(tmp_path, "images:/data/flowers")).accuracy == 0.9


def test_a_run_beside_an_earlier_champion_begins_nothing(tmp_path):
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    (tmp_path / "photos" / "cat" / "1.png").write_bytes(b"1")
    source = f"images:{tmp_path / 'photos'}"
    earlier = tmp_path / "runs" / "champions" / re.sub(r"\W+", "-", source)
    publish(write_export(tmp_path / "model"), earlier, accuracy=0.9)
    given = ["compiled/retrain.yaml", "--runs-dir", tmp_path / "runs", "-p", f"source={source}"]

    done = CliRunner().invoke(cli.main, ["run", *map(str, given)])

    assert (done.exit_code, "an earlier champion is in" in done.output) == (2, True), done.output
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["champions"]


def test_a_damaged_ancestor_does_not_stop_the_next_version(champion, versions, tmp_path, events):
    (champion / versions[0].path / "version.json").write_text("{")

    fourth = publish(write_export(tmp_path / "fourth"), champion, accuracy=0.98, run="today")

    assert (current(champion), fourth.previous) == (fourth, versions[2].version)
    assert publish(tmp_path / "fourth", champion, accuracy=0.98, run="today") == fourth
    assert [event.text.endswith("versions before it are not searched") for event in events] == [True]


READER = """
import pathlib, sys
from shardline.components.champions import current

reads, seen = 0, set()
while reads < 500 or len(seen) < 2:
    seen.add(current(pathlib.Path(sys.argv[1])).version)
    reads += 1
"""


def test_a_reader_sees_one_champion_or_the_other(champion, versions):
    reader = subprocess.Popen([sys.executable, "-c", READER, str(champion)])
    while reader.poll() is None:
        rollback(champion)
        rollback(champion, versions[2].version)

    assert reader.returncode == 0


def test_show_says_what_is_in_use_and_what_one_can_go_back_to(champion, versions):
    rollback(champion)
    done = invoke("show", champion)

    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0] == f"champion    {versions[1].version}"
    assert f"path        {champion / versions[1].path}" in lines
    assert f"replaced    {versions[0].version}" in lines
    marked = {line[2:].split()[0]: line[0] for line in lines if "  accuracy " in line}
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


@pytest.mark.parametrize("command", ["show", "rollback"])
@pytest.mark.parametrize(
    ("place", "message"),
    [("nothing-here", "nothing has been published in"), ("gs://no-such-bucket/x", "is not mounted here")],
)
def test_a_place_without_a_champion_is_one_line(command, place, message, tmp_path):
    done = invoke(command, place if place.startswith("gs:") else tmp_path / place)

    assert done.exit_code == 2
    assert message in done.output
    assert len(done.output.splitlines()) == 1


def test_a_damaged_record_of_a_version_is_said(champion, versions):
    (champion / versions[0].path / "version.json").write_text("{")

    done = invoke("show", champion)

    assert done.exit_code == 2
    assert "version.json is not JSON" in done.output
