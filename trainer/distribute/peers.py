"""Peers: the settings handshake with the other processes before TensorFlow starts, and their loss later.

TensorFlow waits for a missing peer silently and without end, and holds the GIL meanwhile. So each process
first serves its settings, as JSON, on its own port and compares them with its peers': replicas with different
settings would hang in the first exchange. A peer that answers with another protocol has finished the
handshake: its TensorFlow has the port now. Both sides sign with the job's secret and a nonce of each
connection; a process without the secret gets no answer and is not trusted.

Later TensorFlow's coordination service declares a peer dead after `peer_timeout` seconds of silence, which
must exceed a live migration. A process that has ended is detected sooner: its port refuses connections.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import tensorflow as tf

from shardline.trainer.base import progress
from shardline.trainer.base.errors import RunError, SettingsError
from shardline.trainer.base.plugins import identify, installed_version
from shardline.trainer.base.settings import PATH_SETTINGS, TrainSettings, flag_name
from shardline.trainer.cluster import ClusterConfig
from shardline.trainer.distribute.ring import LostPeerError, listen, receive
from shardline.trainer.keras_compat import tensorflow_internals

# Seconds for a peer to accept a connection or send a message, and between two attempts.
_TIMEOUT_S, _PROBE_INTERVAL_S = 3.0, 0.25
# Seconds for a process to end once it is done or killed; of waiting until the missing peers are reported; and
# for which a process that found a difference keeps serving its settings, so that its peers find it too.
_EXIT_S, _REPORT_AFTER_S, _LINGER_S = 5.0, 5.0, 5.0
# Seconds between two checks of the peers, and refusals in a row after which a peer counts as lost.
_WATCH_INTERVAL_S, _REFUSALS = 1.0, 2
# Prefix of every message, and its largest size in bytes.
_MAGIC, _MAX_MESSAGE = b"shardline facts 2\n", 1 << 20
# Bytes of a connection's nonce and of a signature.
_NONCE, _SIGNATURE = 16, 32

_TASK = re.compile(r"/job:(\w+)/(?:replica:\d+/)?task:(\d+)")
# The chief tells its peers which one is lost.
_REPORTER = re.compile(r"Error reported from /job:\w+/(?:replica:\d+/)?task:\d+: ")
_PEER_ERRORS = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.DeadlineExceededError)

#: Configuration that peers compare: JSON values by kind ("settings", "versions", ...) and name.
PeerConfig = Mapping[str, Mapping[str, Any]]
#: Signs the parts of a message with the job's secret (`ClusterConfig.sign`).
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
    """Returns what must be the same on all replicas: settings, dataset, versions, number of GPUs."""
    unshared = (*PATH_SETTINGS, "evaluator")
    packages = ("shardline", "tensorflow", "keras")
    shared = {name: value for name, value in asdict(settings).items() if name not in unshared}
    config: PeerConfig = {
        "settings": shared,
        "dataset": {"fingerprint": fingerprint},
        "devices": {"GPUs": gpus},
        "versions": {name: installed_version(name) or "none" for name in packages},
    }
    plain: PeerConfig = json.loads(json.dumps(config, default=identify))  # as the peers receive it
    return plain


def describe_difference(name: str, own: PeerConfig, other: str, theirs: PeerConfig) -> str:
    """Describes the first difference between this replica, `name`, and another, `other`; "" for none."""
    pairs = [(kind, key) for kind, values in own.items() for key in values]
    differing = [(kind, key) for kind, key in pairs if theirs.get(kind, {}).get(key) != own[kind][key]]
    if not differing:
        return ""
    kind, key = differing[0]
    what = flag_name(key) if kind == "settings" else key
    values = (theirs.get(kind, {}).get(key), own[kind][key])
    there, here = (value if isinstance(value, str) and value else json.dumps(value) for value in values)
    more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
    return f"{other} has {what} {there[:60]}, {name} has {here[:60]}{more}: {_RULES[kind]}"


@contextlib.contextmanager
def serve_config(listener: socket.socket, own: PeerConfig, sign: Sign) -> Iterator[None]:
    """Serves this process's configuration to peers that know the secret, while the context lasts."""
    message = json.dumps(own).encode()
    over = threading.Event()
    listener.settimeout(0.1)

    def answer(connection: socket.socket) -> None:
        nonce = secrets.token_bytes(_NONCE)
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_TIMEOUT_S)
            connection.sendall(_MAGIC + nonce)
            request = receive(connection, _NONCE + _SIGNATURE, time.monotonic() + _TIMEOUT_S) or b""
            theirs, signature = request[:_NONCE], request[_NONCE:]
            if hmac.compare_digest(signature, sign(b"ask", nonce, theirs)):
                connection.sendall(sign(b"tell", nonce, theirs, message) + message)
                connection.shutdown(socket.SHUT_WR)

    def serve() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                # In a thread: a client that sends nothing must not block the others.
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    with tensorflow_internals.in_thread(serve, over, "settings-handshake"):
        yield


