"""Rules about secrets where everybody can read them. A finding never shows the secret."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from shardline.pipelines.check.ir import known_text, list_at
from shardline.pipelines.check.job import Pool
from shardline.pipelines.check.pipeline import Executor, Parameter, Task
from shardline.pipelines.check.registry import error

#: What keys look like: their makers document a fixed beginning and length.
_SECRETS = {
    "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
    "a Google API key": re.compile(r"\bAIza[0-9A-Za-z_-]{35}\b"),
    "a Google OAuth token": re.compile(r"\bya29\.[0-9A-Za-z_-]{20,}"),
    "a Google OAuth client secret": re.compile(r"\bGOCSPX-[0-9A-Za-z_-]{20,}"),
    "an AWS access key": re.compile(r"\b(AKIA|ASIA)[0-9A-Z]{16}\b"),
    "a GitHub token": re.compile(r"\b(gh[pousr]_[0-9A-Za-z]{36,}|github_pat_[0-9A-Za-z_]{60,})"),
    "a GitLab token": re.compile(r"\bglpat-[0-9A-Za-z_-]{20,}"),
    "a Slack token": re.compile(r"\bxox[abprs]-[0-9A-Za-z-]{10,}"),
    "a Hugging Face token": re.compile(r"\bhf_[0-9A-Za-z]{30,}\b"),
    "an OpenAI or Anthropic key": re.compile(r"\bsk-(?:ant-|proj-)?[0-9A-Za-z_-]{32,}"),
    "a password in an address": re.compile(r"\b[a-z][a-z0-9+]*://[^/\s:@{}$<]+:[^/\s:@{}$<]+@[\w.-]+"),
}
#: Names whose value is a secret when it is given as a plain text.
_NAMES = re.compile(r"(?i)(^|[_-])(password|passwd|secret_key|api_?key|access_key|private_key|auth_token)$")
_FIX = "read it from Secret Manager at run time, take it out, and revoke it"


@error("SL811", Parameter, fix=_FIX)
def parameter_holds_no_secret(parameter: Parameter) -> Iterator[str]:
    """A pipeline's parameter holds no secret.

    Source: docs.cloud.google.com, secret-manager/docs/best-practices; parameters are shown in the console.
    """
    yield from _found(parameter.name, parameter.pipeline.value(parameter.name))


@error("SL812", Task, fix=_FIX)
def constant_holds_no_secret(task: Task) -> Iterator[str]:
    """A constant that a task is given holds no secret.

    Source: docs.cloud.google.com, secret-manager/docs/best-practices.
    """
    for name, item in task.inputs("parameters").items():
        if item and "runtimeValue" in item:
            yield from _found(name, task.value(name))


@error("SL813", Pool, fix=_FIX)
def replica_environment_holds_no_secret(pool: Pool) -> Iterator[str]:
    """A replica's environment variables hold no secret.

    Source: docs.cloud.google.com, secret-manager/docs/best-practices: not in environment variables.
    """
    for item in pool.env:
        yield from _found(str(item.get("name", "")), item.get("value"))


@error("SL814", Executor, fix=_FIX)
def container_holds_no_secret(executor: Executor) -> Iterator[str]:
    """A container's environment, command and source hold no secret.

    Source: docs.cloud.google.com, secret-manager/docs/best-practices.
    """
    container = executor.container
    for item in list_at(container, "env"):
        yield from _found(str(item.get("name", "")), item.get("value"))
    for part in [*list_at(container, "command"), *list_at(container, "args")]:
        yield from _found("command", part)


def _found(name: str, value: Any) -> Iterator[str]:
    text = known_text(value) if isinstance(value, str) else str(value)
    kinds = [kind for kind, pattern in _SECRETS.items() if pattern.search(text)]
    if not kinds and known_text(value) and _NAMES.search(name):
        kinds = ["a secret, by its name"]
    if kinds:
        yield f"{name} holds {kinds[0]}"
