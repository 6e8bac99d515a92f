"""`shardline check`: static checks of a compiled pipeline and of a run of it, without Google Cloud.

A rule is in the file of its subject: `job_rules`, `container_rules` or `run_rules`; `checks` says how one
is written. It may import the specs and settings of `pipelines`; it loads neither KFP nor TensorFlow.
"""

from shardline.pipelines.check import container_rules, job_rules, run_rules  # noqa: F401  # they register
from shardline.pipelines.check.checks import (
    RULES,
    Finding,
    apply_rules,
    check_pipeline,
    check_run,
    refuse_errors,
)
from shardline.pipelines.check.pipeline import Job, Pipeline, Schedule, Target
from shardline.pipelines.check.run_rules import split_zone, zone_of

__all__ = [
    "RULES",
    "Finding",
    "Job",
    "Pipeline",
    "Schedule",
    "Target",
    "apply_rules",
    "check_pipeline",
    "check_run",
    "refuse_errors",
    "split_zone",
    "zone_of",
]
