"""Checks of a pipeline against all rules: compiled pipelines, ours or anybody's, and our settings.

As a program it prints the table of all rules: `python -m shardline.pipelines.check.checks > docs/check.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardline.components.vertex.payload import at
from shardline.pipelines.check import (  # noqa: F401  # the rules register themselves
    registry,
    rules,
)
from shardline.pipelines.check.job import Job, Pool, jobs
from shardline.pipelines.check.pipeline import Aim, Executor, Parameter, Pipeline, Task
from shardline.pipelines.check.registry import RULES, Finding, Severity
from shardline.pipelines.check.schedule import Schedule
from shardline.pipelines.preflight import load_study
from shardline.pipelines.remote.environment import read_environment
from shardline.pipelines.remote.schedules.declared import TABLE as SCHEDULES
from shardline.pipelines.remote.schedules.declared import Declared, load_schedules
from shardline.pipelines.settings import load_image
from shardline.pipelines.spec import parse_file, read_pipeline
from shardline.pipelines.tables import read_file
from shardline.trainer.errors import PipelineError

_TOML = (".toml", ".example")
#: What studies say, and no settings: a study has both.
_STUDY = frozenset({"metric", "parameter"})


def check(pipeline: Pipeline, schedule: Schedule | None = None) -> list[Finding]:
    """Returns what is wrong with a pipeline, and with the schedule that it is to run on; errors first."""
    custom_jobs = jobs(pipeline)
    found = registry.apply(
        {
            Pipeline: [pipeline],
            Parameter: pipeline.parameters,
            Task: pipeline.tasks,
            Executor: pipeline.executors,
            Job: custom_jobs,
            Pool: [pool for job in custom_jobs for pool in job.pools],
            Schedule: [schedule] if schedule else [],
        }
    )
    return sorted(
        found, key=lambda finding: (finding.severity is not Severity.ERROR, finding.code, finding.why)
    )


def check_pipeline(
    spec: Mapping[str, Any],
    parameters: Mapping[str, Any] | None = None,
    schedule: Schedule | None = None,
    aim: Aim = Aim.ASKED,
) -> list[Finding]:
    """Returns what is wrong with a compiled pipeline (IR); errors first.

    `parameters` are what the run is given, None while nothing is known about it.

    Raises:
        PipelineError: When the spec is not built as a pipeline is.
    """
    return check(Pipeline(spec, parameters, aim=aim), schedule)


def refuse_errors(pipeline: Pipeline, schedule: Schedule | None = None) -> list[Finding]:
    """Checks a pipeline, as `check` does, and returns the warnings.

    Raises:
        PipelineError: When a rule finds an error.
    """
    findings = check(pipeline, schedule)
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    if errors:
        first = errors[0]
        more = f" (and {len(errors) - 1} more: see 'shardline check')" if len(errors) > 1 else ""
        raise PipelineError(f"{first.code} {first.where}: {first.why}; {first.fix}{more}")
    return findings


def check_file(
    path: Path, given: Mapping[str, Any] | None = None, schedule: Schedule | None = None
) -> list[Finding]:
    """Returns what is wrong with a file: a pipeline or settings, as `load` reads them, schedules or a study.

    A schedule is checked with its own pipeline and parameters; of one in the registry only when it fires.
    Raises as `load` does, and SettingsError when a study is wrong.
    """
    keys = read_file(path).keys() if path.suffix in _TOML else ()
    if not _STUDY.isdisjoint(keys):
        load_study(path)
        return []
    if SCHEDULES not in keys:
        return check(load(path, given), schedule)
    return [
        replace(finding, where=f"schedules.{name}: {finding.where}")
        for name, declared in load_schedules(path).items()
        for finding in _check_declared(declared)
    ]


def _check_declared(declared: Declared) -> list[Finding]:
    if declared.pipeline.startswith("https://"):
        return list(registry.apply({Schedule: [declared]}))
    return check(load(Path(declared.pipeline), declared.parameters), declared)


def load(path: Path, given: Mapping[str, Any] | None = None) -> Pipeline:
    """Reads a file for a check; `given` are the parameters of the run, if they are known.

    It is a pipeline as YAML or JSON, alone or in a PipelineJob; or settings (TOML), which are compiled.

    Raises:
        PipelineError: When the file cannot be read, is too large, or is not a pipeline.
        SettingsError: When settings cannot be read.
    """
    if path.suffix not in _TOML:
        return parse(read_pipeline(path), path, given)
    pipeline = parse(_compiled(path), path, given)
    return replace(pipeline, environment=read_environment(path), image=load_image(path))


def parse(content: bytes | str, path: Path, given: Mapping[str, Any] | None = None) -> Pipeline:
    """Reads the content of the pipeline file `path`; raises as `load` does."""
    file = parse_file(content, path)
    runtime = at(file.job, "runtimeConfig")
    if given is None and "parameterValues" in runtime:
        given = at(runtime, "parameterValues")
    return Pipeline(file.spec, given, tuple(file.platforms), at(file.job, "labels"))


def _compiled(path: Path) -> str:
    from shardline.pipelines import settings
    from shardline.pipelines.compile import compile_pipeline

    return compile_pipeline(settings.load(path))


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

This page is generated: `python -m shardline.pipelines.check.checks > docs/check.md`.

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
