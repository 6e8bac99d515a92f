"""The exit handler in a local run: what it says, records and sends, and what cannot stop it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardline.components.exit_handler import NotifySettings, notification
from shardline.components.exit_handler.component import exit_handler
from shardline.components.exit_handler.notification import format_message, post_message, webhook_url
from shardline.components.runs import Run, RunDirectory, explain
from shardline.pipelines.settings import load_settings
from shardline.trainer.base.errors import PlatformError, SettingsError
from shardline.trainer.base.progress import Event
from tests.helpers.webhook import Webhook, serve_webhook

SECRET = "projects/p/secrets/webhook/versions/latest"
LOG = """\
12:00:00.000 - INFO - Executing task 'train'
    worker-0 | epoch 1
12:00:09.000 - ERROR - Task 'train' finished with status FAILURE
12:00:09.100 - INFO - Executing task 'exit-handler'
"""


class Status:
    """What KFP hands in as PipelineTaskFinalStatus."""

    def __init__(self, state: str) -> None:
        self.state = state
        self.error_message = "Task exit-handler-1 failed." if state == "FAILED" else None


@pytest.fixture
def webhook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Webhook]:
    for name in ("no_proxy", "NO_PROXY"):  # requests then asks a proxy that is not there
        monkeypatch.delenv(name, raising=False)
    with serve_webhook() as found:
        monkeypatch.setattr(notification, "read_secret", lambda name: found.url)
        yield found


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a run that is going on, whose training has failed."""
    directory = tmp_path / "runs" / "today"
    directory.mkdir(parents=True)
    record = {"pipeline": "retrain", "state": "running", "error": None}
    (directory / "run.json").write_text(json.dumps(record))
    (directory / "run.log").write_text(LOG)
    monkeypatch.setenv(RunDirectory.VARIABLE, str(directory))
    return directory


def finish(state: str, history: Path | str = "", when: str = "failure") -> None:
    exit_handler(
        status=Status(state),
        job_name="retrain-1",
        job_resource_name="projects/local/locations/local/pipelineJobs/local",
        history_uri=str(history),
        notify_when=when,
        webhook_secret=SECRET,
    )


def test_a_failure_is_said_recorded_and_sent(
    run: Path, tmp_path: Path, webhook: Webhook, events: list[Event]
) -> None:
    finish("FAILED", tmp_path / "history")

    lines = [event.text for event in events]
    assert lines == [
        "failed step: train",
        "next step: look at the whole log of the task",
        "| worker-0 | epoch 1",
        "the webhook has been notified",
    ]
    (message,) = webhook.messages
    assert message["text"].startswith("*retrain failed: train*\n*failed step*  train\n")
    assert message["text"].endswith("```worker-0 | epoch 1```")
    record = json.loads((tmp_path / "history" / "runs" / "retrain-1" / "run.json").read_text())
    assert (record["state"], record["explanation"]["failed"]) == ("failed", "train")
    # The run's own record is not the exit handler's.
    assert json.loads((run / "run.json").read_text())["state"] == "running"


@pytest.mark.parametrize(
    ("when", "state", "messages"),
    [
        ("failure", "SUCCEEDED", 0),
        ("failure", "CANCELLED", 1),
        ("always", "SUCCEEDED", 1),
        ("never", "FAILED", 0),
    ],
)
def test_it_tells_when_somebody_wants_to_know(
    run: Path, webhook: Webhook, when: str, state: str, messages: int, events: list[Event]
) -> None:
    finish(state, when=when)

    assert len(webhook.messages) == messages
    assert events or (when, state) in {("failure", "SUCCEEDED"), ("never", "FAILED")}


