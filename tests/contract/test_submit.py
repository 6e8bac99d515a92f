"""Runs on the platform: `shardline submit`, `status` and `cancel` with Google's own clients."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from google.cloud.aiplatform_v1.types import CreatePipelineJobRequest, PipelineJob, PipelineTaskDetail
from google.protobuf.json_format import ParseDict
from google.rpc import code_pb2, status_pb2

from shardline.components.runs import Run
from shardline.pipelines.cli.main import main
from tests.contract.conftest import enter
from tests.contract.fake.pipeline_jobs import PipelineOutcome
from tests.contract.fake.services import PROJECT, PROJECT_NUMBER
from tests.contract.fake.vertex import BUCKET, LOCATION, FakeVertex, fake_vertex
from tests.helpers import programs
from tests.helpers.checks import pipeline

pytestmark = pytest.mark.timeout(120)

RETRAIN = Path(__file__).parents[2] / "compiled" / "retrain.yaml"
PLACE = {
    "VERTEX_PROJECT": PROJECT,
    "VERTEX_LOCATION": LOCATION,
    "VERTEX_PIPELINE_ROOT": f"gs://{BUCKET}/runs",
}
NAME = f"projects/{PROJECT_NUMBER}/locations/{LOCATION}/pipelineJobs"
PIPELINE = pipeline(
    parameters={"count": "NUMBER_INTEGER", "note": {"parameterType": "STRING", "defaultValue": ""}},
    schemaVersion="2.1.0",
    sdkVersion="kfp-2",
)
COMMAND = "from shardline.pipelines.cli.main import main; main()"
SUBMIT = ["submit", "pipeline.yaml", "--param", "count=3"]
State = PipelineTaskDetail.State
NOON = datetime.datetime(2030, 1, 1, 12, tzinfo=datetime.UTC)


def task(number: int, name: str, state: State, parent: int = 0, error: str = "") -> PipelineTaskDetail:
    start = NOON + datetime.timedelta(minutes=number)
    return PipelineTaskDetail(
        task_id=number,
        task_name=name,
        parent_task_id=parent,
        state=state,
        create_time=start,
        start_time=start,
        end_time=start + datetime.timedelta(seconds=75),
        error=status_pb2.Status(code=9, message=error) if error else None,
    )


#: Set where a run with way=held may end.
_HELD = threading.Event()


def run_by_label(job: PipelineJob) -> PipelineOutcome:
    """Ends as the job's label says, with the task details that the platform has of such a run."""
    own = job.name.rpartition("/")[2]
    way = job.labels.get("way", "succeed")
    if way == "held":
        job.job_detail.task_details = [task(1, own, State.RUNNING), task(2, "train", State.RUNNING, 1)]
        _HELD.wait(60)
    if way == "fail":
        error = "The replica workerpool0-0 exited with a non-zero status of 137."
        details = [
            task(1, own, State.FAILED),
            task(2, "condition-1", State.FAILED, 1),
            task(3, "train", State.FAILED, 2, error),
            task(4, "register", State.NOT_TRIGGERED, 2),
        ]
        return PipelineOutcome(code_pb2.FAILED_PRECONDITION, "The DAG failed: [train].", details)
    loops = [task(number, "part", State.SUCCEEDED, 10 + number) for number in (3, 4)]
    groups = [task(10 + number, f"for-loop-{number}", State.SUCCEEDED, 1) for number in (3, 4)]
    cached = task(2, "preprocess", State.SKIPPED, 1)
    return PipelineOutcome(tasks=[task(1, own, State.SUCCEEDED), cached, *groups, *loops])


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVertex]:
    (tmp_path / "pipeline.yaml").write_text(yaml.safe_dump(PIPELINE))
    with fake_vertex(tmp_path, run_pipeline=run_by_label) as fake:
        enter({**fake.environment, **PLACE}, monkeypatch)
        monkeypatch.setenv("PYTHONPATH", os.getcwd())
        monkeypatch.chdir(tmp_path)
        _HELD.clear()
        yield fake
        _HELD.set()
        assert fake.refused == []


def shardline(*arguments: str) -> Result:
    """Runs a command in this process."""
    return CliRunner().invoke(main, list(arguments))


def submit(*arguments: str) -> Result:
    return shardline(*SUBMIT, *arguments)


