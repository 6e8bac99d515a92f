"""Cost of a run before it is submitted: list prices of its custom jobs, times their hours.

prices.csv has Compute Engine's prices in USD, an hour or of disks a GB-month. Vertex AI adds a management fee
for training, a share of the standard price on Spot VMs, too: https://cloud.google.com/vertex-ai/pricing
"""

from __future__ import annotations

import csv
import datetime
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shardline.components.runs.record import SUCCEEDED, RunRecord
from shardline.components.storage.listing import files_below
from shardline.components.storage.remote_files import read_bytes
from shardline.components.text import Rows, truncate
from shardline.components.tune.study import parse_study, read_study
from shardline.components.vertex.forms import seconds
from shardline.components.vertex.payload import mapping_at, whole_number
from shardline.pipelines.check.job import Job, Pool, jobs
from shardline.pipelines.check.pipeline import Pipeline
from shardline.pipelines.settings import Budget, Environment
from shardline.pipelines.spec import RETRAIN, TUNE
from shardline.pipelines.tables import read_table
from shardline.trainer.base.deserialize import restore
from shardline.trainer.base.errors import SettingsError, ShardlineError
from shardline.trainer.base.files import parse_json

TABLE = Path(__file__).with_name("prices.csv")
#: A machine type has the price of its series for each vCPU or accelerator: n1-standard-8, a2-highgpu-4g.
_SIZED = re.compile(r"(.+)-(\d+)g?")
_LEFT_OUT = "discounts, taxes, storage, network and tasks without machine_type"
_Rows = Mapping[tuple[str, str], Mapping[str, str]]
_Choices = list[tuple[Mapping[str, str], Job]]


class Part(NamedTuple):
    """Machines, accelerators or disks in a region: USD an hour, infinite where no price is known."""

    name: str
    region: str
    rate: float
    date: str = ""


def within_budget(
    environment: Environment, spec: Mapping[str, Any], given: Mapping[str, Any], *, is_shown: bool
) -> Rows:
    """Returns the rows of `estimate`, or none where they are neither shown nor compared with a [budget]."""
    limit = Budget(**read_table(environment.file, "budget", Budget)).max_cost
    return estimate(spec, given, environment.location, limit) if is_shown or limit is not None else ()


def estimate(
    spec: Mapping[str, Any], given: Mapping[str, Any], region: str, limit: float | None, table: Path = TABLE
) -> Rows:
    """Returns rows about the cost of a run with the parameters `given`; none without custom jobs.

    Raises SettingsError where it may cost more than `limit` in USD, or its cost is not known.
    """
    with table.open(newline="") as file:
        rows = {(row["item"], row["market"]): row for row in csv.DictReader(file)}
    pipeline = Pipeline(spec, given)
    # Both branches of our own pipeline have the same training job, and one of them runs.
    is_ours = pipeline.name == RETRAIN
    found = {job.task.name if is_ours else job.task.path: job for job in jobs(pipeline)}
    needed = {"train"} if is_ours else {job.task.name for job in found.values()}
    run, basis = _last_run(pipeline.value("history_uri"), pipeline.name, needed)
    then = Pipeline(spec, run.parameters if run else given)
    epochs, before = (whole_number(item.value("epochs")) or 1 for item in (pipeline, then))
    trained = next((job.choices[:1] for job in found.values() if job.task.name == "train"), [])
    parts, rates, timeouts, most, measured = list[Part](), list[str](), dict[str, float](), 0.0, 0.0
    for job in found.values():
        name, (choices, together, times) = job.task.name, _scale(job, trained)
        own = _dearest(choices, region, rows)
        parts, rate = parts + own, together * sum(part.rate for part in own)
        rates.append(f"{name} {'up to ' * (len(choices) > 1)}{rate:.2f}")
        timeouts[name] = seconds(str(job.scheduling.get("timeout", "604800s"))) or math.inf
        most += rate * times * timeouts[name] / 3600
        hours = run.task_s.get(name, 0) / 3600 if run else 0
        measured += rate * hours * (epochs / before if name == "train" else 1)
    about = f"about {measured:.2f} USD, " if run else ""
    text = f"{', '.join(rates)} USD an hour; {about}at most {most:.2f} USD by timeouts and retries"
    if unknown := [f"{part.name} in {part.region}" for part in parts if part.rate == math.inf]:
        text = f"no list price known for {', '.join(dict.fromkeys(unknown))}"
    date = min((part.date for part in parts if part.date), default="no date")
    old = " (older than a year)" if date < str(datetime.date.today() - datetime.timedelta(365)) else ""
    places = " and ".join(dict.fromkeys(part.region for part in parts))
    spot = ", of Spot as on that day" if any(job.strategy == "SPOT" for job in found.values()) else ""
    basis = f"list prices of {date}{old} or later in {places}{spot}, without {_LEFT_OUT}; {basis}"
    if limit is not None and (unknown or (measured if run else most) > limit):
        remedy = "take other machines or fewer epochs"
        if not run and most < math.inf:
            fitting = [f"{name} {int(limit / most * each)}s" for name, each in timeouts.items()]
            remedy = f"set timeouts that fit ({', '.join(fitting)}), as [train.job] timeout, and compile"
        raise SettingsError(
            f"[budget] max_cost is {limit:g} USD a run: {text} ({basis}); {remedy}, or raise it"
        )
    return [("cost", text), ("cost is by", basis)] if parts else []


