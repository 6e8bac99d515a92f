"""`shardline logs` and `shardline explain` for runs on the platform, and the exit handler there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from google.cloud.aiplatform_v1 import JobServiceClient, PipelineServiceClient
from google.cloud.aiplatform_v1.types import PipelineJob, PipelineTaskDetail
from google.rpc import code_pb2, status_pb2

from shardline.components.exit_handler import finish_run
from shardline.pipelines.cli.main import main
from tests.contract.conftest import enter
from tests.contract.fake.pipeline_jobs import PipelineOutcome
from tests.contract.fake.services import PROJECT, Outcome
from tests.contract.fake.vertex import BUCKET, LOCATION, FakeVertex, fake_vertex
from tests.helpers.webhook import Webhook, serve_webhook

pytestmark = pytest.mark.timeout(90)

PARENT = f"projects/{PROJECT}/locations/{LOCATION}"
OPTIONS = {"api_endpoint": f"{LOCATION}-aiplatform.googleapis.com"}
SPEC = {"pipelineInfo": {"name": "toy"}, "schemaVersion": "2.1.0", "deploymentSpec": {}, "root": {}}
CONTAINER = {"image_uri": "i:1"}
POOL = {"machine_spec": {"machine_type": "n1-standard-4"}, "replica_count": 1, "container_spec": CONTAINER}
KILLED = (
    "The replica workerpool1-0 exited with a non-zero status of 137. To find out more about why your job "
    "exited please check the logs: https://console.cloud.google.com/logs/viewer?project=123456"
)
State = PipelineTaskDetail.State


@dataclass
class Run:
    """A run on the fake, and the resource name of its custom job."""

    fake: FakeVertex
    training: str

    def say(self, *lines: str, replica: str = "workerpool0-0") -> None:
        labels = {"job_id": self.training.rpartition("/")[2], "task_name": replica}
        for line in lines:
            self.fake.services.logs.add(line, ("ml_job", labels), log=replica)


def detail(number: int, name: str, state: State, parent: int = 0, **values: Any) -> PipelineTaskDetail:
    return PipelineTaskDetail(task_id=number, task_name=name, state=state, parent_task_id=parent, **values)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    """Makes a run "toy-1" whose training failed with the message, or that succeeded without one."""
    told = {"message": ""}
    training: list[str] = []

    def train(job: object) -> Outcome:
        return Outcome(code_pb2.INTERNAL, told["message"]) if told["message"] else Outcome()

    def run(job: PipelineJob) -> PipelineOutcome:
        failed = bool(told["message"])
        group = State.FAILED if failed else State.SUCCEEDED
        resources = json.dumps({"resources": [{"resourceUri": f"https://x/v1/{training[0]}"}]})
        trained = detail(
            4, "train", group, parent=2, execution={"metadata": {"output:gcp_resources": resources}}
        )
        if failed:
            trained.executor_detail = {"container_detail": {"main_job": f"{PARENT}/customJobs/999"}}
            words = "The launcher exited with a non-zero status of 1."
            trained.error = status_pb2.Status(code=9, message=words)
        judged = detail(5, "export-validate", State.NOT_TRIGGERED if failed else State.SUCCEEDED, parent=2)
        if not failed:
            judged.outputs = {
                "exported": {"artifacts": [{"uri": f"gs://{BUCKET}/m", "metadata": {"blessed": True}}]},
                "metrics": {"artifacts": [{"metadata": {"accuracy": 0.75}}]},
            }
        exit_task = detail(6, "exit-handler", State.SUCCEEDED, parent=1)
        group_task = detail(2, "exit-handler-1", group, parent=1)
        tasks = [detail(1, "toy-1", group), group_task, trained, judged, exit_task]
        return PipelineOutcome(code_pb2.FAILED_PRECONDITION if failed else 0, "The DAG failed", tasks)

    with fake_vertex(tmp_path, train, run) as fake:
        enter(fake.environment, monkeypatch)
        monkeypatch.setenv("VERTEX_PROJECT", PROJECT)
        monkeypatch.setenv("VERTEX_LOCATION", LOCATION)

        def begin(message: str = "") -> Run:
            told.update(message=message)
            jobs = JobServiceClient(client_options=OPTIONS)
            content = {"display_name": "train", "job_spec": {"worker_pool_specs": [POOL]}}
            training.append(jobs.create_custom_job(parent=PARENT, custom_job=content).name)
            config = {"gcs_output_directory": f"gs://{BUCKET}/runs"}
            pipeline = {"display_name": "toy", "pipeline_spec": SPEC, "runtime_config": config}
            pipelines = PipelineServiceClient(client_options=OPTIONS)
            pipelines.create_pipeline_job(parent=PARENT, pipeline_job=pipeline, pipeline_job_id="toy-1")
            return Run(fake, training[0])

        yield begin


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with serve_webhook() as found:
        yield found


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def explained(*arguments: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(invoke("explain", "toy-1", "--json", *arguments).stdout)
    return content


def test_a_failed_run_is_explained(start: Callable[..., Run]) -> None:
    run = start(KILLED)
    kfp = ("[KFP Executor 2026-11-20 18:23:47,631 INFO]: Got executor_input:", "{", '    "inputs": {}', "}")
    run.say(*kfp, "epoch 1", "epoch 2", replica="workerpool1-0")
    run.say("the chief has nothing to say")

    result = invoke("explain", "toy-1")

    assert result.exit_code == 1, result.output
    assert result.stdout.splitlines() == [
        "toy failed: train, replica workerpool1-0",
        "  failed step   train, replica workerpool1-0",
        "  exit          SIGKILL (exit code 137): most likely out of memory, or killed by hand",
        f"  error         {KILLED}",
        *result.stdout.splitlines()[4:6],
        f"  run           https://console.cloud.google.com/vertex-ai/locations/{LOCATION}/pipelines/runs/toy-1"
        "?project=acme-vision",
        "  last lines    | epoch 1",
        "                | epoch 2",
    ]
    assert "likely cause  " in result.stdout.splitlines()[4]


def test_the_message_of_the_task_itself_counts_most(start: Callable[..., Run]) -> None:
    run = start("The replica workerpool0-0 exited with a non-zero status of 2.")
    run.say("train: error: epochs is 0; give 1 or more")

    explanation = explained()["explanation"]

    assert explanation["error"] == "epochs is 0; give 1 or more"
    assert explanation["next_step"] == "give 1 or more"
    assert explanation["exit"].startswith("exit code 2: a mistake")


def test_a_run_that_succeeded_has_nothing_to_explain(start: Callable[..., Run]) -> None:
    start()

    content = explained()

    assert content["verdict"] == "blessed"
    assert content["metrics"] == {"accuracy": 0.75}
    assert content["explanation"] is None
    assert invoke("explain", "toy-1").exit_code == 0


def test_without_the_logs_the_rest_is_explained(start: Callable[..., Run]) -> None:
    run = start(KILLED)
    run.fake.services.fail("ListLogEntries", code_pb2.PERMISSION_DENIED)

    result = invoke("explain", "toy-1")

    assert "SIGKILL (exit code 137)" in result.stdout
    assert "cannot read the logs: permission logging.logEntries.list is missing" in result.stderr


def test_a_run_that_is_not_there_is_named(start: Callable[..., Run]) -> None:
    start()

    result = invoke("explain", "toy-2")

    assert result.exit_code == 3
    assert "cannot read the run toy-2: not found" in result.output
    assert "Traceback" not in result.output


def test_logs_have_the_lines_of_every_replica_in_order(start: Callable[..., Run]) -> None:
    run = start()
    run.say("[KFP Executor 2026-11-20 18:23:47,631 INFO]: Got executor_input:", "{", "}")
    run.say("one", replica="workerpool0-0")
    run.say("two\nthree", replica="workerpool1-0")

    everything = ["train workerpool0-0 | one", "train workerpool1-0 | two", "train workerpool1-0 | three"]
    assert invoke("logs", "toy-1").stdout.splitlines() == everything
    assert invoke("logs", "toy-1", "--replica", "worker-0").stdout.splitlines() == everything[1:]
    assert invoke("logs", "toy-1", "--task", "train", "--follow").stdout.splitlines() == everything
    refused = invoke("logs", "toy-1", "--task", "tran")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "no task 'tran' has run; these have: train" in refused.output


SECRET = f"projects/{PROJECT}/secrets/hook/versions/latest"
NAME = f"projects/123456/locations/{LOCATION}/pipelineJobs/toy-1"


def exit_handler(state: str, history: Path, when: str = "failure") -> None:
    finish_run(
        **{"state": state, "error": "The DAG failed", "job_name": "toy-1", "job_resource_name": NAME},
        **{"project": PROJECT, "history_uri": str(history)},
        notify={"when": when, "webhook_secret": SECRET},
    )


def test_the_exit_handler_explains_records_and_tells(
    start: Callable[..., Run], tmp_path: Path, webhook: Webhook, capsys: pytest.CaptureFixture[str]
) -> None:
    run = start(KILLED)
    run.fake.services.project.secrets[SECRET] = webhook.url

    exit_handler("FAILED", tmp_path)

    ((name, text),) = webhook.messages[0].items()
    assert (name, text.split("\n")[0]) == ("text", "*toy failed: train, replica workerpool1-0*")
    record = json.loads((tmp_path / "runs" / "toy-1" / "run.json").read_text())
    assert record["state"] == "failed"
    assert record["explanation"]["failed"] == "train, replica workerpool1-0"
    printed = capsys.readouterr()
    assert "exit-handler: exit: SIGKILL" in printed.out
    assert webhook.url not in printed.out + printed.err


def test_a_secret_that_cannot_be_read_fails_nothing(
    start: Callable[..., Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(KILLED)

    exit_handler("FAILED", tmp_path)

    assert "no notification was sent to the webhook: cannot read the secret" in capsys.readouterr().out
    assert (tmp_path / "runs" / "toy-1" / "run.json").is_file()


def test_a_run_that_cannot_be_read_is_recorded_with_what_is_known(
    start: Callable[..., Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = start(KILLED)
    run.fake.services.fail("GetPipelineJob", code_pb2.PERMISSION_DENIED)

    exit_handler("FAILED", tmp_path, when="never")

    assert "cannot read the run toy-1: permission aiplatform.pipelineJobs.get" in capsys.readouterr().out
    record = json.loads((tmp_path / "runs" / "toy-1" / "run.json").read_text())
    assert record["explanation"]["error"] == "The DAG failed"
