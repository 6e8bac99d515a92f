"""The exit handler in a local run: what it says, records and sends, and what cannot stop it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from shardline.components.conclude import notification
from shardline.components.conclude.component import conclude
from shardline.components.conclude.notification import (
    WEBHOOK_VARIABLE,
    NotifySettings,
    payload,
    send,
    webhook_url,
)
from shardline.components.runs.causes import Failure, explain
from shardline.components.runs.record import RUN_VARIABLE, RunRecord
from shardline.pipelines.settings import load
from shardline.trainer.base.errors import PlatformError, SettingsError
from shardline.trainer.base.progress import Event
from tests.helpers.webhook import Webhook, serve_webhook

LOG = """\
12:00:00.000 - INFO - Executing task 'train'
    worker-0 | epoch 1
12:00:09.000 - ERROR - Task 'train' finished with status FAILURE
12:00:09.100 - INFO - Executing task 'conclude'
"""


class Status:
    """What KFP hands in as PipelineTaskFinalStatus."""

    def __init__(self, state: str) -> None:
        self.state = state
        self.error_message = "Task exit-handler-1 failed." if state == "FAILED" else None


@pytest.fixture
def webhook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Webhook]:
    with serve_webhook() as found:
        monkeypatch.setenv(WEBHOOK_VARIABLE, found.url)
        yield found


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a run that is going on, whose training has failed."""
    directory = tmp_path / "runs" / "today"
    directory.mkdir(parents=True)
    record = {"pipeline": "retrain", "state": "running", "error": None}
    (directory / "run.json").write_text(json.dumps(record))
    (directory / "run.log").write_text(LOG)
    monkeypatch.setenv(RUN_VARIABLE, str(directory))
    return directory


def finish(state: str, history: Path | str = "", when: str = "failure", form: str = "") -> Any:
    return conclude(
        status=Status(state),
        job_name="retrain-1",
        job_resource_name="projects/local/locations/local/pipelineJobs/local",
        history_uri=str(history),
        notify_when=when,
        form=form,
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
    assert message["text"] == "retrain failed: train"
    assert [block["type"] for block in message["blocks"]] == ["section"] * 3
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
    run: Path, webhook: Webhook, when: str, state: str, messages: int
) -> None:
    finish(state, when=when)

    assert len(webhook.messages) == messages


def test_a_success_is_quiet_where_nobody_wants_to_know(run: Path, events: list[Event]) -> None:
    finish("SUCCEEDED")

    assert events == []


def test_a_webhook_that_refuses_fails_nothing_and_stays_secret(
    run: Path, webhook: Webhook, events: list[Event]
) -> None:
    webhook.status = 400

    finish("FAILED")

    refused = "the webhook did not take the message (status 400)"
    assert events[-1].text == f"no notification was sent to the webhook: {refused}"
    assert len(webhook.messages) == 1
    assert not any("T0PS3CRET" in event.text for event in events)


def test_a_webhook_that_is_busy_is_called_again(run: Path, webhook: Webhook, events: list[Event]) -> None:
    webhook.first = [503]

    finish("FAILED")

    assert len(webhook.messages) == 2
    assert [event.text for event in events if event.topic == "vertex"] == [
        "cannot call the webhook yet (503 service unavailable); trying again"
    ]
    assert events[-1].text == "the webhook has been notified"


def test_an_outage_that_ends_costs_no_message(webhook: Webhook, monkeypatch: pytest.MonkeyPatch) -> None:
    """More attempts than the few of a call that somebody waits for."""
    attempts: list[str] = []
    post = requests.post

    def post_later(url: str, **options: Any) -> requests.Response:
        attempts.append(url)
        if len(attempts) < 6:
            raise requests.ConnectionError("Connection refused")
        return post(url, **options)

    monkeypatch.setattr(requests, "post", post_later)
    monkeypatch.setattr(random, "uniform", lambda low, high: 0.0)  # google.api_core's pause

    send(webhook.url, {"text": "it is over"})

    assert webhook.messages == [{"text": "it is over"}]


def test_an_outage_that_lasts_ends_the_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notification, "_OUTAGE_S", 0.3)
    with pytest.raises(PlatformError, match="did not take the message \\(ConnectionError\\)"):
        send("http://127.0.0.1:9/T0PS3CRET", {})


def test_what_did_not_arrive_is_in_the_record(run: Path, tmp_path: Path, webhook: Webhook) -> None:
    webhook.status = 403

    (undelivered,) = finish("FAILED", tmp_path / "history")

    record = RunRecord.read(tmp_path / "history" / "runs" / "retrain-1")
    assert record.undelivered == {"webhook": "the webhook did not take the message (status 403)"}
    assert undelivered == f"webhook: {record.undelivered['webhook']}"


def test_a_record_without_the_field_is_read(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"pipeline": "retrain", "state": "failed"}')

    assert RunRecord.read(tmp_path).undelivered == {}


@pytest.mark.usefixtures("run")
def test_the_record_is_there_before_a_notification_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(notification, "_notify", killed)
    with pytest.raises(KeyboardInterrupt):
        finish("FAILED", tmp_path / "history")

    assert RunRecord.read(tmp_path / "history" / "runs" / "retrain-1").state == "failed"


def test_a_history_that_cannot_be_written_fails_nothing(
    run: Path, tmp_path: Path, events: list[Event]
) -> None:
    (tmp_path / "file").write_text("")

    finish("FAILED", tmp_path / "file")

    assert events[-1].text.startswith("cannot write the record of this run to ")


