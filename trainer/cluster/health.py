"""Health of a running job's peers: one that has ended is noticed, one that stands still is waited for.

TensorFlow's coordination service takes a peer for dead once it has said nothing for `peer_timeout`, which has
to be longer than a live migration. A process that has ended needs no such time: its port refuses connections.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import tensorflow as tf

from shardline.trainer.cluster.cluster import Cluster
from shardline.trainer.cluster.peers import refuses
from shardline.trainer.cluster.ring import LostPeerError
from shardline.trainer.tensorflow_internals import abort_collectives, check_peer

# Seconds between two looks at the peers, and how often one refuses in a row before it counts as gone.
_INTERVAL, _REFUSALS = 1.0, 2
# Milliseconds for a peer's TensorFlow to answer; it is asked again.
_ANSWER_MS = 1000


@contextlib.contextmanager
def watched(cluster: Cluster) -> Iterator[None]:
    """Ends TensorFlow's collectives while the context lasts, in a thread, when a peer's process has ended.

    `Peers.explain` makes words of it. How long a peer may be silent is TensorFlow's affair.
    """
    others = cluster.others
    over = threading.Event()

    def watch() -> None:
        refused: dict[str, int] = {}
        while not over.wait(_INTERVAL):
            refused = {name: refused.get(name, 0) + 1 for name, at in others.items() if refuses(at)}
            if lost := [name for name, times in refused.items() if times >= _REFUSALS]:
                abort_collectives(_words([_task(name) for name in lost]))
                return

    thread = threading.Thread(target=watch, name="health", daemon=True)
    if others:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if others:
            thread.join()


class Health:
    """Health of the peers as one who waits for their numbers asks for it: whether to wait on."""

    def __init__(self, cluster: Cluster, peer_timeout: float) -> None:
        self._others = cluster.others
        self._timeout = peer_timeout
        self._silent: dict[str, float] = {}

    def check(self, began: float) -> None:
        """Raises a LostPeerError when a peer has ended, or was silent at every look for `peer_timeout`.

        `began` is when the wait began, in which this is one look, by `time.monotonic()`.
        """
        # Who was silent in an earlier wait has ended that one.
        self._silent = {name: since for name, since in self._silent.items() if since >= began}
        for name, address in self._others.items():
            if refuses(address):
                raise LostPeerError(_words([_task(name)]))
            try:
                check_peer(_task(name), _ANSWER_MS)
            except tf.errors.DeadlineExceededError:
                since = self._silent.setdefault(name, time.monotonic())
                if time.monotonic() - since > self._timeout:
                    raise LostPeerError(_words([_task(name)])) from None
            except tf.errors.OpError as error:
                raise LostPeerError(f"{_words([_task(name)])}: {error.message}") from None
            else:
                self._silent.pop(name, None)


def _task(name: str) -> str:
    kind, _, index = name.rpartition("-")
    return f"/job:{kind}/replica:0/task:{index}"


def _words(tasks: list[str]) -> str:
    return f"no answer from {', '.join(tasks)}"
