"""Facts of replicas, compared when they meet: those that go different ways would hang in the first exchange.

Until it has met all others, each process tells whoever connects to its port what it trains with, as JSON. One
that answers in another way has met this process already: its TensorFlow has the port now. So of each pair at
least one reads what the other says, and goes on telling for some seconds when it does not like it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from shardline.trainer.settings import TrainSettings, flag_of

#: What a process trains with: JSON by kind ("settings", "versions", ...) and name.
Facts = Mapping[str, Mapping[str, Any]]

# Places and roles may differ from machine to machine; the dataset is compared by its fingerprint.
_OWN = ("dataset", "model_dir", "checkpoint_dir", "tensorboard_log_dir", "evaluator")
# What every message begins with, the bytes that are read of one at most, and seconds to send or get it.
_MAGIC, _MOST, _TIMEOUT = b"shardline facts 1\n", 1 << 20, 3.0

_RULES = {
    "settings": "all replicas take the same flags",
    "dataset": "all replicas read the same dataset",
    "versions": "all replicas take the same image",
    "devices": "all replicas need as many",
}


def facts(settings: TrainSettings, fingerprint: str, gpus: int) -> Facts:
    """Returns what has to be alike on all replicas: settings, dataset, versions, number of GPUs."""
    chosen = {name: value for name, value in asdict(settings).items() if name not in _OWN}
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
def told(listener: socket.socket, own: Facts) -> Iterator[None]:
    """Tells the facts to everybody who connects, one after the other, while the context lasts."""
    message = _MAGIC + json.dumps(own).encode()
    over = threading.Event()
    listener.settimeout(0.1)

    def tell() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(_TIMEOUT)
                    connection.sendall(message)
                    connection.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=tell, name="meeting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def ask(address: str) -> Facts | None:
    """Returns what the process at host:port tells; None when it answers in another way.

    Raises:
        OSError: When nobody accepts the connection, or answers it in time.
    """
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=_TIMEOUT) as connection:
        found, deadline = b"", time.monotonic() + _TIMEOUT
        while len(found) < _MOST and (more := connection.recv(1 << 16)):
            found += more
            if not found.startswith(_MAGIC[: len(found)]):
                return None
            connection.settimeout(max(0.01, deadline - time.monotonic()))
    try:
        value = json.loads(found.removeprefix(_MAGIC))
    except ValueError:
        raise ConnectionError("it has said nothing, or not all") from None
    return value if isinstance(value, dict) and all(isinstance(one, dict) for one in value.values()) else None
