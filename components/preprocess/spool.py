"""Images of a source that can be read only once, kept until their place in the shards is known."""

from __future__ import annotations

import tempfile
from types import TracebackType
from typing import NamedTuple, Self

from trainer.errors import RunError

_MEMORY_BYTES = 64 * 2**20


class Span(NamedTuple):
    """A place in a spool."""

    start: int
    length: int


class Spool:
    """A nameless temporary file, held in memory as long as it is small (64 MiB)."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=_MEMORY_BYTES)  # noqa: SIM115 (see __exit__)
        self._end = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, data: bytes) -> Span:
        """Keeps the bytes and returns where they are.

        Raises:
            RunError: The temporary directory is full.
        """
        try:
            self._file.write(data)
        except OSError as error:
            raise RunError(
                f"cannot keep images in {tempfile.gettempdir()}: {error.strerror}; set TMPDIR to another disk"
            ) from None
        span = Span(self._end, len(data))
        self._end += len(data)
        return span

    def read(self, span: Span) -> bytes:
        """Returns bytes that were kept; call only after the last `append`."""
        self._file.seek(span.start)
        return self._file.read(span.length)
