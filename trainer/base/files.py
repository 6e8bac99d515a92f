"""Files: atomic writes, reads with a size limit, JSON and TOML, and paths of Cloud Storage (gs://, /gcs/)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import resource
import secrets
import stat
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardline.trainer.base.errors import RunError, SettingsError, ShardlineError

#: Environment variable with the directory that replaces /gcs/ on a machine where it is not mounted.
GCS_ROOT_VARIABLE = "SHARDLINE_GCS_ROOT"

#: Prefix of the names of unfinished files.
TEMPORARY = ".tmp-"

#: Largest size of a settings or JSON file in bytes: the manifest of 100,000 shards has 20 MB.
MAX_TEXT_BYTES = 64 << 20
# A longer JSON text is not indented, which would make it several times as large.
_MAX_INDENTED = 1 << 18

#: Errors of a path that a user named; any other may be gone the next time.
PATH_ERRORS = {
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EEXIST),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EROFS, errno.ENXIO),
}

#: Errors of a full disk, and of a used-up quota.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

# Open files of a training process besides its data: libraries, logs, checkpoints, and sockets.
_OTHER_FILES = 100

#: Prefixes of paths in buckets.
BUCKET_PREFIXES = ("gs://", "/gcs/")

# Nesting levels that a JSON or TOML text may have: the functions that walk through it are recursive.
_MAX_DEPTH = 100


def check_open_files(count: int, what: str) -> None:
    """Raises this process's limit of open files to the hard one; SettingsError if `count` more do not fit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # some systems bound it by other limits
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], count + _OTHER_FILES
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise SettingsError(
            f"{count} {what} are open at a time, with other files {needed}, and the limit of open files is "
            f"{limit} (ulimit -n); raise it"
        )


def cannot_read_now(error: BaseException) -> bool:
    """Whether an error of reading a file says nothing of the file: the disk or the network has failed.

    The errors of damaged files that gzip, HDF5 and Arrow raise are OSErrors without a number.
    """
    return isinstance(error, OSError) and error.errno not in (None, *PATH_ERRORS)


def local_path(uri: str | os.PathLike[str]) -> Path:
    """Returns the local path of a URI: gs://bucket/x is /gcs/bucket/x on Vertex AI.

    Raises SettingsError when the path would leave its bucket.
    """
    text = os.fspath(uri)
    for prefix in BUCKET_PREFIXES:
        if text.startswith(prefix):
            if ".." in text.split("/"):
                raise SettingsError(f"{text!r} leads out of its bucket; write the path without '..'")
            return Path(os.environ.get(GCS_ROOT_VARIABLE) or "/gcs", text.removeprefix(prefix).lstrip("/"))
    return Path(text)


def bucket_uri(path: str | os.PathLike[str]) -> str:
    """Returns the URI gs://BUCKET/x of a path in a bucket, gs:// or /gcs/; "" for any other.

    A bucket for which a directory stands (GCS_ROOT_VARIABLE) is none.
    """
    text = os.fspath(path)
    if not text.startswith(BUCKET_PREFIXES):
        return ""
    local_path(text)  # refuses '..'
    name, root = text.removeprefix("gs://").removeprefix("/gcs/"), os.environ.get(GCS_ROOT_VARIABLE)
    return "" if root and Path(root, name.split("/")[0]).is_dir() else f"gs://{name}"


def with_space(text: str, path: str | os.PathLike[str], needed: float = 0) -> str:
    """Returns an error's text; after that of a full disk, the free bytes, and the needed ones if known."""
    full = next((number for number in DISK_FULL if os.strerror(number) in text), None)
    if full is None or f"{os.strerror(full)} (" in text:
        return text
    real = Path(os.path.realpath(path))
    disk = os.statvfs(next(each for each in (real, *real.parents) if each.exists()))
    free = disk.f_bavail * disk.f_frsize if full == errno.ENOSPC else -1  # not known of a quota
    sizes = [(size, what) for size, what in ((free, "free"), (needed or -1, "needed")) if size >= 0]
    parts = [f"{n / 1e6:,.1f} MB {what}" if n >= 1e6 else f"{n / 1e3:,.1f} kB {what}" for n, what in sizes]
    return text.replace(os.strerror(full), f"{os.strerror(full)} ({', '.join(parts) or 'quota'})", 1)


def temporary_name(path: Path) -> Path:
    """Returns a random name in the directory of `path`, with its suffix, unique across containers."""
    return path.with_name(f"{TEMPORARY}{secrets.token_hex(8)}-{path.name[-100:]}")


@contextlib.contextmanager
def replacing(path: Path, needed: float = 0) -> Iterator[Path]:
    """Yields a temporary file to write, which replaces `path`, or the target of that link, at the end.

    An OSError names `path`, and on a full disk also the free bytes and the `needed` ones, if they are known.
    """
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    temporary = temporary_name(target)
    try:
        yield temporary
        sync(temporary)
        temporary.replace(target)
        sync(target.parent)
    except OSError as failure:
        temporary.unlink(missing_ok=True)  # its bytes are free again
        if failure.errno in DISK_FULL or TEMPORARY in str(failure.filename):
            failure.filename, failure.strerror = str(path), with_space(failure.strerror or "", path, needed)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def lock(descriptor: int, *, shared: bool = False, optional: bool = False) -> bool:
    """Locks an open file until it is closed, an `optional` lock where there are any; False if another has."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as failure:
        if not optional or failure.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
    return True


@contextlib.contextmanager
def plain_name(directory: Path) -> Iterator[str]:
    """Yields a name of an existing directory without characters that mean something in patterns."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def names(directory: Path) -> list[str]:
    """Returns the names in a directory, none where there is none; RunError where it cannot be listed."""
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        reason = f"{error.strerror}; nothing was removed: start the run again"
        raise RunError(f"cannot list {directory}: {reason}") from error


