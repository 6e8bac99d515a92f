"""The lines of a log that say something, told from those with which KFP repeats a task's whole input."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_REPLICA = re.compile(r"((?:chief|worker|ps|evaluator)-\d+) \| (.*)", re.DOTALL)
_KFP = re.compile(r"\[KFP Executor [^]]*\]: ")
#: How the lines begin that follow one of KFP's: those of a JSON document.
_JSON = ("{", "}", " ")


class KfpLines:
    """Recognizes what KFP itself has written, line by line, of several processes at once."""

    def __init__(self) -> None:
        self._in_kfp: set[str] = set()

    def has(self, text: str, source: str = "") -> bool:
        """Whether a line is KFP's own, or empty.

        Args:
            text: The next line of a process.
            source: Tells processes apart.
        """
        if _KFP.match(text):
            self._in_kfp.add(source)
            return True
        if source in self._in_kfp and text.startswith(_JSON):
            return True
        self._in_kfp.discard(source)
        return not text.strip()


def readable(lines: Iterable[str]) -> Iterator[str]:
    """Yields the lines that neither KFP has written nor are empty.

    Args:
        lines: Of one process, or of several, each line after the name of its replica: "worker-0 | ...".
    """
    kfp = KfpLines()
    for line in lines:
        replica, text = split_replica(line)
        if not kfp.has(text, replica):
            yield line


def split_replica(line: str) -> tuple[str, str]:
    """Returns the name of the replica at the beginning of a line, "" for none, and the rest."""
    match = _REPLICA.fullmatch(line)
    return (match[1], match[2]) if match else ("", line)
