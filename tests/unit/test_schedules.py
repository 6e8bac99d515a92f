"""Schedules: how schedules.toml is read, what has to be done about each, and in which order."""

from __future__ import annotations

import dataclasses
import datetime
import shutil
from pathlib import Path
from typing import Any

import pytest

from shardline.components.text import timestamp
from shardline.pipelines.check import Schedule
from shardline.pipelines.remote import load_schedules, plan_schedule, schedule_request
from shardline.pipelines.remote.schedules import NEW, Existing, SchedulePlan, schedule_body
from shardline.pipelines.settings import Environment
from shardline.trainer.base.errors import SettingsError
from tests.helpers.checks import pipeline

RIGHT = """
[schedules."every morning"]
cron = "TZ=Europe/Vienna 0 6 * * *"
pipeline = "../compiled/retrain.yaml"
max_run_count = 5
paused = true
[schedules."every morning".parameters]
epochs = 3
train_options = { callbacks = ["my.module:log"], max_time = 2.5 }
[schedules.registry]
cron = "TZ=UTC 0 0 * * *"
pipeline = "https://europe-west4-kfp.pkg.dev/p/r/retrain/latest"
"""


def write(path: Path, text: str) -> Path:
    file = path / "schedules.toml"
    file.write_text(text)
    return file


def test_schedules_are_read(tmp_path: Path) -> None:
    found = load_schedules(write(tmp_path, RIGHT))

    assert found["every morning"] == Schedule(
        display_name="every morning",
        cron="TZ=Europe/Vienna 0 6 * * *",
        pipeline=str(tmp_path / "../compiled/retrain.yaml"),
        parameters={"epochs": 3, "train_options": {"callbacks": ["my.module:log"], "max_time": 2.5}},
        max_run_count=5,
        paused=True,
    )
    assert found["registry"].pipeline.startswith("https://")


def test_parameters_override_those_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('epochs = 1\nsource = "digits"')
    declared = (
        'cron = "TZ=UTC 0 6 * * *"\npipeline = "p.yaml"\nparams = "run.toml"\nparameters = {epochs = 2}'
    )
    (found,) = load_schedules(write(tmp_path, f"[schedules.nightly]\n{declared}")).values()

    assert found.parameters == {"epochs": 2, "source": "digits"}
    (tmp_path / "run.toml").unlink()
    with pytest.raises(SettingsError, match=r"nightly: no parameter file .*run\.toml"):
        load_schedules(tmp_path / "schedules.toml")


def test_a_name_is_one_line(tmp_path: Path) -> None:
    lines = '[schedules."a\\nb"]\ncron = "TZ=UTC 0 6 * * *"\npipeline = "p.yaml"'
    with pytest.raises(SettingsError, match=r"without quotes and line breaks, got 'a\\nb'"):
        load_schedules(write(tmp_path, lines))


