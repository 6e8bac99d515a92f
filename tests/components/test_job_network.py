"""The network of a local job: its replicas reach each other, and no outside client reaches them."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardline.pipelines.local.job import run_job
from shardline.pipelines.local.process import ProcessFailedError, guardian, network
from shardline.trainer.base.errors import EXIT_BAD_INPUT, EXIT_FAILED, PipelineError
from shardline.trainer.base.progress import Event
from tests.helpers.jobs import eventually, make_job
from tests.helpers.network import ORDINARY, WITHOUT_ADMINISTRATION, needs_namespaces, open_from_outside

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("no_orphans")]

#: Each replica serves on all addresses, as TensorFlow does, until the test is done with it.
SERVE = """
    import socket
    cluster, own = (json.loads(os.environ["TF_CONFIG"])[key] for key in ("cluster", "task"))
    addresses = [address.rpartition(":") for hosts in cluster.values() for address in hosts]
    port = int(cluster[own["type"]][own["index"]].rpartition(":")[2])
    with socket.create_server(("", port)):
        for host, _, other in addresses:
            while True:
                try:
                    socket.create_connection((host, int(other))).close()
                    break
                except ConnectionRefusedError:
                    time.sleep(0.01)
        Path({place!r}, name).write_text(str(port))
        wait_for({place!r} + "/end")
"""


@pytest.fixture
def served(request: pytest.FixtureRequest, tmp_path: Path, events: list[Event]) -> Iterator[list[int]]:
    """Ports of a running job with two workers and a parameter server, which is ended after the test."""
    job = make_job(SERVE.format(place=str(tmp_path)), ps=1)
    thread = threading.Thread(target=run_job, args=(job, tmp_path / "logs"), kwargs=request.param)
    thread.start()
    files = [tmp_path / name for name in ("chief-0", "worker-0", "ps-0")]
    try:
        eventually(lambda: all(file.exists() and file.read_text() for file in files))
        yield [int(file.read_text()) for file in files]
    finally:
        (tmp_path / "end").touch()
        thread.join()


@needs_namespaces
@pytest.mark.parametrize("served", [{}, {"network": "isolated"}], indirect=True)
def test_nobody_outside_reaches_a_replica(served: list[int], events: list[Event]) -> None:
    assert open_from_outside(served) == []
    assert not any("listen on all addresses" in event.text for event in events)


@pytest.mark.parametrize("served", [{"network": "host"}], indirect=True)
def test_with_the_machines_own_network_it_is_said_who_reaches_the_replicas(
    served: list[int], events: list[Event]
) -> None:
    assert set(open_from_outside(served)) > {f"127.0.0.1:{port}" for port in served}
    ports = ", ".join(map(str, sorted(served)))
    (said,) = [event.text for event in events if "listen on all addresses" in event.text]
    assert f"(ports {ports})" in said
    assert "close them with a firewall" in said


@needs_namespaces
@pytest.mark.parametrize("wanted", ["auto", "isolated"])
def test_one_replica_which_serves_nobody_keeps_the_machines_network(
    tmp_path: Path, events: list[Event], wanted: str
) -> None:
    run_job(make_job("print(Path('/proc/net/dev').read_text())", workers=0), tmp_path, network=wanted)
    found = (tmp_path / "chief-0.log").read_text().count(":")
    assert found == (1 if wanted == "isolated" else Path("/proc/net/dev").read_text().count(":"))
    assert not any("warning" in event.text for event in events)


_JOB = """
from pathlib import Path
from shardline.pipelines.local.job import run_job
from tests.helpers.jobs import make_job
run_job(make_job({program!r}), Path({logs!r}), network={network!r})
"""


@needs_namespaces
def test_an_ordinary_user_has_a_network_of_its_own_and_its_files(tmp_path: Path) -> None:
    """By way of a user namespace."""
    program = f"""
        own = Path({str(tmp_path)!r}, name)
        own.touch()
        print(own.stat().st_uid, os.getuid(), Path("/proc/net/dev").read_text().count(":"))
    """
    command = _JOB.format(program=program, logs=str(tmp_path / "logs"), network="isolated")
    subprocess.run([*ORDINARY, command], check=True, timeout=30)
    user = os.getuid()
    for name in ("chief-0", "worker-0"):
        assert (tmp_path / "logs" / f"{name}.log").read_text() == f"{user} {user} 1\n"
        assert (tmp_path / name).stat().st_uid == user


@pytest.mark.skipif(os.getuid() != 0, reason="only root has other users' files")
def test_root_without_the_right_to_administer_keeps_other_users_files(tmp_path: Path) -> None:
    """In a user namespace it would not."""
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    os.chown(data, 1000, 1000)

    def job(network: str) -> subprocess.CompletedProcess[str]:
        program, logs = f"os.listdir({str(data)!r})", str(tmp_path / "logs")
        command = [*WITHOUT_ADMINISTRATION, _JOB.format(program=program, logs=logs, network=network)]
        return subprocess.run(command, timeout=30, capture_output=True, text=True)

    done = job("auto")
    assert done.returncode == 0
    assert "Operation not permitted (root without CAP_SYS_ADMIN)" in done.stdout
    assert "cannot have a network of its own: no new network namespace" in job("isolated").stderr


@pytest.fixture
def forbidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine that gives no namespaces."""
    refusing = tmp_path / "refusing.py"
    source, end = Path(guardian.__file__).read_text(), 'if __name__ == "__main__":'
    refusal = "def make_namespaces(): raise PermissionError(1, 'no new namespace: forbidden')"
    refusing.write_text(source.replace(end, f"{refusal}\n\n{end}"))
    monkeypatch.setattr(guardian, "__file__", str(refusing))


