"""Environments: the tasks that Slurm and others start, found from the variables that they give each of them.

A row of `ROWS` takes the environment and returns this task and the addresses of all, or None where its
launcher has not started this process. Raises ClusterError for variables that contradict each other.
"""

from __future__ import annotations

import functools
import itertools
import re
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shardline.trainer.base.errors import ClusterError, RunError

#: Returns the address of each node of a list of names.
Addresses: TypeAlias = Callable[[tuple[str, ...]], Mapping[str, str]]

# Ports of jobs on the same nodes: 1,420 slots of 16, all below those that Linux gives to clients.
_FIRST_PORT, _SLOTS, _SLOT = 10000, 1420, 16
_RANGES = r"[0-9]{1,9}(?:-[0-9]{1,9})?(?:,[0-9]{1,9}(?:-[0-9]{1,9})?)*"
_HOSTS = re.compile(rf"((?:[^\[\],\s]|\[{_RANGES}\])+)(?:,|$)")
_COUNT = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?")


@dataclass(frozen=True)
class Tasks:
    """The tasks that a launcher has started, which train together.

    Attributes:
        rank: Number of this task.
        hosts: host:port of every task, in order of rank.
        origin: What has started them, such as "Slurm job 12, 3 tasks on n1, n2".
    """

    rank: int
    hosts: tuple[str, ...]
    origin: str


def find_tasks(environ: Mapping[str, str]) -> Tasks | None:
    """Returns what the first row finds that matches; None for a process that was started by itself."""
    return next((found for row in ROWS if (found := row(environ))), None)


def slurm_addresses(names: tuple[str, ...]) -> Mapping[str, str]:
    """Returns the addresses of Slurm's nodes: their names, or NodeAddr where one of them is not in DNS.

    Raises:
        ClusterError: A name does not resolve, and there is no scontrol.
        RunError: scontrol fails.
    """
    try:
        for name in names:
            socket.getaddrinfo(name, None)
        return dict(zip(names, names, strict=True))
    except OSError:
        return _node_addresses(names)


