"""What the replicas of custom jobs print, found again in the output of a pipeline."""

from __future__ import annotations

import re

from pipelines.local.job import ROLES

_LINE = re.compile(rf"((?:{'|'.join(ROLES)})-\d+) \| (.*)")
_KFP = "[KFP Executor "
#: How the lines begin that follow one of KFP's: those of a JSON document.
_JSON = ("{", "}", " ")


class ReplicaLines:
    """Tells the lines that a person wants to see from KFP's own, which repeat a task's whole input."""

    def __init__(self) -> None:
        self._in_kfp: set[str] = set()

    def find(self, line: str) -> tuple[str, str] | None:
        """Returns a replica's name and what it has printed, or None where there is nothing to be shown."""
        match = _LINE.fullmatch(line)
        if match is None:
            return None
        name, text = match[1], match[2]
        if text.startswith(_KFP):
            self._in_kfp.add(name)
            return None
        if name in self._in_kfp and text.startswith(_JSON):
            return None
        self._in_kfp.discard(name)
        return name, text