def test_the_example_is_right(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "settings" / "schedules.toml.example"
    (declared,) = load_schedules(Path(shutil.copy(example, tmp_path))).values()

    assert declared.paused is None
    # Every key is shown.
    text = example.read_text()
    assert [key for key in vars(declared) if key != "display_name" and key not in text] == []


@pytest.mark.parametrize(
    ("lines", "word"),
    [
        ("pausd = true", "paused"),
        ("parameters = { rate = nan }", "parameters is {'rate': nan}"),
        ("max_run_count = 0", "max_run_count must be at least 1, got 0"),
    ],
)
def test_a_key_that_is_wrong_is_named(tmp_path: Path, lines: str, word: str) -> None:
    right = {"cron": 'cron = "TZ=UTC 0 6 * * *"', "pipeline": 'pipeline = "a.yaml"'}
    rest = [text for key, text in right.items() if not lines.startswith(key)]
    file = write(tmp_path, "\n".join(["[schedules.nightly]", *rest, lines]))

    with pytest.raises(SettingsError, match=f"nightly.*{word}"):
        load_schedules(file)


@pytest.mark.parametrize(
    "text",
    [
        '[schedules.nightly]\ncron = "TZ=UTC 0 6 * * *"',
        "schedules = 3",
        "[schedules]\nnightly = 3",
        "[schedule.nightly]",
        "[schedules.'a\"b']\ncron='TZ=UTC 0 6 * * *'\npipeline='a'",
    ],
)
def test_what_is_no_file_of_schedules(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingsError, match=r"schedules\.toml"):
        load_schedules(write(tmp_path, text))


NOW = datetime.datetime(2026, 11, 20, 12, 0, 0, tzinfo=datetime.UTC)
ENVIRONMENT = Environment(project="my-project", location="europe-west4", pipeline_root="gs://bucket/root")
SPEC = pipeline(parameters={"epochs": "NUMBER_INTEGER"})


def declared(**fields: Any) -> Schedule:
    given = {"display_name": "nightly", "cron": "TZ=Europe/Vienna 0 6 * * *", "pipeline": "a.yaml"}
    return Schedule(**{**given, "parameters": {"epochs": 3}, **fields})


def request(wanted: Schedule, spec: Any = SPEC, environment: Environment = ENVIRONMENT) -> dict[str, Any]:
    return schedule_request(environment, spec, wanted.parameters)


def existing(wanted: Schedule | None = None, number: int = 1, content: Any = None, **fields: Any) -> Existing:
    """Returns a schedule as the platform has it some days after it was made as it is declared."""
    wanted = wanted or declared()
    begin = NOW - datetime.timedelta(days=10)
    return {
        "startTime": timestamp(begin),
        **schedule_body(wanted, content or request(wanted)),
        "name": f"{ENVIRONMENT.platform.parent}/schedules/{number}",
        "state": "PAUSED" if wanted.paused else "ACTIVE",
        "createTime": timestamp(begin + datetime.timedelta(minutes=number)),
        **fields,
    }


def plan(wanted: Schedule, *found: Existing, **context: Any) -> SchedulePlan:
    return plan_schedule(wanted, request(wanted, **context), found)


def calls(found: SchedulePlan) -> list[str]:
    """Returns the calls in short: "Create", "Pause 1"."""
    return [
        f"{step.call.removesuffix('Schedule')} {step.request.get('name', '').rpartition('/')[2]}".rstrip()
        for step in found.steps
    ]


def test_a_new_schedule_is_created() -> None:
    made = plan(declared())

    assert (made.action, calls(made)) == ("created", ["Create"])
    schedule = made.steps[0].request["schedule"]
    assert made.steps[0].request["parent"] == ENVIRONMENT.platform.parent
    assert schedule.pop("createPipelineJobRequest")
    assert (schedule.pop("displayName"), schedule.pop("cron")) == ("nightly", "TZ=Europe/Vienna 0 6 * * *")
    assert schedule == {"maxConcurrentRunCount": "1", "maxConcurrentActiveRunCount": "1"}
    assert calls(plan(declared(paused=True))) == ["Create", f"Pause {NEW}"]


def test_there_is_nothing_to_do_where_all_is_as_it_is_declared() -> None:
    wanted = declared(max_run_count=5, paused=False)
    made = plan(wanted, existing(wanted))

    assert (made.action, made.differences, made.steps) == ("nothing to do", (), ())


REPLACEMENT = ["Create", "Delete 1"]


@pytest.mark.parametrize(
    ("before", "after", "difference"),
    [
        ({}, {"cron": "TZ=UTC 0 7 * * *"}, ("cron", "TZ=Europe/Vienna 0 6 * * *", "TZ=UTC 0 7 * * *")),
        ({}, {"parameters": {"epochs": 4}}, ("parameters.epochs", "3", "4")),
        ({}, {"parameters": {}}, ("parameters.epochs", "3", "none")),
        ({"max_run_count": 3}, {}, ("max_run_count", "3", "none")),
    ],
)
def test_what_is_not_as_it_is_declared_is_replaced(before: Any, after: Any, difference: Any) -> None:
    made = plan(declared(**after), existing(declared(**before)))

    assert (made.action, calls(made)) == ("replaced", REPLACEMENT)
    assert list(made.differences) == [difference]


SA = "sa@my-project.iam.gserviceaccount.com"


@pytest.mark.parametrize(
    ("context", "what"),
    [
        ({"spec": pipeline(parameters={"epochs": "NUMBER_INTEGER"}, sdkVersion="kfp-3")}, "pipeline"),
        ({"environment": dataclasses.replace(ENVIRONMENT, service_account=SA)}, "environment"),
        ({"environment": dataclasses.replace(ENVIRONMENT, tags={"team": "a"})}, "environment"),
        ({"environment": dataclasses.replace(ENVIRONMENT, pipeline_root="gs://other")}, "environment"),
    ],
)
def test_drift_of_what_a_run_is_made_of_is_found(context: Any, what: str) -> None:
    made = plan(declared(), existing(), **context)

    assert calls(made) == REPLACEMENT
    assert [item.field for item in made.differences] == [what]


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        # Numbers travel as doubles.
        ({"runtimeConfig": {"parameterValues": {"epochs": 3.0}}}, []),
        # The label is right, and the parameters were edited elsewhere.
        ({"runtimeConfig": {"parameterValues": {"epochs": 9}}}, ["parameters.epochs"]),
        # What the platform writes in its own way is no drift where the label is right.
        ({"network": "projects/123/global/networks/default"}, []),
    ],
)
def test_differences_are_those_that_change_a_run(edit: Any, what: list[str]) -> None:
    content = request(declared())
    content["pipelineJob"] |= edit
    made = plan(declared(), existing(content=content))

    assert [item.field for item in made.differences] == what
    assert calls(made) == (REPLACEMENT if what else [])


