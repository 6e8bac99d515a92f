"""How long the ring of sockets takes over a network with a delay, and what sizes of socket buffers do to it.

sudo python -m benchmarks.network --delay-ms 0.3 --gbit 10

Two network namespaces, joined by two TUN devices and a process that hands each packet over when its time has
come (netem does the same where the kernel has it): the TCP of this kernel, with its windows and its tuning of
buffers. Medians (smallest-largest) of the rounds; the variants take turns.
"""

from __future__ import annotations

import argparse
import collections
import fcntl
import multiprocessing
import os
import select
import socket
import statistics
import struct
import subprocess
import sys
import time

import numpy as np

from shardline.trainer.distribute.ring import Ring

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_SIDES = ("shardline0", "shardline1")
_PORT, _MTU = 7000, 65000
#: Bytes of SO_SNDBUF and SO_RCVBUF; 0 leaves them to the kernel. A stock kernel makes 208 KiB of any more.
BUFFERS = {"the kernel's": 0, "208 KiB": 212_992, "4 MiB": 4 << 20}


def _device(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return descriptor


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def forward(descriptors: list[int], delay: float, bytes_per_s: float) -> None:
    """Hands packets from each device to the other, without end: late by the delay, at the rate of a link."""
    queues: list[collections.deque[tuple[float, bytes]]] = [collections.deque(), collections.deque()]
    free = [0.0, 0.0]
    while True:
        due = min((queue[0][0] for queue in queues if queue), default=None)
        # select sleeps too long for tenths of a millisecond.
        select.select(descriptors, [], [], None if due is None else 0)
        for side in (0, 1):
            try:
                packet = os.read(descriptors[side], _MTU + 100)
            except BlockingIOError:
                continue
            free[side] = max(time.perf_counter(), free[side]) + len(packet) / bytes_per_s
            queues[side].append((free[side] + delay, packet))
        for side in (0, 1):
            while queues[side] and queues[side][0][0] <= time.perf_counter():
                os.write(descriptors[1 - side], queues[side].popleft()[1])


def sums(rank: int, megabytes: float, rounds: int) -> None:
    """Takes part, inside its namespace, in sums over the ring; the first prints milliseconds by variant."""
    found: dict[str, list[float]] = {name: [] for name in BUFFERS}
    listener = socket.create_server((f"10.77.0.{rank + 1}", _PORT))
    values = np.ones(int(megabytes * 1e6 / 4), np.float32)
    places = {}
    for name, size in BUFFERS.items():
        to_next = _connected(f"10.77.0.{2 - rank}")
        from_previous, _ = listener.accept()
        for one in (to_next, from_previous):
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF) if size else ():
                one.setsockopt(socket.SOL_SOCKET, option, size)
        places[name] = Ring(rank, 2, to_next, from_previous)
    for turn in range(rounds + 2):
        for name, ring in places.items():
            started = time.perf_counter()
            ring.sum(values)
            if turn >= 2:  # the kernel's tuning has had its time
                found[name].append((time.perf_counter() - started) * 1e3)
            values[:] = 1
    if rank == 0:
        for name, times in found.items():
            median = statistics.median(times)
            print(
                f"{megabytes:g} MB, buffers {name}: {median:.1f} ms ({min(times):.1f}-{max(times):.1f}), "
                f"{megabytes * 8e-3 / median * 1e3:.2f} Gbit/s each way"
            )


def _connected(host: str) -> socket.socket:
    while True:
        try:
            return socket.create_connection((host, _PORT), timeout=1)
        except OSError:
            time.sleep(0.05)


def main() -> None:
    """Builds the network, runs both processes for each size, and takes the network down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--delay-ms", type=float, default=0.3, help="one way")
    parser.add_argument("--gbit", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--megabytes", type=float, nargs="*", default=[11.0, 94.0])
    options = parser.parse_args()
    if options.rank >= 0:
        sums(options.rank, options.megabytes[0], options.rounds)
        return
    descriptors = [_device(name) for name in _SIDES]
    forwarder = multiprocessing.Process(
        target=forward, args=(descriptors, options.delay_ms / 1e3, options.gbit * 1e9 / 8), daemon=True
    )
    try:
        for rank, name in enumerate(_SIDES):
            _ip("netns", "add", name)
            _ip("link", "set", name, "netns", name)
            _ip("-n", name, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", name)
            _ip("-n", name, "link", "set", name, "mtu", str(_MTU), "txqueuelen", "10000", "up")
        forwarder.start()
        own = [sys.executable, "-m", "benchmarks.network", "--rounds", str(options.rounds)]
        for megabytes in options.megabytes:
            for child in [
                subprocess.Popen(
                    ["ip", "netns", "exec", name, *own, "--megabytes", str(megabytes), "--rank", str(rank)]
                )
                for rank, name in enumerate(_SIDES)
            ]:
                child.wait()
    finally:
        if forwarder.is_alive():
            forwarder.kill()
        for name in _SIDES:
            subprocess.run(["ip", "netns", "del", name], check=False)


if __name__ == "__main__":
    main()
