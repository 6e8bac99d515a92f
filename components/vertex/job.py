"""Settings of the training step's custom job, and of the machine of any other task."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from shardline.components.vertex import forms
from shardline.components.vertex.forms import (
    check_accelerators,
    check_labels,
    check_pasted_text,
    check_text,
    seconds,
)
from shardline.components.vertex.pools import Cluster
from shardline.trainer.base.errors import SettingsError
from shardline.trainer.base.progress import TIMEOUT_VARIABLE

if TYPE_CHECKING:
    from kfp import dsl

STRATEGIES = ("STANDARD", "SPOT", "FLEX_START")

SERVICE_ACCOUNT = "{{$.pipeline_service_account}}"
NETWORK = "{{$.pipeline_network}}"
ENCRYPTION_KEY = "{{$.pipeline_encryption_key_name}}"
PERSISTENT_RESOURCE = "{{$.pipeline_persistent_resource_id}}"

#: Texts that the launcher's payload pastes between quotes, and their formats.
_PASTED = {
    "display_name": None,
    "timeout": None,
    "max_wait_duration": None,
    "service_account": None,
    "network": forms.NETWORK,
    "encryption_spec_key_name": forms.ENCRYPTION_KEY,
    "tensorboard": forms.TENSORBOARD,
    "persistent_resource_id": forms.PERSISTENT_RESOURCE,
    "base_output_directory": forms.BUCKET_PATH,
}
#: Fields that are not arguments of GCPC's component, or that the pipeline sets itself.
_NOT_GCPC_ARGUMENTS = (
    *("cluster", "display_name", "num_retries", "backoff_duration", "tags"),
    "extra",
)
#: Placeholders that differ from run to run.
_RUN_PLACEHOLDERS = tuple(f"{{{{$.pipeline_{name}}}}}" for name in ("job_name", "job_uuid", "task_uuid"))
SEVEN_DAYS_S = 604_800.0
_NO_WAIT = "86400s"
_MEMORY = re.compile(r"[1-9]\d*[GM]i?")
_MAX_RETRIES = 10


@dataclass(frozen=True, kw_only=True)
class CustomJobSettings:
    """Settings of a custom job without its program; fixed when the pipeline is compiled.

    Texts may hold the platform's placeholders; the defaults are the pipeline's own values (empty where the
    run has none). The fields are the keys of [train.job], which settings/vertex.toml.example explains;
    durations are seconds, as in "3600s".

    Attributes:
        cluster: The machines.
        display_name: Name of the job; "" for the component's.
        restart_job_on_worker_restart: Whether all replicas restart when one does; None: when they train
            synchronously.
        service_account: Account of the replicas; "" for the platform's own agent.
        base_output_directory: Root of AIP_MODEL_DIR and its siblings, the same in all attempts; "" for
            PIPELINE_ROOT/jobs/RUN.
        extra: Further fields of the API's CustomJobSpec, [train.job.extra]; none of them is checked here.
    """

    cluster: Cluster
    display_name: str = ""
    strategy: str = "STANDARD"
    max_wait_duration: str = _NO_WAIT
    timeout: str = "604800s"
    restart_job_on_worker_restart: bool | None = None
    num_retries: int = 2
    backoff_duration: str = "60s"
    service_account: str = SERVICE_ACCOUNT
    network: str = NETWORK
    reserved_ip_ranges: tuple[str, ...] = ()
    psc_interface_config: Mapping[str, Any] = field(default_factory=dict)
    encryption_spec_key_name: str = ENCRYPTION_KEY
    tensorboard: str = ""
    base_output_directory: str = ""
    persistent_resource_id: str = PERSISTENT_RESOURCE
    tags: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, form in _PASTED.items():
            check_pasted_text(name, getattr(self, name), form)
        _check_nested_text("reserved_ip_ranges", list(self.reserved_ip_ranges))
        _check_nested_text("psc_interface_config", self.psc_interface_config)
        _check_nested_text("extra", self.extra)
        check_labels(self.tags)
        self._check_scheduling()
        self._check_connections()

    @property
    def arguments(self) -> dict[str, Any]:
        """The job as keyword arguments of GCPC, without its name, worker pools and tags."""
        restart = self.restart_job_on_worker_restart
        if restart is None:  # a synchronous replica cannot continue without a peer: all restart and resume
            restart = self.cluster.parameter_servers is None
        own = {name: value for name, value in vars(self).items() if name not in _NOT_GCPC_ARGUMENTS}
        return own | {
            "restart_job_on_worker_restart": restart,
            # The two exclude each other, and the default is the pipeline's own network.
            "network": "" if self.psc_interface_config and self.network == NETWORK else self.network,
            "reserved_ip_ranges": list(self.reserved_ip_ranges),
            "psc_interface_config": dict(self.psc_interface_config),
        }

    def _check_scheduling(self) -> None:
        if self.strategy not in STRATEGIES:
            raise SettingsError(f"strategy is one of {', '.join(STRATEGIES)}, got {self.strategy!r}")
        for name in ("timeout", "max_wait_duration"):
            if seconds(getattr(self, name)) is None:
                raise SettingsError(
                    f"{name} must be {forms.DURATION.description}, got {getattr(self, name)!r}"
                )
        timeout = seconds(self.timeout)
        if not timeout:
            raise SettingsError("timeout must be more than 0s")
        if self.num_retries < 0:
            raise SettingsError(f"num_retries must not be negative, got {self.num_retries}")
        if seconds(self.backoff_duration) is None or "." in self.backoff_duration:
            raise SettingsError(
                f"backoff_duration must be whole seconds, as in '60s', got {self.backoff_duration!r}"
            )
        if self.strategy != "FLEX_START":
            if self.max_wait_duration != _NO_WAIT:
                raise SettingsError(f"max_wait_duration goes with strategy FLEX_START, not {self.strategy}")
            return
        if timeout > SEVEN_DAYS_S:
            raise SettingsError(f"timeout is at most 604800s (7 days) with FLEX_START, got {self.timeout}")
        if len({pool.machine for pool in self.cluster.pools if pool}) > 1:
            raise SettingsError(
                "strategy FLEX_START needs the same machine and accelerators in all worker pools"
            )

    def _check_connections(self) -> None:
        if self.psc_interface_config and self.network not in ("", NETWORK):
            raise SettingsError("network and psc_interface_config exclude each other; set one of them")
        if self.reserved_ip_ranges and not self.arguments["network"]:
            raise SettingsError("reserved_ip_ranges are ranges of a network; set network")
        pools = [pool for pool in self.cluster.pools if pool]
        if any(pool.nfs_mounts for pool in pools) and not (self.network or self.psc_interface_config):
            raise SettingsError("nfs_mounts need a network on which the server can be reached; set network")
        if self.tensorboard and not self.service_account:
            raise SettingsError("tensorboard needs service_account")
        if self.persistent_resource_id not in ("", PERSISTENT_RESOURCE) and not self.service_account:
            raise SettingsError("persistent_resource_id needs service_account")
        if self.base_output_directory and not any(
            name in self.base_output_directory for name in _RUN_PLACEHOLDERS
        ):
            raise SettingsError(
                "all runs would share the checkpoints of base_output_directory "
                f"{self.base_output_directory!r}; add the run: "
                f"{self.base_output_directory.rstrip('/')}/{{{{$.pipeline_job_name}}}}"
            )


def _check_nested_text(name: str, value: Any) -> None:
    if isinstance(value, str):
        check_text(name, value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _check_nested_text(f"{name}.{key}", item)
    elif isinstance(value, list):
        for item in value:
            _check_nested_text(name, item)


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
        if self.cpu < 0:
            raise SettingsError(f"cpu must not be negative, got {self.cpu}")
        if self.memory and not _MEMORY.fullmatch(self.memory):
            raise SettingsError(f"memory must be a number and G or M, as in '32G', got {self.memory!r}")
        check_accelerators(self.accelerator_type, self.accelerator_count)
        check_text("accelerator_type", self.accelerator_type)
        if self.machine_type and not forms.MACHINE_TYPE.fits(self.machine_type):
            raise SettingsError(
                f"machine_type must be {forms.MACHINE_TYPE.description}, got {self.machine_type!r}"
            )
        if self.machine_type and (self.cpu or self.memory):
            raise SettingsError(
                "machine_type says how many cores and how much memory; leave out cpu and memory"
            )
        if self.disk and not self.machine_type:
            raise SettingsError("disk needs a machine_type; set one instead of cpu and memory")
        if self.disk and self.disk < 100:
            raise SettingsError(f"disk must be at least 100 GB, got {self.disk}")
        if not 0 <= self.retries <= _MAX_RETRIES:
            raise SettingsError(f"retries must be 0 to {_MAX_RETRIES}, got {self.retries}")
        if not seconds(self.timeout):
            raise SettingsError(
                f"timeout must be {forms.DURATION.description}, more than 0s, got {self.timeout!r}"
            )

    def uncached(self) -> TaskMachine:
        """Returns the machine without caching, for a task whose result depends on more than its inputs."""
        return replace(self, cache=False)

    def apply(self, task: dsl.PipelineTask) -> dsl.PipelineTask:
        """Requests this machine for a task with its own container; returns the task."""
        if self.cpu:
            task.set_cpu_limit(str(self.cpu))
        if self.memory:
            task.set_memory_limit(self.memory)
        if self.accelerator_type:
            task.set_accelerator_type(self.accelerator_type).set_accelerator_limit(self.accelerator_count)
        task.set_env_variable(TIMEOUT_VARIABLE, self.timeout.removesuffix("s"))
        return self.schedule(task)

    def schedule(self, task: dsl.PipelineTask) -> dsl.PipelineTask:
        """Sets retries and caching of a task; returns the task."""
        if self.retries:
            task.set_retry(self.retries, backoff_duration="30s")
        if not self.cache:
            task.set_caching_options(False)
        return task
