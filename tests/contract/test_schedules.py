"""Schedules, applied with the real client against the fake."""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from google.cloud.aiplatform_v1.types import CreateNotebookExecutionJobRequest, Schedule
from google.rpc import code_pb2

from shardline.pipelines.cli.main import main
from shardline.pipelines.project import write_project
from tests.contract.fake.services import PROJECT
from tests.contract.fake.vertex import BUCKET, LOCATION, FakeVertex
from tests.helpers.checks import pipeline

pytestmark = pytest.mark.timeout(120)

#: No run is near it, so that nothing has to be waited for.
CALM = "TZ=Europe/Vienna 0 0 29 2 *"
NEXT = "Tue 2028-02-29 00:00 CET (23:00 UTC)"
WHERE = {
    "VERTEX_PROJECT": PROJECT,
    "VERTEX_LOCATION": LOCATION,
    "VERTEX_PIPELINE_ROOT": f"gs://{BUCKET}/root",
}


@pytest.fixture
def workplace(vertex_environ: FakeVertex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeVertex:
    """A directory with a pipeline, and the fake around it."""
    spec = pipeline(
        parameters={"epochs": "NUMBER_INTEGER", "day": "STRING", "source": "STRING"}, sdkVersion="kfp-2"
    )
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(spec))
    monkeypatch.chdir(tmp_path)
    for name, value in WHERE.items():
        monkeypatch.setenv(name, value)
    declare()
    return vertex_environ


def declare(epochs: int = 3, cron: str = CALM, name: str = "nightly", **keys: Any) -> None:
    """Writes schedules.toml."""
    content = {"cron": cron, "pipeline": "toy.yaml", **keys}
    source = "table:{date}.csv"
    lines = [f"{key} = {json.dumps(value)}" for key, value in content.items()]
    day = "{{$.pipeline_job_schedule_time_utc}}"
    Path("schedules.toml").write_text(
        "\n".join(
            [
                f"[schedules.{name}]",
                *lines,
                f'parameters = {{ epochs = {epochs}, day = "{day}", source = "{source}" }}',
            ]
        )
    )


def shardline(verb: str, *arguments: str) -> Result:
    """Runs `shardline schedule VERB` in this process."""
    file = ["--file", "schedules.toml"] if verb == "apply" else []
    return CliRunner().invoke(main, ["schedule", verb, *file, *arguments])


def done(verb: str, *arguments: str) -> str:
    """Runs a verb that succeeds, and returns what it prints."""
    result = shardline(verb, *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def is_done() -> bool:
    """Whether there is nothing left to do."""
    code = shardline("apply", "--dry-run", "--check").exit_code
    assert code in (0, 1)
    return code == 0


def only(fake: FakeVertex) -> Schedule:
    (schedule,) = fake.services.schedules.values()
    return schedule


def written(fake: FakeVertex) -> list[str]:
    """Returns the calls that change something, and forgets all."""
    calls = [name for name in fake.services.calls if not name.startswith(("List", "Get"))]
    fake.services.calls.clear()
    return calls


def fired(fake: FakeVertex, at: datetime.datetime) -> list[float]:
    """Lets a moment come, and returns the epochs of the runs that all schedules together start at it."""
    names = list(fake.services.schedules)
    jobs = [job for name in names if (job := fake.services.fire(name, at)) is not None]
    return [job.runtime_config.parameter_values["epochs"] for job in jobs]


def later(**delta: float) -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) + datetime.timedelta(**delta)


def test_apply_makes_it_so_and_twice_is_once(workplace: FakeVertex) -> None:
    (planned,) = json.loads(done("apply", "--dry-run", "--json"))["schedules"]
    assert (planned["name"], planned["action"]) == ("nightly", "created")
    assert not is_done()
    assert written(workplace) == []

    said = done("apply", "nightly", "nightly")
    assert said.startswith(f"nightly: created; fires next {NEXT}\n")
    assert "proof: " in said
    assert written(workplace) == ["CreateSchedule"]
    before = Schedule.to_dict(only(workplace))
    request = planned["requests"][0]["request"]["schedule"]
    labels = request["createPipelineJobRequest"]["pipelineJob"]["labels"]
    assert labels == dict(only(workplace).create_pipeline_job_request.pipeline_job.labels)
    assert is_done()
    assert done("apply") == f"nightly: nothing to do; fires next {NEXT}\n"
    assert written(workplace) == []
    assert Schedule.to_dict(only(workplace)) == before


