"""Proof of a pipeline: the runs on this machine of a file of the same bytes, and how they came out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardline.components.run_directory import local_runs
from shardline.components.run_record import SUCCEEDED, RunRecord
from shardline.components.text import quality, short
from shardline.pipelines.spec import defaults
from shardline.trainer.errors import PipelineError

#: Runs of a directory that are looked at, the newest first.
_MOST = 1000
#: Parameters that a local run has of its own, and those that name a place of this machine.
_OWN = ("champion_uri",)
#: Characters of a value that are shown.
_LONGEST = 40


@dataclass(frozen=True)
class Proofs:
    """Where runs on this machine are, and whether a pipeline has to have succeeded in one of them.

    `parameters` are the options by which a command was given those of the run, " --params FILE".
    """

    runs_dir: Path
    required: bool = False
    parameters: str = ""

    def of(self, content: bytes, spec: Mapping[str, Any]) -> str:
        """Returns in one line whether a file of this content has run here, and how that came out.

        The run that is named is the newest that succeeded, and where there is none the newest. Raises
        PipelineError where a success is required and there is none.
        """
        digest = hashlib.sha256(content).hexdigest()
        same = [record for record in local_runs(self.runs_dir, _MOST) if record.sha256 == digest]
        # One that found nothing changed has proved least.
        succeeded = sorted(
            (record for record in same if record.state == SUCCEEDED),
            key=lambda record: record.verdict == "unchanged",
        )
        if not same:
            line = f"this file (sha256 {digest[:12]}) has not run here, in {self.runs_dir}"
        else:
            times = "once" if len(same) == 1 else f"{len(same)} times"
            line = f"this file has run here {times}: {_words([*succeeded, *same][0], spec)}"
        if self.required and not succeeded:
            raise PipelineError(
                f"{line}; --proven wants a run that succeeded: 'shardline run{self.parameters}' makes one"
            )
        return line


def _words(record: RunRecord, spec: Mapping[str, Any]) -> str:
    usual = defaults(spec)
    changed = [
        f"{name}={short(value, _LONGEST)}"
        for name, value in record.parameters.items()
        if value != usual.get(name) and name not in _OWN
    ]
    given = f"with {', '.join(changed)}" if changed else "with all defaults"
    figures = f", {figures}" if (figures := quality(record.metrics)) else ""
    verdict = f" ({record.verdict}{figures})" if record.verdict else ""
    return f"{record.name} {record.state}{verdict}, {given}"