def start(*arguments: str) -> subprocess.Popen[str]:
    """Starts a command as a person does, in a process of its own."""
    return programs.Popen(
        [sys.executable, "-c", COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@contextlib.contextmanager
def watched() -> Iterator[subprocess.Popen[str]]:
    """Starts and watches a run, toy-1, whose training is running."""
    with start(*SUBMIT, "--wait", "--tag", "way=held", "--job-id", "toy-1") as run:
        assert run.stdout is not None
        while run.stdout.readline() not in ("train: running\n", ""):
            pass
        yield run


def test_a_run_is_submitted_and_shown(fake: FakeVertex) -> None:
    with start(*SUBMIT, "-p", 'note=a "b" {c}', "--tag", "team=vision") as run:
        out, err = run.communicate(timeout=100)

    assert (run.returncode, err) == (0, "")
    ((name, job),) = fake.services.pipeline_jobs.items()
    job_id = name.rpartition("/")[2]
    said, address, proof, *_ = out.splitlines()
    assert re.fullmatch(r"proof: this file \(sha256 [0-9a-f]{12}\) has not run here, in runs", proof)
    console = f"https://console.cloud.google.com/vertex-ai/locations/{LOCATION}/pipelines/runs"
    assert (said, address) == (f"submitted {job_id}", f"{console}/{job_id}?project={PROJECT}")
    values = PipelineJob.to_dict(job)["runtime_config"]["parameter_values"]
    assert values == {"count": 3, "note": 'a "b" {c}'}
    assert job.labels["team"] == "vision"
    assert job.runtime_config.gcs_output_directory == f"gs://{BUCKET}/runs"


def test_dry_run_prints_what_would_be_sent_and_sends_nothing(fake: FakeVertex) -> None:
    shown = submit("--dry-run", "--json", "--job-id", "toy-1", "--no-cache")
    assert shown.exit_code == 0, shown.output
    assert fake.services.calls == []

    assert submit("--job-id", "toy-1", "--no-cache").exit_code == 0
    message = ParseDict(json.loads(shown.stdout), CreatePipelineJobRequest.pb(CreatePipelineJobRequest()))
    (sent,) = fake.services.pipeline_jobs.values()
    for field in ("display_name", "pipeline_spec", "runtime_config", "service_account"):
        assert getattr(PipelineJob.pb(sent), field) == getattr(message.pipeline_job, field)


def test_dry_run_shows_in_some_lines_what_matters(fake: FakeVertex) -> None:
    given = ["source=images:gs://acme/photos", "champion_uri=gs://acme/c", "epochs=3", "model=mnist_cnn"]
    done = submit_retrain(*given, VERTEX_SERVICE_ACCOUNT="runs@acme.iam.gserviceaccount.com")

    assert done.exit_code == 0, done.output
    lines = dict(re.findall(r"^(\S+(?: \S+)*) {2,}(.*)$", done.stdout, re.MULTILINE))
    assert lines["what"] == "retrain, retrain.yaml"
    assert lines["where"] == f"projects/{PROJECT}/locations/{LOCATION}, outputs below gs://{BUCKET}/runs"
    assert lines["as"] == "runs@acme.iam.gserviceaccount.com"
    assert lines["parameters"].startswith(
        "source=images:gs://acme/photos, champion_uri=gs://acme/c, epochs=3, "
    )
    assert "mnist_cnn" not in lines["parameters"]  # the default
    assert lines["image"] == f"{LOCATION}-docker.pkg.dev/{PROJECT}/r/shardline:1"
    assert lines["training"] == "chief 1 x n1-standard-8, workers 1 x n1-standard-8 (2 machines)"
    assert "has not run here, in runs" in lines["proof"]
    assert done.stdout.endswith("nothing was sent; --json shows the whole request\n")
    assert len(done.stdout.splitlines()) <= 11
    assert fake.services.calls == []


def test_a_file_is_sent_with_what_came_of_it_here(fake: FakeVertex) -> None:
    """A run directory as `shardline run` leaves it, of this very file."""
    done = submit("--proven")
    assert done.exit_code == 2
    assert "has not run here, in runs; --proven requires a run that succeeded: 'shardline run" in done.stderr
    ran("2027-01-30T09-00-00Z", state="failed")
    done = submit("--proven")
    assert "has run here once: 2027-01-30T09-00-00Z failed (no verdict); --proven requires" in done.stderr
    assert fake.services.calls == []

    ran("2027-01-29T09-00-00Z", state="succeeded", verdict="blessed", metrics={"accuracy": 0.98765})
    ran("2027-01-31T09-00-00Z", state="succeeded", sha256="of another file")
    done = submit("--proven")
    assert done.exit_code == 0, done.output
    words = "this file has run here 2 times: 2027-01-29T09-00-00Z succeeded (blessed, accuracy 0.9877)"
    assert f"\nproof: {words}\n" in done.stdout

    done = shardline("submit", "pipeline.yaml", "-pcount=6", "-pnote=a")
    assert f"proof: {words}, with other values of count, note\n" in done.stdout
    ran("2027-01-28T09-00-00Z", state="succeeded", parameters={"count": 6, "note": "a"})
    done = shardline("submit", "pipeline.yaml", "-pcount=6", "-pnote=a")
    assert "3 times: 2027-01-28T09-00-00Z succeeded (no verdict)\n" in done.stdout


def ran(name: str, **facts: Any) -> None:
    digest = hashlib.sha256(Path("pipeline.yaml").read_bytes()).hexdigest()
    values = {"sha256": digest, "parameters": {"count": 3, "note": ""}, **facts}
    Run(name=name, pipeline="toy", **values).write(Path("runs", name))


def test_mistakes_are_found_before_anything_is_sent(fake: FakeVertex) -> None:
    done = shardline("submit", "pipeline.yaml")
    assert done.exit_code == 2
    assert "the parameter count (int) has no default and must be set" in done.output
    assert fake.services.calls == []


def test_wait_ends_with_0_and_shows_the_tasks(fake: FakeVertex) -> None:
    fake.services.fail("GetPipelineJob", code_pb2.UNAVAILABLE, times=2)
    done = submit("--wait", "--job-id", "toy-1")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("cannot read the run toy-1 yet (503 service unavailable)") == 2
    assert "preprocess: from the cache\n" in done.stdout
    # Two of one name, in a loop: told apart by their path. What only holds others is not shown.
    assert "for-loop-3.part: succeeded after 1 min 15 s\n" in done.stdout
    assert re.search(r"^for-loop-4\.part +succeeded +1 min 15 s$", done.stdout, re.MULTILINE)
    assert re.search(r"^for-loop-4 ", done.stdout, re.MULTILINE) is None
    assert "\ntoy-1: succeeded" in done.stdout


def test_wait_ends_with_1_and_names_the_task_that_failed(fake: FakeVertex) -> None:
    done = submit("--wait", "--tag", "way=fail", "--job-id", "toy-1")
    assert done.exit_code == 1
    assert done.stderr == (
        "Error: the run toy-1 failed in the task train: The replica workerpool0-0 exited with a non-zero "
        "status of 137; 'shardline explain toy-1' says more\n"
    )
    assert re.search(r"^register +not run +", done.stdout, re.MULTILINE)


def test_json_is_all_there_is_on_standard_output(fake: FakeVertex) -> None:
    fake.services.fail("CreatePipelineJob", code_pb2.UNAVAILABLE)
    done = submit("--wait", "--json", "--tag", "way=fail", "--job-id", "toy-1")
    assert done.exit_code == 1
    content = json.loads(done.stdout)
    assert (content["run"], content["state"]) == ("toy-1", "failed")
    train = next(task for task in content["tasks"] if task["name"] == "train")
    assert train["path"] == "condition-1.train"
    assert train["seconds"] == 75
    assert "cannot submit the run toy-1 yet (503 service unavailable); trying again" in done.stderr
    assert "train: failed" in done.stderr


def test_a_run_is_cancelled_which_is_no_success(fake: FakeVertex) -> None:
    with watched() as run:
        assert "train" in shardline("status", "toy-1").stdout
        done = shardline("cancel", "toy-1")
        assert done.stdout == "asked the platform to cancel toy-1, which was running\n"
        _, err = run.communicate(timeout=60)

    assert run.returncode == 4
    assert err == "Error: the run toy-1 was cancelled\n"
    again = shardline("cancel", "toy-1", "--json")
    assert json.loads(again.stdout) == {"run": "toy-1", "asked": False, "state": "cancelled"}
    assert shardline("cancel", "toy-1").stdout == "nothing to cancel: toy-1 was cancelled\n"
    assert fake.services.calls.count("CancelPipelineJob") == 1
    assert shardline("status", "toy-1", "--wait").exit_code == 4


def test_a_run_goes_on_from_the_checkpoints_of_one_that_has_ended(fake: FakeVertex, tmp_path: Path) -> None:
    text = {"parameterType": "STRING", "defaultValue": ""}
    parameters = {"count": "NUMBER_INTEGER", "note": text, "continue_run": text}
    made = pipeline(parameters=parameters, schemaVersion="2.1.0", sdkVersion="kfp-2")
    (tmp_path / "pipeline.yaml").write_text(json.dumps(made))
    with watched() as run:
        refused = submit("--continue", "toy-1")
        shardline("cancel", "toy-1")
        run.communicate(timeout=60)
    done = shardline(
        "submit", "pipeline.yaml", "--continue", "toy-1", "-p", "note=again", "--job-id", "toy-2"
    )

    assert refused.exit_code == 1
    assert "the run toy-1 is running; cancel it, or wait until it has ended" in refused.output
    assert done.exit_code == 0, done.output
    values = dict(fake.services.pipeline_jobs[f"{NAME}/toy-2"].runtime_config.parameter_values)
    assert values == {"count": 3, "note": "again", "continue_run": "toy-1"}


def test_who_stops_watching_leaves_the_run_alone(fake: FakeVertex) -> None:
    with watched() as run:
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=60)
    assert run.returncode == 75
    assert "the run continues: 'shardline status toy-1 --wait' watches it again" in err
    assert "CancelPipelineJob" not in fake.services.calls


def test_a_suggested_command_works_where_the_first_one_did(fake: FakeVertex, tmp_path: Path) -> None:
    for name in ("PROJECT", "LOCATION"):
        del os.environ[f"VERTEX_{name}"]
    (tmp_path / "my settings.toml").write_text(f'[vertex]\nlocation = "{LOCATION}"')
    options = ("--settings", "my settings.toml", "--project", PROJECT)
    said = shardline(*SUBMIT, "--job-id", "toy-1", *options).stdout

    (suggested,) = re.findall(r"'shardline (.*)' watches it", said)
    assert shardline(*shlex.split(suggested)).exit_code == 0


def test_status_lists_the_latest_runs(fake: FakeVertex) -> None:
    assert shardline("status").stdout == f"no runs in runs and projects/{PROJECT}/locations/{LOCATION}\n"
    for number in range(3):
        assert submit("--wait", "--job-id", f"toy-{number}").exit_code == 0
    listed = shardline("status", "--limit", "2").stdout.splitlines()
    assert [line.split()[:4] for line in listed] == [
        ["RUN", "WHERE", "PIPELINE", "STATE"],
        ["toy-2", "platform", "toy", "succeeded"],
        ["toy-1", "platform", "toy", "succeeded"],
    ]
    content = json.loads(shardline("status", "--json").stdout)
    assert [item["run"] for item in content["runs"]] == ["toy-2", "toy-1", "toy-0"]
    full = shardline("status", f"{NAME}/toy-0").stdout
    assert "toy-0: succeeded" in full
    assert f"/runs/toy-0?project={PROJECT}" in full


def test_status_in_a_project_lists_the_runs_of_its_platform(
    fake: FakeVertex, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in PLACE:
        monkeypatch.delenv(name)
    settings, here = Path("settings.toml"), "no runs in runs\n"
    settings.write_text("")
    assert shardline("status").stdout == here
    place = f'[vertex]\nproject = "{PROJECT}"\nlocation = "{LOCATION}"\npipeline_root = "gs://B/runs"\n'
    for placeholder in (place.replace(PROJECT, "my-project"), place.replace("B", "my-bucket")):
        settings.write_text(placeholder)
        assert shardline("status").stdout == here
    settings.write_text(place)
    assert shardline("status").stdout == f"no runs in runs and projects/{PROJECT}/locations/{LOCATION}\n"


def test_a_run_that_is_elsewhere(fake: FakeVertex) -> None:
    done = shardline("status", NAME.replace(LOCATION, "us-east1") + "/toy")
    assert done.exit_code == 2
    assert "give --location us-east1" in done.output


@pytest.mark.parametrize("verb", [SUBMIT, ["status"]])
def test_without_a_network_there_is_one_line(
    fake: FakeVertex, monkeypatch: pytest.MonkeyPatch, verb: list[str]
) -> None:
    with socket.socket() as nobody:  # a port at which nobody listens
        nobody.bind(("127.0.0.1", 0))
        for name in ("https_proxy", "HTTPS_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{nobody.getsockname()[1]}")
        with start(*verb) as run:
            out, err = run.communicate(timeout=100)
    assert (run.returncode, out) == (3, "")
    assert "Google Cloud was not reached (" in err
    assert "check this machine's network connection" in err
    assert err.count("\n") == 1


def test_data_that_only_the_run_can_reach_is_no_mistake(fake: FakeVertex) -> None:
    done = submit_retrain("source=images:/mnt/nowhere", "champion_uri=")
    assert done.exit_code == 0, done.output
    done = shardline("run", "retrain.yaml", "-p", "source=images:/mnt/nowhere")
    assert done.exit_code == 2


def test_an_image_of_this_machine_and_placeholders_are_refused(fake: FakeVertex) -> None:
    done = shardline("submit", str(RETRAIN), "-p", "champion_uri=", "--dry-run")
    assert done.exit_code == 2
    assert "SL411 pipeline: the image shardline:0.1.0 has no registry" in done.stderr
    done = shardline("submit", "pipeline.yaml", "-p", "count=3", "--project", "my-project")
    assert done.exit_code == 2
    assert "project is 'my-project', where my-project is a placeholder" in done.stderr


def submit_retrain(*given: str, **environ: str) -> Result:
    """Shows what a submission of our own pipeline, with an image of a registry, would send."""
    text = RETRAIN.read_text().replace(
        "shardline:0.1.0", f"{LOCATION}-docker.pkg.dev/{PROJECT}/r/shardline:1"
    )
    Path("retrain.yaml").write_text(text)
    arguments = ["submit", "retrain.yaml", *(f"-p{pair}" for pair in given), "--dry-run"]
    return CliRunner().invoke(main, arguments, env=environ)
