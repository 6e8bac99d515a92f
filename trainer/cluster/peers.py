"""Peers: the other processes of the cluster, met before TensorFlow starts and named when one is lost.

TensorFlow waits for a missing peer without a word and without end, and holds the GIL while it does. Peers are
therefore met before: until it has met all others, each process tells those that connect to its port what it
trains with, as JSON, since those that go different ways would hang in the first exchange. One that answers in
another way has met this process already: its TensorFlow has the port now. Both sign that they know the job's
secret, with numbers that are drawn for each connection: who does not is told nothing, and not believed.

Later TensorFlow's coordination service takes a peer for dead that has said nothing for `peer_timeout`, which
has to be longer than a live migration; one that has ended needs no such time: its port refuses connections.
"""

from __future__ import annotations

import contextlib
import hmac
import importlib.metadata
import json
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import tensorflow as tf

from shardline.trainer.base import progress
from shardline.trainer.base.errors import ClusterError, RunError, SettingsError
from shardline.trainer.base.settings import PATH_SETTINGS, TrainSettings, flag_name
from shardline.trainer.cluster.cluster import ClusterConfig
from shardline.trainer.cluster.ring import LostPeerError, listen, receive
from shardline.trainer.keras_compat.tensorflow_internals import abort_collectives, check_peer

# Seconds for a peer to accept a connection, or for a message, and between two attempts.
_TIMEOUT_S, _PROBE_INTERVAL_S = 3.0, 0.25
# Seconds that a process has to end once all its work is done or it was killed; after which another says for
# whom it waits; and for which one that found a difference goes on telling the others what it has.
_EXIT_S, _REPORT_AFTER_S, _LINGER_S = 5.0, 5.0, 5.0
# Seconds between two looks at the peers, and how often one refuses in a row before it counts as gone.
_WATCH_INTERVAL_S, _REFUSALS = 1.0, 2
# Milliseconds for a peer's TensorFlow to answer; it is asked again.
_ANSWER_MS = 1000
# What every message begins with, and the bytes that are read of one at most.
_MAGIC, _MAX_MESSAGE = b"shardline facts 2\n", 1 << 20
# Bytes of a number that is drawn for a connection, and of a proof.
_NONCE, _SIGNATURE = 16, 32

_TASK = re.compile(r"/job:(\w+)/(?:replica:\d+/)?task:(\d+)")
_PEER_ERRORS = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.DeadlineExceededError)

#: What a process trains with: JSON by kind ("settings", "versions", ...) and name.
PeerConfig = Mapping[str, Mapping[str, Any]]
#: Shows that the parts of a message come from somebody who knows the secret (`ClusterConfig.sign`).
Sign = Callable[..., bytes]

_RULES = {
    "settings": "all replicas take the same flags",
    "dataset": "all replicas read the same dataset",
    "versions": "all replicas take the same image",
    "devices": "all replicas need as many",
    "call": "all processes make the same call",
    "data": "all processes make the same data; seed what draws it, as numpy.random.default_rng(0) does",
}


def peer_config(settings: TrainSettings, fingerprint: str, gpus: int) -> PeerConfig:
    """Returns what has to be alike on all replicas: settings, dataset, versions, number of GPUs."""
    chosen = {
        name: value for name, value in asdict(settings).items() if name not in (*PATH_SETTINGS, "evaluator")
    }
    found: PeerConfig = {
        "settings": chosen,
        "dataset": {"fingerprint": fingerprint},
        "devices": {"GPUs": gpus},
        "versions": {name: _version(name) for name in ("shardline", "tensorflow", "keras")},
    }
    plain: PeerConfig = json.loads(json.dumps(found, default=repr))  # as the others will have it
    return plain


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "none"


def describe_difference(name: str, own: PeerConfig, other: str, theirs: PeerConfig) -> str:
    """Says in what another replica, `other`, first differs from this one, `name`; "" when in nothing."""
    pairs = [(kind, key) for kind, values in own.items() for key in values]
    found = [(kind, key) for kind, key in pairs if theirs.get(kind, {}).get(key) != own[kind][key]]
    if not found:
        return ""
    kind, key = found[0]
    what = flag_name(key) if kind == "settings" else key
    values = (theirs.get(kind, {}).get(key), own[kind][key])
    there, here = (one if isinstance(one, str) and one else json.dumps(one) for one in values)
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"{other} has {what} {there[:60]}, {name} has {here[:60]}{more}: {_RULES[kind]}"


