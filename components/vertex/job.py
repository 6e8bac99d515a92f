"""Settings of the training step's custom job, and of the machine of any other task.

They build the payload. What is wrong with it is found by the rules of `shardline check`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from shardline.components.vertex.forms import (
    DURATION,
    KEY,
    NETWORK,
    TENSORBOARD,
    check_forms,
    check_ranges,
    seconds,
)
from shardline.components.vertex.payload import mapping_at
from shardline.components.vertex.pools import Cluster
from shardline.trainer.base.errors import SettingsError
from shardline.trainer.base.progress import TIMEOUT_VARIABLE

if TYPE_CHECKING:
    from kfp import dsl

#: Fields that are not arguments of GCPC's component, or that the pipeline sets itself.
_NOT_GCPC_ARGUMENTS = ("cluster", "num_retries", "tags", "extra")
#: Placeholders that differ from run to run.
_RUN_PLACEHOLDERS = tuple(f"{{{{$.pipeline_{name}}}}}" for name in ("job_name", "job_uuid", "task_uuid"))


@dataclass(frozen=True, kw_only=True)
class CustomJobSettings:
    """Settings of a custom job without its program; fixed when the pipeline is compiled.

    Texts may hold the platform's placeholders; the defaults are the pipeline's own values (empty where the
    run has none). The fields are the keys of [train.job], which settings/vertex.toml.example explains;
    durations are seconds, as in "3600s".

    Attributes:
        cluster: The machines.
        restart_job_on_worker_restart: Whether all replicas restart when one does; None: when they train
            synchronously.
        num_retries: Retries of the task, by the pipeline, after the job has failed.
        service_account: Account of the replicas; "" for the platform's own agent.
        base_output_directory: Root of AIP_MODEL_DIR and its siblings, the same in all attempts; "" for
            PIPELINE_ROOT/jobs/RUN.
        extra: Further fields of the API's CustomJobSpec, [train.job.extra], sent as they are.
    """

    cluster: Cluster
    strategy: str = "STANDARD"
    timeout: str = "604800s"
    restart_job_on_worker_restart: bool | None = None
    num_retries: int = 2
    service_account: str = "{{$.pipeline_service_account}}"
    network: str = "{{$.pipeline_network}}"
    encryption_spec_key_name: str = "{{$.pipeline_encryption_key_name}}"
    tensorboard: str = ""
    base_output_directory: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own = {*vars(self), "worker_pool_specs"} & {*self.extra, *mapping_at(self.extra, "scheduling")}
        if own:
            raise SettingsError(f"extra sets {', '.join(sorted(own))}, which other keys set; leave it out")
        check_ranges(vars(self), num_retries=(0, 10))
        forms = {"timeout": DURATION, "network": NETWORK, "encryption_spec_key_name": KEY}
        check_forms({**forms, "tensorboard": TENSORBOARD}, vars(self))
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

    Attributes:
        cpu: Cores; 0 leaves it to the platform.
        memory: Memory as in "32G"; "" leaves it to the platform.
        machine_type: As in [train].
        disk: GB of the boot disk of a machine_type; 0 is the least, 100.
        accelerator_type: As in [train].
        accelerator_count: As in [train].
        retries: Retries after a failure, 0 to 10.
        timeout: Seconds after which the task ends itself, as in "3600s".
        cache: Whether the result of an earlier run with the same inputs is reused.
    """

    cpu: int = 0
    memory: str = ""
    machine_type: str = ""
    disk: int = 0
    accelerator_type: str = ""
    accelerator_count: int = 0
    retries: int = 2
    timeout: str = "86400s"
    cache: bool = True

    def __post_init__(self) -> None:
        if self.machine_type and (self.cpu or self.memory):
            raise SettingsError(
                "machine_type says how many cores and how much memory; leave out cpu and memory"
            )
        if self.disk and not self.machine_type:
            raise SettingsError("disk needs a machine_type; set one instead of cpu and memory")
        check_ranges(vars(self), retries=(0, 10))
        if not seconds(self.timeout):
            raise SettingsError(f"timeout must be {DURATION.description}, more than 0s, got {self.timeout!r}")

    def uncached(self) -> TaskMachine:
        """Returns the machine without caching, for a task whose result depends on more than its inputs."""
        return replace(self, cache=False)

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
