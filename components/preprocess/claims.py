"""Claims: who writes what, in a directory that several machines see.

    NAME.N  a claim: a file that is created exclusively, and written again and again while its holder lives

A lock of the file system is known to one machine alone where a bucket is mounted. Cloud Storage FUSE creates
an object exclusively (generation 0). A claim that stays as it is for longer than any pause is a dead run's:
the next one takes the number behind it, and whoever holds a lower one has lost it. A run that was stopped and
wakes finds out before it changes anything that is not its own (`Pulse`, `Claim.check`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from shardline.components.preprocess.ahead import persistently
from shardline.trainer import progress
from shardline.trainer.errors import RunError

#: Seconds between two signs of life, and those without one after which a claim is a dead run's. What another
#: machine has written is seen with a delay of up to a minute.
BEAT, SILENCE = 20.0, 150.0
_POLL = 2.0


class Pulse:
    """The last sign of life of a claim, in a file of this machine's disk: what its workers see of it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def beat(self, at: float) -> None:
        """Notes that the claim was held at a time, in seconds since the epoch."""
        self._path.touch()
        os.utime(self._path, (at, at))

    def wait(self) -> None:
        """Returns while the claim is surely held: at once, but after a stop of the machine or of the bucket.

        Raises RunError where it stays silent, since somebody else may have taken over.
        """
        end = time.monotonic() + SILENCE
        while self._path.exists() and time.time() - self._path.stat().st_mtime > SILENCE / 2:
            if time.monotonic() > end:
                raise RunError(f"the run gave no sign of life for {1.5 * SILENCE:.0f} s; run again")
            time.sleep(min(_POLL, BEAT))


class Claim:
    """A claim that is held. A context manager, which gives it back.

    Attributes:
        is_lost: Whether somebody else was seen to have taken over.
    """

    def __init__(self, path: Path, pulse: Pulse | None = None) -> None:
        self.path = path
        self.is_lost = False
        self._pulse = pulse
        self._holder = f"{here()} {secrets.token_hex(8)}"
        self._beats = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True, name="claim")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def create(self) -> bool:
        """Creates the file, and says whether this is the one who did."""

        def write(path: Path) -> None:
            try:
                number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                with open(number, "wb") as file:
                    file.write(self._text())
                    file.flush()
                    os.fsync(number)
            except OSError as error:  # it is there, perhaps by the try before, whose answer was lost
                if error.errno not in (errno.EEXIST, errno.ESTALE):
                    raise

        started = time.time()
        persistently(write, self.path)
        if held := self._is_held():
            self._beat(started)
        return held

    def holds(self) -> bool:
        """Asks whether nobody else has taken over."""
        self.is_lost = self.is_lost or not self._is_held()
        return not self.is_lost

    def check(self, *, ask: bool = True) -> None:
        """Raises RunError where another run has taken over, since this one seemed to be dead.

        Without `ask` it says only what is known already.
        """
        if self.is_lost or (ask and not self.holds()):
            raise RunError(
                f"another run took over the writing of {self.path.parent.parent}, as this one gave no sign "
                "of life; look at that one"
            )

    def release(self) -> None:
        """Removes the claim, and those before it."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        if not self.is_lost:
            name, _, number = self.path.name.rpartition(".")
            for each in range(1, int(number) + 1):
                self.path.with_name(f"{name}.{each}").unlink(missing_ok=True)

    def _live(self) -> None:
        while not self._ended.wait(BEAT):
            self._beats += 1
            started = time.time()  # a stop may come between any two of these lines
            try:
                if not self.holds():
                    return
                # Not made anew, where it has gone in the meantime.
                with open(os.open(self.path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC), "wb") as file:
                    file.write(self._text())
                self._beat(started)
            except OSError:
                continue  # the next one may get through

    def _text(self) -> bytes:
        return json.dumps({"holder": self._holder, "beats": self._beats}).encode()

    def _beat(self, at: float) -> None:
        if self._pulse:
            self._pulse.beat(at)

    def _is_held(self) -> bool:
        name, _, number = self.path.name.rpartition(".")
        return _last(self.path.parent).get(name) == int(number) and self._holder in _read(self.path)


class Claims:
    """Claims of one directory, of which each may be another run's, as this run has seen them."""

    def __init__(self, directory: Path, pulse: Pulse | None = None) -> None:
        self._directory = directory
        self._pulse = pulse
        self._seen: dict[Path, tuple[str, float]] = {}
        self._living: set[Path] = set()

    def take(self, *names: str) -> Claim | None:
        """Returns the first of these claims that nobody holds, or None: all who have one live, or may."""
        last = _last(self._directory)
        for name in names:
            number = last.get(name, 0)
            if number and not self._is_dead(self._directory / f"{name}.{number}"):
                continue
            claim = Claim(self._directory / f"{name}.{number + 1}", self._pulse)
            if claim.create():
                return claim
        return None

    def wait_for(self, name: str, in_use: Callable[[], RunError]) -> Claim:
        """Returns a claim once it is known that nobody holds it; raises `in_use` where somebody does."""
        said = False
        while (claim := self.take(name)) is None:
            path = self._directory / f"{name}.{_last(self._directory).get(name, 0)}"
            host = _host(_read(path))
            if host == _host(here()) or path in self._living:
                raise in_use()
            if not said:
                said = True
                progress.say(
                    "preprocess",
                    f"another run wrote here, on {host.partition('/')[0]}: it takes up to "
                    f"{SILENCE:.0f} s to see whether it lives",
                )
            time.sleep(_POLL)
        return claim

    def _is_dead(self, path: Path) -> bool:
        text, now = _read(path), time.monotonic()
        if not text:  # given back in the meantime, or not written yet
            text = "?"
        if _host(text) == _host(here()):
            return not _runs(text)
        seen, since = self._seen.setdefault(path, (text, now))
        if seen != text:
            self._seen[path] = text, now
            self._living.add(path)
            return False
        return now - since >= SILENCE


def _last(directory: Path) -> dict[str, int]:
    """Returns the highest number of each claim, in one listing."""
    found = dict[str, int]()
    with contextlib.suppress(FileNotFoundError):
        for entry in persistently(os.listdir, directory):
            name, _, number = entry.rpartition(".")
            if number.isdecimal():
                found[name] = max(found.get(name, 0), int(number))
    return found


def _read(path: Path) -> str:
    """Returns what a claim says, "" where there is none."""
    try:
        return persistently(Path.read_bytes, path)[:4096].decode(errors="replace")
    except FileNotFoundError:
        return ""


def here() -> str:
    """Returns what tells this process from all others: machine, its start, number, and when it began."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # Containers may have the machine's name, each with numbers of processes of its own.
    numbers = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()}/{boot}/{numbers} {os.getpid()} {began(os.getpid())}"


def began(pid: int) -> str:
    """Returns when a process of this machine began, "" where there is none with this number."""
    try:
        state, *others = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state == "Z" else others[18]
    except (OSError, IndexError):
        return ""


def _parts(text: str) -> list[str]:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = json.loads(text)["holder"]
    return str(text).split()


def _host(text: str) -> str:
    return next(iter(_parts(text)), "")


def _runs(text: str) -> bool:
    """Returns whether the process of this machine that holds a claim runs."""
    parts = _parts(text)
    return len(parts) > 2 and parts[1].isdecimal() and began(int(parts[1])) == parts[2]