@contextlib.contextmanager
def serve_config(listener: socket.socket, own: PeerConfig, sign: Sign) -> Iterator[None]:
    """Tells the facts to everybody who connects and knows the secret, while the context lasts."""
    message = json.dumps(own).encode()
    over = threading.Event()
    listener.settimeout(0.1)

    def tell(connection: socket.socket) -> None:
        drawn = secrets.token_bytes(_NONCE)
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_TIMEOUT_S)
            connection.sendall(_MAGIC + drawn)
            asked = receive(connection, _NONCE + _SIGNATURE, time.monotonic() + _TIMEOUT_S) or b""
            theirs, proof = asked[:_NONCE], asked[_NONCE:]
            if hmac.compare_digest(proof, sign(b"ask", drawn, theirs)):
                connection.sendall(sign(b"tell", drawn, theirs, message) + message)
                connection.shutdown(socket.SHUT_WR)

    def serve() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                # One that connects and says nothing keeps no other waiting.
                threading.Thread(target=tell, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=serve, name="settings-handshake", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def request_config(address: str, sign: Sign) -> PeerConfig | None:
    """Returns what the process at host:port tells; None when it answers in another way.

    Raises:
        OSError: When nobody accepts the connection, or answers it in time, or knows the secret.
    """
    deadline = time.monotonic() + _TIMEOUT_S
    with _connect(address) as connection:
        found = receive(connection, len(_MAGIC) + _NONCE, deadline, _MAGIC)
        if found is None:
            return None
        drawn, own = found[len(_MAGIC) :], secrets.token_bytes(_NONCE)
        connection.sendall(own + sign(b"ask", drawn, own))
        reply = receive(connection, _MAX_MESSAGE, deadline) or b""
    proof, message = reply[:_SIGNATURE], reply[_SIGNATURE:]
    if not hmac.compare_digest(proof, sign(b"tell", drawn, own, message)):
        raise ConnectionError("it has said nothing, or not all, or is of another job")
    try:
        value = json.loads(message)
    except (ValueError, RecursionError):  # where nothing is secret, anybody can sign that he knows it
        raise ConnectionError("it has said what is no JSON") from None
    return value if isinstance(value, dict) and all(isinstance(one, dict) for one in value.values()) else None


class Peers:
    """The processes with which this one works together. Without a cluster there are none."""

    def __init__(self, cluster: ClusterConfig) -> None:
        self._cluster = cluster
        self._others = cluster.others

    def handshake(self, startup_timeout: float, own: PeerConfig | None = None) -> None:
        """Returns when all peers have come up; to be called just before the strategy is created.

        While it waits, this process answers on its own port, with its own `facts`, if there are any. A
        ClusterError says that another one serves the port, a RunError which peers are still missing after
        the timeout (seconds; 0 for none), a SettingsError in what a peer differs.
        """
        address, facts = self._cluster.addresses.get(self._cluster.name), own or {}
        if address is None:  # no cluster, or the evaluator, with whom nobody connects
            return
        start, missing, said, port = time.monotonic(), self._others, False, int(address.rpartition(":")[2])
        try:  # as TensorFlow will, or on loopback alone where all peers are there
            listener = listen(self._cluster.own_host, port, backlog=2 * len(self._others) + 8)
        except OSError as error:
            raise ClusterError(
                f"{self._cluster.name} cannot serve its address {address}: {error.strerror}; end the process "
                f"that has port {port}, perhaps one of an earlier run, or give this replica another port in "
                "TF_CONFIG"
            ) from None
        with listener, serve_config(listener, facts, self._cluster.sign):
            while missing := self._compared(missing, facts):
                waited = time.monotonic() - start
                if startup_timeout and waited > startup_timeout:
                    raise RunError(
                        f"not all replicas came up within {startup_timeout:g} s: no answer from "
                        f"{_listed(missing)}; see their logs, or raise startup_timeout"
                    )
                if waited > _REPORT_AFTER_S and not said:
                    progress.report("train", f"waiting for {_listed(missing)}")
                    said = True
                time.sleep(_PROBE_INTERVAL_S)

    def _compared(self, peers: dict[str, str], own: PeerConfig) -> dict[str, str]:
        """Returns the peers that do not answer; a SettingsError, told to them as well, names a difference."""
        missing, differences = {}, []
        for name, address in peers.items():
            try:
                theirs = request_config(address, self._cluster.sign)
            except OSError:
                missing[name] = address
                continue
            if own and theirs and (words := describe_difference(self._cluster.name, own, name, theirs)):
                differences.append(words)
        if differences:
            time.sleep(_LINGER_S)
            raise SettingsError(differences[0])
        return missing

    def leave(self, seconds: float = _EXIT_S) -> None:
        """Waits, on any replica but the chief, up to some seconds for the chief to end; all work is done.

        The chief serves TensorFlow's coordination, which takes a peer that leaves before it for a lost one.
        """
        if self._cluster.is_chief:
            return
        chief = next(iter(self._cluster.addresses.values()), "")
        deadline = time.monotonic() + seconds
        while chief and accepts_connections(chief) and time.monotonic() < deadline:
            time.sleep(_PROBE_INTERVAL_S)

    def explain(self, error: BaseException) -> RunError | None:
        """Returns what an error of TensorFlow says about a peer; None when it is not about one."""
        text = str(error)
        words = ("Collective ops is aborted by", LostPeerError.__name__)
        aborted = isinstance(error, tf.errors.OpError) and any(word in text for word in words)
        if not self._others or not (aborted or isinstance(error, _PEER_ERRORS)):
            return None
        named = [f"{kind}-{index}" for kind, index in _TASK.findall(text)]
        if "CoordinationService/" in text:  # a call that the first task did not answer
            named.append(next(iter(self._cluster.addresses)))
        lost = [name for name in dict.fromkeys(named) if name in self._others]
        deadline = time.monotonic() + _EXIT_S
        # A process that was killed closes its sockets one after another.
        while not lost and time.monotonic() < deadline:
            lost = [name for name, address in self._others.items() if not accepts_connections(address)]
            time.sleep(0 if lost else _PROBE_INTERVAL_S)
        names = _listed({name: self._others[name] for name in lost}) or "another replica"
        return RunError(f"lost {names}: it ended or stands still; its own log says why")


def _connect(address: str, timeout: float = _TIMEOUT_S) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=timeout)


