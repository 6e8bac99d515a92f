"""Screening: every image is looked at before anything is decided, so that bad ones are not planned."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from shardline.components.preprocess import rows
from shardline.components.preprocess.images.codec import Codec
from shardline.components.preprocess.places import NOWHERE, ImageReader
from shardline.components.preprocess.plan import Plan
from shardline.components.preprocess.pool import Processes, Report
from shardline.components.preprocess.rows import Rows
from shardline.components.preprocess.survey import Rejected, Survey
from shardline.components.preprocess.work_directory import WorkDirectory
from shardline.trainer.errors import BadRecordError
from shardline.trainer.progress import Meter


def without_bad(
    found: Survey, plan: Plan, work: WorkDirectory, processes: Processes, rejected: Rejected
) -> Survey:
    """Takes examples whose image cannot be stored out of the buckets.

    Args:
        found: All examples.
        plan: What is known of the plan so far: settings and places.
        work: Where the buckets are.
        processes: Who looks at the images.
        rejected: Gets what was taken out.
    """
    plan.save(work.plan)
    found.buckets.flush()
    paths = [found.buckets.path(bucket) for bucket in range(rows.BUCKETS)]
    meter = Meter("checked", sum(found.codes), rejected=found.bad)
    processes.do(check_buckets, work.given, [path.name for path in paths], meter.advance)
    codes = list(found.codes)
    for path in paths:
        for line in path.with_suffix(".bad").read_text().splitlines():
            bad = json.loads(line)
            codes[bad["code"]] -= 1
            rejected.add(BadRecordError(bad["file"], bad["reason"]))
    return replace(found, codes=codes)


def check_buckets(given: Mapping[str, Any], items: Iterable[str], report: Report) -> dict[str, Any]:
    """Takes the rows whose image cannot be stored out of bucket files: a job of the process pool.

    `given` has `out`, the dataset directory, whose plan is known as far as settings and places. Beside each
    bucket file, NAME.bad names what was taken out and why, and its split code.
    """
    work = WorkDirectory.of(given)
    plan = Plan.load(work.plan)
    codec = plan.make_codec()
    with ImageReader(plan.places, work.spool, plan.surveyed) as images:
        for bucket in items:
            path, bad = work.buckets / bucket, list[dict[str, object]]()
            checked = path.with_suffix(".checked")
            rows.write(checked, (_usable(block, images, codec, bad, report) for block in rows.read(path)))
            checked.replace(path)
            path.with_suffix(".bad").write_text("".join(json.dumps(each) + "\n" for each in bad))
    return {}


def _usable(
    block: Rows, images: ImageReader, codec: Codec, bad: list[dict[str, object]], report: Report
) -> Rows:
    """Returns the rows whose image can be stored, and adds the others to `bad`."""
    good = []
    for number, (key, where, _, _, place, offset, length) in enumerate(block.fields()):
        data = b""
        try:
            if place != NOWHERE:
                data = images.read(place, offset, length, where, key)
                codec.store(data, rows.key_text(key))
            good.append(number)
        except BadRecordError as error:
            code = int(block.heads["code"][number])
            bad.append({"file": error.name, "reason": error.reason, "code": code})
        report(1, len(data))
    return block.take(np.array(good, np.int64))
