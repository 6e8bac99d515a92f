"""Settings handshake over real sockets: missing, differing and lost peers are named in time."""

import contextlib
import re
import socket
import threading
from types import SimpleNamespace

import pytest
import tensorflow as tf

from shardline.trainer.base import progress
from shardline.trainer.base.errors import RunError, SettingsError, ShardlineError
from shardline.trainer.base.settings import TrainSettings
from shardline.trainer.cluster import ClusterConfig
from shardline.trainer.distribute import peers, ring
from shardline.trainer.distribute.peers import Health, Peers
from shardline.trainer.distribute.ring import LostPeerError
from shardline.trainer.keras_compat import tensorflow_internals
from tests.helpers.replicas import free_ports


def clusters(ports, secret="of the job"):
    hosts = tuple(f"127.0.0.1:{port}" for port in ports)
    kinds = [("chief", 0), *(("worker", index) for index in range(len(hosts) - 1))]
    return [ClusterConfig(kind, index, hosts, secret=secret) for kind, index in kinds]


@contextlib.contextmanager
def tensorflow(port):
    """Answers as TensorFlow does after the handshake, in HTTP/2."""
    with socket.create_server(("127.0.0.1", port)) as server:

        def answer():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(b"\x00\x00\x18\x04")

        thread = threading.Thread(target=answer)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def handshake(*configs, ports=(), before=lambda: None):
    """Runs the handshake of peers with these configurations; returns the error of each, or None.

    The last one starts when `before` has returned.
    """
    errors, barrier = [None] * len(configs), threading.Barrier(len(configs))

    def start(rank, cluster):
        if rank == len(configs) - 1:
            before()
        try:
            Peers(cluster).handshake(30, configs[rank])
        except ShardlineError as error:
            errors[rank] = error
            return
        with tensorflow(int(cluster.hosts[rank].rpartition(":")[2])):
            barrier.wait(30)

    items = enumerate(clusters(ports or free_ports(len(configs))))
    threads = [threading.Thread(target=start, args=item) for item in items]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def config(fingerprint="one", gpus=0, **settings):
    return peers.peer_config(TrainSettings(dataset="-", model="-", **settings), fingerprint, gpus)


@pytest.mark.parametrize(
    ("chief", "worker", "name", "message"),
    [
        ({}, {"per_replica_batch_size": 8}, "--per-replica-batch-size", "has {} 8, chief-0 has 16: all "),
        ({}, {"callbacks": ("a:b",)}, "--callback", r'has {} \["a:b"\], chief-0 has \[\]: all replicas'),
        ({}, {"fingerprint": "two"}, "fingerprint", "has {} two, chief-0 has one: .* the same dataset"),
        ({"gpus": 4}, {}, "GPUs", "has {} 0, chief-0 has 4: all replicas need as many"),
        ({"seed": 1, "epochs": 3}, {}, "--epochs", r"has {} 10, chief-0 has 3 \(and 1 more\)"),
    ],
)
def test_a_difference_is_named_on_both_sides(monkeypatch, chief, worker, name, message):
    monkeypatch.setattr(peers, "_LINGER_S", 1.0)
    first, second = handshake(config(**chief), config(**worker))

    assert isinstance(first, SettingsError)
    assert isinstance(second, SettingsError)
    assert re.search("worker-0 " + message.format(name), str(first))
    assert f"chief-0 has {name} " in str(second)


def test_paths_may_differ():
    assert handshake(config(model_dir="a"), config(model_dir="b", evaluator=True)) == [None, None]


def test_all_replicas_report_a_difference(monkeypatch):
    monkeypatch.setattr(peers, "_LINGER_S", 2.0)
    errors = handshake(config(), config(seed=1), config())

    assert [isinstance(error, SettingsError) for error in errors] == [True] * 3
    assert "worker-0 has --seed 1, worker-1 has 0" in str(errors[2])


@pytest.mark.parametrize("answer", [b"", b"shardline facts 2\n[[[", b"shardline facts 2\n" + b"0" * 200])
def test_unknown_clients_and_damaged_answers_are_harmless(monkeypatch, answer):
    """An unknown connection to this process, and an answer that is cut."""
    monkeypatch.setattr(peers, "_TIMEOUT_S", 0.2)
    ports = free_ports(2)

    def disturb():
        with socket.create_server(("127.0.0.1", ports[1])) as server:
            connection = server.accept()[0]
            with connection, socket.create_connection(("127.0.0.1", ports[0])) as stranger:
                stranger.sendall(answer)
                connection.sendall(answer)

    assert handshake(config(), config(), ports=ports, before=disturb) == [None, None]