def accepts_connections(address: str, timeout: float = _TIMEOUT_S) -> bool:
    """Whether a process accepts connections at host:port within some seconds."""
    try:
        _connect(address, timeout).close()
    except OSError:
        return False
    return True


def refuses_connections(address: str) -> bool:
    """Whether the machine at host:port says that nobody serves it; else a process may be slow, or cut off."""
    try:
        _connect(address).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


def _listed(peers: dict[str, str]) -> str:
    return ", ".join(f"{name} ({address})" for name, address in peers.items())


@contextlib.contextmanager
def abort_when_peer_ends(cluster: ClusterConfig) -> Iterator[None]:
    """Ends TensorFlow's collectives while the context lasts, in a thread, when a peer's process has ended.

    `Peers.explain` makes words of it. How long a peer may be silent is TensorFlow's affair.
    """
    others = cluster.others
    over = threading.Event()

    def watch() -> None:
        refused: dict[str, int] = {}
        while not over.wait(_WATCH_INTERVAL_S):
            refused = {
                name: refused.get(name, 0) + 1 for name, at in others.items() if refuses_connections(at)
            }
            if lost := [name for name, times in refused.items() if times >= _REFUSALS]:
                abort_collectives(f"no answer from {', '.join(map(_task_path, lost))}")
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

    def __init__(self, cluster: ClusterConfig, peer_timeout: float) -> None:
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
            words = f"no answer from {_task_path(name)}"
            if refuses_connections(address):
                raise LostPeerError(words)
            try:
                check_peer(_task_path(name), _ANSWER_MS)
            except tf.errors.DeadlineExceededError:
                since = self._silent.setdefault(name, time.monotonic())
                if time.monotonic() - since > self._timeout:
                    raise LostPeerError(words) from None
            except tf.errors.OpError as error:
                raise LostPeerError(f"{words}: {error.message}") from None
            else:
                self._silent.pop(name, None)


def _task_path(name: str) -> str:
    kind, _, index = name.rpartition("-")
    return f"/job:{kind}/replica:0/task:{index}"
