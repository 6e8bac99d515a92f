"""Peers: the other processes of the cluster, met before TensorFlow starts and named when one is lost.

TensorFlow waits for a missing peer without a word and without end, and holds the GIL while it does, so that
nothing in this process could say anything. Peers are therefore met before. Later its coordination service
takes a peer for dead that has said nothing for `peer_timeout`, which has to be longer than a live migration;
one that has ended needs no such time: its port refuses connections. Then every collective ends (killed,
stopped and exited peers, chief and worker, were tried with 2.21), and `Peers.explain` makes words of it.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator

import tensorflow as tf

from shardline.trainer import progress
from shardline.trainer.cluster import meeting
from shardline.trainer.cluster.cluster import Cluster
from shardline.trainer.cluster.meeting import Facts
from shardline.trainer.cluster.ring import LostPeerError, listen
from shardline.trainer.errors import ClusterError, RunError, SettingsError
from shardline.trainer.tensorflow_internals import abort_collectives, check_peer

# Seconds for a peer to accept a connection, and between two attempts.
_PROBE_TIMEOUT, _PROBE_INTERVAL = 3.0, 0.25
# Seconds that a process has to end once all its work is done or it was killed, and after which another says
# for whom it waits.
_FAREWELL, _PATIENCE = 5.0, 5.0
# Seconds for which a process that found a difference goes on telling the others what it has.
_LINGER = 5.0

_TASK = re.compile(r"/job:(\w+)/(?:replica:\d+/)?task:(\d+)")
_LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.DeadlineExceededError)


class Peers:
    """The processes with which this one works together. Without a cluster there are none."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._others = cluster.others

    def meet(self, startup_timeout: float, own: Facts | None = None) -> None:
        """Returns when all peers have come up; to be called just before the strategy is created.

        While it waits, this process answers on its own port, with its own `meeting.facts`, if given. A
        ClusterError says that another one serves the port, a RunError which peers are still missing after
        the timeout (seconds; 0 for none), a SettingsError in what a peer differs.
        """
        address, facts = self._cluster.addresses.get(self._cluster.name), own or {}
        if address is None:  # no cluster, or the evaluator, with whom nobody connects
            return
        start, missing, said = time.monotonic(), self._others, False
        with (
            _serve(self._cluster, address) as listener,
            meeting.told(listener, facts, self._cluster.proof),
        ):
            while missing := self._compared(missing, facts):
                waited = time.monotonic() - start
                if startup_timeout and waited > startup_timeout:
                    raise RunError(
                        f"not all replicas came up within {startup_timeout:g} s: no answer from "
                        f"{_listed(missing)}; see their logs, or raise startup_timeout"
                    )
                if waited > _PATIENCE and not said:
                    progress.say("train", f"waiting for {_listed(missing)}")
                    said = True
                time.sleep(_PROBE_INTERVAL)

    def _compared(self, peers: dict[str, str], own: Facts) -> dict[str, str]:
        """Returns the peers that do not answer; a SettingsError, told to them as well, names a difference."""
        missing, differences = {}, []
        for name, address in peers.items():
            try:
                theirs = meeting.ask(address, self._cluster.proof)
            except OSError:
                missing[name] = address
                continue
            if own and theirs and (words := meeting.difference(self._cluster.name, own, name, theirs)):
                differences.append(words)
        if differences:
            time.sleep(_LINGER)
            raise SettingsError(differences[0])
        return missing

    def leave(self, seconds: float = _FAREWELL) -> None:
        """Waits, on any replica but the chief, up to some seconds for the chief to end; all work is done.

        The chief serves TensorFlow's coordination, which takes a peer that leaves before it for a lost one.
        """
        if self._cluster.is_chief:
            return
        name, address = next(iter(self._cluster.addresses.items()), ("", ""))
        deadline = time.monotonic() + seconds
        while address and not _silent({name: address}) and time.monotonic() < deadline:
            time.sleep(_PROBE_INTERVAL)

    def explain(self, error: BaseException) -> RunError | None:
        """Returns what an error of TensorFlow says about a peer; None when it is not about one."""
        text = str(error)
        words = ("Collective ops is aborted by", LostPeerError.__name__)
        aborted = isinstance(error, tf.errors.OpError) and any(word in text for word in words)
        if not self._others or not (aborted or isinstance(error, _LOST)):
            return None
        named = [f"{kind}-{index}" for kind, index in _TASK.findall(text)]
        if "CoordinationService/" in text:  # a call that the first task did not answer
            named.append(next(iter(self._cluster.addresses)))
        lost = [name for name in dict.fromkeys(named) if name in self._others]
        deadline = time.monotonic() + _FAREWELL
        # A process that was killed closes its sockets one after another.
        while not (lost := lost or list(_silent(self._others))) and time.monotonic() < deadline:
            time.sleep(_PROBE_INTERVAL)
        names = _listed({name: self._others[name] for name in lost}) or "another replica"
        return RunError(f"lost {names}: it ended or stands still; its own log says why")


def _serve(cluster: Cluster, address: str) -> socket.socket:
    """Listens as TensorFlow will, or on loopback alone where all peers are there."""
    port = int(address.rpartition(":")[2])
    try:
        return listen(cluster.own_host, port, backlog=2 * len(cluster.others) + 8)
    except OSError as error:
        raise ClusterError(
            f"{cluster.name} cannot serve its address {address}: {error.strerror}; end the process that has "
            f"port {port}, perhaps one of an earlier run, or give this replica another port in TF_CONFIG"
        ) from None


def answers(address: str, timeout: float = _PROBE_TIMEOUT) -> bool:
    """Whether somebody accepts connections at host:port within some seconds."""
    return _probe(address, timeout) is None


def refuses(address: str) -> bool:
    """Whether the machine at host:port says that nobody serves it; else somebody may be slow, or cut off."""
    return isinstance(_probe(address, _PROBE_TIMEOUT), ConnectionRefusedError)


def _probe(address: str, timeout: float) -> OSError | None:
    """Returns why nobody accepts a connection at host:port; None where somebody does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout).close()
    except OSError as error:
        return error
    return None


def _silent(peers: dict[str, str]) -> dict[str, str]:
    """Returns those peers, each with its address, that accept no connection."""
    return {name: address for name, address in peers.items() if not answers(address)}


def _listed(peers: dict[str, str]) -> str:
    return ", ".join(f"{name} ({address})" for name, address in peers.items())


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
