"""Injections as users write them."""

from __future__ import annotations

import pytest

from shardline.pipelines.local.job.injections import Injection, parse_injection
from shardline.trainer.base.errors import SettingsError


@pytest.mark.parametrize(
    ("text", "injection"),
    [
        ("preempt:worker:0@step=30", Injection("preempt", "worker-0", step=30)),
        ("kill:chief@t=5s", Injection("kill", "chief-0", seconds=5)),
        ("kill:ps:1@t=0.5s", Injection("kill", "ps-1", seconds=0.5)),
        ("slow:worker:1=2x", Injection("slow", "worker-1", factor=2)),
        ("slow:evaluator=1.5x", Injection("slow", "evaluator-0", factor=1.5)),
    ],
)
def test_reads(text: str, injection: Injection) -> None:
    assert parse_injection(text) == injection


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "takes preempt:worker:0@step=30, kill:chief@t=5s or slow:worker:1=2x, got ''"),
        ("kill", "takes preempt:worker:0@step=30"),
        ("kill:boss@t=5s", "takes preempt:worker:0@step=30"),
        ("stop:chief@t=5s", "takes preempt:worker:0@step=30"),
        ("kill:chief@t=5", "takes preempt:worker:0@step=30"),  # of what?
        ("kill:chief:-1@t=5s", "takes preempt:worker:0@step=30"),
        ("kill:chief=2x", "--inject kill takes @step=30 or @t=5s"),
        ("slow:chief@t=5s", "--inject slow takes =2x"),
        ("slow:chief=1x", "a factor above 1 and up to 100"),
        ("slow:chief=1000x", "a factor above 1 and up to 100"),
    ],
)
def test_refuses(text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message.replace("?", r"\?")):
        parse_injection(text)