def _scale(job: Job, trained: _Choices) -> tuple[_Choices, int, int]:
    """Returns a job's machines, `trained` for our own trials, and how often it runs: at once, one by one."""
    attempts = 1 + (whole_number(mapping_at(job.task.spec, "retryPolicy").get("maxRetryCount")) or 0)
    value = job.task.pipeline.value
    if job.task.pipeline.name == TUNE and "study_spec" in job.content:
        most = whole_number(value("max_trial_count")) or 0
        study = read_study(parse_study(value("study")), max_trial_count=most)
        rounds = math.ceil(study.max_trial_count / study.parallel_trial_count)
        return trained, study.parallel_trial_count, rounds * attempts
    together = (whole_number(value("preprocess_tasks")) or 0) if "for-loop" in job.task.path else 1
    return job.choices if together else [], together or 1, attempts


def _dearest(choices: _Choices, region: str, rows: _Rows) -> list[Part]:
    """Returns the parts of the dearest of the machines that a job may run on."""
    parts = (
        [part for pool in job.pools for part in _parts(pool, choice["location"] or region, rows)]
        for choice, job in choices
    )
    dearest = max(parts, key=lambda own: sum(part.rate for part in own), default=[])
    return dearest or [Part("machines that are known at run time only", region, math.inf)]


def _parts(pool: Pool, region: str, rows: _Rows) -> Iterator[Part]:
    """Yields the machines, disks and accelerators of a pool."""
    machine, machine_type = pool.machine, pool.machine_type
    sized = None if (machine_type, "standard") in rows else _SIZED.fullmatch(machine_type)
    series, size = (sized[1], int(sized[2])) if sized else (machine_type, 1)
    disk = {"boot_disk_type": "pd-ssd", "boot_disk_size_gb": 100, **mapping_at(pool.spec, "disk_spec")}
    months = (whole_number(disk["boot_disk_size_gb"]) or 0) / 730  # of hours
    items = [(machine_type, series, size), (disk["boot_disk_type"], disk["boot_disk_type"], months)]
    kind = machine.get("accelerator_type")
    if kind and rows.get((series, "standard"), {}).get("unit") != "accelerator with its machine":
        items.append((kind, kind, whole_number(machine.get("accelerator_count")) or 0))
    for name, item, count in items:
        row = rows.get((item, "standard"), {})
        standard, number = float(row.get(region) or math.inf), count * pool.replicas or math.inf
        # Without a Spot price the standard price is the most that it can be.
        price = float(rows.get((item, pool.job.strategy.lower()), {}).get(region) or standard)
        fee = float(rows["management fee", "standard"].get(region) or math.inf)
        rate = number * (price + fee * standard)
        yield Part(name or "a machine of the run", region, rate, row.get("date", ""))


def _last_run(uri: Any, pipeline: str, tasks: set[str]) -> tuple[RunRecord | None, str]:
    """Returns the last successful run of a pipeline that has run these tasks, and what was found."""
    if not uri or not isinstance(uri, str):
        return None, "no earlier run without history_uri"
    try:
        records = [item for item in files_below(f"{uri.rstrip('/')}/runs") if item.name.endswith("/run.json")]
        for file in sorted(records, key=lambda file: int(file.version), reverse=True)[:20]:
            content = parse_json(read_bytes(file.path), file.path, SettingsError)
            run = restore(RunRecord, content, file.path, SettingsError)
            if (run.state, run.pipeline) == (SUCCEEDED, pipeline) and tasks <= run.task_s.keys():
                return run, f"hours as in {run.name}"
    except (OSError, ShardlineError) as error:
        return None, f"no earlier run read: {truncate(error, 160)}"
    return None, f"no earlier run of these tasks in {uri}"
