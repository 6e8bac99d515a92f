"""Cluster: the processes of a job and this one's role, read from TF_CONFIG or the launcher's variables.

The tasks that Slurm and others start are found from the variables that they give each of them. A row of
`ROWS` takes the environment and returns this task with the addresses of all, or None where its launcher has
not started this process. Raises ClusterError for variables that contradict each other, and for those of
several tasks that cannot find each other.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import itertools
import re
import socket
import subprocess
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeAlias

from shardline.trainer.base import files
from shardline.trainer.base.errors import ClusterError, RunError

# Task types, those that train in TensorFlow's order.
_TASKS = ("chief", "worker", "ps", "evaluator")
#: Environment variable with the secret by which a job's processes authenticate each other. The platform
#: sets none: there, any process that reaches their ports is trusted.
SECRET_VARIABLE = "SHARDLINE_JOB_SECRET"
#: Environment variable with the accelerators of this replica's worker pool, and the job's Reduction Servers,
#: which TF_CONFIG lists as parameter servers: "1 NVIDIA_TESLA_T4, 2 reduction servers".
ACCELERATORS_VARIABLE = "SHARDLINE_ACCELERATORS"
#: Environment variable with the hosts that gRPC, and nothing else, reaches without a proxy. It replaces
#: `no_proxy`, which gRPC reads where there is none (github.com/grpc/grpc, doc/environment_variables.md).
NO_PROXY_VARIABLE = "no_grpc_proxy"
_INDEX = re.compile(r"(-?[0-9]{1,9})(?:\.0)?")
_ADDRESS = re.compile(r"[!-~]+:([0-9]{1,5})")

#: Returns the address of each node of a list of names.
Addresses: TypeAlias = Callable[[tuple[str, ...]], Mapping[str, str]]

#: Environment variable with the host of each task, for launchers that do not tell it: "n[1-3],n3". With
#: "localhost" each task trains alone.
HOSTS_VARIABLE = "SHARDLINE_HOSTS"
# Ports of jobs on the same nodes: 1,420 slots of 16, all below those that Linux gives to clients.
_FIRST_PORT, _SLOTS, _SLOT = 10000, 1420, 16
# Most tasks of a cluster: a list of hosts is refused before it fills the memory.
_MOST = 2**16
_RANGES = r"[0-9]{1,9}(?:-[0-9]{1,9})?(?:,[0-9]{1,9}(?:-[0-9]{1,9})?)*"
_HOSTS = re.compile(rf"((?:[^\[\],\s]|\[{_RANGES}\])+)(?:,|$)")
_COUNT = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?")
# Variables with the number of tasks that a launcher has started, and with the rank of this one, which shows
# that there are several where it sets no number; also of launchers that have no row.
_SIZES = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("WORLD_SIZE", ""),  # RANK alone may be anything
    ("SLURM_STEP_NUM_TASKS", ""),  # the batch script has a rank, too
    ("PMI_SIZE", "PMI_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("HOROVOD_SIZE", "HOROVOD_RANK"),
    ("FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    ("", "JOB_COMPLETION_INDEX"),
)
_STEP, _ALLOCATION = "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"


@dataclass(frozen=True)
class ClusterConfig:
    """One process's view of its cluster.

    Attributes:
        task_type: "chief", "worker", "ps" or "evaluator"; "chief" when there is no cluster.
        task_index: Index among the tasks of that type.
        hosts: host:port of every training task, chief first; empty for one process without servers.
        ps_hosts: host:port of every parameter server.
        has_chief_task: Whether TF_CONFIG has a chief; worker 0 is the chief where it has none.
        secret: Secret of the job's processes; "" for none.
        origin: What describes the cluster: "TF_CONFIG", or "Slurm job 12, 3 tasks on n1, n2".
    """

    task_type: str = "chief"
    task_index: int = 0
    hosts: tuple[str, ...] = ()
    ps_hosts: tuple[str, ...] = ()
    has_chief_task: bool = True
    secret: str = field(default="", repr=False)
    origin: str = "TF_CONFIG"

    @property
    def role(self) -> str:
        """Role of this process: "chief", "worker", "ps" or "evaluator"."""
        first_worker = self.task_type == "worker" and self.task_index == 0
        return "chief" if first_worker and not self.has_chief_task else self.task_type

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the artifacts: the chief task, or worker 0 where there is none."""
        return self.role == "chief"

    @property
    def num_workers(self) -> int:
        """Number of processes that train together, at least 1; 1 in the evaluator."""
        return 1 if self.role == "evaluator" else max(1, len(self.hosts))

    @property
    def name(self) -> str:
        """Name of this process: "chief-0", "worker-1"."""
        return f"{self.task_type}-{self.task_index}"

    @property
    def tasks(self) -> dict[str, list[str]]:
        """Addresses of training tasks and parameter servers by type, as `tf.train.ClusterSpec` takes them."""
        chiefs = int(self.has_chief_task)
        by_type = {"chief": self.hosts[:chiefs], "worker": self.hosts[chiefs:], "ps": self.ps_hosts}
        return {kind: list(hosts) for kind, hosts in by_type.items() if hosts}

    @property
    def addresses(self) -> dict[str, str]:
        """host:port of every training task and parameter server by its name ("worker-1")."""
        return {
            f"{kind}-{index}": host for kind, hosts in self.tasks.items() for index, host in enumerate(hosts)
        }

    @property
    def others(self) -> dict[str, str]:
        """host:port by name of every training task and parameter server but this process."""
        return {name: address for name, address in self.addresses.items() if name != self.name}

    @property
    def own_host(self) -> str:
        """Host on which this process listens: its own when all are on loopback, else "", all interfaces."""

        def is_loopback(host: str) -> bool:
            try:
                return ipaddress.ip_address(host).is_loopback
            except ValueError:
                return host == "localhost"

        hosts = {name: host.rpartition(":")[0].strip("[]") for name, host in self.addresses.items()}
        return hosts.get(self.name, "") if all(map(is_loopback, hosts.values())) else ""

    def sign(self, *parts: bytes) -> bytes:
        """Returns the 32-byte HMAC of a message under the job's secret."""
        return hmac.digest(self.secret.encode(), b"".join(parts), "sha256")

    def __str__(self) -> str:
        """Returns the cluster as text: "chief + 1 worker"."""
        parts = ["chief" if self.has_chief_task else "worker 0 as chief"]
        for number, noun in ((len(self.hosts) - 1, "worker"), (len(self.ps_hosts), "parameter server")):
            if number > 0:
                parts.append(f"{number} {noun}{'s' * (number > 1)}")
        return " + ".join(parts) if len(parts) > 1 else "one process"


