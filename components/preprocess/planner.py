"""The first step: the source is surveyed, bad examples are left out, and the plan is written."""

from __future__ import annotations

import json
import time
from dataclasses import replace

from shardline.components.preprocess.meter import Meter
from shardline.components.preprocess.planning import plan_file, rows
from shardline.components.preprocess.planning.dealing import deal_rows
from shardline.components.preprocess.planning.plan_file import Plan
from shardline.components.preprocess.planning.rejected import Rejected
from shardline.components.preprocess.planning.survey import Survey, survey
from shardline.components.preprocess.processes import Processes
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources import open_source
from shardline.components.preprocess.work_directory import WorkDirectory
from shardline.trainer.errors import BadRecordError, ShardlineError


def make_plan(settings: PreprocessSettings, work: WorkDirectory, processes: Processes) -> Plan:
    """Surveys the source and writes the plan into the work directory.

    What an earlier run has done stays; what only its survey had made is made anew.

    Raises:
        SourceError: The source, or one of its examples, cannot be used.
    """
    try:
        return _make_plan(settings, work, processes)
    except ShardlineError:
        # Nothing is left of a source that cannot be used, unless there was something before.
        work.forget_plan()
        if not work.has_marks():
            work.remove()
        raise


def _make_plan(settings: PreprocessSettings, work: WorkDirectory, processes: Processes) -> Plan:
    work.forget_plan()
    surveyed = time.time_ns()
    rejected = Rejected(settings.on_bad_record, work.rejected)
    found = survey(open_source(settings), settings, work, rejected)
    plan = Plan(
        settings=settings,
        class_names=found.class_names,
        features=found.features,
        places=tuple(found.places),
        surveyed=surveyed,
        records_in=sum(found.codes) + found.bad,
        rejected={},
        shards=(),
    )
    if settings.on_bad_record == "skip":
        found = _check(found, plan, work, processes, rejected)
        rejected.check(plan.records_in, settings.max_bad_fraction)
    plan = replace(plan, rejected=dict(rejected.reasons), shards=deal_rows(found, settings, work))
    work.forget_shards({shard.file for shard in plan.shards})
    plan_file.save(plan, work.plan)
    return plan


def _check(
    found: Survey, plan: Plan, work: WorkDirectory, processes: Processes, rejected: Rejected
) -> Survey:
    """Takes examples whose image cannot be stored out of the buckets."""
    plan_file.save(plan, work.plan)
    found.buckets.flush()
    paths = [found.buckets.path(bucket) for bucket in range(rows.BUCKETS)]
    meter = Meter("checked", sum(found.codes), rejected=found.bad)
    processes.do("check", work.out, [path.name for path in paths], meter.advance)
    codes = list(found.codes)
    for path in paths:
        for line in path.with_suffix(".bad").read_text().splitlines():
            bad = json.loads(line)
            codes[bad["code"]] -= 1
            rejected.add(BadRecordError(bad["file"], bad["reason"]))
    return replace(found, codes=codes)
