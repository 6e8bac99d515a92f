"""Files that are read: on this machine, in Cloud Storage mounted under /gcs/, or behind any other URL.

Whatever cannot be found, opened or read is a SourceError of one line.
"""

from __future__ import annotations

import contextlib
import glob
import io
import logging
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, TextIO, cast

from shardline.trainer import files
from shardline.trainer.errors import ShardlineError, SourceError

#: Characters of a line.
_LONGEST_LINE = 64 << 20


def resolve(path: str) -> str:
    """Returns how a path is best read: gs://bucket/x as /gcs/bucket/x where the bucket is mounted."""
    if not path.startswith("gs://"):
        return os.path.expanduser(path)
    bucket = "/".join(path.split("/", 3)[:3])
    return str(files.local_path(path)) if files.local_path(bucket).is_dir() else path


def is_remote(path: str) -> bool:
    """Returns whether a resolved path is a URL, to be read through fsspec."""
    return "://" in path


@contextlib.contextmanager
def one_line(path: str, what: str = "") -> Iterator[None]:
    """Turns what reading a file raises into one line; of a URL that is anything (HTTP, credentials)."""
    try:
        yield
    except ShardlineError:
        raise
    except Exception as error:
        if not isinstance(error, OSError | ValueError) and not is_remote(path):
            raise
        raise SourceError(f"cannot read {what}{path!r}: {reason(error)}") from None


def open_read(path: str) -> BinaryIO:
    """Opens a file for reading; a local one without a buffer, as its readers ask for large blocks."""
    with one_line(path):
        if is_remote(path):
            file_system, inner = _remote(path)
            return cast(BinaryIO, file_system.open(inner, "rb"))
        # A pipe would be waited for, and a device read without end.
        file = io.FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise SourceError(f"cannot read {path!r}: it is not a file but a pipe, a socket or a device")
        return cast(BinaryIO, file)


def open_text(path: str) -> TextIO:
    """Opens a UTF-8 file for reading, line ends as they are; bytes that are not UTF-8 survive as in names."""
    # A byte-order mark is what spreadsheets write.
    return io.TextIOWrapper(
        io.BufferedReader(cast(io.RawIOBase, open_read(path))), "utf-8-sig", "surrogateescape", newline=""
    )


def lines(text: TextIO, path: str) -> Iterator[str]:
    """Yields the lines of a text file; SourceError where one is longer than any row of a table."""
    for number, line in enumerate(iter(lambda: text.readline(_LONGEST_LINE + 1), ""), start=1):
        if len(line) > _LONGEST_LINE:
            raise SourceError(
                f"{path!r}, row {number} has more than {_LONGEST_LINE >> 20} MiB; a row is one line"
            )
        yield line


def find_files(pattern: str) -> list[str]:
    """Returns the files that match a pattern with *, ?, [] and **, sorted; hidden ones are left out."""
    if is_remote(pattern):
        found = list(describe_files(pattern))
    elif os.path.lexists(pattern):  # the name itself may have brackets
        found = [pattern]
    else:
        found = [path for path in glob.glob(pattern, recursive=True) if not os.path.isdir(path)]
    if not found:
        raise SourceError(f"no file matches {pattern!r}")
    if os.path.isdir(found[0]):
        raise SourceError(
            f"{pattern!r} is a directory; give a pattern such as {pattern.rstrip('/')}/*.tfrecord"
        )
    return sorted(found)


def describe_files(pattern: str) -> dict[str, Mapping[str, Any]]:
    """Returns what a remote file system says of the files that match a pattern, by URL, sorted."""
    file_system, inner = _remote(pattern)
    with one_line(pattern):
        found = file_system.glob(inner, detail=True)
    if not found:
        raise SourceError(f"no file matches {pattern!r}")
    return {file_system.unstrip_protocol(path): found[path] for path in sorted(found)}


def describe_below(root: str) -> dict[str, Mapping[str, Any]]:
    """Returns what a remote file system says of the visible files below a directory, by relative path."""
    file_system, inner = _remote(root)
    with one_line(root, "the directory "):
        found = file_system.find(inner, detail=True)
    prefix = inner.rstrip("/") + "/"
    below = {path.removeprefix(prefix): found[path] for path in sorted(found) if path.startswith(prefix)}
    visible = {path: status for path, status in below.items() if "/." not in f"/{path}"}
    if not visible:
        raise SourceError(f"cannot read the directory {root!r}: there is no file in it")
    return visible


def fetch(root: str, names: Sequence[str]) -> dict[str, bytes | Exception]:
    """Returns the content of files below a remote directory by name, or why one cannot be read."""
    if not names:
        return {}
    file_system, inner = _remote(root)
    prefix = inner.rstrip("/") + "/"
    # Given as a list, so that one file does not come back as bytes.
    with one_line(root, "files in "):
        content = file_system.cat([prefix + name for name in names], on_error="return")
    return {name: content[prefix + name] for name in names}


def reason(error: BaseException) -> str:
    """Returns the words of the operating system, or the first line of another message."""
    if isinstance(error, FileNotFoundError):  # from fsspec these have no words of their own
        return "No such file or directory"
    words = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(words).strip().partition("\n")[0]


def _remote(url: str) -> tuple[Any, str]:
    """Returns the file system of a URL and the path inside it."""
    # It logs what it then raises, with tracebacks, and every attempt before.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    try:
        import fsspec

        file_system, inner = fsspec.core.url_to_fs(url)
    except ImportError as missing:
        hint = "; pip install 'shardline[gcs]'" if url.startswith("gs://") else ""
        raise SourceError(f"cannot read {url!r}: {missing}{hint}") from None
    except Exception as error:  # of credentials, settings, unknown protocols
        raise SourceError(f"cannot read {url!r}: {reason(error)}") from None
    return file_system, cast(str, inner)
