import os
import subprocess
import sys

import pytest
from kfp import dsl

from shardline.components import model_store
from shardline.components.model_store.champions import champion_directory, current, publish
from shardline.components.register import register_model
from shardline.components.register.component import register
from shardline.components.runs import directory as run_directory
from shardline.trainer.base.errors import ModelError, SettingsError
from tests.helpers.exports import judge_again, write_export


@pytest.fixture
def exported(tmp_path):
    return write_export(tmp_path / "exported")


@pytest.fixture
def champion(tmp_path):
    return tmp_path / "store" / "champion"


def test_on_the_platform_nothing_is_published_in_a_container(exported, champion, monkeypatch, tmp_path):
    monkeypatch.setattr(run_directory, "_BUCKETS", tmp_path)
    monkeypatch.delenv(run_directory.RunDirectory.VARIABLE, raising=False)

    with pytest.raises(SettingsError, match="thrown away with it; give champion_uri=gs://BUCKET/PATH"):
        register_model(exported, str(champion))

    assert not champion.exists()


def test_a_version_is_on_disk_with_its_directories_before_it_is_the_champion(exported, champion, monkeypatch):
    synced = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    )
    published = publish(exported, champion)

    version = champion / published.path
    copied = [path for path in version.rglob("*") if path.name != "version.json"]
    last = max(synced.index(str(path)) for path in (*copied, version, version.parent))
    written = [index for index, path in enumerate(synced) if ".tmp-" in path]
    # Of champion.json, empty before the first version, the version's record, and champion.json with it: the
    # file, and the directory after it has its name.
    assert written[0] < last < written[1]
    assert [synced[index + 1] for index in written] == [str(champion), str(version), str(champion)]


def test_publishing_on_a_disk_loads_neither_tensorflow_nor_kfp_nor_google(exported, champion):
    script = (
        "import pathlib, sys; from shardline.components.register.registration import register_model; "
        "register_model(pathlib.Path(sys.argv[1]), sys.argv[2]); "
        "print([name for name in ('tensorflow', 'keras', 'kfp', 'google.auth') if name in sys.modules])"
    )
    command = [sys.executable, "-c", script, str(exported), str(champion)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)

    assert result.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("missing", [model_store.BLESSING_FILE, model_store.EXPORT_FILE])
def test_an_unfinished_validation_is_not_published(missing, exported, champion):
    (exported / missing).unlink()

    with pytest.raises(ModelError, match=f"no {missing} in .*: validation did not finish"):
        publish(exported, champion)
    assert not champion.exists()


def test_a_place_that_cannot_be_written_to_is_refused(exported, tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(SettingsError, match=r"cannot write to .*; choose another champion_uri"):
        publish(exported, tmp_path / "file" / "champion")


def test_a_bucket_without_a_client_is_reached_through_its_mount_or_not_at_all():
    with pytest.raises(SettingsError, match=r"/gcs/no-such-bucket is not mounted here"):
        champion_directory("gs://no-such-bucket/history")


def test_the_component_publishes(exported, champion, events):
    run = {"exported": dsl.Model(uri=str(exported)), "champion_uri": str(champion)}
    register(**run)
    first = current(champion)
    judge_again(exported, champion)
    register(**run)
    second = current(champion)

    facts = [(event.topic, event.value) for event in events if event.kind == "fact"]
    lines = [event.text for event in events if event.kind == "line"]
    assert facts == [("champion", str(champion / first.path)), ("champion", str(champion / second.path))]
    assert lines[1].endswith(f"is the champion, replacing {first.version}")


def test_without_a_place_nothing_is_published(exported, tmp_path, events):
    before = sorted(tmp_path.rglob("*"))

    register(exported=dsl.Model(uri=str(exported)), champion_uri="")

    assert [event.text for event in events] == ["champion_uri is empty: the blessed model is not published"]
    assert sorted(tmp_path.rglob("*")) == before


def test_the_component_ends_with_one_line_and_exit_code_2(champion, tmp_path, events):
    weak = write_export(tmp_path / "weak", blessed=False)

    with pytest.raises(SystemExit) as ended:
        register(exported=dsl.Model(uri=str(weak)), champion_uri=str(champion))

    assert ended.value.code == 2
    (event,) = events
    assert event.kind == "error"
    assert "is not blessed (accuracy 0.9 is below 0.95)" in event.text
    assert not champion.exists()


def test_a_model_that_lost_the_race_may_be_served(exported, champion, tmp_path):
    publish(write_export(tmp_path / "other"), champion)

    with pytest.raises(ModelError, match=r"; if this run deployed it, the endpoint serves it$"):
        register_model(exported, str(champion))
