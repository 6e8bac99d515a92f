"""Everything that a platform may do to a command, against every command that speaks to it.

What is refused for good ends with status 3 and one line that says what to do, and has changed nothing. What
passes is tried again and said so; where an answer was lost nothing is done twice.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from google.cloud.aiplatform_v1.types import PipelineJob, PipelineState, Schedule
from google.rpc import code_pb2

from shardline.components import vertex
from shardline.pipelines.cli.main import main
from shardline.trainer.base.errors import EXIT_PLATFORM
from tests.contract.conftest import enter
from tests.contract.fake.failures import Drop, permission_of
from tests.contract.fake.pipeline_jobs import PipelineOutcome
from tests.contract.fake.services import PROJECT, FakeServices
from tests.contract.fake.vertex import BUCKET, LOCATION, fake_vertex
from tests.helpers.checks import pipeline

pytestmark = pytest.mark.timeout(180)

#: More often than anybody tries.
ALWAYS = 1000
ACCOUNT = "tests@acme-vision.iam.gserviceaccount.com"
WHERE = {
    "VERTEX_PROJECT": PROJECT,
    "VERTEX_LOCATION": LOCATION,
    "VERTEX_PIPELINE_ROOT": f"gs://{BUCKET}/root",
    "VERTEX_REGISTRY": f"https://{LOCATION}-kfp.pkg.dev/{PROJECT}/pipelines",
}
SCHEDULES = """
[schedules.nightly]
cron = "TZ=Europe/Vienna 0 0 29 2 *"
pipeline = "toy.yaml"
parameters = { epochs = 3 }
"""

#: Commands, and the call that each of them cannot do without. The run "run-1" is running; the schedule
#: "standing" is there, and active.
COMMANDS = {
    "CreatePipelineJob": ("submit", "toy.yaml", "--param", "epochs=3", "--job-id", "mine"),
    "GetPipelineJob": ("status", "run-1"),
    "ListPipelineJobs": ("status",),
    "CancelPipelineJob": ("cancel", "run-1"),
    "UploadPipeline": ("upload", "toy.yaml"),
    "CreateTag": ("upload", "toy.yaml", "--tag", "latest"),
    "ListSchedules": ("schedule", "list"),
    "CreateSchedule": ("schedule", "apply", "--file", "schedules.toml"),
    "DeleteSchedule": ("schedule", "delete", "standing"),
}
#: One for each way in which commands speak to the platform.
WAYS = ("CreatePipelineJob", "GetPipelineJob", "UploadPipeline", "ListSchedules")
#: Those of them that make something, by gRPC and by REST.
MAKING = ("CreatePipelineJob", "UploadPipeline")
#: Calls that are not made again when it is not known whether they have been done: the command is.
UNCERTAIN = ("CreateSchedule",)


class Waiting:
    """A run that lasts until it is cancelled."""

    def __init__(self) -> None:
        self.stop = threading.Event()

    def __call__(self, job: PipelineJob) -> PipelineOutcome:
        self.stop.wait()
        return PipelineOutcome()

    def cancel(self, job: PipelineJob) -> None:
        self.stop.set()


def first(chosen: Collection[str], methods: Collection[str]) -> list[Any]:
    """Returns methods as parameters; those that are not among the chosen are left to make test-all."""
    return [pytest.param(one, marks=[] if one in chosen else pytest.mark.matrix) for one in methods]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServices]:
    """A directory with a pipeline and schedules, and a platform on which a run is running."""
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(pipeline(parameters={"epochs": "NUMBER_INTEGER"})))
    monkeypatch.chdir(tmp_path)
    for name, value in WHERE.items():
        monkeypatch.setenv(name, value)
    run = Waiting()
    with fake_vertex(tmp_path, run_pipeline=run) as vertex:
        enter(vertex.environment, monkeypatch)
        assert shardline(*COMMANDS["CreatePipelineJob"][:-1], "run-1").exit_code == 0
        (tmp_path / "schedules.toml").write_text(SCHEDULES.replace("nightly", "standing"))
        assert shardline(*COMMANDS["CreateSchedule"]).exit_code == 0
        (tmp_path / "schedules.toml").write_text(SCHEDULES)
        vertex.services.calls.clear()
        yield vertex.services
        run.stop.set()


def shardline(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def state(fake: FakeServices) -> str:
    """Returns all that commands can change, as text."""
    runs = {name: job.state.name for name, job in fake.pipeline_jobs.items()}
    schedules = {name: (item.display_name, item.state.name) for name, item in fake.schedules.items()}
    packages = {
        name: (sorted(package.versions), package.tags) for name, package in fake.registry.packages.items()
    }
    return json.dumps([runs, schedules, packages])


def refused(result: Result) -> str:
    """Returns the one line of a command that the platform has refused."""
    assert result.exit_code == EXIT_PLATFORM, result.output
    (line,) = result.stderr.splitlines()
    assert "Traceback" not in result.output
    return line


@pytest.mark.parametrize("method", first(WAYS, COMMANDS))
def test_a_missing_permission_is_named(fake: FakeServices, method: str) -> None:
    before = state(fake)
    fake.fail(method, code_pb2.PERMISSION_DENIED, times=ALWAYS)
    line = refused(shardline(*COMMANDS[method]))

    assert f"permission {permission_of(method)} is missing on projects/{PROJECT}" in line
    assert f"to {ACCOUNT}" in line
    assert "grant roles/" in line
    assert fake.calls.count(method) == 1
    if method != "CreateTag":  # the version itself is there by then, and the next attempt goes on from it
        assert state(fake) == before


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (code_pb2.NOT_FOUND, "not found: Requested entity was not found; check the name"),
        (code_pb2.INVALID_ARGUMENT, "the platform refused it: a field is wrong"),
        (code_pb2.UNAUTHENTICATED, "not signed in"),
    ],
)
@pytest.mark.parametrize(
    "method", first(MAKING, ["CreatePipelineJob", "CancelPipelineJob", "CreateSchedule"])
)
def test_what_is_refused_for_good_is_not_tried_again(
    fake: FakeServices, method: str, code: int, words: str
) -> None:
    before = state(fake)
    fake.fail(method, code, "a field is wrong" if code == code_pb2.INVALID_ARGUMENT else "", times=ALWAYS)
    assert words in refused(shardline(*COMMANDS[method]))
    # With a new token it is worth an attempt.
    assert fake.calls.count(method) == (2 if code == code_pb2.UNAUTHENTICATED else 1)
    assert state(fake) == before


def test_an_id_that_is_taken_is_a_conflict(fake: FakeServices) -> None:
    line = refused(shardline(*COMMANDS["CreatePipelineJob"][:-1], "run-1"))
    assert "it exists already" in line
    assert "run-1" in line


@pytest.mark.parametrize("command", ["status", "cancel"])
def test_what_is_not_there_is_named(fake: FakeServices, command: str) -> None:
    line = refused(shardline(command, "nosuch"))
    assert "not found: The PipelineJob does not exist" in line
    assert f"projects/{PROJECT}/locations/{LOCATION}/pipelineJobs/nosuch" in line


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (code_pb2.RESOURCE_EXHAUSTED, "Quota exceeded for quota metric"),
        (code_pb2.UNAVAILABLE, "the service failed or the connection was lost (503 service unavailable"),
    ],
)
@pytest.mark.parametrize("method", first(MAKING, WAYS))
def test_patience_ends(
    fake: FakeServices, monkeypatch: pytest.MonkeyPatch, method: str, code: int, words: str
) -> None:
    monkeypatch.setattr(vertex, "_RETRY_S", 0.5)
    fake.fail(method, code, times=ALWAYS)
    result = shardline(*COMMANDS[method])
    assert words in refused(result)
    assert "trying again" in result.output


def done_once(fake: FakeServices, method: str) -> bool:
    """Whether what a command is there for is done, and once."""
    schedules = [(item.display_name, item.state) for item in fake.schedules.values()]
    standing, active = "standing", Schedule.State.ACTIVE
    packages = list(fake.registry.packages.values())
    checks: dict[str, Callable[[], bool]] = {
        "CreatePipelineJob": lambda: len(fake.pipeline_jobs) == 2,
        "CancelPipelineJob": lambda: (
            [job.state for job in fake.pipeline_jobs.values()] == [PipelineState.PIPELINE_STATE_CANCELLED]
        ),
        "UploadPipeline": lambda: [len(package.versions) for package in packages] == [1],
        "CreateTag": lambda: [list(package.tags) for package in packages] == [["latest"]],
        "CreateSchedule": lambda: sorted(schedules) == [("nightly", active), (standing, active)],
        "DeleteSchedule": lambda: not schedules,
    }
    return checks[method]() if method in checks else True


@pytest.mark.parametrize(
    ("method", "code"),
    [
        *((method, code_pb2.UNAVAILABLE) for method in WAYS),
        *(
            pytest.param(method, code, marks=pytest.mark.matrix)
            for method in COMMANDS
            for code in (code_pb2.RESOURCE_EXHAUSTED, code_pb2.UNAVAILABLE)
            if code == code_pb2.RESOURCE_EXHAUSTED or method not in (*WAYS, *UNCERTAIN)
        ),
    ],
)
def test_what_passes_is_tried_again(fake: FakeServices, method: str, code: int) -> None:
    fake.fail(method, code, times=2)
    result = shardline(*COMMANDS[method])
    assert result.exit_code == 0, result.output
    assert result.output.count("trying again") == 2
    assert fake.calls.count(method) >= 3
    assert done_once(fake, method)


def test_a_schedule_is_not_made_again_where_it_may_be_there(fake: FakeServices) -> None:
    """Names of schedules are not unique, and it has no id of our choice: the command looks first."""
    fake.fail("CreateSchedule", code_pb2.UNAVAILABLE)
    refused(shardline(*COMMANDS["CreateSchedule"]))
    assert fake.calls.count("CreateSchedule") == 1
    assert shardline(*COMMANDS["CreateSchedule"]).exit_code == 0
    assert done_once(fake, "CreateSchedule")


@pytest.mark.parametrize("drop", ["answer", pytest.param("request", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("method", first((*MAKING, *UNCERTAIN), COMMANDS))
def test_a_lost_connection_does_nothing_twice(fake: FakeServices, method: str, drop: Drop) -> None:
    fake.fail(method, drop=drop)
    result = shardline(*COMMANDS[method])
    if method in UNCERTAIN:
        assert result.exit_code in (0, EXIT_PLATFORM), result.output
        result = shardline(*COMMANDS[method])
    assert result.exit_code == 0, result.output
    assert done_once(fake, method)


def test_a_large_upload_is_cut_off_in_the_middle(fake: FakeServices) -> None:
    with Path("toy.yaml").open("a") as file:
        file.write("#" * 2_000_000)
    fake.fail("UploadPipeline", drop="request", times=2)
    result = shardline(*COMMANDS["CreateTag"])
    assert result.exit_code == 0, result.output
    assert done_once(fake, "UploadPipeline")
    assert done_once(fake, "CreateTag")


@pytest.mark.parametrize("method", first(MAKING, WAYS))
def test_a_slow_answer_is_waited_for(fake: FakeServices, method: str) -> None:
    fake.fail(method, delay_s=0.7)
    result = shardline(*COMMANDS[method])
    assert result.exit_code == 0, result.output
    assert "trying again" not in result.output
    assert done_once(fake, method)


@pytest.mark.parametrize("method", ["CreatePipelineJob", "CreateSchedule"])
def test_an_answer_that_is_too_late_makes_nothing_twice(
    fake: FakeServices, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(vertex, "_TIMEOUT_S", 0.5)
    fake.fail(method, delay_s=1.5)
    result = shardline(*COMMANDS[method])
    fake.settle()
    if method in UNCERTAIN:
        assert result.exit_code == EXIT_PLATFORM, result.output
        result = shardline(*COMMANDS[method])
    assert result.exit_code == 0, result.output
    assert done_once(fake, method)


@pytest.mark.parametrize("method", ["UploadPipeline", "CreateTag"])
def test_a_token_that_expires_meanwhile_is_replaced(fake: FakeServices, method: str) -> None:
    """The call before is the last for which the first token is good."""
    fake.tokens.expire_after({"UploadPipeline": "GetVersion", "CreateTag": "UploadPipeline"}[method])
    result = shardline(*COMMANDS["CreateTag"])
    assert result.exit_code == 0, result.output
    assert done_once(fake, "CreateTag")


def test_the_token_of_a_person_who_has_signed_in_is_replaced(
    fake: FakeServices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What 'gcloud auth application-default login' leaves, in place of a service account's key."""
    person = {"type": "authorized_user", "client_id": "1", "client_secret": "2", "refresh_token": "3"}
    (tmp_path / "person.json").write_text(json.dumps({**person, "quota_project_id": PROJECT}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "person.json"))
    fake.tokens.expire_after("GetPipelineJob")
    result = shardline(*COMMANDS["CancelPipelineJob"])
    assert result.exit_code == 0, result.output
    assert (fake.calls.count("CancelPipelineJob"), fake.tokens.refused) == (2, 1)
    assert done_once(fake, "CancelPipelineJob")