def without_proxy(environ: Mapping[str, str], addresses: Iterable[str]) -> dict[str, str]:
    """Returns the variable by which TensorFlow reaches host:port of replicas without the proxy of a network.

    gRPC asks the proxies of http_proxy, https_proxy and grpc_proxy even for loopback, and waits without end.
    """
    before = environ.get(NO_PROXY_VARIABLE, environ.get("no_proxy", "")).split(",")
    hosts = (address.rpartition(":")[0].strip("[]") for address in addresses)
    return {NO_PROXY_VARIABLE: ",".join(dict.fromkeys(filter(None, (*before, *hosts))))}


def read_cluster(environ: Mapping[str, str]) -> ClusterConfig:
    """Reads TF_CONFIG, or else the variables of the launcher that has started this process (`ROWS`).

    TF_CONFIG has a chief and workers, or workers only, and possibly parameter servers. An
    evaluator may appear as the task only. Task types without hosts are ignored, and Reduction Servers are not
    parameter servers. Other launchers have workers only. Raises ClusterError for a malformed cluster, and
    RunError where the launcher does not answer.
    """
    text = environ.get("TF_CONFIG", "").strip()
    secret = environ.get(SECRET_VARIABLE, "")
    config = files.parse_json(text or "{}", "TF_CONFIG", ClusterError)
    # Ray, and a custom job, start replicas within the tasks of another launcher. A custom job sets
    # CLUSTER_SPEC in each, and TF_CONFIG where there are several.
    is_ray = "RAY_JOB_ID" in environ
    is_inner = is_ray or bool(environ.get("CLUSTER_SPEC"))
    if config == {}:  # as in TensorFlow
        is_alone = is_ray or environ.get(HOSTS_VARIABLE) == "localhost"
        if _pools(environ).get("workerpool1") and not is_alone:
            raise ClusterError(
                "CLUSTER_SPEC has workers, but TF_CONFIG, with the addresses of all, is not set"
            )
        found = None if is_inner else find_tasks(environ)
        return replace(found, secret=secret) if found else ClusterConfig()
    tasks = _tasks(config, text)
    if not is_inner:
        count = sum(map(len, tasks.values()))
        check_sizes(environ, count, f"TF_CONFIG has {count}")
    if "reduction server" in environ.get(ACCELERATORS_VARIABLE, ""):
        tasks.pop("ps", None)
    task_type, task_index = _this_task(config, tasks)
    hosts = (*tasks.get("chief", ()), *tasks.get("worker", ()))
    if len(hosts) == 1 and "ps" not in tasks:
        return ClusterConfig(task_type, task_index) if task_type == "evaluator" else ClusterConfig()
    return ClusterConfig(
        task_type,
        task_index,
        hosts,
        tuple(tasks.get("ps", ())),
        has_chief_task="chief" in tasks,
        secret=secret,
    )


