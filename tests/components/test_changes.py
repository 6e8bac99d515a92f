"""Whether a run has anything to do, and what it leaves for the next to compare with."""

import errno
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import get_type_hints

import pytest
from kfp import dsl

from shardline.components import model_store
from shardline.components.changes import fill_in_date, in_zone, record_dataset
from shardline.components.changes.component import detect_changes, record_run
from shardline.components.changes.detection import Fingerprint, State, describe_changes, run_time
from shardline.components.runs import directory as run_directory
from shardline.components.validate.export import formats
from shardline.pipelines.parameters import check_values
from shardline.pipelines.spec import defaults, load_pipeline
from shardline.trainer.base import files
from shardline.trainer.base.errors import SettingsError
from shardline.trainer.base.settings import MODEL_FILE, TrainSettings
from tests.helpers.exports import METRICS, publish_next
from tests.helpers.fake_storage import fake_storage

ROOT = Path(__file__).resolve().parents[2]
RETRAIN = load_pipeline(ROOT / "compiled" / "retrain.yaml")

SETTINGS = {"model_function": "mnist_cnn", "readers": 2, "hparams": {"filters": 8}}
#: Settings of the trainer that name code of a user, as each says of itself.
CODE_OF_A_USER = [
    name
    for name, kind in get_type_hints(TrainSettings, include_extras=True).items()
    if "pkg.module:" in kind.__metadata__[-1]
]
A_DAY = 86_400 * 10**9


