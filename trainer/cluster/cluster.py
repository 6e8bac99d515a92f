"""Cluster: the processes of a job and this one's role, read from TF_CONFIG or the launcher's variables."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardline.trainer.base import files
from shardline.trainer.base.errors import ClusterError
from shardline.trainer.cluster.environments import HOSTS_VARIABLE, check_sizes, find_tasks

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
    """Reads TF_CONFIG, or else the variables of the launcher that has started this process (`environments`).

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
        if found is None:
            return ClusterConfig()
        return ClusterConfig("worker", found.rank, found.hosts, (), False, secret, found.origin)
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