def _tasks(config: Any, text: str) -> dict[str, list[str]]:
    cluster = config.get("cluster") if isinstance(config, dict) else None
    if not isinstance(cluster, dict) or not all(isinstance(hosts, list) for hosts in cluster.values()):
        raise ClusterError(f"TF_CONFIG has no 'cluster' of task types with lists of hosts: {text[:80]!r}")
    tasks: dict[str, list[str]] = {}
    for kind, hosts in cluster.items():
        if kind not in _TASKS:
            raise ClusterError(
                f"TF_CONFIG has tasks of type {kind!r}; this trainer knows {', '.join(_TASKS)}"
            )
        if hosts:
            tasks[kind] = hosts
    owners: dict[str, str] = {}
    for kind, index, host in ((kind, *task) for kind, hosts in tasks.items() for task in enumerate(hosts)):
        match = _ADDRESS.fullmatch(host) if isinstance(host, str) else None
        if not match or not 0 < int(match[1]) < 2**16:
            raise ClusterError(f"TF_CONFIG's {kind} {index} is {host!r}, which is not host:port")
        if host in owners:
            raise ClusterError(f"TF_CONFIG has {host} twice, as {owners[host]} and as {kind} {index}")
        owners[host] = f"{kind} {index}"
    if len(tasks.get("chief", ())) > 1:
        raise ClusterError(f"TF_CONFIG has {len(tasks['chief'])} chiefs; a cluster has one")
    if "chief" not in tasks and "worker" not in tasks:
        raise ClusterError(f"TF_CONFIG has neither a chief nor workers, only {sorted(tasks)}")
    if "ps" in tasks and not {"chief", "worker"} <= set(tasks):
        raise ClusterError("TF_CONFIG has parameter servers, which need a chief and at least one worker")
    return tasks


def _this_task(config: Mapping[str, Any], tasks: Mapping[str, list[str]]) -> tuple[str, int]:
    task = config.get("task")
    if not isinstance(task, dict) or "type" not in task or "index" not in task:
        raise ClusterError(f"TF_CONFIG has no 'task' with 'type' and 'index': {task!r}")
    kind = str(task["type"])
    # The index may be text, or a double as in a protobuf Struct.
    match = _INDEX.fullmatch(str(task["index"]))
    if match is None:
        raise ClusterError(f"TF_CONFIG's task index is not a number: {str(task['index'])[:80]!r}")
    index = int(match[1])
    if kind == "chief" and index != 0:
        raise ClusterError(f"TF_CONFIG says this is chief {index}, but the only chief has index 0")
    if kind == "evaluator" and "evaluator" not in tasks:
        return kind, index
    if kind not in tasks or not 0 <= index < len(tasks[kind]):
        sizes = {name: len(hosts) for name, hosts in tasks.items()}
        raise ClusterError(f"TF_CONFIG's task {kind}:{index} is not in its cluster of {sizes}")
    return kind, index


def has_evaluator(environ: Mapping[str, str]) -> bool:
    """Whether the job has an evaluator: Vertex AI's worker pool 3, which only CLUSTER_SPEC lists."""
    return bool(_pools(environ).get("workerpool3"))