@pytest.fixture
def photos(tmp_path):
    for name in ("cat/1.png", "cat/2.png", "dog/1.png"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return tmp_path / "photos"


@pytest.fixture
def history(tmp_path):
    return tmp_path / "history"


@pytest.fixture
def storage(monkeypatch):
    """The objects of a bucket, gs://bucket, and what becomes of the coming requests."""
    objects, fates = {}, [""]
    with fake_storage("bucket", objects, lambda _: fates[0]) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        yield objects, fates


def known_as(found):
    """Returns what a dataset is known by, but for what tells it from an earlier one that may be gone."""
    key, _, last = found.fingerprint.rpartition("-")
    return last if key == "run" else key


def look(history, source, **settings):
    of_the_run = {"force": False, "scheduled": "", "created": "2026-11-20T06:00:00Z"}
    return detect_changes(
        **{"history_uri": str(history), "source": str(source), **of_the_run, **SETTINGS, **settings}
    )


def export(directory, *, blessed=True, model=b"weights"):
    directory.mkdir()
    (directory / MODEL_FILE).write_bytes(model)
    verdict = {"blessed": blessed, "reason": "", "headline": "accuracy 0.9000 >= 0.8", "metrics": METRICS}
    (directory / model_store.BLESSING_FILE).write_text(json.dumps(verdict))
    (directory / model_store.EXPORT_FILE).write_text(json.dumps({"fingerprint": "sha256:abc"}))
    return directory


def record(history, found, exported, job="run-1", champion=""):
    record_run(
        exported=dsl.Model(uri=str(exported)),
        state=found.state,
        history_uri=str(history),
        champion_uri=str(champion),
        job_name=job,
    )


def train(history, source, tmp_path, **settings):
    """A run from its first step to its last."""
    found = look(history, source, **settings)
    assert found.changed
    record(history, found, export(tmp_path / "exported"))
    return found


def age(path, nanoseconds=A_DAY):
    os.utime(path, ns=(0, path.stat().st_mtime_ns + nanoseconds))


def test_the_first_run_trains_and_the_same_again_does_not(photos, history, tmp_path, events):
    source = f"images:{photos}"
    first = train(history, source, tmp_path)
    assert first.reason == f"no run is recorded in {history}"
    assert first.source == source

    look(history, source)
    again = look(history, source)

    assert (again.changed, again.still_blessed, first.still_blessed) == (False, True, False)
    assert again.reason == "data (3 files, 27 B), settings and code are those of run-1"
    facts = {event.topic: event for event in events if event.kind == "fact"}
    assert facts["state"].value == "unchanged"
    assert facts["state"].text.startswith(f"unchanged: {again.reason}, which finished 20")
    assert facts["blessed"].value is True
    assert facts["blessed"].text == "accuracy 0.9000 >= 0.8 (of run-1)"
    assert facts["quality"].value == "accuracy 0.9000"


def touch(photos):
    age(photos / "cat" / "1.png")


def add(photos):
    (photos / "dog" / "2.png").write_bytes(b"new")


def rename(photos):
    (photos / "cat" / "2.png").rename(photos / "dog" / "2.png")


def replace_by_an_older_one(photos):
    (photos / "dog" / "1.png").write_bytes(b"dog/9.png")
    age(photos / "dog" / "1.png", -A_DAY)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (touch, "3 files, 27 B, as before"),
        (add, "4 files, 30 B, was 3 files, 27 B"),
        (rename, "3 files, 27 B, as before"),
        (replace_by_an_older_one, "3 files, 27 B, as before"),
    ],
)
def test_other_data_trains(change, text, photos, history, tmp_path):
    first = train(history, f"images:{photos}", tmp_path)
    change(photos)

    found = look(history, f"images:{photos}")

    assert (found.changed, found.reason) == (True, f"the data has changed ({text})")
    assert known_as(found) != known_as(first)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"hparams": {"filters": 16}}, 'hparams was {"filters": 8}, is {"filters": 16}'),
        ({"readers": 4}, "readers was 2, is 4"),
        ({"champion_uri": "elsewhere"}, 'champion_uri was "", is "elsewhere"'),
        ({"rules": ["ece <= 0.1"]}, 'rules was [], is ["ece <= 0.1"]'),
        # A JSON object travels with whole numbers as floats.
        ({"hparams": {"filters": 8.0}}, ""),
    ],
)
def test_other_settings_train_on_the_dataset_as_it_is(
    settings, reason, photos, history, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    first = train(history, f"images:{photos}", tmp_path)

    found = look(history, f"images:{photos}", **settings)

    assert found.changed == bool(reason)
    if reason:
        assert found.reason == reason
        assert known_as(found) == known_as(first)


def test_a_history_in_a_bucket_needs_no_mount(photos, storage, tmp_path, events):
    objects, fates = storage
    first = train("gs://bucket/history", f"images:{photos}", tmp_path)
    assert first.reason == "no run is recorded in gs://bucket/history"
    record_dataset("/gcs/bucket/history", first.fingerprint, "gs://bucket/dataset")

    assert not look("/gcs/bucket/history", f"images:{photos}").changed
    kept = f"history/datasets/{known_as(first)}.json"
    assert sorted(objects) == [kept, "history/latest.json"]
    assert json.loads(objects[kept])["uri"] == "gs://bucket/dataset"
    fates[0] = "before"
    with pytest.raises(SystemExit):
        look("gs://bucket/history", f"images:{photos}")
    assert events[-1].text.startswith("cannot write gs://bucket/history/")


def test_a_run_that_failed_is_not_remembered(photos, history):
    for _ in range(2):
        assert look(history, f"images:{photos}").reason == f"no run is recorded in {history}"


def test_force_trains_and_takes_nothing_from_a_cache(photos, history, tmp_path):
    first = train(history, f"images:{photos}", tmp_path)

    forced = [look(history, f"images:{photos}", force=True) for _ in range(2)]

    assert {(found.changed, found.reason) for found in forced} == {(True, "force is set")}
    assert len({known_as(first), *(known_as(found) for found in forced)}) == 3


def start_from_a_file(directory, champion, tmp_path):
    (directory / "model.keras").write_bytes(b"other weights")


def start_from_another_champion(directory, champion, tmp_path):
    publish_next(export(tmp_path / "better", model=b"better"), champion)


@pytest.mark.parametrize(
    ("start", "change"),
    [
        ("models", start_from_a_file),
        ("models/model.keras", start_from_a_file),
        ("champion", start_from_another_champion),
    ],
)
def test_other_weights_to_start_from_train(start, change, photos, history, tmp_path):
    """The option's text is the same, and nothing comes from a cache."""
    champion, models = tmp_path / "champion", tmp_path / "models"
    models.mkdir()
    (models / "model.keras").write_bytes(b"weights")
    publish_next(export(tmp_path / "first", model=b"good"), champion)
    options = {"train_options": {"initial_model": str(tmp_path / start)}}
    first = train(history, f"images:{photos}", tmp_path, **options)
    assert not look(history, f"images:{photos}", **options).changed

    change(models, champion, tmp_path)

    found = look(history, f"images:{photos}", **options)
    assert found.reason.startswith('content of initial_model was "sha256:')
    assert known_as(found) != known_as(first)


def test_weights_that_cannot_be_read_here_always_train(photos, history, tmp_path):
    options = {"train_options": {"initial_model": "/mnt/only/on/replicas"}}
    train(history, f"images:{photos}", tmp_path, **options)

    found = look(history, f"images:{photos}", **options)

    assert found.reason.startswith('content of initial_model was "not known (')


def test_without_a_history_every_run_trains_and_nothing_is_looked_at(tmp_path):
    found = [look("", f"images:{tmp_path}/missing") for _ in range(2)]

    assert [item.changed for item in found] == [True, True]
    assert known_as(found[0]) != known_as(found[1])
    record("", found[0], tmp_path / "missing")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A source of one's own in a module beside another one, and a function that writes it."""
    directory = tmp_path / "own"
    directory.mkdir()
    monkeypatch.syspath_prepend(str(directory))
    (directory / "own_helper.py").write_text("VERSION = 1\n")
    body = (
        "from pathlib import Path\n"
        "class Own:\n"
        "    class_names = ('a', 'b')\n"
        "    def __iter__(self): yield from ()\n"
    )

    def write(fingerprint=""):
        sys.modules.pop("own_source", None)
        (directory / "own_source.py").write_text(body + fingerprint)
        return "own_source:Own"

    return write


def test_a_plugin_without_a_fingerprint_always_trains(plugin, history, tmp_path):
    source = plugin()
    first = train(history, source, tmp_path)

    found = look(history, source)

    assert found.reason == (
        "whether the data has changed is not known: own_source:Own has no method fingerprint() -> str"
    )
    assert known_as(found) != known_as(first)


def test_a_plugin_says_when_its_data_changes(plugin, history, tmp_path):
    version = tmp_path / "version"
    version.write_text("monday")
    source = plugin(f"    def fingerprint(self): return Path({str(version)!r}).read_text()\n")
    train(history, source, tmp_path)
    assert not look(history, source).changed

    version.write_text("tuesday")

    assert look(history, source).reason == "the data has changed (tuesday, was monday)"


def test_what_a_plugin_imports_counts_as_its_code(plugin, history, tmp_path):
    source = plugin("    def fingerprint(self): return 'one'\n")
    first = train(history, source, tmp_path)

    (tmp_path / "own" / "own_helper.py").write_text("VERSION = 2\n")

    found = look(history, source)
    assert found.reason == "the code of own_source has changed"
    assert known_as(found) != known_as(first)


@pytest.mark.parametrize("option", [name for name in CODE_OF_A_USER if name != "model"])
def test_code_that_is_named_among_the_options_of_training_counts(
    option, photos, history, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(str(tmp_path / "own"))
    file = tmp_path / "own" / "own_option" / "inner.py"
    file.parent.mkdir(parents=True)
    file.write_text("VERSION = 1\n")
    (file.parent / "__init__.py").touch()
    reference = "own_option.inner:f"
    options = {option: [reference] if option == "callbacks" else reference}
    source = f"images:{photos}"
    train(history, source, tmp_path, train_options=options)
    assert not look(history, source, train_options=options).changed

    file.write_text("VERSION = 2\n")

    assert look(history, source, train_options=options).reason == "the code of own_option has changed"


@pytest.mark.parametrize("answer", ["''", "1 / 0"])
def test_a_fingerprint_that_is_none_is_one_line(answer, plugin, history, events):
    source = plugin(f"    def fingerprint(self): return {answer}\n")

    with pytest.raises(SystemExit) as caught:
        look(history, source)

    assert caught.value.code == 2
    assert events[-1].text.startswith("fingerprint() of 'own_source:Own' ")


def test_tables_and_the_images_that_they_name(photos, history, tmp_path):
    table = photos / "table.csv"
    table.write_text("label,size\ncat,1\ndog,2\n")
    train(history, f"table:{table}", tmp_path)
    touch(photos)
    assert not look(history, f"table:{table}").changed
    age(table)
    assert look(history, f"table:{table}").reason == "the data has changed (1 file, 23 B, as before)"

    table.write_text("label,image\ncat,cat/1.png\ndog,dog/1.png\n")
    with_images = look(history, f"table:{table}")
    touch(photos)
    assert known_as(look(history, f"table:{table}")) != known_as(with_images)


def test_records_a_label_file_and_prepared_datasets(photos, history, tmp_path):
    """Every file that a source may read is looked at, and no other."""
    (tmp_path / "labels.csv").write_text("path,label\ncat/1.png,cat\n")
    (tmp_path / "b.tfrecord").touch()
    (tmp_path / "a.tfrecord").touch()
    tfds = {"source": "tfds:digits:big", "data_options": {"data_dir": str(tmp_path / "tfds")}}
    (tmp_path / "tfds" / "digits" / "big" / "1.0.0").mkdir(parents=True)
    (tmp_path / "tfds" / "digits" / "big" / "1.0.0" / "info.json").touch()
    (tmp_path / "tfds" / "mnist").mkdir()
    looked = {
        "labels.csv": {
            "source": f"images:{photos}",
            "data_options": {"labels": str(tmp_path / "labels.csv")},
        },
        "b.tfrecord": {"source": f"tfrecord:{tmp_path}/*.tfrecord"},
        "tfds/digits/big/1.0.0/info.json": tfds,
    }
    for name, settings in looked.items():
        before = known_as(look(history, **settings))
        age(tmp_path / "tfds" / "mnist")
        assert known_as(look(history, **settings)) == before
        age(tmp_path / name)
        assert known_as(look(history, **settings)) != before


@pytest.mark.parametrize("source", ["digits", "tfds:mnist"])
def test_what_comes_in_a_package_changes_with_it(source, history):
    data = json.loads(look(history, source).state)["data"]

    assert data["known_by"] == "version"
    assert data["text"].split()[0] == {"digits": "scikit-learn", "tfds:mnist": "tensorflow-datasets"}[source]


def test_a_damaged_record_trains(photos, history, tmp_path):
    train(history, f"images:{photos}", tmp_path)
    (history / "latest.json").write_text("{")

    assert look(history, f"images:{photos}").reason.startswith(f"{history}/latest.json is not JSON: ")


def test_a_record_that_cannot_be_written_leaves_the_last(photos, history, tmp_path, events, monkeypatch):
    train(history, f"images:{photos}", tmp_path)
    found = look(history, f"images:{photos}", force=True)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_text", full)
    with pytest.raises(SystemExit) as caught:
        record(history, found, tmp_path / "exported", job="run-2")

    assert caught.value.code == 1
    assert events[-1].text.endswith("the run is not recorded")
    assert json.loads((history / "latest.json").read_text())["run"] == "run-1"


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("gs://no-such-bucket/champions", "cannot write gs://no-such-bucket/champions/.tmp-check"),
        ("/gcs/no-such-bucket/champions", "cannot write gs://no-such-bucket/champions/.tmp-check"),
        ("gs://bucket/damaged", "gs://bucket/damaged/champion.json is not JSON"),
        ("file/champions", "Not a directory; choose another champion_uri"),
        ("damaged", "champion.json is not JSON"),
        ("new/champion", "mount the disk that it is on, or begin anew with mkdir -p"),
    ],
)
def test_a_champion_that_could_not_be_replaced_is_said_before_anything_is_trained(
    place, message, photos, tmp_path, events, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "champion.json").write_text("{")

    with fake_storage("bucket", {"damaged/champion.json": b"{"}) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        with pytest.raises(SystemExit) as caught:
            look("", f"images:{photos}", champion_uri=place)

    assert caught.value.code == (3 if "no-such-bucket" in place else 2)
    assert message in events[-1].text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "file", "photos"]