@pytest.mark.usefixtures("forbidden")
def test_where_the_kernel_allows_no_namespace_a_warning_names_the_ports(
    tmp_path: Path, events: list[Event]
) -> None:
    run_job(make_job("pass"), tmp_path)
    (said,) = [event.text for event in events if "warning" in event.text]
    assert "the job has no network of its own: no new namespace: forbidden; allow unprivileged user" in said
    assert network.isolation_unavailable() == "no new namespace: forbidden"

    with pytest.raises(PipelineError, match="cannot have a network of its own: no new namespace: forbidden"):
        run_job(make_job("pass"), tmp_path, network="isolated")


@pytest.mark.parametrize(
    ("line", "hinted"),
    [
        ("curl: (7) Failed to connect to localhost port 5000: Connection refused", True),
        ("failed to connect to all addresses; ipv4:127.0.0.1:2223: Connection refused", False),
    ],
)
def test_a_service_of_this_machine_that_is_not_reached_is_hinted_at(line: str, hinted: bool) -> None:
    assert (network.UNREACHABLE.search(line) is not None) == hinted


_DOWNLOAD = """
    import urllib.request
    with progress.exit_on_error("train"):
        try:
            urllib.request.build_opener(urllib.request.ProxyHandler(dict())).open("https://example.invalid/weights")
        except OSError as error:
            {end}
"""


@needs_namespaces
@pytest.mark.parametrize(
    ("end", "exit_code", "words"),
    [
        ('raise ModelError(f"model mine failed: {error}")', EXIT_BAD_INPUT, "^model mine failed: .*"),
        ("sys.exit(f'{error}')", EXIT_FAILED, "-0 ended with exit code 1 .*"),
    ],
)
def test_a_download_that_fails_names_the_setting_that_lets_it(
    tmp_path: Path, end: str, exit_code: int, words: str
) -> None:
    with pytest.raises(ProcessFailedError, match=f"{words}no network but loopback.*--network host") as caught:
        run_job(make_job(_DOWNLOAD.format(end=end), disable_retries=True), tmp_path)
    assert caught.value.exit_code == exit_code
