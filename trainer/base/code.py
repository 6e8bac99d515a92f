"""Code of a user in the text of a task: files of packages as one text, which the task unpacks first.

The text is base64 of bz2 of JSON: the names of the files, sorted, and their content, a character a byte. It
has no times, owners or modes, and equal files give the same text on every machine: what libbz2 writes has not
changed since its release 1.0.
"""

from __future__ import annotations

import atexit
import base64
import bz2
import hashlib
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from shardline.trainer.base.errors import PipelineError

#: Environment variable of a task, and of its child processes: directory of its unpacked code.
VARIABLE = "SHARDLINE_CODE"
#: Most bytes of all files; a short text could have billions.
_MOST = 32 * 2**20


def files_in(package: Path) -> Iterator[Path]:
    """Yields the files of a package, sorted: none that is hidden, a cache, or a link that leads out of it."""
    root = package.resolve()
    for path in sorted(package.rglob("*")):
        parts = path.relative_to(package).parts
        own = not any(part.startswith(".") or part == "__pycache__" for part in parts)
        if own and path.suffix != ".pyc" and path.is_file() and path.resolve().is_relative_to(root):
            yield path


def pack(files: Mapping[str, bytes]) -> str:
    """Returns files, by their names relative to a directory of sys.path, as a text."""
    content = {name: files[name].decode("latin-1") for name in sorted(files)}
    encoded = json.dumps(content, ensure_ascii=False).encode(errors="surrogateescape")
    return base64.b64encode(bz2.compress(encoded)).decode()


def read_files(text: str) -> dict[str, bytes]:
    """Returns the files in a text of `pack`; PipelineError where it is damaged, or a name leads elsewhere."""
    try:
        encoded = bz2.BZ2Decompressor().decompress(base64.b64decode(text), _MOST)
        content = json.loads(encoded.decode(errors="surrogateescape"))
        files = {str(name): each.encode("latin-1") for name, each in content.items()}
    except (AttributeError, OSError, ValueError) as error:
        raise PipelineError(f"the packed code is damaged ({error}); compile again") from None
    for name in files:
        if name.startswith("/") or ".." in PurePosixPath(name).parts:
            raise PipelineError(f"the packed code has the file {name!r}, outside of its directory")
    return files


def unpack(text: str) -> None:
    """Unpacks a text of `pack`, and puts its directory first on the path of this process and its children."""
    directory = tempfile.mkdtemp(prefix="shardline-code-")
    atexit.register(_remove, directory, os.getpid())
    for name, content in read_files(text).items():
        path = Path(directory, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    sys.path.insert(0, directory)
    others = filter(None, [os.environ.get("PYTHONPATH")])
    os.environ.update({VARIABLE: directory, "PYTHONPATH": os.pathsep.join([directory, *others])})
    importlib.invalidate_caches()


def _remove(directory: str, owner: int) -> None:
    if os.getpid() == owner:  # and not a fork of it
        import shutil

        shutil.rmtree(directory, ignore_errors=True)


def unpacked_files() -> dict[str, bytes]:
    """Returns the files of the unpacked code of this task; none where there is none."""
    root = os.environ.get(VARIABLE)
    files = files_in(Path(root)) if root else ()
    return {path.relative_to(root or "").as_posix(): path.read_bytes() for path in files}


def versions(files: Mapping[str, bytes]) -> dict[str, str]:
    """Returns the packages and top-level modules of files, sorted, each with a digest of its files."""
    packages: dict[str, dict[str, bytes]] = {}
    for name in sorted(files):
        packages.setdefault(name.partition("/")[0].removesuffix(".py"), {})[name] = files[name]
    return {
        package: f"sha256:{hashlib.sha256(pack(own).encode()).hexdigest()[:16]}"
        for package, own in packages.items()
    }