def test_a_client_without_the_secret_gets_no_answer_and_blocks_no_one():
    """The first sends nothing, the second signs with another secret, the third is of the job."""
    ports, own = free_ports(2), config(seed=42)
    chief, _ = clusters(ports)
    _, stranger = clusters(ports, "another")
    with ring.listen(chief.own_host, ports[0]) as listener, peers.serve_config(listener, own, chief.sign):
        with socket.create_connection(("127.0.0.1", ports[0])):
            with pytest.raises(ConnectionError, match="from another job"):
                peers.request_config(chief.hosts[0], stranger.sign)
            assert peers.request_config(chief.hosts[0], chief.sign) == own
        with socket.create_connection(("127.0.0.1", ports[0])) as connection:
            connection.sendall(b"0" * 48)
            with contextlib.suppress(ConnectionResetError):
                assert (
                    len(b"".join(iter(lambda: connection.recv(4096), b""))) == len("shardline facts 2.") + 16
                )


class Dripping(socket.socket):
    """A connection that receives all data in pieces."""

    def recv(self, size, *flags):
        return super().recv(min(size, 10))


def test_a_greeting_that_comes_in_pieces_is_accepted():
    here, there = socket.socketpair()
    with there, Dripping(fileno=here.detach()) as connection:
        there.sendall(b"g" * 32)
        accepted = iter([(connection, None)])
        listener = SimpleNamespace(settimeout=lambda seconds: None, accept=lambda: next(accepted))
        assert ring._accept(listener, b"g" * 32) is connection


def test_an_answer_without_the_secret_is_rejected():
    ports = free_ports(2)
    chief, _ = clusters(ports)
    _, stranger = clusters(ports, "another")
    with (
        ring.listen("127.0.0.1", ports[1]) as listener,
        peers.serve_config(listener, config(seed=1), stranger.sign),
        pytest.raises(RunError, match="no answer from worker-0"),
    ):
        Peers(chief).handshake(0.1, config())


@pytest.mark.parametrize(
    ("hosts", "reached"),
    [(("127.0.0.1", "localhost"), False), (("127.0.0.1", "192.0.2.1"), True), (("127.0.0.1", "a.b"), True)],
)
def test_peers_on_one_machine_listen_on_loopback_only(hosts, reached):
    cluster = ClusterConfig("chief", 0, tuple(f"{host}:2222" for host in hosts))
    with ring.listen(cluster.own_host) as listener:
        address = f"127.0.0.2:{listener.getsockname()[1]}"  # another one of this machine
        assert peers.accepts_connections(address) is reached


def test_the_secret_is_not_shown():
    (chief, _) = clusters([1, 2])
    assert "of the job" not in f"{chief!r} {chief}"


def test_all_peers_complete_the_handshake():
    assert handshake(None, None, None) == [None] * 3


def test_a_missing_peer_is_named():
    chief, *_ = clusters(ports := free_ports(3))
    with tensorflow(ports[1]):
        expected = f"within 0.1 s: no answer from worker-1 (127.0.0.1:{ports[2]})"
        with pytest.raises(RunError, match=re.escape(expected)):
            Peers(chief).handshake(0.1)


def test_each_reports_the_peers_that_it_waits_for(monkeypatch):
    monkeypatch.setattr("shardline.trainer.distribute.peers._REPORT_AFTER_S", 0.0)
    chief, worker = clusters(free_ports(2))
    lines = []
    for cluster in (chief, worker):
        with progress.sink(lambda event: lines.append(event.text)), pytest.raises(RunError):
            Peers(cluster).handshake(0.5)

    assert lines == [f"waiting for worker-0 ({chief.hosts[1]})", f"waiting for chief-0 ({chief.hosts[0]})"]


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        chief, _ = clusters([port, *free_ports(1)])
        with pytest.raises(RunError, match=f"chief-0 cannot serve its address 127.0.0.1:{port}.*in use"):
            Peers(chief).handshake(60)


@pytest.mark.parametrize("cluster", [ClusterConfig(), ClusterConfig("evaluator", 0, ("a:1", "b:1"))])
def test_without_peers_there_is_no_wait(cluster):
    Peers(cluster).handshake(60)

    assert Peers(cluster).explain(ValueError("no")) is None


