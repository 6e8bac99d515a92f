"""Settings of the training step's custom job, its worker pools, and the machine of any other task.

They build the payload. What is wrong with it is found by the rules of `shardline check`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

from shardline.components.vertex import forms
from shardline.components.vertex.payload import mapping_at
from shardline.trainer.base.deserialize import Count, Rule, Within, check_types
from shardline.trainer.base.errors import SettingsError
from shardline.trainer.base.progress import TIMEOUT_VARIABLE
from shardline.trainer.cluster.cluster import ACCELERATORS_VARIABLE

if TYPE_CHECKING:
    from kfp import dsl

#: Prefixes of machine types with TPUs.
_TPU_FAMILIES = ("cloud-tpu", "ct5lp-", "ct6e-", "tpu7x-")
#: The platform's own program for a Reduction Server.
REDUCTION_SERVER_IMAGE = "us-docker.pkg.dev/vertex-ai-restricted/training/reductionserver:latest"

#: A slot without replicas. The API skips an empty pool, but the launcher drops empty objects and zeros from
#: its payload, which would move later pools to other roles. To the launcher the text "0" is neither; its
#: client reads it as a number (int64 is text in JSON), and a WorkerPoolSpec of zeros is the empty message.
EMPTY_POOL: Mapping[str, Any] = {"replica_count": "0"}
#: Fields that are not arguments of GCPC's component, or that the pipeline sets itself.
_NOT_GCPC_ARGUMENTS = ("cluster", "num_retries", "tags", "extra")
_RETRIES = Within(0, 10)
_TIMEOUT = Rule(f"{forms.DURATION.description}, more than 0s", lambda text: bool(forms.seconds(text)))
#: Placeholders that differ from run to run.
_RUN_PLACEHOLDERS = tuple(f"{{{{$.pipeline_{name}}}}}" for name in ("job_name", "job_uuid", "task_uuid"))


@dataclass(frozen=True, kw_only=True)
class WorkerPool:
    """Replicas with the same machine and the same container.

    The fields are the keys of [train], which settings/vertex.toml.example explains.
    """

    machine_type: str
    replica_count: Count = 1
    accelerator_type: str = ""
    accelerator_count: int = 0
    boot_disk_size_gb: int = 100
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types(self)
        if self.machine_type.startswith(_TPU_FAMILIES) or self.accelerator_type.startswith("TPU"):
            raise SettingsError(
                f"machine_type {self.machine_type} has TPUs, on which Shardline does not train; "
                "use CPUs or GPUs"
            )

    @property
    def accelerators(self) -> str:
        """Accelerators of each replica, "1 NVIDIA_TESLA_T4"; "" for none."""
        return f"{self.accelerator_count} {self.accelerator_type}" if self.accelerator_type else ""

    def spec(self, container: Mapping[str, Any], reduction_servers: int = 0) -> dict[str, Any]:
        """Returns the platform's WorkerPoolSpec.

        `container` has image_uri, command and args where they are not the image's own, and env by name, which
        overrides the pool's. A variable tells the trainer its accelerators and the job's number of
        `reduction_servers`.
        """
        told = [self.accelerators, f"{reduction_servers} reduction servers" if reduction_servers else ""]
        variables = {**self.env, **container.get("env", {})}
        if any(told):
            variables[ACCELERATORS_VARIABLE] = ", ".join(filter(None, told))
        env = [{"name": name, "value": value} for name, value in variables.items()]
        machine: dict[str, Any] = {"machine_type": self.machine_type}
        if self.accelerator_type or self.accelerator_count:
            machine["accelerator_type"] = self.accelerator_type
            machine["accelerator_count"] = self.accelerator_count
        return {
            "container_spec": {**container, "env": env},
            "machine_spec": machine,
            "replica_count": self.replica_count,
            "disk_spec": {"boot_disk_size_gb": self.boot_disk_size_gb},
        }


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The machines of a training job, by role.

    The platform knows a role by the index of the pool: 0 is the chief, 1 workers, 2 parameter servers or
    Reduction Server, 3 evaluators.

    Attributes:
        chief: One replica.
        workers: Further replicas that train.
        parameter_servers: Replicas that hold the variables (ParameterServerStrategy).
        reduction_server: Replicas that add up the gradients of GPU workers; in the parameter servers' slot.
        evaluator: Replicas that evaluate checkpoints during the training.
    """

    chief: WorkerPool
    workers: WorkerPool | None = None
    parameter_servers: WorkerPool | None = None
    reduction_server: WorkerPool | None = None
    evaluator: WorkerPool | None = None

    def __post_init__(self) -> None:
        if self.parameter_servers and self.reduction_server:
            raise SettingsError(
                "parameter_servers and reduction_server share one worker pool; leave one of them out"
            )

    @classmethod
    def of(cls, pool: WorkerPool) -> Cluster:
        """Returns a chief and, where the pool has more than one replica, workers, all alike."""
        rest = pool.replica_count - 1
        return cls(
            chief=replace(pool, replica_count=1),
            workers=replace(pool, replica_count=rest) if rest else None,
        )

    @property
    def replica_count(self) -> int:
        """Replicas that train: the chief and the workers."""
        return self.chief.replica_count + (self.workers.replica_count if self.workers else 0)

    @property
    def pools(self) -> tuple[WorkerPool | None, ...]:
        """The pools by index, None for an empty slot, without empty slots at the end."""
        server = self.parameter_servers or self.reduction_server
        slots = [self.chief, self.workers, server, self.evaluator]
        while slots[-1] is None:
            slots.pop()
        return tuple(slots)

    def specs(self, container: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the platform's worker_pool_specs.

        `container` is the container_spec of the program that all replicas but a Reduction Server run.
        """
        servers = self.reduction_server.replica_count if self.reduction_server else 0
        return [
            dict(EMPTY_POOL)
            if pool is None
            else pool.spec({"image_uri": REDUCTION_SERVER_IMAGE})
            if pool is self.reduction_server
            else pool.spec(container, servers)
            for pool in self.pools
        ]


@dataclass(frozen=True, kw_only=True)
class CustomJobSettings:
    """Settings of a custom job without its program; fixed when the pipeline is compiled.

    Texts may hold the platform's placeholders; the defaults are the pipeline's own values (empty where the
    run has none). The fields are the keys of [train.job], which settings/vertex.toml.example explains;
    durations are seconds, as in "3600s".
    """

    cluster: Cluster
    strategy: str = "STANDARD"
    timeout: Annotated[str, forms.DURATION] = "604800s"
    restart_job_on_worker_restart: bool | None = None
    num_retries: Annotated[int, _RETRIES] = 2
    service_account: str = "{{$.pipeline_service_account}}"
    network: Annotated[str, forms.NETWORK] = "{{$.pipeline_network}}"
    encryption_spec_key_name: Annotated[str, forms.KEY] = "{{$.pipeline_encryption_key_name}}"
    tensorboard: Annotated[str, forms.TENSORBOARD] = ""
    base_output_directory: str = ""
    tags: forms.Tags = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.cluster, Cluster):
            raise SettingsError(f"cluster must be a Cluster, such as Cluster.of(pool), got {self.cluster!r}")
        check_types(self)
        own = {*vars(self), "worker_pool_specs"} & {*self.extra, *mapping_at(self.extra, "scheduling")}
        if own:
            raise SettingsError(f"extra sets {', '.join(sorted(own))}, which other keys set; leave it out")
        directory = self.base_output_directory
        # A compiled pipeline gives the job a directory that its rehearsal returns: no rule sees this one.
        if directory and not any(name in directory for name in _RUN_PLACEHOLDERS):
            raise SettingsError(
                f"all runs would share the checkpoints of base_output_directory {directory!r}; add the run: "
                f"{directory.rstrip('/')}/{{{{$.pipeline_job_name}}}}"
            )

    @property
    def arguments(self) -> dict[str, Any]:
        """The job as keyword arguments of GCPC, without its name, worker pools and tags."""
        restart = self.restart_job_on_worker_restart
        if restart is None:  # a synchronous replica cannot continue without a peer: all restart and resume
            restart = self.cluster.parameter_servers is None
        own = {name: value for name, value in vars(self).items() if name not in _NOT_GCPC_ARGUMENTS}
        return own | {"restart_job_on_worker_restart": restart}


@dataclass(frozen=True, kw_only=True)
class TaskMachine:
    """Machine of a task: a table such as [preprocess], which settings/vertex.toml.example explains.

    Without `machine_type` the platform chooses a machine with `cpu` and `memory`; with it the task runs as a
    custom job of one replica, whose boot disk has `disk` GB. Other tasks cannot choose a disk size.
    """

    cpu: int = 0
    memory: str = ""
    machine_type: str = ""
    disk: int = 0
    accelerator_type: str = ""
    accelerator_count: int = 0
    retries: Annotated[int, _RETRIES] = 2
    timeout: Annotated[str, _TIMEOUT] = "86400s"
    cache: bool = True

    def __post_init__(self) -> None:
        check_types(self)
        if self.machine_type and (self.cpu or self.memory):
            raise SettingsError(
                "machine_type says how many cores and how much memory; leave out cpu and memory"
            )
        if self.disk and not self.machine_type:
            raise SettingsError("disk needs a machine_type; set one instead of cpu and memory")

    def uncached(self) -> TaskMachine:
        """Returns the machine without caching, for a task whose result depends on more than its inputs."""
        return replace(self, cache=False)

    def job(self, training: CustomJobSettings) -> CustomJobSettings:
        """Returns a job of one replica on this machine, in the network of `training`."""
        pool = WorkerPool(
            machine_type=self.machine_type,
            accelerator_type=self.accelerator_type,
            accelerator_count=self.accelerator_count,
            boot_disk_size_gb=self.disk or WorkerPool.boot_disk_size_gb,
        )
        network = ("psc_interface_config", "reserved_ip_ranges")
        return CustomJobSettings(
            cluster=Cluster.of(pool),
            timeout=self.timeout,
            num_retries=0,
            restart_job_on_worker_restart=training.restart_job_on_worker_restart,
            network=training.network,  # not the account: training has its own
            encryption_spec_key_name=training.encryption_spec_key_name,
            tags=training.tags,
            extra={name: training.extra[name] for name in network if name in training.extra},
        )

    def apply(self, task: dsl.PipelineTask) -> dsl.PipelineTask:
        """Requests this machine for a task with its own container; returns the task."""
        try:
            if self.cpu:
                task.set_cpu_limit(str(self.cpu))
            if self.memory:
                task.set_memory_limit(self.memory)
            if self.accelerator_type:
                task.set_accelerator_type(self.accelerator_type)
                task.set_accelerator_limit(self.accelerator_count)
        except ValueError as error:
            raise SettingsError(
                f"the platform takes no machine of cpu = {self.cpu}, memory = {self.memory!r}, "
                f"accelerator_count = {self.accelerator_count}: {' '.join(str(error).split())}"
            ) from None
        task.set_env_variable(TIMEOUT_VARIABLE, self.timeout.removesuffix("s"))
        return self.schedule(task)

    def schedule(self, task: dsl.PipelineTask) -> dsl.PipelineTask:
        """Sets retries and caching of a task; returns the task."""
        if self.retries:
            task.set_retry(self.retries, backoff_duration="30s")
        if not self.cache:
            task.set_caching_options(False)
        return task


@dataclass(frozen=True)
class PreprocessMachine(TaskMachine):
    """Machine of each task that makes the dataset, of which there are at most `tasks`: [preprocess]."""

    tasks: Annotated[int, Within(1, 1_000)] = 1
