"""Connections of a ring, each process in a thread."""

import socket
import threading

import numpy as np
import pytest

from shardline.trainer.cluster import ClusterConfig
from shardline.trainer.distribute import ring


class Together:
    """Sums over threads, as the processes of a strategy sum over theirs."""

    def __init__(self, size):
        self._barrier = threading.Barrier(size)
        self._lock = threading.Lock()
        self._sums = []

    def of(self, on_total=lambda values: None):
        calls = iter(range(100))
        outer = self

        class One:
            def total(self, values):
                call = next(calls)
                with outer._lock:
                    if len(outer._sums) == call:
                        outer._sums.append(np.zeros(len(values)))
                    outer._sums[call] += values
                outer._barrier.wait(30)
                on_total(outer._sums[call])
                return outer._sums[call].tolist()

        return One()


def clusters(hosts):
    addresses = tuple(f"{host}:2222" for host in hosts)
    settings = {"has_chief_task": False, "secret": "of the job"}
    return [ClusterConfig("worker", rank, addresses, **settings) for rank in range(len(addresses))]


def connect(hosts, on_total=lambda values: None, **options):
    together = Together(len(hosts))
    made = [None] * len(hosts)

    def run(rank, cluster):
        total = together.of(on_total if rank == 0 else lambda values: None).total
        made[rank] = ring.make_ring(cluster, total, lambda began: None, **options)

    threads = [threading.Thread(target=run, args=item) for item in enumerate(clusters(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


@pytest.mark.parametrize("unix", [False, True])
@pytest.mark.parametrize("hosts", [["127.0.0.1"] * 2, ["localhost", "127.0.0.1", "127.0.0.1"]])
def test_processes_connect_in_a_ring(hosts, unix):
    assert clusters(hosts)[0].own_host
    rings = connect(hosts, unix=unix)
    values = [np.full(5, rank + 1, np.float32) for rank in range(len(hosts))]
    threads = [threading.Thread(target=one.sum, args=(own,)) for one, own in zip(rings, values, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, own in zip(rings, values, strict=True):
        assert own.tolist() == [sum(range(1, len(hosts) + 1))] * 5
        one.close()


def test_without_a_connection_no_process_has_a_ring(monkeypatch):
    monkeypatch.setattr(ring, "_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = server.getsockname()[1]

    def lead_astray(values):
        if len(values) == 4:
            values[2] = nobody  # the second process's port

    assert connect(["127.0.0.1", "127.0.0.1"], lead_astray) == [None, None]


@pytest.mark.parametrize("knows_the_number", [False, True])
def test_an_unknown_client_is_rejected(knows_the_number):
    strangers = []

    def intrude(values):
        for rank, (port, number) in enumerate(values.reshape(-1, 2)):
            said = b"GET / HTTP/1.1\r\n\r\n" + b" " * 32
            if knows_the_number:  # but not the secret of the job
                said = ring._greeting(ClusterConfig(secret="another"), 1 - rank, int(number))
            stranger = socket.create_connection(("127.0.0.1", int(port)))
            stranger.sendall(said)
            strangers.append(stranger)

    called = []
    rings = connect(["127.0.0.1"] * 2, lambda values: called or (called.append(1), intrude(values)))
    for stranger in strangers:
        stranger.settimeout(10)
        assert _closed(stranger)
        stranger.close()
    for one in rings:
        one.close()


def _closed(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
