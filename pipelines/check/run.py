"""Checks a pipeline against all rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardline.pipelines.check import (  # noqa: F401  # the rules register themselves
    registry,
    rules,
)
from shardline.pipelines.check.findings import Finding, Severity
from shardline.pipelines.check.job import Job, Pool, jobs
from shardline.pipelines.check.pipeline import Executor, Parameter, Pipeline, Task
from shardline.pipelines.check.schedule import Schedule
from shardline.trainer.errors import PipelineError


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
) -> list[Finding]:
    """Returns what is wrong with a compiled pipeline; errors first.

    Args:
        spec: The pipeline spec (IR).
        parameters: What the run is given; None while nothing is known about it.
        schedule: What it is to run on, if it is.

    Raises:
        PipelineError: When the spec is not built as a pipeline is.
    """
    return check(Pipeline(spec, parameters), schedule)


def refuse_errors(
    spec: Mapping[str, Any],
    parameters: Mapping[str, Any] | None = None,
    schedule: Schedule | None = None,
) -> list[Finding]:
    """Checks a pipeline, as `check_pipeline` does, and refuses it when there are errors.

    Returns:
        The warnings.

    Raises:
        PipelineError: When a rule finds an error.
    """
    findings = check_pipeline(spec, parameters, schedule)
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    if errors:
        first = errors[0]
        more = f" (and {len(errors) - 1} more: see 'shardline check')" if len(errors) > 1 else ""
        raise PipelineError(f"{first.code} {first.where}: {first.why}; {first.fix}{more}")
    return findings
