"""Facts of replicas, compared when they meet: those that go different ways would hang in the first exchange.

Until it has met all others, each process tells those that connect to its port what it trains with, as JSON.
One that answers in another way has met this process already: its TensorFlow has the port now. So of each pair
at least one reads what the other says, and goes on telling for some seconds when it does not like it.

Both prove that they know the job's secret, with numbers that are drawn for each connection: who does not is
told nothing, and not believed.
"""

from __future__ import annotations

import contextlib
import hmac
import importlib.metadata
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from shardline.trainer.settings import PLACES, TrainSettings, flag_of

#: What a process trains with: JSON by kind ("settings", "versions", ...) and name.
Facts = Mapping[str, Mapping[str, Any]]
#: Shows that the parts of a message come from somebody who knows the secret (`Cluster.proof`).
Prove = Callable[..., bytes]

# What every message begins with, the bytes that are read of one at most, and seconds to send or get it.
_MAGIC, _MOST, _TIMEOUT = b"shardline facts 2\n", 1 << 20, 3.0
# Bytes of a number that is drawn for a connection, and of a proof.
_DRAWN, _PROOF = 16, 32

_RULES = {
    "settings": "all replicas take the same flags",
    "dataset": "all replicas read the same dataset",
    "versions": "all replicas take the same image",
    "devices": "all replicas need as many",
    "call": "all processes make the same call",
    "data": "all processes make the same data; seed what draws it, as numpy.random.default_rng(0) does",
}


def facts(settings: TrainSettings, fingerprint: str, gpus: int) -> Facts:
    """Returns what has to be alike on all replicas: settings, dataset, versions, number of GPUs."""
    chosen = {name: value for name, value in asdict(settings).items() if name not in (*PLACES, "evaluator")}
    found: Facts = {
        "settings": chosen,
        "dataset": {"fingerprint": fingerprint},
        "devices": {"GPUs": gpus},
        "versions": {name: _version(name) for name in ("shardline", "tensorflow", "keras")},
    }
    plain: Facts = json.loads(json.dumps(found, default=repr))  # as the others will have it
    return plain


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "none"


def difference(name: str, own: Facts, other: str, theirs: Facts) -> str:
    """Says in what another replica, `other`, first differs from this one, `name`; "" when in nothing."""
    found = [
        (kind, key)
        for kind, values in own.items()
        for key, value in values.items()
        if theirs.get(kind, {}).get(key) != value
    ]
    if not found:
        return ""
    kind, key = found[0]
    what = flag_of(key) if kind == "settings" else key
    here, there = own[kind][key], theirs.get(kind, {}).get(key)
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"{other} has {what} {_shown(there)}, {name} has {_shown(here)}{more}: {_RULES[kind]}"


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) and value else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


@contextlib.contextmanager
def told(listener: socket.socket, own: Facts, prove: Prove) -> Iterator[None]:
    """Tells the facts to everybody who connects and knows the secret, while the context lasts."""
    message = json.dumps(own).encode()
    over = threading.Event()
    listener.settimeout(0.1)

    def serve() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                # Somebody who connects and says nothing keeps nobody else waiting.
                threading.Thread(target=_tell, args=(connection, message, prove), daemon=True).start()

    thread = threading.Thread(target=serve, name="meeting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _tell(connection: socket.socket, message: bytes, prove: Prove) -> None:
    drawn = secrets.token_bytes(_DRAWN)
    with connection, contextlib.suppress(OSError):
        connection.settimeout(_TIMEOUT)
        connection.sendall(_MAGIC + drawn)
        asked = received(connection, _DRAWN + _PROOF, time.monotonic() + _TIMEOUT) or b""
        theirs, proof = asked[:_DRAWN], asked[_DRAWN:]
        if hmac.compare_digest(proof, prove(b"ask", drawn, theirs)):
            connection.sendall(prove(b"tell", drawn, theirs, message) + message)
            connection.shutdown(socket.SHUT_WR)


def ask(address: str, prove: Prove) -> Facts | None:
    """Returns what the process at host:port tells; None when it answers in another way.

    Raises:
        OSError: When nobody accepts the connection, or answers it in time, or knows the secret.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + _TIMEOUT
    with socket.create_connection((host.strip("[]"), int(port)), timeout=_TIMEOUT) as connection:
        found = received(connection, len(_MAGIC) + _DRAWN, deadline, _MAGIC)
        if found is None:
            return None
        drawn, own = found[len(_MAGIC) :], secrets.token_bytes(_DRAWN)
        connection.sendall(own + prove(b"ask", drawn, own))
        told = received(connection, _MOST, deadline) or b""
    proof, message = told[:_PROOF], told[_PROOF:]
    if not hmac.compare_digest(proof, prove(b"tell", drawn, own, message)):
        raise ConnectionError("it has said nothing, or not all, or is of another job")
    try:
        value = json.loads(message)
    except (ValueError, RecursionError):  # where nothing is secret, anybody can prove that he knows it
        raise ConnectionError("it has said what is no JSON") from None
    return value if isinstance(value, dict) and all(isinstance(one, dict) for one in value.values()) else None


def received(connection: socket.socket, most: int, deadline: float, beginning: bytes = b"") -> bytes | None:
    """Returns what comes until the connection ends or there is enough; None when it begins otherwise."""
    found = b""
    while len(found) < most:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        if not (more := connection.recv(most - len(found))):
            break
        found += more
        if found[: len(beginning)] != beginning[: len(found)]:
            return None
    return found
