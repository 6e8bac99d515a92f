"""The table of all rules: `python -m shardline.pipelines.check.table > docs/check.md`."""

from __future__ import annotations

from shardline.pipelines.check import rules  # noqa: F401  # the rules register themselves
from shardline.pipelines.check.registry import RULES

_HEAD = """\
# What `shardline check` looks at

    shardline check compiled/retrain.yaml
    shardline check settings/vertex.toml --json
    shardline check anybodys.yaml --param epochs=3 --cron 'TZ=Europe/Vienna 0 6 * * 1'

It reads compiled pipelines (YAML or JSON of Kubeflow Pipelines 2, not only ours) and our settings files. It
loads neither TensorFlow nor the Vertex AI client and contacts nobody. It exits with 0 when there are no
errors, with 1 when there are, and with 2 when a file is no pipeline. `shardline compile` refuses errors.

A custom job is checked as the API would receive it: parameters filled in, after the launcher has dropped what
is empty. What is known at run time only, such as another task's output, is not guessed at.

An **error** is refused by the platform, fails, or does something else than was meant; a **warning** works and
is likely to be regretted. Codes are stable. Where the source is docs.cloud.google.com, the page is below
gemini-enterprise-agent-platform/machine-learning (formerly vertex-ai/docs).

This page is generated: `python -m shardline.pipelines.check.table > docs/check.md`.

| code | | what is demanded | what to do | source |
|---|---|---|---|---|
"""


def table() -> str:
    """Returns the page with all rules in Markdown."""
    rows = [
        f"| {rule.code} | {rule.severity} | {_cell(rule.demand)} | {_cell(rule.fix)} | {_cell(rule.source)} |"
        for rule in sorted(RULES.values(), key=lambda rule: rule.code)
    ]
    return _HEAD + "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    """Returns a text for a cell of the table; {{ would be a template to some renderers."""
    return text.replace("|", "\\|").replace("{{", "`{{").replace("}}", "}}`")


if __name__ == "__main__":
    print(table(), end="")