def test_a_lost_peer_that_still_accepts_connections_is_named(monkeypatch):
    """A process that was killed closes its sockets one after another."""
    answers = iter([True, True, False])
    monkeypatch.setattr(peers, "accepts_connections", lambda address: next(answers))
    monkeypatch.setattr(peers, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda seconds: None))
    _, worker = clusters(free_ports(2))

    error = Peers(worker).explain(tf.errors.AbortedError(None, None, "Connection reset by peer"))

    assert str(error).startswith("lost chief-0 (127.0.0.1:")


def test_of_tasks_that_pass_an_error_on_none_is_named():
    chief, *_, last = clusters(ports := free_ports(4))
    passed_on = (
        "Additional GRPC error information from remote target /job:worker/replica:0/task:{}:\n:UNKNOWN\n"
    )
    text = "Collective ops is aborted by: recvmsg:Connection reset by peer\n" + "".join(
        map(passed_on.format, (0, 1))
    )

    for cluster in (chief, last):
        error = Peers(cluster).explain(tf.errors.UnavailableError(None, None, text))
        assert str(error).startswith(f"lost worker-0 (127.0.0.1:{ports[1]}):")


def late(task, timeout_ms):
    raise tf.errors.DeadlineExceededError(None, None, "late")


def test_only_a_peer_that_is_silent_throughout_one_wait_is_lost(monkeypatch):
    """Silent once in each of two waits, an hour apart: between them it must have answered."""
    now = 5.0
    monkeypatch.setattr(peers, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(tensorflow_internals, "check_peer", late)
    chief, _ = clusters(free_ports(2))
    health = Health(chief, peer_timeout=60.0)
    health.check_peers(began=0.0)
    for seconds in (3605.0, 3660.0):
        now = seconds
        health.check_peers(began=3600.0)

    now = 3661.0 + 5.0
    with pytest.raises(LostPeerError, match="no answer from /job:worker/replica:0/task:0"):
        health.check_peers(began=3600.0)


def test_a_worker_that_waits_asks_the_other_workers_too(monkeypatch):
    """One that hangs is known by its silence alone, and all must name it."""
    asked = []
    monkeypatch.setattr(tensorflow_internals, "check_peer", lambda task, timeout_ms: asked.append(task))
    _, worker, _ = clusters(free_ports(3))
    Health(worker, peer_timeout=60.0).check_peers(began=0.0)

    assert asked == ["/job:chief/replica:0/task:0", "/job:worker/replica:0/task:1"]


class Listener:
    """A server that counts connections."""

    def __init__(self):
        self.server, self.connections = socket.create_server(("127.0.0.1", 0), backlog=512), 0
        threading.Thread(target=self._count, daemon=True).start()

    def _count(self):
        with contextlib.suppress(OSError):
            while True:
                self.server.accept()[0].close()
                self.connections += 1

    def close(self):
        with contextlib.suppress(OSError):
            self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()


@pytest.mark.parametrize("lost", [0, 5])
def test_a_lost_peer_is_noticed_with_connections_that_grow_as_the_processes(monkeypatch, lost):
    """Eight processes: the chief checks all and tells them, and all check the chief."""
    aborted, told = threading.Semaphore(0), []
    listeners = [Listener() for _ in range(8)]
    monkeypatch.setattr(peers, "_WATCH_INTERVAL_S", 0.05)
    monkeypatch.setattr(tensorflow_internals, "abort_collectives", lambda reason: aborted.release())
    monkeypatch.setattr(tensorflow_internals, "abort_peers", lambda reason: told.append(reason))
    members = clusters([listener.server.getsockname()[1] for listener in listeners])
    with contextlib.ExitStack() as stack:
        for member in members:
            stack.enter_context(peers.abort_when_peer_ends(member))
        while listeners[0].connections < 7 * 5:  # five rounds of the seven workers
            threading.Event().wait(0.01)
        made = sum(listener.connections for listener in listeners)
        listeners[lost].close()
        # Each notices the end of the chief, and the chief that of a worker, of which it tells the others.
        for _ in range(1 if lost else 7):
            assert aborted.acquire(timeout=20)
    for listener in listeners:
        listener.close()

    assert made < 7 * 5 * 4  # 280 where all check all
    assert told == ([f"no answer from /job:worker/replica:0/task:{lost - 1}"] if lost else [])
