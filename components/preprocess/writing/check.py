"""Looking at every image before anything is decided, so that bad ones can be left out of the plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from shardline.components.preprocess.planning import rows
from shardline.components.preprocess.planning.payload import Payloads
from shardline.components.preprocess.planning.places import NOWHERE
from shardline.components.preprocess.planning.plan_file import Plan
from shardline.components.preprocess.work_directory import WorkDirectory
from shardline.trainer.errors import BadRecordError


def check_bucket(plan: Plan, work: WorkDirectory, path: Path, report: Callable[[int, int], None]) -> None:
    """Takes the rows whose image cannot be stored out of a bucket file.

    Args:
        plan: The plan as far as it is known: settings and places.
        work: The work directory.
        path: The bucket file; beside it, NAME.bad names what was taken out and why, and its split code.
        report: Told of progress: records and bytes since the last call.
    """
    codec = plan.make_codec()
    good, bad = [], []
    with Payloads(plan.places, work.spool, plan.surveyed) as payloads:
        for row in rows.read(path):
            parsed = rows.parse(row)
            data = b""
            try:
                if parsed.place != NOWHERE:
                    data = payloads.read(parsed.place, parsed.offset, parsed.length, parsed.path, parsed.key)
                    codec.store(data, parsed.name)
                good.append(row)
            except BadRecordError as error:
                bad.append({"file": error.name, "reason": error.reason, "code": parsed.code})
            report(1, len(data))
    path.write_bytes(b"".join(good))
    path.with_suffix(".bad").write_text("".join(json.dumps(each) + "\n" for each in bad))