def sync(path: Path) -> None:
    """Flushes a file, or the names in a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # a mounted bucket may have no fsync of directories
            raise
    finally:
        os.close(descriptor)


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a file atomically; a device or pipe, such as /dev/stdout, is written to directly.

    Raises SettingsError for a pipe that no process reads.
    """
    if path.exists() and (not path.is_file() or path.parts[:2] in (("/", "dev"), ("/", "proc"))):
        try:
            # Without O_NONBLOCK, opening a pipe waits for a reader.
            descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as failure:
            if not path.is_fifo():
                raise
            raise SettingsError(
                f"cannot write to {path} ({failure.strerror}): nothing reads this pipe; name a file"
            ) from None
        os.set_blocking(descriptor, True)
        with open(descriptor, "wb") as file:
            file.write(data)
        return
    with replacing(path, len(data)) as temporary:
        temporary.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Writes a UTF-8 text file atomically."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Mapping[str, Any] | list[Any]) -> None:
    """Writes a JSON file atomically, as `to_json` returns it."""
    write_text(path, to_json(value, path.name))


def to_json(value: Mapping[str, Any] | list[Any], name: str) -> str:
    """Returns the text of a JSON file: keys in their order, NaN refused, indented unless it is long.

    Raises SettingsError when it has more bytes than are read.
    """
    text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    if len(text) <= _MAX_INDENTED:
        text = json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False)
    if (size := len(text.encode())) >= MAX_TEXT_BYTES:
        raise SettingsError(
            f"{name} would have {size >> 20:,} MiB, and at most {MAX_TEXT_BYTES >> 20} MiB are read; use "
            "fewer classes, columns or shards"
        )
    return text + "\n"


def read_text(path: Path, error: type[ShardlineError], *, limit: int = MAX_TEXT_BYTES) -> str:
    """Returns the content of a UTF-8 text file.

    Raises `error` when the file is missing, not a regular file or text, or larger than `limit` bytes. One
    that cannot be read is neither missing nor damaged: SettingsError without permission, else RunError.
    """
    try:
        # Without O_NONBLOCK, opening a pipe waits for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise error(f"{path} is not a file")
            data = file.read(limit + 1)
    except FileNotFoundError:
        raise error(f"no file {path}") from None
    except (OSError, ValueError) as failure:  # ValueError: a NUL in its name
        kind = SettingsError if isinstance(failure, PermissionError) else error
        kind = RunError if cannot_read_now(failure) else kind
        raise kind(f"cannot read {path}: {getattr(failure, 'strerror', None) or failure}") from None
    if len(data) > limit:
        raise error(f"{path} has more than {limit >> 20} MiB, which no such file needs")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as failure:
        raise error(f"{path} is not UTF-8 text: {failure.reason} at byte {failure.start}") from None


def parse_json(text: str | bytes, what: str, error: type[ShardlineError]) -> Any:
    """Returns the value of a JSON text.

    Raises `error`, naming `what`, when it is not JSON, has a number that is not finite or a duplicate key, or
    is nested too deeply.
    """
    with _parse_errors(what, "JSON", error):
        return _check_depth(
            json.loads(text, parse_constant=_finite, parse_float=_finite, object_pairs_hook=_unique_keys)
        )


def read_json(path: Path, error: type[ShardlineError]) -> dict[str, Any]:
    """Returns the object in a JSON file; raises `error` when there is none."""
    content = parse_json(read_text(path, error), str(path), error)
    if not isinstance(content, dict):
        raise error(f"{path} holds no JSON object")
    return content


def read_toml(path: Path, error: type[ShardlineError]) -> dict[str, Any]:
    """Returns the tables of a TOML file; raises `error` when it is not one."""
    text = read_text(path, error)
    with _parse_errors(str(path), "TOML", error):
        tables: dict[str, Any] = _check_depth(tomllib.loads(text))
        return tables


@contextlib.contextmanager
def _parse_errors(what: str, form: str, error: type[ShardlineError]) -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise error(f"{what} is nested too deeply") from None
    except ValueError as failure:
        raise error(f"{what} is not {form}: {failure}") from None


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:40]} is not a JSON number that can be held")
    return number


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice[:40]!r} is there twice")
    return unique


def _check_depth(value: Any) -> Any:
    """Returns the value; raises RecursionError when it is nested too deeply."""
    level: list[Any] = [[value]]
    for _ in range(_MAX_DEPTH + 1):
        nodes = (node.values() if isinstance(node, dict) else node for node in level)
        level = [item for items in nodes for item in items if isinstance(item, (dict, list))]
        if not level:
            return value
    raise RecursionError
