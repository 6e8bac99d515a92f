"""What has to be done about a schedule, and in which order."""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any

import pytest

from shardline.components.text import timestamp
from shardline.pipelines.remote.environment import Environment
from shardline.pipelines.remote.schedules.declared import Declared
from shardline.pipelines.remote.schedules.plan import Action, Plan, make_plan, run_request, schedule_body
from shardline.pipelines.remote.schedules.steps import NEW, Existing, quiet_moment, read_existing
from tests.helpers.checks import pipeline

NOW = datetime.datetime(2026, 11, 20, 12, 0, 0, tzinfo=datetime.UTC)
ENVIRONMENT = Environment(project="my-project", location="europe-west4", pipeline_root="gs://bucket/root")
FAR = NOW + datetime.timedelta(days=30)
SPEC = pipeline(parameters={"epochs": "NUMBER_INTEGER"})


def declared(**fields: Any) -> Declared:
    given = {"display_name": "nightly", "cron": "TZ=Europe/Vienna 0 6 * * *", "pipeline": "a.yaml"}
    return Declared(**{**given, "parameters": {"epochs": 3}, **fields})


def request(wanted: Declared, spec: Any = SPEC, environment: Environment = ENVIRONMENT) -> dict[str, Any]:
    return run_request(environment, wanted, spec, wanted.parameters)


def existing(wanted: Declared | None = None, number: int = 1, content: Any = None, **fields: Any) -> Existing:
    """Returns a schedule as the platform has it some days after it was made as it is declared."""
    wanted = wanted or declared()
    begin = NOW - datetime.timedelta(days=10)
    found = {
        "startTime": timestamp(begin),
        **schedule_body(wanted, content or request(wanted), begin),
        "name": f"{ENVIRONMENT.platform.parent}/schedules/{number}",
        "state": "PAUSED" if wanted.paused else "ACTIVE",
        "createTime": timestamp(begin + datetime.timedelta(minutes=number)),
    }
    return dataclasses.replace(read_existing(found), **fields)


def asleep(wanted: Declared, number: int = 2, **fields: Any) -> Existing:
    """Returns a schedule that was created to replace another one, and not yet woken."""
    return existing(wanted, number, start_time=NOW + datetime.timedelta(days=365), **fields)


def plan(wanted: Declared, *found: Existing, now: datetime.datetime = NOW, **context: Any) -> Plan:
    return make_plan(wanted, request(wanted, **context), found, now)


def calls(found: Plan) -> list[str]:
    """Returns the steps in short: "Pause 1", "Update (the new schedule) startTime"."""
    short = []
    for step in found.steps:
        content = step.request
        words = [step.call.removesuffix("Schedule")]
        if step.call != "Wait":
            name = content.get("name") or content["schedule"].get("name", "")
            words += [name.rpartition("/")[2], content.get("updateMask", "")]
        short.append(" ".join(word for word in words if word))
    return short


def test_a_new_schedule_is_created_and_looked_at() -> None:
    made = plan(declared())

    assert made.action is Action.CREATE
    assert calls(made) == ["Create", f"Get {NEW}"]
    schedule = made.steps[0].request["schedule"]
    assert made.steps[0].request["parent"] == ENVIRONMENT.platform.parent
    assert {key: schedule[key] for key in schedule if key != "createPipelineJobRequest"} == {
        "displayName": "nightly",
        "cron": "TZ=Europe/Vienna 0 6 * * *",
        "maxConcurrentRunCount": 1,
        "maxConcurrentActiveRunCount": 1,
        "allowQueueing": False,
    }


def test_there_is_nothing_to_do_where_all_is_as_it_is_declared() -> None:
    wanted = declared(max_run_count=5, end_time=FAR, paused=False, allow_queueing=True)
    made = plan(wanted, existing(wanted))

    assert (made.action, made.differences, made.steps) == (Action.NOTHING, (), ())


