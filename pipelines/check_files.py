"""Files that `shardline check` reads: compiled pipelines, settings, schedules and studies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardline.pipelines.check.checks import check, parse
from shardline.pipelines.check.pipeline import Pipeline
from shardline.pipelines.check.registry import Finding, apply
from shardline.pipelines.check.rules.schedules import Schedule
from shardline.pipelines.parameters import load_study
from shardline.pipelines.remote.schedules import TABLE as SCHEDULES
from shardline.pipelines.remote.schedules import load_schedules
from shardline.pipelines.settings import load, read_environment
from shardline.pipelines.spec import read_pipeline
from shardline.pipelines.tables import read_settings_file

_TOML = (".toml", ".example")
#: Keys that every study has, and no settings file.
_STUDY = frozenset({"metric", "parameter"})


def check_file(path: Path, parameters: Mapping[str, Any] | None = None) -> list[Finding]:
    """Returns the findings in a file: a pipeline or settings, as `read` reads them, schedules or a study.

    A schedule is checked with its pipeline and parameters; if its pipeline is in the registry, only the
    schedule is checked. Raises as `read` does, and SettingsError for an invalid study.
    """
    keys = read_settings_file(path).keys() if path.suffix in _TOML else ()
    if not _STUDY.isdisjoint(keys):
        load_study(path)
        return []
    if SCHEDULES not in keys:
        return check(read(path, parameters))
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
    Raises PipelineError when it is not a pipeline, and SettingsError when settings cannot be read.
    """
    if path.suffix not in _TOML:
        return parse(read_pipeline(path), path, parameters)
    from shardline.pipelines.compile import compile_pipeline  # with KFP's compiler

    location = str(read_environment(path).get("location", ""))
    return replace(parse(compile_pipeline(load(path)), path, parameters), location=location)