LITERT = {"formats": ["litert"]}
MISFIT = "does not fit a label of kind"


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"label": "fare", "rules": ["accuracy >= 0.9"]}, MISFIT),  # the kind is inferred from the column
        ({"label": "regression:fare", "rules": ["r2 >= 0.5", "macro_f1 >= 0.5"]}, MISFIT),
        ({"label": "fare", "rules": ["rmse <= 60"]}, ""),
        ({"label": "class:zone", "rules": ["rmse <= 60"]}, MISFIT),
        ({"label": "fare;zone", "rules": ["fare.r2 >= 0.5", "zone.accuracy >= 0.9"]}, ""),
        ({"label": "fare;zone", "rules": ["zone.r2 >= 0.5"]}, MISFIT),
        ({"label": "zone", "rules": ["macro_f1 >= champion"]}, "but champion_uri is empty"),
        (
            {"label": "zone", "gate_options": LITERT},
            "can be converted to litert; the data are a table",
        ),
        (
            {
                "label": "zone",
                "gate_options": LITERT,
                "data_options": {"features": {"image": "zone"}},
            },
            "",
        ),
    ],
)
def test_rules_and_formats_that_do_not_fit_the_data_are_refused_before_preprocessing(
    settings, refused, tmp_path, events, monkeypatch
):
    monkeypatch.setattr(formats.util, "find_spec", lambda name: True)
    (tmp_path / "rows.csv").write_text("fare,zone\n1.5,a\n2.5,b\n")

    def found():
        return look("", f"table:{tmp_path / 'rows.csv'}", **settings)

    if refused:
        with pytest.raises(SystemExit):
            found()
        assert refused in events[-1].text
    else:
        assert found().changed