@pytest.mark.parametrize(
    ("before", "after", "mask", "difference"),
    [
        (
            {},
            {"cron": "TZ=UTC 0 7 * * *"},
            "cron",
            ("cron", "TZ=Europe/Vienna 0 6 * * *", "TZ=UTC 0 7 * * *"),
        ),
        (
            {},
            {"max_concurrent_active_run_count": 2},
            "maxConcurrentActiveRunCount",
            ("max_concurrent_active_run_count", "1", "2"),
        ),
        ({}, {"allow_queueing": True}, "allowQueueing", ("allow_queueing", "no", "yes")),
        ({}, {"max_run_count": 3}, "maxRunCount", ("max_run_count", "none", "3")),
        ({}, {"end_time": FAR}, "endTime", ("end_time", "none", "2026-12-20T12:00:00Z")),
        (
            {},
            {"start_time": FAR},
            "startTime",
            ("start_time", "2026-11-10T12:00:00Z", "2026-12-20T12:00:00Z"),
        ),
    ],
)
def test_what_the_api_can_change_is_changed_in_place(
    before: Any, after: Any, mask: str, difference: tuple[str, str, str]
) -> None:
    made = plan(declared(**after), existing(declared(**before)))

    assert made.action is Action.UPDATE
    assert calls(made) == [f"Update 1 {mask}"]
    assert [dataclasses.astuple(item) for item in made.differences] == [difference]
    assert set(made.steps[0].request["schedule"]) == {"name", mask}


REPLACEMENT = ["Create", f"Get {NEW}", f"Update {NEW} startTime", "Delete 1"]


@pytest.mark.parametrize(
    ("before", "after", "difference"),
    [
        ({}, {"parameters": {"epochs": 4}}, ("parameters.epochs", "3", "4")),
        ({}, {"parameters": {}}, ("parameters.epochs", "3", "its default")),
        # The API cannot unset what is set.
        ({"max_run_count": 3}, {}, ("max_run_count", "3", "none")),
        ({"end_time": FAR}, {}, ("end_time", "2026-12-20T12:00:00Z", "none")),
        ({"allow_queueing": True}, {}, ("allow_queueing", "yes", "no")),
    ],
)
def test_what_it_cannot_change_is_replaced(before: Any, after: Any, difference: tuple[str, str, str]) -> None:
    made = plan(declared(**after), existing(declared(**before)))

    assert made.action is Action.REPLACE
    assert calls(made) == REPLACEMENT
    assert [dataclasses.astuple(item) for item in made.differences] == [difference]
    # It is created asleep, and woken for the next moments.
    create, _, wake, _ = made.steps
    assert create.request["schedule"]["startTime"] == "2027-11-20T12:00:00Z"
    assert wake.request["schedule"] == {"name": NEW, "startTime": "2026-11-20T12:00:15Z"}


@pytest.mark.parametrize(
    ("context", "what"),
    [
        ({"spec": pipeline(parameters={"epochs": "NUMBER_INTEGER"}, sdkVersion="kfp-3")}, ["pipeline"]),
        (
            {
                "environment": dataclasses.replace(
                    ENVIRONMENT, service_account="sa@my-project.iam.gserviceaccount.com"
                )
            },
            ["service_account"],
        ),
        ({"environment": dataclasses.replace(ENVIRONMENT, labels={"team": "a"})}, ["labels"]),
        ({"environment": dataclasses.replace(ENVIRONMENT, pipeline_root="gs://other")}, ["pipeline_root"]),
    ],
)
def test_drift_of_what_a_run_is_made_of_is_found(context: Any, what: list[str]) -> None:
    made = plan(declared(), existing(), **context)

    assert calls(made) == REPLACEMENT
    assert [item.what for item in made.differences] == what


def test_numbers_travel_as_doubles_and_are_no_drift() -> None:
    content = request(declared())
    content["pipelineJob"]["runtimeConfig"]["parameterValues"] = {"epochs": 3.0}

    assert plan(declared(), existing(content=content)).action is Action.NOTHING


def test_parameters_that_were_edited_elsewhere_are_drift_although_the_label_is_right() -> None:
    content = request(declared())
    content["pipelineJob"]["runtimeConfig"] = {"parameterValues": {"epochs": 9}}
    made = plan(declared(), existing(content=content))

    assert made.action is Action.REPLACE
    assert ("parameters.epochs", "9", "3") in [dataclasses.astuple(item) for item in made.differences]


