"""Bytes from a pipe, in whole lines of text."""

from __future__ import annotations

#: Longest line that is waited for; a longer one is passed on in pieces.
_LONGEST = 1 << 20


class LineBuffer:
    """Collects the bytes of one stream until a line is whole."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Takes bytes and returns the lines that they complete, without line ends."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST:
            whole.append(self._rest)
            self._rest = b""
        return [_text(line) for line in whole]

    def flush(self) -> list[str]:
        """Returns the last line when the stream has ended without a line end."""
        rest, self._rest = self._rest, b""
        return [_text(rest)] if rest else []


def _text(line: bytes) -> str:
    return line.rstrip(b"\r").decode("utf-8", "replace")