def _pools(environ: Mapping[str, str]) -> Mapping[str, Any]:
    with contextlib.suppress(ClusterError, AttributeError):  # a CLUSTER_SPEC that is not Vertex AI's
        spec = files.parse_json(environ.get("CLUSTER_SPEC") or "{}", "CLUSTER_SPEC", ClusterError)
        pools = spec.get("cluster", {})
        return pools if isinstance(pools, dict) else {}
    return {}


def find_tasks(environ: Mapping[str, str]) -> ClusterConfig | None:
    """Returns several tasks as the first row finds them that matches; None for a process by itself."""
    if environ.get(HOSTS_VARIABLE) == "localhost":
        return None
    for row in ROWS:
        if (tasks := row(environ)) and len(tasks.hosts) > 1:
            # mpirun starts its daemons as a step of Slurm, with a task a node.
            outer = {name: text for name, text in environ.items() if row is not open_mpi or name != _STEP}
            check_sizes(outer, len(tasks.hosts), tasks.origin)
            return tasks
    check_sizes(environ, 1, "where the others are is not known")
    return None


def check_sizes(environ: Mapping[str, str], tasks: int, origin: str) -> None:
    """Raises ClusterError where a launcher has started several tasks, and not the number that was found.

    `origin` describes the tasks that were found, or says why there is only one.
    """
    if environ.get(HOSTS_VARIABLE) == "localhost":
        return
    for name, size, is_exact in _started(environ):
        if size > 1 and tasks == 1:
            remedy = "start the program with srun" if name == _ALLOCATION else "set TF_CONFIG for each task"
            raise ClusterError(
                f"{name} is {environ[name][:80]!r}, so there are several tasks, but {origin}; {remedy}, "
                f"or set {HOSTS_VARIABLE}=localhost where each trains alone"
            )
        if is_exact and size not in (1, tasks):
            raise ClusterError(
                f"two launchers disagree: {origin}, but {name} is {environ[name][:80]!r}; "
                "start the program with one of them only"
            )


def _started(environ: Mapping[str, str]) -> Iterator[tuple[str, int, bool]]:
    """Yields variables that tell how many tasks a launcher has started, the number, and if it is exact."""
    numbers = {name: int(text) for name, text in environ.items() if re.fullmatch("[0-9]{1,9}", text)}
    for size, rank in _SIZES:
        if size in numbers:
            yield size, numbers[size], True
        elif rank in numbers:
            yield rank, numbers[rank] + 1, False
    if environ.get(HOSTS_VARIABLE):
        yield HOSTS_VARIABLE, len(expand_hosts(environ, HOSTS_VARIABLE)), True
    if not any(size in numbers for size, _ in _SIZES):
        if _ALLOCATION in numbers:  # which may hold many steps
            yield _ALLOCATION, numbers[_ALLOCATION], False
        if "PMIX_RANK" in environ:  # PMIx sets no number
            yield "PMIX_RANK", 2, False


