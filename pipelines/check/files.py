"""Files that are checked: compiled pipelines, settings, schedules and studies.

As a program it prints the table of all rules: `python -m shardline.pipelines.check.files > docs/check.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardline.pipelines.check.checks import check, parse
from shardline.pipelines.check.pipeline import Pipeline
from shardline.pipelines.check.registry import RULES, Finding, apply
from shardline.pipelines.check.rules.schedules import Schedule
from shardline.pipelines.parameters import load_study
from shardline.pipelines.remote.schedules import TABLE as SCHEDULES
from shardline.pipelines.remote.schedules import load_schedules
from shardline.pipelines.settings import load, load_image, read_environment
from shardline.pipelines.spec import read_pipeline
from shardline.pipelines.tables import read_file

_TOML = (".toml", ".example")
#: What studies say, and no settings: a study has both.
_STUDY = frozenset({"metric", "parameter"})


def check_file(
    path: Path, given: Mapping[str, Any] | None = None, schedule: Schedule | None = None
) -> list[Finding]:
    """Returns what is wrong with a file: a pipeline or settings, as `read` reads them, schedules or a study.

    A schedule is checked with its own pipeline and parameters; of one in the registry only when it fires.
    Raises as `read` does, and SettingsError when a study is wrong.
    """
    keys = read_file(path).keys() if path.suffix in _TOML else ()
    if not _STUDY.isdisjoint(keys):
        load_study(path)
        return []
    if SCHEDULES not in keys:
        return check(read(path, given), schedule)
    found = []
    for name, declared in load_schedules(path).items():
        if declared.pipeline.startswith("https://"):
            findings = list(apply({Schedule: [declared]}))
        else:
            findings = check(read(Path(declared.pipeline), declared.parameters), declared)
        found += [replace(finding, where=f"schedules.{name}: {finding.where}") for finding in findings]
    return found


def read(path: Path, given: Mapping[str, Any] | None = None) -> Pipeline:
    """Reads a file for a check; `given` are the parameters of the run, if they are known.

    It is a pipeline as YAML or JSON, alone or in a PipelineJob; or settings (TOML), which are compiled.
    Raises PipelineError when it is no pipeline, and SettingsError when settings cannot be read.
    """
    if path.suffix not in _TOML:
        return parse(read_pipeline(path), path, given)
    from shardline.pipelines.compile import compile_pipeline  # with KFP's compiler

    pipeline = parse(compile_pipeline(load(path)), path, given)
    return replace(pipeline, environment=read_environment(path), image=load_image(path))


_HEAD = """\
# What `shardline check` looks at

    shardline check compiled/retrain.yaml
    shardline check settings/vertex.toml --json
    shardline check settings/schedules.toml settings/tune.toml
    shardline check anybodys.yaml --param epochs=3 --cron 'TZ=Europe/Vienna 0 6 * * 1'

It reads compiled pipelines (YAML or JSON of Kubeflow Pipelines 2, not only ours), our settings files,
files of schedules, each with its pipeline and parameters, and studies. It loads neither TensorFlow nor the
Vertex AI client and contacts nobody. It exits with 0 when there are no errors, with 1 when there are, and
with 2 when a file is no pipeline, or settings or a study cannot be read. `shardline compile` refuses errors.

A custom job is checked as the API would receive it: parameters filled in, after the launcher has dropped what
is empty. What is known at run time only, such as another task's output, is not guessed at.

An **error** is refused by the platform, fails, or does something else than was meant; a **warning** works and
is likely to be regretted. Codes are stable. Where the source is docs.cloud.google.com, the page is below
gemini-enterprise-agent-platform/machine-learning (formerly vertex-ai/docs).

This page is generated: `python -m shardline.pipelines.check.files > docs/check.md`.

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