def test_a_schedule_that_was_made_elsewhere_is_replaced() -> None:
    content = request(declared())
    del content["pipelineJob"]["labels"]
    made = plan(declared(), existing(content=content))

    assert calls(made) == REPLACEMENT
    assert [(item.what, item.before) for item in made.differences] == [("pipeline", "unknown")]


def test_of_two_schedules_of_one_name_the_one_that_is_right_is_kept() -> None:
    other = existing(declared(parameters={"epochs": 9}), 1)
    made = plan(declared(), other, existing(number=2))

    assert made.action is Action.RETIRE
    assert calls(made) == ["Delete 1"]


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        ({}, {}, 1),  # the older one
        ({"state": "PAUSED"}, {}, 2),  # the one that is in use
        ({"cron": "TZ=UTC 0 1 * * *"}, {}, 2),  # the one that needs no change
        ({"state": "COMPLETED"}, {"cron": "TZ=UTC 0 1 * * *"}, 2),
    ],
)
def test_of_two_schedules_that_start_the_same_runs_one_is_kept(first: Any, second: Any, kept: int) -> None:
    made = plan(declared(), existing(number=1, **first), existing(number=2, **second))

    assert calls(made)[-1] == f"Delete {3 - kept}"
    assert made.existing[0].name.endswith(f"/{kept}")


def test_a_pause_by_hand_is_left_alone_and_outlives_a_replacement() -> None:
    paused = existing(state="PAUSED")

    assert plan(declared(), paused).action is Action.NOTHING
    made = plan(declared(parameters={"epochs": 4}), paused)
    assert calls(made) == ["Create", f"Pause {NEW}", f"Get {NEW}", f"Update {NEW} startTime", "Delete 1"]
    assert made.paused


@pytest.mark.parametrize(
    ("paused", "state", "expected"),
    [
        (True, "ACTIVE", ["Pause 1"]),
        (False, "PAUSED", ["Resume 1"]),
        (True, "PAUSED", []),
        (False, "ACTIVE", []),
    ],
)
def test_a_declared_state_is_enforced(paused: bool, state: str, expected: list[str]) -> None:
    made = plan(declared(paused=paused), existing(state=state))

    assert calls(made) == expected
    assert [item.what for item in made.differences] == ["paused"] * len(expected)
    # Runs that were missed on purpose are not made up for.
    assert all(step.request.get("catchUp", False) is False for step in made.steps)


@pytest.mark.parametrize(
    ("paused", "state", "expected"),
    [
        (True, "ACTIVE", ["Pause 1", "Update 1 cron"]),
        (False, "PAUSED", ["Update 1 cron", "Resume 1"]),
    ],
)
def test_it_does_not_fire_in_between(paused: bool, state: str, expected: list[str]) -> None:
    assert calls(plan(declared(paused=paused, cron="TZ=UTC 0 1 * * *"), existing(state=state))) == expected


def test_a_new_schedule_that_is_to_be_paused_never_fires() -> None:
    made = plan(declared(paused=True))

    assert calls(made) == ["Create", f"Pause {NEW}", f"Get {NEW}", f"Update {NEW} startTime"]
    assert made.steps[0].request["schedule"]["startTime"] == "2027-11-20T12:00:00Z"


def test_a_replacement_sleeps_until_before_its_end() -> None:
    made = plan(declared(end_time=FAR, parameters={"epochs": 4}), existing())

    assert made.steps[0].request["schedule"]["startTime"] == "2026-12-20T11:59:59Z"


CHANGED = declared(parameters={"epochs": 4})


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        ([existing(), asleep(CHANGED)], ["Update 2 startTime", "Delete 1"]),
        # A second attempt to create it, where the answer to the first one was lost.
        ([existing(), asleep(CHANGED), asleep(CHANGED, 3)], ["Update 2 startTime", "Delete 1", "Delete 3"]),
        ([existing(), existing(CHANGED, 2)], ["Delete 1"]),
        ([existing(CHANGED, 2)], []),
        # Of one that was paused.
        ([existing(state="PAUSED"), asleep(CHANGED)], ["Pause 2", "Update 2 startTime", "Delete 1"]),
        ([existing(state="PAUSED"), asleep(CHANGED, state="PAUSED")], ["Update 2 startTime", "Delete 1"]),
        ([existing(state="PAUSED"), existing(CHANGED, 2, state="PAUSED")], ["Delete 1"]),
    ],
)
def test_a_replacement_that_was_broken_off_is_finished(left: list[Existing], expected: list[str]) -> None:
    assert calls(plan(CHANGED, *left)) == expected


