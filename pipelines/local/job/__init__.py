"""Custom jobs on this machine: their replicas, environment, restarts, failures and trials.

It may import `process`, and knows no pipeline. `tuning` loads Optuna: only a tuning job imports it.
"""

from shardline.pipelines.local.job.custom_job import EXECUTOR_INPUT_MARKER as EXECUTOR_INPUT_MARKER
from shardline.pipelines.local.job.custom_job import LOCAL_PROJECT as LOCAL_PROJECT
from shardline.pipelines.local.job.custom_job import CustomJob as CustomJob
from shardline.pipelines.local.job.custom_job import parse_payload as parse_payload
from shardline.pipelines.local.job.custom_job import read_request as read_request
from shardline.pipelines.local.job.supervisor import parse_injection as parse_injection
from shardline.pipelines.local.job.supervisor import run_job as run_job