def test_a_webhook_that_refuses_fails_nothing_and_stays_secret(
    run: Path, webhook: Webhook, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    webhook.status = 400
    monkeypatch.setattr(notification, "_PAUSE_S", 0.0)

    finish("FAILED")

    refused = "the webhook did not take the message (status 400)"
    assert events[-1].text == f"no notification was sent to the webhook: {refused}"
    assert len(webhook.messages) == 3
    assert not any("T0PS3CRET" in event.text for event in events)


def test_a_webhook_that_is_busy_is_called_again(
    run: Path, webhook: Webhook, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notification, "_PAUSE_S", 0.0)
    webhook.first = [503, 429]

    finish("FAILED")

    assert len(webhook.messages) == 3
    assert events[-1].text == "the webhook has been notified"


def test_the_record_is_there_before_a_notification_is_sent(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(notification, "log_run", None)  # MLflow's server, which may be slow, comes last
    monkeypatch.setattr(notification, "_notify", killed)
    with pytest.raises(KeyboardInterrupt):
        finish("FAILED", tmp_path / "history")

    assert RunDirectory(tmp_path / "history" / "runs" / "retrain-1").record().state == "failed"


def test_a_history_that_cannot_be_written_fails_nothing(
    run: Path, tmp_path: Path, events: list[Event]
) -> None:
    (tmp_path / "file").write_text("")

    finish("FAILED", tmp_path / "file", when="never")

    assert events[-1].text.startswith("cannot write the record of this run to ")


def test_a_run_directory_that_is_damaged_is_no_reason_to_fail(
    run: Path, tmp_path: Path, events: list[Event]
) -> None:
    (run / "run.json").write_text("{")

    finish("FAILED", tmp_path / "history")

    assert events[0].text.startswith(f"cannot read how the run ended: {run} is not the directory of a run")
    record = json.loads((tmp_path / "history" / "runs" / "retrain-1" / "run.json").read_text())
    assert record["explanation"]["error"] == "Task exit-handler-1 failed."


@pytest.mark.parametrize(("endless", "refused"), [("header", True), ("body", False)])
def test_an_answer_without_end_is_given_up(
    webhook: Webhook,
    endless: str,
    refused: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(notification, "_PAUSE_S", 0.0)
    monkeypatch.setattr(notification, "_TIMEOUT_S", 0.3)
    webhook.endless = endless
    with pytest.raises(PlatformError, match="TimeoutError") if refused else contextlib.nullcontext():
        post_message(webhook.url, "")
    webhook.endless = ""

    assert len(webhook.messages) == (3 if refused else 1)
    assert "T0PS3CRET" not in caplog.text, "the libraries' own log has the address"


@pytest.mark.parametrize("status", [302, None])
def test_a_webhook_that_sends_elsewhere_or_is_not_there_is_not_named(
    webhook: Webhook, status: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notification, "_PAUSE_S", 0.0)
    webhook.status = status or 200
    with pytest.raises(PlatformError, match="did not take the message") as refused:
        post_message(webhook.url if status else "http://127.0.0.1:9/T0PS3CRET", "")

    assert "T0PS3CRET" not in str(refused.value)
    assert refused.value.__cause__ is None
    assert refused.value.__context__ is None


@pytest.mark.parametrize(
    "url", ["T0PS3CRET", "http://example.com/T0PS3CRET", "http://127.0.0.1.example.com/T0PS3CRET"]
)
def test_a_url_that_is_none_or_readable_on_the_way_is_not_named(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notification, "read_secret", lambda name: url)
    with pytest.raises(SettingsError, match=f"{SECRET} does not hold a URL") as refused:
        webhook_url(SECRET)

    assert "T0PS3CRET" not in str(refused.value)


def test_the_message_calls_nobody_and_fits() -> None:
    failure = explain(task="train", error="<users/all> & co", log=("x" * 3000, "the last"))
    text = format_message(Run(name="r", pipeline="p" * 9000, state="failed", explanation=failure))

    assert "<" not in text
    assert text.endswith("the last```")
    assert len(text) <= 4100


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"webhook_secret": "https://hooks.x/T0PS3CRET"}, "webhook_secret must be projects/"),
        ({"emails": ("nobody",)}, "emails must be e-mail addresses, got 'nobody'"),
        ({"emails": ("a@b.c",), "webhook_secret": "projects/p/secrets/s/versions/1"}, "exclude each other"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as refused:
        NotifySettings(**values)  # type: ignore[arg-type]

    assert "T0PS3CRET" not in str(refused.value)


def test_the_settings_file_has_a_table_for_it(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    start = 'image = "i:1"\n[train]\nreplica_count = 1\nmachine_type = "n1-standard-4"\n'
    path.write_text(f'{start}[notify]\nwhen = "always"\nemails = ["a@b.c"]\n')

    assert load_settings(path).notify == NotifySettings(when="always", emails=("a@b.c",))
    path.write_text(f'{start}[notify]\nwhen = "often"\n')
    with pytest.raises(
        SettingsError, match=r"notify\.when must be 'failure', 'always' or 'never', got 'often'"
    ):
        load_settings(path)