def test_a_run_directory_that_is_damaged_is_no_reason_to_fail(
    run: Path, tmp_path: Path, events: list[Event]
) -> None:
    (run / "run.json").write_text("{")

    finish("FAILED", tmp_path / "history")

    assert events[0].text.startswith(f"cannot read how the run ended: {run} is not the directory of a run")
    record = json.loads((tmp_path / "history" / "runs" / "retrain-1" / "run.json").read_text())
    assert record["explanation"]["error"] == "Task exit-handler-1 failed."


def test_a_webhook_that_sends_elsewhere_has_not_taken_the_message() -> None:
    with serve_webhook() as webhook:
        webhook.status = 302
        with pytest.raises(PlatformError, match="did not take the message"):
            send(webhook.url, {})


def test_a_webhook_that_is_not_there_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notification, "_OUTAGE_S", 1e-9)
    with pytest.raises(PlatformError) as refused:
        send("http://127.0.0.1:9/T0PS3CRET", {})

    assert "T0PS3CRET" not in str(refused.value)
    assert refused.value.__cause__ is None


@pytest.mark.parametrize(
    "url", ["T0PS3CRET", "http://example.com/T0PS3CRET", "http://127.0.0.1.example.com/T0PS3CRET"]
)
def test_a_url_that_is_none_or_readable_on_the_way_is_not_named(url: str) -> None:
    with pytest.raises(SettingsError, match="SHARDLINE_WEBHOOK does not hold a URL") as refused:
        webhook_url("", {WEBHOOK_VARIABLE: url})

    assert "T0PS3CRET" not in str(refused.value)


def test_the_message_is_no_markup_and_fits() -> None:
    failure = Failure(task="train", error="<b> & co", lines=("x" * 3000, "the last"))
    blocks = payload(RunRecord(name="r", pipeline="p", state="failed", explanation=explain(failure)))[
        "blocks"
    ]

    texts = [block["text"]["text"] for block in blocks]
    assert "&lt;b&gt; &amp; co" in texts[1]
    assert texts[2].endswith("the last```")
    assert all(len(text) <= 3000 for text in texts)
    # Fields of a section: https://api.slack.com/reference/block-kit/blocks#section
    assert all(set(block) == {"type", "text"} and set(block["text"]) == {"type", "text"} for block in blocks)


#: Fields of a message that a webhook may set. Source: spaces.messages of
#: https://developers.google.com/workspace/chat/api/reference/rest/v1, without those of "Output only".
CHAT_FIELDS = {"text", "cardsV2", "thread", "fallbackText", "accessoryWidgets"}


def test_google_chat_takes_its_form() -> None:
    error = "<users/all> & co"
    failure = Failure(task="train", error=error, lines=("\U0001f600" * 3000, "the last"))
    explanation = explain(failure)
    message = payload(
        RunRecord(name="r", pipeline="p" * 9000, state="failed", explanation=explanation), "chat"
    )

    assert set(message) <= CHAT_FIELDS
    assert "\u2039users/all> & co" in message["text"]
    assert "<users/all>" not in message["text"]
    assert message["text"].endswith("the last```")
    assert len(message["text"].encode()) <= 32_000


@pytest.mark.parametrize(
    ("url", "form", "keys"),
    [
        ("https://hooks.slack.com/services/x", "", {"text", "blocks"}),
        ("https://chat.googleapis.com/v1/spaces/x/messages?key=y", "", {"text"}),
        ("https://chat.googleapis.com.example.com/x", "", {"text", "blocks"}),
        ("https://mattermost.example.com/hooks/x", "", {"text", "blocks"}),
        ("https://chat.googleapis.com/v1/spaces/x/messages?key=y", "slack", {"text", "blocks"}),
        ("https://example.com/x", "chat", {"text"}),
        ("https://example.com/x", "json", {"headline", "pipeline", "run", "state", "verdict", "lines"}),
    ],
)
def test_the_form_is_that_of_the_host_or_the_settings(
    run: Path, monkeypatch: pytest.MonkeyPatch, url: str, form: str, keys: set[str]
) -> None:
    sent: list[dict[str, Any]] = []
    monkeypatch.setenv(WEBHOOK_VARIABLE, url)
    monkeypatch.setattr(notification, "send", lambda url, message: sent.append(message))

    finish("CANCELLED", form=form)

    (message,) = sent
    assert {key for key in message if not key.startswith("link_")} == keys


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"webhook_secret": "https://hooks.x/T0PS3CRET"}, "webhook_secret must be projects/"),
        ({"emails": ("nobody",)}, "emails must be e-mail addresses, got 'nobody'"),
        ({"emails": ("a@b.c",), "webhook_secret": "projects/p/secrets/s/versions/1"}, "exclude each other"),
        ({"emails": ("a@b.c",), "topic": "projects/p/topics/runs"}, "emails and topic exclude each other"),
        ({"topic": "runs"}, "topic must be projects/PROJECT/topics/TOPIC, got 'runs'"),
        ({"topic": "projects/p/topics/google-runs"}, "topic must be projects/"),
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

    assert load(path).notify == NotifySettings(when="always", emails=("a@b.c",))
    for key, known in (("when", "'failure', 'always' or 'never'"), ("form", "'', 'slack', 'chat' or 'json'")):
        path.write_text(f'{start}[notify]\n{key} = "often"\n')
        with pytest.raises(SettingsError, match=f"notify.{key} must be {known}, got 'often'"):
            load(path)
