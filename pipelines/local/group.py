"""The running replicas of a job, watched together."""

from __future__ import annotations

import contextlib
import math
import selectors
import time
from collections.abc import Callable, Iterator
from types import TracebackType

from shardline.pipelines.local import processes
from shardline.pipelines.local.replica import Replica


class Group:
    """A set of running replicas; leaving the context kills those that are left.

    Args:
        ended: Called with each replica that has ended and with its exit status.
    """

    def __init__(self, ended: Callable[[Replica, int], None]) -> None:
        self._ended = ended
        self._replicas: dict[str, Replica] = {}
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(0)
        self._selector.close()

    def __iter__(self) -> Iterator[Replica]:
        return iter(list(self._replicas.values()))

    def find(self, name: str) -> Replica | None:
        """Returns the running replica of that name."""
        return self._replicas.get(name)

    def add(self, replica: Replica) -> None:
        """Watches a replica that has just been started."""
        self._replicas[replica.name] = replica
        self._selector.register(replica.pidfd, selectors.EVENT_READ, (replica, "end"))
        self._selector.register(replica.pipe, selectors.EVENT_READ, (replica, "output"))

    def wait(self, until: float) -> list[tuple[Replica, int]]:
        """Takes what the replicas print until one of them prints or ends, or the time has come.

        Each is given the same share of attention, however much it prints.

        Args:
            until: Value of the monotonic clock; may be infinite.

        Returns:
            The replicas that have ended, with their exit status.
        """
        left = until - time.monotonic()
        ready = [key.data for key, _ in self._selector.select(None if left == math.inf else max(0, left))]
        for replica, what in ready:
            if what == "output" and not replica.read():
                self._selector.unregister(replica.pipe)
        return [(replica, self._finish(replica)) for replica, what in ready if what == "end"]

    def wait_for_all(self, seconds: float) -> list[tuple[Replica, int]]:
        """Waits until all have ended by themselves, for some seconds at most; returns those that have."""
        ended = []
        deadline = time.monotonic() + seconds
        while self._replicas and time.monotonic() < deadline:
            ended += self.wait(deadline)
        return ended

    def ask_to_end(self) -> None:
        """Sends SIGTERM to all; from now on only their logs have what they print."""
        for replica in self:
            replica.output.muted = True
            replica.stop()

    def stop(self, grace: float) -> None:
        """Ends all: SIGTERM, a grace period in seconds, then SIGKILL."""
        with processes.undisturbed():
            if grace:
                self.ask_to_end()
                self.wait_for_all(grace)
            for replica in self:
                replica.kill()
            for replica in self:
                self._finish(replica)

    def _finish(self, replica: Replica) -> int:
        del self._replicas[replica.name]
        self._selector.unregister(replica.pidfd)
        with contextlib.suppress(KeyError):
            self._selector.unregister(replica.pipe)
        code = replica.finish()
        self._ended(replica, code)
        return code
