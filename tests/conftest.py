"""No test reaches beyond this machine.

Of the test's own process every connection that Python makes is looked at: one to anything but loopback or a
unix socket fails at once, as without a network, and then fails the test, whatever has become of the error.
What cannot be looked at are connections made in C (gRPC) and those of child processes. They inherit proxies
at which nobody listens, unless a test gives them others: gRPC, requests, urllib and pip ask those for every
host beyond loopback.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

#: The discard port, where nobody listens.
_NOWHERE = "http://127.0.0.1:9"

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
    os.environ.setdefault(_name, _NOWHERE)
    os.environ.setdefault(_name.upper(), os.environ[_name])
for _name in ("no_proxy", "NO_PROXY"):
    os.environ.setdefault(_name, "localhost,127.0.0.1,::1")
# google-auth asks for the metadata server at an address of its own, past all proxies.
os.environ.setdefault("NO_GCE_CHECK", "true")


@pytest.fixture(autouse=True)
def only_this_machine() -> Iterator[None]:
    """Fails the test when it has tried to reach another machine."""
    _reached.clear()
    yield
    assert not _reached, f"the test has tried to reach {', '.join(dict.fromkeys(_reached))}"