def request_config(address: str, sign: Sign) -> PeerConfig | None:
    """Returns the configuration that the process at host:port serves; None for any other protocol.

    Raises OSError if the connection is refused, not answered in time, or the peer does not know the secret.
    """
    deadline = time.monotonic() + _TIMEOUT_S
    with _connect(address) as connection:
        greeting = receive(connection, len(_MAGIC) + _NONCE, deadline, _MAGIC)
        if greeting is None:
            return None
        nonce, own = greeting[len(_MAGIC) :], secrets.token_bytes(_NONCE)
        connection.sendall(own + sign(b"ask", nonce, own))
        reply = receive(connection, _MAX_MESSAGE, deadline) or b""
    signature, message = reply[:_SIGNATURE], reply[_SIGNATURE:]
    if not hmac.compare_digest(signature, sign(b"tell", nonce, own, message)):
        raise ConnectionError("the answer is missing, incomplete, or from another job")
    try:
        config = json.loads(message)
    except (ValueError, RecursionError):  # without a secret, any process can sign
        raise ConnectionError("the answer is not JSON") from None
    is_config = isinstance(config, dict) and all(isinstance(values, dict) for values in config.values())
    return config if is_config else None


class Peers:
    """The other processes of the cluster; none without a cluster."""

    def __init__(self, cluster: ClusterConfig) -> None:
        self._cluster = cluster
        self._others = cluster.others
        #: Error of the peer that was lost, without which TensorFlow exchanges nothing in this process.
        self.lost: RunError | None = None

    def handshake(self, startup_timeout: float, own: PeerConfig | None = None) -> None:
        """Waits until all peers are up and compares configurations; called before the strategy is created.

        Raises RunError if peers are missing after the timeout in seconds, 0 for none, or another process has
        this one's port; SettingsError if a peer's configuration differs from its `own`, unless that is None.
        """
        address, config = self._cluster.addresses.get(self._cluster.name), own or {}
        if address is None:  # no cluster, or the evaluator, which has no peers
            return
        start, missing, reported = time.monotonic(), self._others, False
        port = int(address.rpartition(":")[2])
        try:  # on all interfaces, as TensorFlow will, or on loopback when all peers are there
            listener = listen(self._cluster.own_host, port, backlog=2 * len(self._others) + 8)
        except OSError as error:
            raise RunError(  # which a restart may mend, for it may have another port
                f"{self._cluster.name} cannot serve its address {address}: {error.strerror}; end the process "
                f"that has port {port}, perhaps one of an earlier run, or give this replica another port in "
                "TF_CONFIG"
            ) from None
        with listener, serve_config(listener, config, self._cluster.sign):
            while missing := self._compare(missing, config):
                waited = time.monotonic() - start
                if startup_timeout and waited > startup_timeout:
                    raise RunError(
                        f"not all replicas started within {startup_timeout:g} s: no answer from "
                        f"{_listed(missing)}; see their logs, or raise startup_timeout"
                    )
                if waited > _REPORT_AFTER_S and not reported:
                    progress.report("train", f"waiting for {_listed(missing)}")
                    reported = True
                time.sleep(min(_PROBE_INTERVAL_S, 0.02 + waited))  # replicas of one machine start together

    def _compare(self, peers: dict[str, str], own: PeerConfig) -> dict[str, str]:
        """Returns the peers that do not answer; raises SettingsError when a peer's configuration differs."""
        missing, differences = {}, []
        for name, address in peers.items():
            try:
                theirs = request_config(address, self._cluster.sign)
            except OSError:
                missing[name] = address
                continue
            if own and theirs and (difference := describe_difference(self._cluster.name, own, name, theirs)):
                differences.append(difference)
        if differences:
            time.sleep(_LINGER_S)
            raise SettingsError(differences[0])
        return missing

    def leave(self, seconds: float = _EXIT_S) -> None:
        """Waits on replicas other than the chief, for up to `seconds`, until the chief ends; called last.

        TensorFlow's coordination service, in the chief, takes a peer that leaves before it for lost.
        """
        if self._cluster.is_chief:
            return
        chief = next(iter(self._cluster.addresses.values()), "")
        deadline = time.monotonic() + seconds
        while chief and accepts_connections(chief) and time.monotonic() < deadline:
            time.sleep(_PROBE_INTERVAL_S)

    def explain(self, error: BaseException | None) -> RunError | None:
        """Returns the error for a lost peer that an error of TensorFlow is about; None for any other."""
        text = _REPORTER.sub("", str(error))
        markers = ("Collective ops is aborted by", LostPeerError.__name__)
        aborted = isinstance(error, tf.errors.OpError) and any(marker in text for marker in markers)
        if not self._others or not (aborted or isinstance(error, _PEER_ERRORS)):
            return None
        lines = (map("-".join, _TASK.findall(line)) for line in text.splitlines())
        named = ([name for name in dict.fromkeys(names) if name in self._others] for names in lines)
        # The first line with tasks has the lost ones, the next ones those that have passed the error on.
        lost = next(filter(None, named), [])
        if not lost and "CoordinationService/" in text:  # the first task did not answer a call
            lost = [name for name in list(self._cluster.addresses)[:1] if name in self._others]
        deadline = time.monotonic() + _EXIT_S
        # A killed process closes its sockets one after another.
        while not lost and time.monotonic() < deadline:
            lost = [name for name, address in self._others.items() if not accepts_connections(address)]
            time.sleep(0 if lost else _PROBE_INTERVAL_S)
        if lost:
            self._tell(_no_answer(lost))
        names = _listed({name: self._others[name] for name in lost}) or "another replica"
        self.lost = RunError(f"lost {names}: it has ended or hangs; see its own log")
        return self.lost

    def _tell(self, message: str) -> None:
        """Tells all peers that one is lost; the chief's task, which checks all of them."""
        if self._cluster.is_chief:
            # Parameter servers have no coordination service.
            with contextlib.suppress(tf.errors.OpError, ValueError):
                tensorflow_internals.abort_peers(message)


