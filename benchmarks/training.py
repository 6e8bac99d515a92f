"""How fast training is: the loop on one worker, and what more workers lose to the exchange of gradients.

python -m benchmarks.training --only loop --only exchange

Every worker has one core (pinned, one thread). Batches are in memory. Weak scaling: a worker's batch stays
the same, so that efficiency is t(1) / t(N). Variants take turns inside the same processes; the single worker
is measured before and after them. Medians (smallest-largest) of the rounds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
from typing import Any

_CNN = "benchmarks.training_process:tutorial_cnn"

#: Name, model, side of the images in pixels, examples per worker, steps a round.
WORKS: dict[str, tuple[str, int, int, int]] = {
    "tutorial CNN, B=64": (_CNN, 28, 64, 50),
    "tutorial CNN, B=512": (_CNN, 28, 512, 15),
    "ResNet50 96 px, B=16": ("resnet50", 96, 16, 4),
}
_PARTS = ("loop", "mirrored", "exchange", "crowd")
_EXCHANGES = {
    "TensorFlow's ring": {"communication": "ring"},
    "ring of sockets": {"communication": "auto"},
    "ring of TCP sockets": {"communication": "tcp"},
    "sockets, every 4 steps": {"communication": "auto", "gradient_accumulation_steps": 4},
}


def measure(
    workers: int,
    work: str,
    variants: dict[str, Any],
    rounds: int,
    steps: int = 0,
    strategy: str = "auto",
) -> dict[str, list[float]]:
    """Returns milliseconds a step by variant, of the slowest worker in each round."""
    model, side, batch, usual = WORKS[work]
    cores = sorted(os.sched_getaffinity(0))
    hosts = [f"127.0.0.1:{port}" for port in _free_ports(workers)]
    children = []
    for rank in range(workers):
        request = {
            "model": model,
            "side": side,
            "batch": batch,
            "steps": steps or usual,
            "rounds": rounds,
            "cores": cores[:2] if strategy == "mirrored" else [cores[rank % len(cores)]],
            "strategy": strategy,
            "variants": variants,
        }
        environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
        if workers > 1:
            task = {"type": "worker", "index": rank}
            environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": hosts}, "task": task})
        command = [sys.executable, "-m", "benchmarks.training_process", json.dumps(request)]
        children.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True))
    outputs = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        raise SystemExit(f"a process of {work} on {workers} workers failed; its output is above")
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    return {
        name: [max(one) for one in zip(*(each[name] for each in found), strict=True)] for name in variants
    }


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _show(values: list[float]) -> str:
    return f"{statistics.median(values):,.1f} ms ({min(values):,.1f}-{max(values):,.1f})"


def loop(rounds: int) -> None:
    """Our loop against the bare compiled step and Keras' fit, on one worker."""
    work = "tutorial CNN, B=64"
    # Each is first in one of two processes: where a model lies in memory makes some percent.
    ways = ["bare step", "our loop", "Keras fit"]
    ways += ["tf_keras fit"] if importlib.util.find_spec("tf_keras") else []
    orders = ways, ways[::-1]
    each = [measure(1, work, {name: {} for name in order}, rounds, steps=300) for order in orders]
    found = {name: [*each[0][name], *each[1][name]] for name in orders[0]}
    print(f"\n| {work}, one worker | a step | of the bare step |\n|---|---|---|")
    bare = statistics.median(found["bare step"])
    for name, values in found.items():
        print(f"| {name} | {_show(values)} | {statistics.median(values) / bare:.3f} |", flush=True)


def mirrored(rounds: int) -> None:
    """Our loop under two replicas in one process against Keras' fit under the same."""
    work = "tutorial CNN, B=512"
    ways: dict[str, Any] = {"our loop": {}, "Keras fit": {}}
    found = measure(1, work, ways, rounds, strategy="mirrored")
    print(f"\n| {work}, mirrored(2) | a step | of Keras' fit |\n|---|---|---|")
    peer = statistics.median(found["Keras fit"])
    for name, values in found.items():
        print(f"| {name} | {_show(values)} | {statistics.median(values) / peer:.3f} |", flush=True)


def exchange(rounds: int, works: list[str]) -> None:
    """Two workers in all ways of exchanging gradients against one."""
    for work in works:
        before = measure(1, work, {"one": {}}, rounds)["one"]
        two = measure(2, work, _EXCHANGES, rounds)
        one = before + measure(1, work, {"one": {}}, rounds)["one"]
        print(f"\n| {work} | a step | efficiency |\n|---|---|---|\n| one worker | {_show(one)} | |")
        for name, values in two.items():
            efficiency = statistics.median(one) / statistics.median(values)
            print(f"| two workers, {name} | {_show(values)} | {efficiency:.2f} |", flush=True)


def crowd(rounds: int) -> None:
    """More workers than cores: what becomes of the throughput of all together."""
    work = "tutorial CNN, B=512"
    print(f"\n| {work} | a step | examples/s of all | of two workers |\n|---|---|---|---|")
    two = 0.0
    for workers in (1, 2, 4, 8):
        values = measure(workers, work, {"sockets": {"communication": "tcp"}}, rounds)["sockets"]
        speed = workers * WORKS[work][2] / statistics.median(values) * 1000
        two = speed if workers == 2 else two
        ratio = f"{speed / two:.2f}" if two else ""
        print(f"| {workers} | {_show(values)} | {speed:,.0f} | {ratio} |", flush=True)


def main() -> None:
    """Measures and prints tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", choices=_PARTS)
    parser.add_argument("--work", action="append", choices=tuple(WORKS))
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    wanted = options.only or _PARTS
    if "loop" in wanted:
        loop(options.rounds)
    if "exchange" in wanted:
        exchange(options.rounds, options.work or list(WORKS))
    if "mirrored" in wanted:
        mirrored(options.rounds)
    if "crowd" in wanted:
        crowd(options.rounds)


if __name__ == "__main__":
    main()
