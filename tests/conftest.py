"""Rules for all tests.

No test reaches beyond this machine. Every connection that Python makes in a test's own process is looked at:
one to anything but loopback or a unix socket fails at once, as without a network, and then fails the test,
however the error was handled. Connections made in C (gRPC) and those of child processes cannot be looked at.
They inherit proxies at which nothing listens, unless a test gives them others: gRPC, requests, urllib and pip
ask those for every host beyond loopback. One test of test-all takes them away: it installs from an index.

What takes no time runs first, so that most failures are seen in the first minute, and then the files whose
tests start jobs and pipelines, so that no process is left with a long file at the end.
With --quick TensorFlow cannot be imported: a test that needs it is skipped.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.helpers.slurm import Slurm

#: The discard port, where nobody listens.
NOWHERE = "http://127.0.0.1:9"

_reached: list[str] = []


def _is_near(address: Any) -> bool:
    """Whether an address of a socket is on this machine; one that is no host and port is (unix, netlink)."""
    if not isinstance(address, tuple) or not isinstance(address[0], str):
        return True
    host = address[0].partition("%")[0]
    try:
        number = ipaddress.ip_address(host)
    except ValueError:
        return host in ("", "localhost")
    mapped = getattr(number, "ipv4_mapped", None)
    return number.is_loopback or number.is_unspecified or bool(mapped and mapped.is_loopback)


def _guard(event: str, arguments: tuple[Any, ...]) -> None:
    # Called for each thing of any kind that is audited.
    if event not in ("socket.connect", "socket.sendto"):
        return
    if not _is_near(arguments[1]):
        _reached.append(f"{arguments[1][0]}:{arguments[1][1]}")
        raise OSError(errno.ENETUNREACH, f"a test may not reach {_reached[-1]}")


sys.addaudithook(_guard)
for _name in ("https_proxy", "http_proxy"):
    os.environ.setdefault(_name, NOWHERE)
    os.environ.setdefault(_name.upper(), os.environ[_name])
for _name in ("no_proxy", "NO_PROXY"):
    os.environ.setdefault(_name, "localhost,127.0.0.1,::1")
# google-auth asks for the metadata server at an address of its own, past all proxies.
os.environ.setdefault("NO_GCE_CHECK", "true")


# What was said to the make that runs the tests is not for those that they start.
for _name in ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL"):
    os.environ.pop(_name, None)

# Tests run beside each other, and many start several processes: one thread each is fastest for all.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"):
    os.environ.setdefault(_name, "1")

#: Directories under tests/ in the order in which they run.
_ORDER = ("unit", "compile", "e2e", "engines", "multiworker", "contract", "battery", "trainer", "components")


class _NoTensorFlow:
    """Finder of modules that skips the test, or the file of tests, that imports TensorFlow or Keras."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name in ("tensorflow", "keras"):
            pytest.skip("needs TensorFlow, and --quick was given", allow_module_level=True)
        return None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="skip what imports TensorFlow")
    parser.addoption("--weights", metavar="FILE", help="write what each file of tests costs, say what grew")


def pytest_configure(config: pytest.Config) -> None:
    if output := config.getoption("weights"):
        from tests.helpers.weights import Weights  # not there where a test copies this file

        config.pluginmanager.register(Weights(output))
    if config.getoption("quick"):
        sys.meta_path.insert(0, _NoTensorFlow())  # type: ignore[arg-type]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(_ORDER)}
    items.sort(key=lambda item: order.get(item.path.parent.name, len(order)))
    for item in items:
        if item.path.parent.name == "engines":
            item.add_marker("engine")


@pytest.fixture(autouse=True)
def only_this_machine() -> Iterator[None]:
    """Fails the test when it has tried to reach another machine; looking up plug-ins extends sys.path."""
    _reached.clear()
    path = [*sys.path]
    yield
    sys.path[:] = path
    assert not _reached, f"the test has tried to reach {', '.join(dict.fromkeys(_reached))}"


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[Slurm]:
    """A real Slurm of two nodes, one in each process of pytest that needs it; it starts in a second."""
    from tests.helpers.slurm import start, unavailable  # not there where a test copies this file

    if reason := unavailable():
        pytest.skip(reason)
    with start() as slurm:
        yield slurm


@pytest.fixture
def slurm(slurm_cluster: Slurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """A real Slurm without jobs, both of whose nodes are idle; what the test starts reaches it."""
    monkeypatch.setenv("SLURM_CONF", str(slurm_cluster.conf))
    yield slurm_cluster
    slurm_cluster.reset()