@functools.cache
def _node_addresses(names: tuple[str, ...]) -> Mapping[str, str]:
    command = ["scontrol", "show", "node", "--oneliner", ",".join(names)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        raise ClusterError(
            f"nodes {', '.join(names)} are not all in DNS, and scontrol, which knows their addresses, "
            "is not in PATH"
        ) from None
    except subprocess.TimeoutExpired:
        raise RunError("scontrol show node, asked for the addresses of nodes, took more than 60 s") from None
    found = dict(re.findall(r"^NodeName=(\S+) .*?\bNodeAddr=(\S+)", done.stdout, re.MULTILINE))
    if done.returncode or not set(names) <= set(found):
        raise RunError(f"scontrol show node does not know the addresses of {', '.join(names)}: {done.stderr}")
    return found


def slurm(environ: Mapping[str, str], addresses: Addresses = slurm_addresses) -> Tasks | None:
    """Returns the tasks of a step of Slurm; None outside of one, as in the script of sbatch.

    The variables are those of https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES.
    """
    if "SLURM_STEP_NUM_TASKS" not in environ:
        return None
    size = _number(environ, "SLURM_STEP_NUM_TASKS", 1)
    rank = _number(environ, "SLURM_PROCID", 0, size)
    job, step = (_number(environ, f"SLURM_{name}_ID", 0) for name in ("JOB", "STEP"))
    nodes = expand_hosts(environ, "SLURM_STEP_NODELIST")
    counts = _expand_counts(environ, "SLURM_STEP_TASKS_PER_NODE")
    if len(nodes) != len(counts) or sum(counts) != size:
        raise ClusterError(
            f"SLURM_STEP_TASKS_PER_NODE is {environ['SLURM_STEP_TASKS_PER_NODE']!r}, which is not "
            f"SLURM_STEP_NUM_TASKS {size} on SLURM_STEP_NODELIST {environ['SLURM_STEP_NODELIST']!r}"
        )
    places = _places(environ, dict(zip(nodes, counts, strict=True)))
    own = (environ.get("SLURMD_NODENAME", ""), environ.get("SLURM_LOCALID", ""))
    # Every task checks its own place: where all are right, so is the whole list.
    if len(places) != size or any(a and a != str(b) for a, b in zip(own, places[rank], strict=True)):
        raise ClusterError(
            f"the nodes of the other tasks are not known: task {rank} of {size} is on {own[0]!r} as its task "
            f"{own[1]!r}, with SLURM_DISTRIBUTION {environ.get('SLURM_DISTRIBUTION', '')!r}; start the step "
            "with 'srun -m block'"
        )
    # A step on one node needs no other address. Nodes have one in common where a machine stands for several.
    known = addresses(tuple(nodes)) if len(nodes) > 1 else {nodes[0]: "127.0.0.1"}
    own_hosts = [known[node] for node, _ in places]
    numbers = [own_hosts[:place].count(host) for place, host in enumerate(own_hosts)]
    ports = _reserved_ports(environ)
    if len(ports) <= max(numbers):
        # Steps of a job, and jobs with numbers near each other, may be on a node at the same time.
        ports = range(_port(4 * job + step % 4), 2**16)
    hosts = tuple(_address(host, ports[number]) for host, number in zip(own_hosts, numbers, strict=True))
    return Tasks(rank, hosts, f"Slurm job {job}, {_on(size, nodes)}")


def _places(environ: Mapping[str, str], counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Returns node and number on it of each task.

    The step of a heterogeneous job has the tasks of its groups one after the other, and a sorted list of
    nodes; the variable of the distribution is that of one group only.
    """
    groups = [list(counts)]
    cyclic = environ.get("SLURM_DISTRIBUTION", "").startswith("cyclic")
    if environ.get("SLURM_HET_SIZE"):
        cyclic = False
        names = (f"SLURM_JOB_NODELIST_HET_GROUP_{i}" for i in range(_number(environ, "SLURM_HET_SIZE", 1)))
        groups = [expand_hosts(environ, name) for name in names]
    places = []
    for group in groups:
        tasks = [(node, local) for node in group for local in range(counts.get(node, 0))]
        places += sorted(tasks, key=lambda place: place[1]) if cyclic else tasks
    return places


def _reserved_ports(environ: Mapping[str, str]) -> Sequence[int]:
    """Returns the ports that Slurm keeps free on the nodes of the step, where MpiParams has some."""
    text = environ.get("SLURM_STEP_RESV_PORTS", "")
    return list(map(int, _expand_range(text))) if re.fullmatch(_RANGES, text) else []


def expand_hosts(environ: Mapping[str, str], name: str) -> list[str]:
    """Returns the names of a list such as "n[1-3,07-09],m1", as `scontrol show hostnames` does."""
    text, position, hosts = environ.get(name, ""), 0, list[str]()
    while position < len(text) or not text:
        match = _HOSTS.match(text, position)
        if not match:
            raise ClusterError(f"{name} is {text[:80]!r}, which is no list of hosts such as 'n[1-3],m1'")
        parts = enumerate(re.split(r"\[(.*?)\]", match[1]))
        choices = (_expand_range(part) if odd % 2 else [part] for odd, part in parts)
        hosts += map("".join, itertools.product(*choices))
        position = match.end()
    return hosts


def _expand_range(text: str) -> list[str]:
    numbers = []
    for first, _, last in (part.partition("-") for part in text.split(",")):
        if int(last or first) - int(first) >= 2**16:
            raise ClusterError(f"{first}-{last} is a range of more than {2**16} numbers")
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last or first) + 1)]
    return numbers


def _expand_counts(environ: Mapping[str, str], name: str) -> list[int]:
    """Returns the numbers of a list such as "2(x3),1"."""
    text = environ.get(name, "")
    matches = [_COUNT.fullmatch(part) for part in text.split(",")]
    if None in matches:
        raise ClusterError(f"{name} is {text[:80]!r}, which is no list of numbers such as '2(x3),1'")
    return [int(m[1]) for m in matches if m for _ in range(int(m[2] or 1))]


def _number(environ: Mapping[str, str], name: str, least: int, end: int = 2**32) -> int:
    text = environ.get(name, "")
    if not re.fullmatch(r"[0-9]{1,10}", text) or not least <= int(text) < end:
        most = "" if end == 2**32 else f" to {end - 1}"
        raise ClusterError(f"{name} is {text[:80]!r}, which is not a number from {least}{most}")
    return int(text)


def _port(slot: int) -> int:
    return _FIRST_PORT + slot % _SLOTS * _SLOT


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _on(tasks: int, hosts: Sequence[str]) -> str:
    shown = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
    return f"{tasks} task{'s' * (tasks > 1)} on {shown}"


#: The launchers, in the order in which they are asked.
ROWS: tuple[Callable[[Mapping[str, str]], Tasks | None], ...] = (slurm,)
