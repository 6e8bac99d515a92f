"""Checks of a compiled pipeline, and of a run of it, against all rules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardline.pipelines.check import rules  # noqa: F401  # the rules register themselves
from shardline.pipelines.check.pipeline import Aim, Pipeline, jobs
from shardline.pipelines.check.registry import Finding, apply
from shardline.pipelines.check.rules.schedules import Schedule
from shardline.pipelines.parameters import check_parameters, check_values, fold_options
from shardline.pipelines.spec import OWN_PIPELINES, defaults, parse_pipeline
from shardline.trainer.base.errors import PipelineError


def check(pipeline: Pipeline, schedule: Schedule | None = None) -> list[Finding]:
    """Returns what is wrong with a pipeline, and with its schedule; errors first."""
    custom_jobs = jobs(pipeline)
    # A secret is reported alone: other rules quote values.
    pools = [pool for job in custom_jobs for pool in job.pools]
    found = list(apply(pipeline.parameters)) or apply(
        [pipeline, *pipeline.tasks, *pipeline.executors, *custom_jobs, *pools, schedule]
    )
    return sorted(
        dict.fromkeys(found),
        key=lambda finding: (finding.severity != "error", finding.code, finding.why),
    )


def refuse_errors(findings: list[Finding]) -> list[Finding]:
    """Returns findings that are only warnings; PipelineError names the first error."""
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        first = errors[0]
        count = len(errors) - 1
        more = f" (and {count} more: 'shardline check FILE' lists all, with --params those of a run)"
        raise PipelineError(f"{first.code} {first.where}: {first.why}; {first.fix}{more if count else ''}")
    return findings


def check_run(
    spec: Mapping[str, Any],
    given: Mapping[str, Any],
    schedule: Schedule | None = None,
    *,
    here: bool = False,
    location: str = "",
    uri: str = "",
) -> tuple[dict[str, Any], list[Finding]]:
    """Checks a pipeline (IR), the parameters of a run and its schedule, before the run starts.

    `given` has values by name: texts, as on a command line, or values of the declared type. A run `here`, on
    this machine, needs the data and the model function here; any other is in the region `location`. A version
    in the registry, at `uri`, may hold older code than this machine. Returns the parameters, converted to
    their declared types, and the warnings of `shardline check`.

    Raises:
        PipelineError: When a parameter is unknown, mistyped or missing, `shardline check` finds an error, the
            file holds other code than this machine, or a run on the platform has no champion_uri, not even an
            empty one.
        SettingsError: When a value of one of our own pipelines is out of range.
        SourceError, ModelError: When there is no such source or model.
    """
    given = fold_options(spec, given)
    refuse_errors(list(apply(Pipeline(spec, given).parameters)))  # before a value is quoted
    parameters = check_parameters(spec, given)
    if spec["pipelineInfo"]["name"] in OWN_PIPELINES:
        packed = Pipeline(spec).packages
        check_values(spec["pipelineInfo"]["name"], defaults(spec) | parameters, here=here, packed=packed)
    aim = Aim.HERE if here else Aim.SENT
    findings = refuse_errors(check(Pipeline(spec, parameters, aim=aim, location=location), schedule))
    refused = ("SL611",) if uri else ("SL611", "SL614")
    if found := next((finding for finding in findings if finding.code in refused), None):
        raise PipelineError(f"{found.why}; {found.fix}")
    return parameters, findings


def parse(content: bytes | str, path: Path, given: Mapping[str, Any] | None = None) -> Pipeline:
    """Parses the content of the pipeline file `path`; raises PipelineError when it is not a pipeline."""
    spec = parse_pipeline(content, path)
    return Pipeline(spec, None if given is None else fold_options(spec, given))