@cache
def slurm_addresses(names: tuple[str, ...]) -> Mapping[str, str]:
    """Returns the addresses of Slurm's nodes: their names, or NodeAddr where one of them is not in DNS.

    Raises ClusterError if a name does not resolve and there is no scontrol, RunError if scontrol fails.
    """
    with contextlib.suppress(OSError):
        for name in names:
            socket.getaddrinfo(name, None)
        return dict(zip(names, names, strict=True))
    command = ["scontrol", "show", "node", "--oneliner", ",".join(names)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except OSError as error:  # not in PATH, or too many names for a command
        raise ClusterError(
            f"nodes {', '.join(names)[:80]} are not all in DNS, and scontrol, which knows their addresses, "
            f"cannot be run: {error.strerror}"
        ) from None
    except subprocess.TimeoutExpired:
        raise RunError("scontrol show node, asked for the addresses of nodes, took more than 60 s") from None
    found = dict(re.findall(r"^NodeName=(\S+) .*?\bNodeAddr=(\S+)", done.stdout, re.MULTILINE))
    if done.returncode or not set(names) <= set(found):
        raise RunError(f"scontrol show node does not know the addresses of {', '.join(names)}: {done.stderr}")
    return found


def slurm(environ: Mapping[str, str], addresses: Addresses = slurm_addresses) -> ClusterConfig | None:
    """Returns the tasks of a step of Slurm; None outside of one, as in the script of sbatch.

    The variables are those of https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES.
    """
    if _STEP not in environ:
        return None
    size = _number(environ, _STEP, 1, _MOST + 1)
    rank = _number(environ, "SLURM_PROCID", 0, size)
    job, step = (_number(environ, f"SLURM_{name}_ID", 0) for name in ("JOB", "STEP"))
    nodes = expand_hosts(environ, "SLURM_STEP_NODELIST")
    counts = _expand_counts(environ, "SLURM_STEP_TASKS_PER_NODE")
    if len(nodes) != len(counts) or sum(counts) != size:
        raise ClusterError(
            f"SLURM_STEP_TASKS_PER_NODE is {environ['SLURM_STEP_TASKS_PER_NODE']!r}, which is not "
            f"SLURM_STEP_NUM_TASKS {size} on SLURM_STEP_NODELIST {environ['SLURM_STEP_NODELIST']!r}"
        )
    places = [(node, local) for node, count in zip(nodes, counts, strict=True) for local in range(count)]
    if environ.get("SLURM_DISTRIBUTION", "").startswith("cyclic"):
        places.sort(key=lambda place: place[1])
    own = (environ.get("SLURMD_NODENAME", ""), environ.get("SLURM_LOCALID", ""))
    # Every task checks its own place: where all are right, so is the whole list.
    if any(a and a != str(b) for a, b in zip(own, places[rank], strict=True)):
        raise ClusterError(
            f"the nodes of the other tasks are not known: task {rank} of {size} is on {own[0]!r} as its task "
            f"{own[1]!r}, with SLURM_DISTRIBUTION {environ.get('SLURM_DISTRIBUTION', '')!r}; start the step "
            "with 'srun -m block'"
        )
    # A step on one node needs no other address.
    known = addresses(tuple(nodes)) if len(nodes) > 1 else {nodes[0]: "127.0.0.1"}
    # Steps of a job, and jobs with numbers near each other, may be on a node at the same time.
    hosts = _add_ports([known[node] for node, _ in places], 4 * job + step % 4)
    return _found(rank, hosts, f"Slurm job {job}, {_on(size, nodes)}")


def expand_hosts(environ: Mapping[str, str], name: str) -> list[str]:
    """Returns the names of a list such as "n[1-3,07-09],m1", as `scontrol show hostnames` does."""
    text, position, hosts = environ.get(name, ""), 0, list[str]()
    while position < len(text) or not text:
        match = _HOSTS.match(text, position)
        if not match:
            raise ClusterError(f"{name} is {text[:80]!r}, which is no list of hosts such as 'n[1-3],m1'")
        choices, product = list[list[str]](), 1
        for odd, part in enumerate(re.split(r"\[(.*?)\]", match[1])):
            ranges = [each.partition("-") for each in part.split(",")] if odd % 2 else []
            sizes = [max(0, int(last or first) - int(first) + 1) for first, _, last in ranges]
            product *= sum(sizes) if odd % 2 else 1
            if len(hosts) + product > _MOST:
                raise ClusterError(f"{name} is {text[:80]!r}, which has more than {_MOST} hosts")
            numbers = [
                str(int(first) + n).zfill(len(first))
                for (first, _, _), size in zip(ranges, sizes, strict=True)
                for n in range(size)
            ]
            choices.append(numbers if odd % 2 else [part])
        hosts += map("".join, itertools.product(*choices))
        position = match.end()
    return hosts


def _expand_counts(environ: Mapping[str, str], name: str) -> list[int]:
    text = environ.get(name, "")
    matches = [_COUNT.fullmatch(part) for part in text.split(",")]
    counts = [(int(match[1]), int(match[2] or 1)) for match in matches if match]
    if None in matches or sum(times for _, times in counts) > _MOST:
        raise ClusterError(f"{name} is {text[:80]!r}, which is no list of numbers such as '2(x3),1'")
    return [count for count, times in counts for _ in range(times)]


def _number(environ: Mapping[str, str], name: str, least: int, end: int = 2**32) -> int:
    text = environ.get(name, "")
    if not re.fullmatch(r"[0-9]{1,10}", text) or not least <= int(text) < end:
        most = "" if end == 2**32 else f" to {end - 1}"
        raise ClusterError(f"{name} is {text[:80]!r}, which is not a number from {least}{most}")
    return int(text)


def _found(rank: int, hosts: tuple[str, ...], origin: str) -> ClusterConfig:
    return ClusterConfig("worker", rank, hosts, has_chief_task=False, origin=origin)


def _add_ports(hosts: Sequence[str], slot: int) -> tuple[str, ...]:
    ports, addresses = Counter[str](), []
    for host in hosts:
        port = _FIRST_PORT + slot % _SLOTS * _SLOT + ports[host]
        ports[host] += 1
        addresses.append(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    return tuple(addresses)


def _on(tasks: int, hosts: Sequence[str]) -> str:
    shown = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
    return f"{tasks} task{'s' * (tasks > 1)} on {shown}"


def kubernetes(environ: Mapping[str, str]) -> ClusterConfig | None:
    """Returns the pods of an Indexed Job or a JobSet, whose manifest lists them in SHARDLINE_HOSTS.

    Kubernetes tells a pod its hostname and JOB_COMPLETION_INDEX, not the number of pods
    (https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode); JobSet adds labels only
    (https://jobset.sigs.k8s.io/docs/concepts/).
    """
    if "JOB_COMPLETION_INDEX" not in environ:
        return None
    hosts = _listed_hosts(environ, "JOB_COMPLETION_INDEX is set", "pod", "train-[0-3].train")
    names = [host.partition(".")[0] for host in hosts]
    own = environ.get("HOSTNAME", "").partition(".")[0]
    if names.count(own) != 1 or len(set(hosts)) < len(hosts):
        raise ClusterError(
            f"{HOSTS_VARIABLE} is {environ[HOSTS_VARIABLE]!r}, which must have the host of every pod once, "
            f"also this one's, HOSTNAME {own!r}"
        )
    return _found(names.index(own), _add_ports(hosts, 0), f"Kubernetes, {_on(len(hosts), hosts)}")


def open_mpi(environ: Mapping[str, str]) -> ClusterConfig | None:
    """Returns the ranks of Open MPI, which does not tell hosts: all on this machine, or on SHARDLINE_HOSTS.

    The variables are those of https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html.
    """
    rank, size, local = (f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_SIZE"))
    if not environ.get(size) or rank not in environ:
        return None
    tasks = _number(environ, size, 1, _MOST + 1)
    own = _number(environ, rank, 0, tasks)
    hosts = ["127.0.0.1"] * tasks
    if tasks > 1 and environ.get(local) != environ[size]:
        hosts = _listed_hosts(environ, f"{size} is {tasks}: one task of Open MPI", "rank", "n1,n1,n2")
        here = environ.get(local, "some")
        if len(hosts) != tasks or here not in ("some", str(hosts.count(hosts[own]))):
            raise ClusterError(
                f"{HOSTS_VARIABLE} is {environ[HOSTS_VARIABLE]!r}, which is not the host of each of {tasks} "
                f"ranks, with {here} of them on the host of rank {own}"
            )
    addresses = _add_ports(hosts, zlib.crc32(environ.get("PMIX_NAMESPACE", "").encode()))
    return _found(own, addresses, f"Open MPI, {_on(tasks, list(dict.fromkeys(hosts)))}")


def _listed_hosts(environ: Mapping[str, str], found: str, task: str, example: str) -> list[str]:
    if environ.get(HOSTS_VARIABLE):
        return expand_hosts(environ, HOSTS_VARIABLE)
    raise ClusterError(
        f"{found}, but where the others are is not known; set {HOSTS_VARIABLE} to the host of each {task}, "
        f"such as {example!r}, or to 'localhost' where each trains alone"
    )


#: The launchers, in the order in which they are asked: mpirun may itself be started by Slurm.
ROWS: tuple[Callable[[Mapping[str, str]], ClusterConfig | None], ...] = (open_mpi, slurm, kubernetes)
