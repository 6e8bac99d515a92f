"""Files that `shardline check` reads: compiled pipelines, settings, schedules and studies.

As a program, it prints the page of all rules: `python -m shardline.pipelines.check_files > docs/check.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardline.pipelines.check.checks import check, parse
from shardline.pipelines.check.pipeline import Pipeline
from shardline.pipelines.check.registry import RULES, Finding, Severity, apply
from shardline.pipelines.check.rules.schedules import Schedule
from shardline.pipelines.parameters import load_study
from shardline.pipelines.remote.schedules import TABLE as SCHEDULES
from shardline.pipelines.remote.schedules import load_schedules
from shardline.pipelines.settings import load, load_image, read_environment
from shardline.pipelines.spec import read_pipeline
from shardline.pipelines.tables import PROJECT_SETTINGS, read_settings_file

_TOML = (".toml", ".example")
#: Keys that every study has, and no settings file.
_STUDY = frozenset({"metric", "parameter"})


def check_file(
    path: Path, parameters: Mapping[str, Any] | None = None, schedule: Schedule | None = None
) -> list[Finding]:
    """Returns the findings in a file: a pipeline or settings, as `read` reads them, schedules or a study.

    A schedule is checked with its pipeline and parameters; if its pipeline is in the registry, only the
    schedule is checked. Raises as `read` does, and SettingsError for an invalid study.
    """
    keys = read_settings_file(path).keys() if path.suffix in _TOML else ()
    if not _STUDY.isdisjoint(keys):
        load_study(path)
        return []
    if SCHEDULES not in keys:
        return check(read(path, parameters), schedule)
    findings = []
    for name, declared in load_schedules(path).items():
        if declared.pipeline.startswith("https://"):
            own = list(apply({Schedule: [declared]}))
        else:
            own = check(read(Path(declared.pipeline), declared.parameters), declared)
        findings += [replace(finding, where=f"schedules.{name}: {finding.where}") for finding in own]
    return findings


def read(path: Path, parameters: Mapping[str, Any] | None = None) -> Pipeline:
    """Reads a file for a check; `parameters` are those of the run, None if they are not known.

    The file is a pipeline (YAML or JSON), alone or in a PipelineJob, or settings (TOML), which are compiled.
    In a project, its settings say what the image holds.
    Raises PipelineError when it is not a pipeline, and SettingsError when settings cannot be read.
    """
    if path.suffix not in _TOML:
        image = load_image(PROJECT_SETTINGS) if PROJECT_SETTINGS.is_file() else None
        return replace(parse(read_pipeline(path), path, parameters), image=image)
    from shardline.pipelines.compile import compile_pipeline  # with KFP's compiler

    pipeline = parse(compile_pipeline(load(path)), path, parameters)
    return replace(pipeline, environment=read_environment(path), image=load_image(path))


_HEAD = """\
# What `shardline check` looks at

`shardline check` finds mistakes in a file before anything runs. This page lists its rules.

    shardline check compiled/retrain.yaml
    shardline check settings/vertex.toml settings/schedules.toml settings/tune.toml
    shardline check anybodys.yaml --param epochs=3 --cron 'TZ=Europe/Vienna 0 6 * * 1'

It reads compiled pipelines (KFP 2, YAML or JSON, Shardline's or not), settings, schedules with their
pipelines and parameters, and studies. It needs no network, TensorFlow or Google Cloud client. A finding says
what was found and how to fix it.

- An **error** is refused by the platform, fails, or does something other than you meant. A **warning** works,
  and you will probably regret it. Codes never change their meaning.
- The exit code is 1 with errors, else 0; 2 if a file is of another kind or cannot be read.
- `shardline compile`, `run`, `submit`, `upload` and `schedule apply` refuse errors, too.
- A custom job is checked as the API receives it. Values known only at run time, such as another task's
  output, are not checked.

The last column names the source of a rule:

- `training/`, `pipelines/`, `general/`: docs.cloud.google.com, below
  gemini-enterprise-agent-platform/machine-learning (formerly vertex-ai/docs)
- other paths: docs.cloud.google.com
- `CustomJobSpec` and other types: google.cloud.aiplatform_v1.types
- SDK: google-cloud-aiplatform; GCPC: google_cloud_pipeline_components 2.22
- `pipeline_spec.proto`: kubeflow/pipelines

This page is generated: `python -m shardline.pipelines.check_files > docs/check.md`.
"""
#: Titles of the page's tables, by the first digit of a rule's code.
_TITLES = {
    "1": "Worker pools and machines",
    "2": "Scheduling, accounts and networks",
    "3": "Payload, arguments and variables",
    "4": "Images",
    "5": "Tasks, retries and caching",
    "6": "Parameters and paths of a run",
    "7": "Batches and shards",
    "8": "Labels and secrets",
    "9": "Schedules",
}


def rules_page() -> str:
    """Returns the page with all rules in Markdown."""
    parts = [_HEAD]
    for digit, title in _TITLES.items():
        parts.append(f"\n## {title}\n\n| code | rule | source |\n|---|---|---|\n")
        for code, rule in sorted(RULES.items()):
            if code[2] == digit:
                mark = " warning" if rule.severity is Severity.WARNING else ""
                parts.append(f"| {code}{mark} | {_cell(rule.demand)} | {_cell(rule.source)} |\n")
    return "".join(parts)


def _cell(text: str) -> str:
    """Returns a text for a cell of the table; {{ would be a template to some renderers."""
    return text.removesuffix(".").replace("|", "\\|").replace("{{", "`{{").replace("}}", "}}`")


if __name__ == "__main__":
    print(rules_page(), end="")