def _connect(address: str, timeout: float = _TIMEOUT_S) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=timeout)


def _failure(address: str, timeout: float = _TIMEOUT_S) -> OSError | None:
    try:
        _connect(address, timeout).close()
    except OSError as error:
        return error
    return None


def accepts_connections(address: str, timeout: float = _TIMEOUT_S) -> bool:
    """Whether a process accepts connections at host:port within the timeout in seconds."""
    return _failure(address, timeout) is None


def _listed(peers: dict[str, str]) -> str:
    return ", ".join(f"{name} ({address})" for name, address in peers.items())


# The message of the first loss that this process has noticed.
_noticed: list[str] = []


@contextlib.contextmanager
def abort_when_peer_ends(cluster: ClusterConfig) -> Iterator[None]:
    """Watches, in a thread, for a peer that has ended, and then aborts TensorFlow's collectives.

    `Peers.explain` turns that into an error. TensorFlow itself handles silent peers. The chief's task checks
    all and tells them, the others check it: N processes make 2 (N - 1) checks at a time, not N (N - 1).
    """
    first, over, tell = dict(list(cluster.addresses.items())[:1]), threading.Event(), Peers(cluster)._tell
    watched = cluster.others if cluster.name in first else first
    _noticed.clear()

    def watch() -> None:
        refused: dict[str, int] = {}
        while not over.wait(_WATCH_INTERVAL_S):
            refused = {
                name: refused.get(name, 0) + 1
                for name, address in watched.items()
                if isinstance(_failure(address), ConnectionRefusedError)  # no process has the port
            }
            if lost := [name for name, times in refused.items() if times >= _REFUSALS]:
                _noticed.append(_no_answer(lost))
                tensorflow_internals.abort_collectives(_noticed[0])
                tell(_noticed[0])
                return

    with (
        tensorflow_internals.in_thread(watch, over, "health") if cluster.others else contextlib.nullcontext()
    ):
        yield


class Health:
    """Health checks of the peers for a process that waits for their data."""

    def __init__(self, cluster: ClusterConfig, peer_timeout: float) -> None:
        self._others = tuple(cluster.others)
        self._timeout = peer_timeout
        self._silent: dict[str, float] = {}

    def check_peers(self, began: float) -> None:
        """Raises LostPeerError when a peer has ended, or has not answered any check for `peer_timeout`.

        `began` is the time (`time.monotonic()`) at which the wait began that this check is part of.
        """
        if _noticed:
            raise LostPeerError(_noticed[0])
        # Silence in an earlier wait does not count.
        self._silent = {name: since for name, since in self._silent.items() if since >= began}
        # All, as a peer that hangs still accepts connections; TensorFlow's own stay open.
        for name in self._others:
            message = _no_answer([name])
            try:
                tensorflow_internals.check_peer(_task_path(name), 1000)  # milliseconds to answer
            except tf.errors.DeadlineExceededError:
                since = self._silent.setdefault(name, time.monotonic())
                if time.monotonic() - since > self._timeout:
                    raise LostPeerError(message) from None
            except tf.errors.OpError as error:
                raise LostPeerError(f"{message}: {error.message}") from None
            else:
                self._silent.pop(name, None)


def _no_answer(names: Iterable[str]) -> str:
    return f"no answer from {', '.join(map(_task_path, names))}"


def _task_path(name: str) -> str:
    kind, _, index = name.rpartition("-")
    return f"/job:{kind}/replica:0/task:{index}"
