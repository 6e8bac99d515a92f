"""Injections as users write them."""

from __future__ import annotations

import pytest

from shardline.pipelines.local.job.supervisor import Injection, parse_injection
from shardline.trainer.base.errors import SettingsError


@pytest.mark.parametrize(
    ("text", "injection"),
    [
        ("preempt:worker:0@step=30", Injection("preempt", "worker-0", step=30)),
        ("kill:chief@t=5s", Injection("kill", "chief-0", seconds=5)),
        ("kill:ps:1@t=0.5s", Injection("kill", "ps-1", seconds=0.5)),
    ],
)
def test_reads(text: str, injection: Injection) -> None:
    assert parse_injection(text) == injection


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "takes preempt:worker:0@step=30 or kill:chief@t=5s, got ''"),
        ("kill", "takes preempt:worker:0@step=30"),
        ("kill:boss@t=5s", "takes preempt:worker:0@step=30"),
        ("stop:chief@t=5s", "takes preempt:worker:0@step=30"),
        ("kill:chief@t=5", "takes preempt:worker:0@step=30"),  # of what?
        ("kill:chief:-1@t=5s", "takes preempt:worker:0@step=30"),
    ],
)
def test_refuses(text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message.replace("?", r"\?")):
        parse_injection(text)
