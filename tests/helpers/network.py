"""This machine's network as somebody else sees it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterable

import psutil
import pytest

from shardline.pipelines.local.process import network

_PROBE = """
import json, socket, sys
for host, port in json.loads(sys.argv[1]):
    try:
        socket.create_connection((host, port), 2).close()
        print(f"{host}:{port}")
    except OSError:
        pass
"""


def open_from_outside(ports: Iterable[int]) -> list[str]:
    """Returns host:port of all that this machine's network reaches, by each of its addresses.

    In a process of its own, since no test may connect to more than loopback.
    """
    kinds = (socket.AF_INET, socket.AF_INET6)
    own = [item.address for items in psutil.net_if_addrs().values() for item in items if item.family in kinds]
    assert {"127.0.0.1"} < set(own), "this machine has another address than loopback"
    asked = json.dumps([(host, port) for port in ports for host in [*own, "127.0.0.2"]])
    done = subprocess.run([sys.executable, "-c", _PROBE, asked], capture_output=True, text=True, check=True)
    return done.stdout.split()


_WITHOUT = """
import ctypes, os, sys
for capability in {capabilities}:
    ctypes.CDLL(None).prctl(24, capability)  # PR_CAPBSET_DROP
os.execv(sys.executable, [sys.executable, "-c", *sys.argv[1:]])
"""
_DAC_OVERRIDE, _DAC_READ_SEARCH, _SYS_ADMIN = 1, 2, 21
#: Starts `python -c` with what follows, without the right to administer the machine.
WITHOUT_ADMINISTRATION = (sys.executable, "-c", _WITHOUT.format(capabilities=(_SYS_ADMIN,)))
#: The same without the right to other users' files, as ordinary users are.
ORDINARY = (sys.executable, "-c", _WITHOUT.format(capabilities=(_SYS_ADMIN, _DAC_OVERRIDE, _DAC_READ_SEARCH)))

#: Left out, with the reason, where the kernel gives no network namespace.
needs_namespaces = pytest.mark.skipif(bool(reason := network.isolation_unavailable()), reason=reason)