def test_a_new_project_is_retrained_every_week(
    workplace: FakeVertex, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_project(Path("project"), "table", "leafnet", "shardline")
    monkeypatch.chdir("project")
    for name in WHERE:
        monkeypatch.delenv(name)
    for file in (Path("settings.toml"), Path("params/vertex.toml")):
        file.write_text(file.read_text().replace("my-project", PROJECT).replace("my-bucket", BUCKET))

    def typed(words: str) -> str:
        result = CliRunner().invoke(main, words.split())
        assert result.exit_code == 0, result.output
        return result.output

    typed("compile")
    checked = typed("check schedules.toml")
    assert "error" not in checked
    assert "what the image holds" not in checked
    assert "leafnet-weekly: would be created" in typed("schedule apply --dry-run")
    assert written(workplace) == []
    created = typed("schedule apply")
    assert re.search(r"^leafnet-weekly: created; fires next Mon \S+ 06:00 UTC$", created, re.MULTILINE)
    assert written(workplace) == ["CreateSchedule"]
    assert "leafnet-weekly: nothing to do" in typed("schedule apply")
    assert written(workplace) == []
    assert re.search("^leafnet-weekly .* active .*0 6 [*] [*] 1 ", typed("schedule list"), re.MULTILINE)
    job = only(workplace).create_pipeline_job_request.pipeline_job
    values = dict(job.runtime_config.parameter_values)
    assert (values["source"], values["epochs"]) == ("leafnet.source:Source", 30)
    assert values["history_uri"] == f"gs://{BUCKET}/history/leafnet"


def test_a_run_is_what_was_declared(workplace: FakeVertex) -> None:
    declare()
    done("apply")
    schedule = only(workplace)
    assert (schedule.cron, schedule.max_concurrent_active_run_count) == (CALM, 1)

    job = workplace.services.fire(schedule.name, schedule.next_run_time)
    assert job is not None
    values = dict(job.runtime_config.parameter_values)
    source = "table:{date in Europe/Vienna}.csv"
    assert values == {"epochs": 3, "day": "2028-02-28T23:00:00Z", "source": source}
    assert job.runtime_config.gcs_output_directory == f"gs://{BUCKET}/root"
    assert set(job.labels) >= {"shardline-template", "shardline-request"}


def test_other_parameters_are_another_schedule(workplace: FakeVertex) -> None:
    done("apply")
    name = only(workplace).name
    declare(epochs=4)
    planned = done("apply", "--dry-run")
    assert planned.startswith("nightly: would be replaced\n")
    assert "parameters.epochs: 3 -> 4" in planned
    written(workplace)

    done("apply")
    assert written(workplace) == ["CreateSchedule", "DeleteSchedule"]
    assert only(workplace).name != name
    assert fired(workplace, later(minutes=1)) == [4]
    assert is_done()


#: How `apply` ends: the call at which it does, and whether that one is done.
DEATHS = [("CreateSchedule", False), ("CreateSchedule", True), ("DeleteSchedule", False)]


@pytest.mark.parametrize(("method", "answer_is_lost"), DEATHS)
@pytest.mark.parametrize(
    "paused", [False, pytest.param(True, marks=pytest.mark.matrix)], ids=["active", "paused"]
)
def test_apply_that_died_anywhere_is_repaired_by_the_next(
    workplace: FakeVertex, method: str, answer_is_lost: bool, paused: bool
) -> None:
    done("apply")
    if paused:
        only(workplace).state = Schedule.State.PAUSED
    declare(epochs=4)
    if answer_is_lost:
        workplace.services.fail(method, drop="answer")
    else:
        workplace.services.fail(method, code_pb2.PERMISSION_DENIED)
    died = shardline("apply")
    assert died.exit_code == 3
    assert "Traceback" not in died.output
    assert not is_done()

    done("apply")
    expected = Schedule.State.PAUSED if paused else Schedule.State.ACTIVE
    assert only(workplace).state == expected
    assert fired(workplace, later(minutes=2)) == ([] if paused else [4])
    assert is_done()


def test_a_second_schedule_of_the_name_is_seen_and_removed(workplace: FakeVertex) -> None:
    done("apply")
    twin = Schedule(only(workplace))
    twin.name = f"{twin.name}7"
    workplace.services.schedules[twin.name] = twin

    assert "cleaned up" in done("apply")
    assert only(workplace).name != twin.name


def test_a_schedule_of_notebooks_is_left_alone(workplace: FakeVertex) -> None:
    other = Schedule(
        name=f"projects/123456/locations/{LOCATION}/schedules/77",
        display_name="nightly",
        cron=CALM,
        create_notebook_execution_job_request=CreateNotebookExecutionJobRequest(parent="x"),
    )
    workplace.services.schedules[other.name] = other
    done("apply")
    done("delete", "nightly")

    assert list(workplace.services.schedules) == [other.name]


@pytest.mark.parametrize(
    ("labels", "pipeline_name", "message"),
    [({}, None, "was not made by Shardline"), (None, "other", "runs the pipeline 'other'")],
    ids=["another tool", "another pipeline"],
)
def test_a_schedule_of_others_is_neither_replaced_nor_deleted(
    workplace: FakeVertex, labels: Any, pipeline_name: str | None, message: str
) -> None:
    done("apply")
    foreign = only(workplace)
    job = foreign.create_pipeline_job_request.pipeline_job
    if labels is not None:
        job.labels = labels
    if pipeline_name:
        job.pipeline_spec = {"pipelineInfo": {"name": pipeline_name}}
    declare(epochs=4)
    written(workplace)

    for arguments in (("apply", "--dry-run"), ("apply",), *([("delete", "nightly")] if labels == {} else [])):
        refused = shardline(*arguments)
        assert refused.exit_code == 2, refused.output
        assert message in refused.output
        assert foreign.name in refused.output
    assert written(workplace) == []
    assert only(workplace) == foreign


def test_one_that_was_paused_on_the_platform_stays_so(workplace: FakeVertex) -> None:
    done("apply")
    only(workplace).state = Schedule.State.PAUSED
    assert done("apply") == "nightly: nothing to do; is paused\n"


def test_list_and_delete(workplace: FakeVertex) -> None:
    assert done("list") == f"no schedules in projects/{PROJECT}/locations/{LOCATION}\n"
    done("apply")
    heading, row = done("list").splitlines()
    assert heading.split() == ["NAME", "ID", "STATE", "CRON", "NEXT", "RUN", "RUNS"]
    assert NEXT in row
    assert json.loads(done("list", "--json"))["schedules"][0]["state"] == "ACTIVE"
    # Texts that others have written on the platform stay in their line.
    only(workplace).create_pipeline_job_request.pipeline_job.runtime_config.parameter_values["day"] = "a\nb"
    assert r"parameters.day: a\nb -> " in done("apply", "--dry-run")
    only(workplace).cron = "TZ=UTC\n0 0 29 2 *"
    assert r"TZ=UTC\n0" in done("list").splitlines()[1]

    assert done("delete", "nightly") == "nightly deleted\n"
    assert done("delete", "nightly") == "nightly: nothing to do\n"


def test_what_is_not_in_the_file_is_left_alone(workplace: FakeVertex) -> None:
    done("apply")
    declare(name="weekly")
    assert "not in schedules.toml, and left alone: nightly" in done("apply")

    names = sorted(item.display_name for item in workplace.services.schedules.values())
    assert names == ["nightly", "weekly"]


@pytest.mark.parametrize(
    ("keys", "given", "message"),
    [
        ({"pipeline": "no.yaml"}, "nightly", "schedules.nightly: no pipeline no.yaml"),
        ({"epochs": 2.5}, "nightly", "schedules.nightly: the parameter epochs"),
        ({}, "nigthly", "did you mean nightly?"),
        ({}, "--proven", "schedules.nightly: this file (sha256 "),  # which has not run here
    ],
)
def test_nothing_is_touched_where_a_declaration_is_wrong(
    workplace: FakeVertex, keys: Any, given: str, message: str
) -> None:
    declare(**keys)
    result = shardline("apply", given)

    assert result.exit_code == 2
    assert message in result.output
    assert workplace.services.calls == []