def test_of_two_schedules_of_one_name_the_older_is_kept() -> None:
    made = plan(declared(), existing(number=2), existing(number=1))

    assert (made.action, calls(made)) == ("cleaned up", ["Delete 2"])


CHANGED = declared(parameters={"epochs": 4})


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        ([existing(), existing(CHANGED, 2)], ["Delete 1"]),
        # A second attempt to create it, where the answer to the first one was lost.
        ([existing(), existing(CHANGED, 2), existing(CHANGED, 3)], ["Delete 1", "Delete 3"]),
        ([existing(CHANGED, 2)], []),
        # Of one that was paused.
        ([existing(state="PAUSED"), existing(CHANGED, 2)], ["Pause 2", "Delete 1"]),
        ([existing(state="PAUSED"), existing(CHANGED, 2, state="PAUSED")], ["Delete 1"]),
    ],
)
def test_a_replacement_that_was_broken_off_is_finished(left: list[Existing], expected: list[str]) -> None:
    assert sorted(calls(plan(CHANGED, *left))) == sorted(expected)


def test_a_pause_by_hand_is_left_alone_and_outlives_a_replacement() -> None:
    paused = existing(state="PAUSED")

    assert plan(declared(), paused).action == "nothing to do"
    made = plan(CHANGED, paused)
    assert calls(made) == ["Create", f"Pause {NEW}", "Delete 1"]
    assert made.paused


@pytest.mark.parametrize(
    ("fields", "state", "expected"),
    [
        ({"paused": True}, "ACTIVE", ["Pause 1"]),
        ({"paused": False}, "PAUSED", ["Resume 1"]),
        ({"paused": True}, "PAUSED", []),
        ({"paused": False}, "ACTIVE", []),
    ],
)
def test_a_declared_state_is_enforced(fields: Any, state: str, expected: list[str]) -> None:
    made = plan(declared(**fields), existing(state=state))

    assert calls(made) == expected
    # Runs that were missed on purpose are not made up for.
    assert all(step.request.get("catchUp", False) is False for step in made.steps)


def test_a_completed_schedule_stays_until_it_is_declared_otherwise() -> None:
    wanted = declared(max_run_count=3)
    done = existing(wanted, state="COMPLETED")

    assert plan(wanted, done).action == "nothing to do"
    assert calls(plan(declared(max_run_count=9), done)) == REPLACEMENT