def test_a_replacement_that_is_not_wanted_any_more_is_taken_back() -> None:
    assert calls(plan(declared(), existing(), asleep(CHANGED))) == ["Delete 2"]


def test_a_schedule_that_was_just_woken_is_not_woken_again() -> None:
    woken = existing(start_time=NOW + datetime.timedelta(seconds=15))

    assert plan(declared(), woken).action is Action.NOTHING


def test_a_start_that_has_passed_is_neither_sent_nor_compared() -> None:
    wanted = declared(start_time=NOW - datetime.timedelta(days=1))

    assert plan(wanted, existing()).action is Action.NOTHING
    assert "startTime" not in plan(wanted).steps[0].request["schedule"]


@pytest.mark.parametrize(
    ("after", "action"),
    [
        ({}, Action.NOTHING),
        ({"max_run_count": 9}, Action.REPLACE),
        ({"cron": "TZ=UTC 0 1 * * *"}, Action.REPLACE),
    ],
)
def test_a_completed_schedule_cannot_be_changed(after: Any, action: Action) -> None:
    before = {"max_run_count": 3}
    found = existing(declared(**before), state="COMPLETED")
    made = plan(declared(**{**before, **after}), found)

    assert made.action is action
    # There is nothing that could fire twice: the new one need not sleep.
    assert calls(made) in ([], ["Create", f"Get {NEW}", "Delete 1"])


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([], []),
        ([existing(declared(end_time=NOW), state="COMPLETED")], []),
        ([existing(declared(end_time=NOW))], []),  # it is about to end by itself
        ([existing()], ["Delete 1"]),
    ],
)
def test_where_the_declared_end_has_passed_nothing_is_left_that_fires(
    found: list[Existing], expected: list[str]
) -> None:
    assert calls(plan(declared(end_time=NOW), *found)) == expected


@pytest.mark.parametrize(
    ("crons", "now", "expected"),
    [
        (["TZ=UTC 0 6 * * *"], "05:00:00", "05:00:00"),
        (["TZ=UTC 0 6 * * *"], "05:59:29", "05:59:29"),
        (["TZ=UTC 0 6 * * *"], "05:59:31", "06:00:10"),
        (["TZ=UTC 0 6 * * *"], "06:00:05", "06:00:10"),  # it may be starting its run just now
        (["TZ=UTC 0 6 * * *"], "06:00:10", "06:00:10"),
        (["TZ=UTC 0 6 * * *", "TZ=UTC 1 6 * * *"], "05:59:40", "06:00:10"),
        (["TZ=UTC * * * * *"], "06:00:45", "06:01:10"),
        (["what the platform alone understands"], "06:00:00", "06:00:00"),
        (["TZ=No/Where 0 6 * * *"], "06:00:00", "06:00:00"),
    ],
)
def test_schedules_are_exchanged_at_a_quiet_moment(crons: list[str], now: str, expected: str) -> None:
    today = "2026-11-20T{}+00:00"
    moment = quiet_moment(crons, datetime.datetime.fromisoformat(today.format(now)))

    assert moment.isoformat() == today.format(expected)


def test_a_replacement_near_a_run_waits_for_it() -> None:
    now = datetime.datetime(2026, 11, 20, 4, 59, 50, tzinfo=datetime.UTC)  # 05:59:50 in Vienna
    made = plan(CHANGED, existing(), now=now)

    assert calls(made) == ["Create", f"Get {NEW}", "Wait", f"Update {NEW} startTime", "Delete 1"]
    assert made.steps[2].request == {"until": "2026-11-20T05:00:10Z"}
    assert made.steps[3].request["schedule"]["startTime"] == "2026-11-20T05:00:25Z"