def test_a_format_without_its_converter_is_refused_before_anything_is_trained(photos, monkeypatch, events):
    monkeypatch.setattr(formats.util, "find_spec", lambda name: None)

    with pytest.raises(SystemExit):
        look("", f"images:{photos}", gate_options=LITERT)

    assert "litert needs ai_edge_litert, " in events[-1].text


@pytest.mark.parametrize("name", ["champion_uri", "history_uri"])
def test_on_the_platform_nothing_is_remembered_or_published_in_a_container(
    name, photos, tmp_path, monkeypatch, events
):
    monkeypatch.setattr(run_directory, "_BUCKETS", tmp_path)
    monkeypatch.delenv(run_directory.RunDirectory.VARIABLE, raising=False)
    settings = {"history_uri": "", "champion_uri": "", name: f"{tmp_path}/own"}

    with pytest.raises(SystemExit):
        look(settings.pop("history_uri"), f"images:{photos}", **settings)

    assert f"{name} is '{tmp_path}/own', a directory of this container" in events[-1].text
    assert not (tmp_path / "own").exists()


def test_a_history_that_cannot_be_written_is_said_at_once(photos, events):
    with pytest.raises(SystemExit):
        look(photos / "cat" / "1.png", f"images:{photos}")

    assert events[-1].text.endswith("cat/1.png: Not a directory; choose another history_uri")


@pytest.mark.parametrize("blessed", [True, False])
def test_the_champion_that_a_run_made_is_remembered(blessed, photos, history, tmp_path, events):
    champion = tmp_path / "champion"
    publish_next(export(tmp_path / "before"), champion)
    found = look(history, f"images:{photos}", champion_uri=str(champion))
    exported = export(tmp_path / "now", blessed=blessed)
    version = publish_next(exported, champion, run="run-1").version if blessed else ""
    publish_next(export(tmp_path / "of-another-run"), champion, run="run-2")

    record(history, found, exported, champion=champion)

    remembered = json.loads((history / "latest.json").read_text())
    assert (remembered["blessed"], remembered["champion"]) == (blessed, version)
    assert remembered["metrics"] == METRICS
    assert not look(history, f"images:{photos}", champion_uri=str(champion)).changed
    facts = {event.topic: event.value for event in events if event.kind == "fact"}
    assert facts.get("champion") == (str(champion / "versions" / version) if blessed else None)
    assert facts["blessed"] is blessed


@pytest.mark.parametrize(
    ("source", "filled_in"),
    [
        ("images:/data/{date}", "images:/data/2026-11-19"),
        ("tfrecord:gs://b/{date:%Y/%m/%d}/*.tfrecord", "tfrecord:gs://b/2026/11/19/*.tfrecord"),
        ("table:{date:%Y}-{date:%j}.csv", "table:2026-323.csv"),
        ("images:/data/{a,b}", "images:/data/{a,b}"),
        ("table:{date in America/Los_Angeles}-{date}.csv", "table:2026-11-19-2026-11-19.csv"),
        ("table:{date in Asia/Tokyo:%d}-{last 2 days in Asia/Tokyo:%d}.csv", "table:20-{19,20}.csv"),
        ("digits", "digits"),
    ],
)
def test_the_date_in_a_source(source, filled_in):
    assert fill_in_date(source, datetime(2026, 11, 19, 23, 30, tzinfo=UTC)) == filled_in


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("{datum}", "'{datum}', which is no field; write {date}"),
        ("{Date}", "which is no field"),
        ("{last 3 day}", "which is no field"),
        ("{date:YYYY-MM}", "which is no field"),
        ("{date:%Q}", "which is no field"),
        ("{date in Mars/Olympus}", "there is no such time zone"),
    ],
)
def test_another_field_is_refused_before_the_run(field: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        fill_in_date(f"images:gs://b/{field}", datetime.now(UTC))
    with pytest.raises(SettingsError, match=message):
        check_values("retrain", defaults(RETRAIN) | {"source": f"images:gs://b/{field}"}, here=False)


def test_a_date_is_a_day_of_the_schedules_zone() -> None:
    source = in_zone("a/{date:%d}/{last 2 days}/{date in UTC}", "America/Los_Angeles")
    assert source == "a/{date in America/Los_Angeles:%d}/{last 2 days in America/Los_Angeles}/{date in UTC}"
    at_22 = run_time("2026-11-20T06:00:00Z", "")
    assert fill_in_date(source, at_22) == "a/19/{2026-11-18,2026-11-19}/2026-11-20"


def test_a_window_of_days_ends_with_the_runs_day() -> None:
    day = datetime(2026, 3, 1, 23, 30, tzinfo=UTC)
    assert fill_in_date("a/{last 3 days}/b", day) == "a/{2026-02-27,2026-02-28,2026-03-01}/b"
    assert fill_in_date("{last 40 days:%Y%m}", day) == "{202601,202602,202603}"
    with pytest.raises(SettingsError, match="must be 1 to 400"):
        fill_in_date("{last 0 days}", day)


def test_a_table_of_bigquery_is_read_as_of_the_run():
    found = look("", "bigquery:p.shop.orders_{date:%Y} WHERE a > 1")
    assert found.source == "bigquery:p.shop.orders_2026@2026-11-20T06:00:00.000Z WHERE a > 1"
    query = "bigquery:SELECT a FROM b FOR SYSTEM_TIME AS OF '{}'"
    assert look("", query.format("{snapshot}")).source == query.format("2026-11-20T06:00:00.000Z")
    pinned = "bigquery:p.shop.orders@2026-11-01T00:00:00Z"
    assert look("", pinned).source == pinned


def test_the_scheduled_time_comes_before_that_of_creation():
    created = "2026-11-20T06:00:03Z"
    # A run that catches up is for a day of the past.
    assert run_time("2026-11-18T06:00:00Z", created).day == 18
    assert run_time("2026-11-18T23:00:00-02:00", created) == datetime(2026, 11, 19, 1, tzinfo=UTC)
    assert run_time("2026-11-19T06:00:00.123456789", created).isoformat()[:19] == "2026-11-19T06:00:00"
    # What the platform leaves of the placeholder where nothing was scheduled.
    for nothing in (
        "",
        "{{$.pipeline_job_schedule_time_utc}}",
        "1970-01-01T00:00:00Z",
        "1969-12-31T19:00:00-05:00",
    ):
        assert run_time(nothing, created).day == 20
    with pytest.raises(SettingsError, match="the run has no time"):
        run_time("", "never")


def test_the_day_of_a_scheduled_run_finds_its_data(photos, history, tmp_path):
    photos.rename(tmp_path / "2026-11-19")
    source = f"images:{tmp_path}/{{date}}"

    found = look(history, source, scheduled="2026-11-19T06:00:00Z")

    assert found.source == f"images:{tmp_path}/2026-11-19"
    assert json.loads(found.state)["data"]["text"] == "3 files, 27 B"


def test_differences_are_few_words():
    def state(settings, **code):
        data = Fingerprint(known_by="content", digest="1", text="1 file")
        return State(data=data, settings=settings, code=code)

    before = {"keras": "3.15.0", "own": "sha256:1"}
    after = {"keras": "3.15.1", "own": "sha256:2", "tensorflow": "2.21.0"}
    last = state({"gone": 1, "a": 1, "b": "x" * 100, "c": 1, "d": 1}, **before)
    now = state({"a": 1, "b": "y", "c": 2, "d": True}, **after)
    assert describe_changes(last, last) == []
    assert describe_changes(last, now) == [
        f'b was "{"x" * 56}..., is "y"',
        "c was 1, is 2",
        "gone was 1, is null",
        "3 more changes",
    ]
    found = describe_changes(state({}, **before), state({}, **after))
    assert found == [
        "keras was 3.15.0, is 3.15.1",
        "the code of own has changed",
        "tensorflow was missing, is 2.21.0",
    ]


def test_detecting_changes_loads_neither_tensorflow_nor_keras(photos, history):
    program = (
        "import sys; from tests.components.test_changes import look\n"
        "look(sys.argv[1], sys.argv[2])\n"
        "sys.exit(', '.join({'tensorflow', 'keras', 'sklearn', 'pyarrow'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", program, str(history), f"images:{photos}"], cwd=ROOT, check=True)
