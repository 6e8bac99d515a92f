"""The custom job of a training step: its cluster and how the platform schedules and runs it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardline.components.vertex.forms import check_pasted_text, check_text, resolved
from shardline.components.vertex.pools import Cluster
from shardline.trainer.errors import SettingsError

STRATEGIES = ("STANDARD", "SPOT", "FLEX_START")

SERVICE_ACCOUNT = "{{$.pipeline_service_account}}"
NETWORK = "{{$.pipeline_network}}"
ENCRYPTION_KEY = "{{$.pipeline_encryption_key_name}}"
PERSISTENT_RESOURCE = "{{$.pipeline_persistent_resource_id}}"

_PASTED = (
    "display_name",
    "backoff_duration",
    "timeout",
    "max_wait_duration",
    "service_account",
    "network",
    "encryption_spec_key_name",
    "tensorboard",
    "persistent_resource_id",
    "base_output_directory",
)
_FORMS = {
    "network": (r"projects/\d+/global/networks/[a-z0-9-]+", "projects/NUMBER/global/networks/NAME"),
    "encryption_spec_key_name": (
        r"projects/[^/]+/locations/[^/]+/keyRings/[^/]+/cryptoKeys/[^/]+",
        "projects/P/locations/L/keyRings/R/cryptoKeys/K",
    ),
    "tensorboard": (
        r"projects/[^/]+/locations/[^/]+/tensorboards/[^/]+",
        "projects/P/locations/L/tensorboards/T",
    ),
    "base_output_directory": (r"gs://[^/]+(/.*)?", "gs://BUCKET/PATH"),
    "persistent_resource_id": (r"[a-z]([a-z0-9-]*[a-z0-9])?", "the resource's id, not its full name"),
}
#: Names by which the runs of a pipeline differ.
_OF_THE_RUN = re.compile(r"\{\{\$\.pipeline_(job_name|job_uuid|task_uuid)\}\}")
_DURATION = re.compile(r"\d+(\.\d{1,9})?s")
_LABEL_KEY = re.compile(r"[^\W\d_][\w-]{0,62}")
_LABEL_VALUE = re.compile(r"[\w-]{0,63}")
_MOST_LABELS = 64
_SEVEN_DAYS_S = 604_800.0
_NO_WAIT = "86400s"


@dataclass(frozen=True, kw_only=True)
class CustomJobSettings:
    """Everything of a custom job but the program; fixed when the pipeline is compiled.

    Texts may hold the platform's placeholders; the defaults take over what the pipeline itself has been
    given (and are empty on the platform where it has been given nothing).

    Attributes:
        cluster: The machines.
        display_name: Name of the job; "" for the component's.
        strategy: One of `STRATEGIES`.
        max_wait_duration: How long to wait for machines with FLEX_START, in seconds ("3600s").
        timeout: How long the job may run, in seconds ("604800s").
        restart_job_on_worker_restart: Whether all replicas start again when one has; None: when they
            train in step.
        num_retries: How often the pipeline tries the step again after the job has failed.
        backoff_duration: How long to wait before the first of these tries, in seconds ("60s"); twice as
            long before each further one.
        service_account: Whom the replicas run as; "" for the platform's own agent.
        network: VPC network, projects/NUMBER/global/networks/NAME; "" for none.
        reserved_ip_ranges: Names of the IP ranges of the network in which the replicas get addresses.
        psc_interface_config: Private Service Connect interface, in the platform's form.
        encryption_spec_key_name: Customer-managed encryption key; "" for none.
        tensorboard: TensorBoard resource that gets the logs; "" for none.
        base_output_directory: gs:// directory of AIP_MODEL_DIR and its siblings; "" for none.
        persistent_resource_id: Persistent resource on whose machines the job runs; "" for none.
        enable_web_access: Whether a shell can be opened in the replicas.
        labels: Labels of the job.
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
    enable_web_access: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_texts()
        check_labels(self.labels)
        self._check_scheduling()
        self._check_connections()

    @property
    def replica_count(self) -> int:
        """Replicas that train: the chief and the workers."""
        return self.cluster.replica_count

    @property
    def arguments(self) -> dict[str, Any]:
        """The job as keyword arguments of GCPC, without its name, worker pools and labels."""
        restart = self.restart_job_on_worker_restart
        return {
            "timeout": self.timeout,
            # A replica that trains in step cannot go on without a peer: all start again and resume.
            "restart_job_on_worker_restart": self.cluster.is_synchronous if restart is None else restart,
            "strategy": self.strategy,
            "max_wait_duration": self.max_wait_duration,
            "service_account": self.service_account,
            # The two exclude each other, and the pipeline's own network would come in beside.
            "network": "" if self.psc_interface_config and self.network == NETWORK else self.network,
            "reserved_ip_ranges": list(self.reserved_ip_ranges),
            "psc_interface_config": dict(self.psc_interface_config),
            "encryption_spec_key_name": self.encryption_spec_key_name,
            "tensorboard": self.tensorboard,
            "base_output_directory": self.base_output_directory,
            "persistent_resource_id": self.persistent_resource_id,
            "enable_web_access": self.enable_web_access,
        }

    def _check_texts(self) -> None:
        for name in _PASTED:
            text = getattr(self, name)
            check_pasted_text(name, text)
            form, words = _FORMS.get(name, (".*", ""))
            shown = resolved(text)
            if shown and not re.fullmatch(form, shown):
                raise SettingsError(f"{name} must be {words}, got {text!r}")
        for name in self.reserved_ip_ranges:
            check_text("reserved_ip_ranges", name)
        _check_deep("psc_interface_config", self.psc_interface_config)

    def _check_scheduling(self) -> None:
        if self.strategy not in STRATEGIES:
            raise SettingsError(f"strategy is one of {', '.join(STRATEGIES)}, got {self.strategy!r}")
        timeout, _ = _seconds("timeout", self.timeout), _seconds("max_wait_duration", self.max_wait_duration)
        if not timeout:
            raise SettingsError("timeout must be more than 0s")
        if self.num_retries < 0:
            raise SettingsError(f"num_retries must not be negative, got {self.num_retries}")
        if not re.fullmatch(r"\d+s", self.backoff_duration):
            raise SettingsError(
                f"backoff_duration must be whole seconds, as in '60s', got {self.backoff_duration!r}"
            )
        if self.strategy != "FLEX_START":
            if self.max_wait_duration != _NO_WAIT:
                raise SettingsError(f"max_wait_duration goes with strategy FLEX_START, not {self.strategy}")
            return
        if timeout > _SEVEN_DAYS_S:
            raise SettingsError(f"timeout is at most 604800s (7 days) with FLEX_START, got {self.timeout}")
        if len({pool.machine for pool in self.cluster.pools if pool}) > 1:
            raise SettingsError(
                "strategy FLEX_START needs the same machine and accelerators in all worker pools"
            )

    def _check_connections(self) -> None:
        if self.psc_interface_config and self.network not in ("", NETWORK):
            raise SettingsError("network and psc_interface_config exclude each other; give one of them")
        if self.reserved_ip_ranges and not self.arguments["network"]:
            raise SettingsError("reserved_ip_ranges are ranges of a network; give network")
        pools = [pool for pool in self.cluster.pools if pool]
        if any(pool.nfs_mounts for pool in pools) and not (self.network or self.psc_interface_config):
            raise SettingsError("nfs_mounts need a network on which the server can be reached; give network")
        if self.tensorboard and not (self.service_account and self.base_output_directory):
            raise SettingsError("tensorboard needs service_account and base_output_directory")
        if self.persistent_resource_id not in ("", PERSISTENT_RESOURCE) and not self.service_account:
            raise SettingsError("persistent_resource_id needs service_account")
        if self.base_output_directory and not _OF_THE_RUN.search(self.base_output_directory):
            raise SettingsError(
                "all runs would share the checkpoints of base_output_directory "
                f"{self.base_output_directory!r}; add the run: "
                f"{self.base_output_directory.rstrip('/')}/{{{{$.pipeline_job_name}}}}"
            )


def check_labels(labels: Mapping[str, str]) -> None:
    """Checks labels as the API does.

    Raises:
        SettingsError: When there are too many, or a key or value has characters that are not allowed.
    """
    if len(labels) > _MOST_LABELS:
        raise SettingsError(f"labels: a job has at most {_MOST_LABELS}, got {len(labels)}")
    for key, value in labels.items():
        if not _LABEL_KEY.fullmatch(key) or key != key.lower():
            raise SettingsError(
                f"labels: a key is 1 to 63 lowercase letters, digits, '_' and '-' and begins with a letter, "
                f"got {key!r}"
            )
        if not _LABEL_VALUE.fullmatch(value) or value != value.lower():
            raise SettingsError(
                f"labels.{key}: a value is at most 63 lowercase letters, digits, '_' and '-', got {value!r}"
            )


def _seconds(name: str, duration: str) -> float:
    if not _DURATION.fullmatch(duration):
        raise SettingsError(f"{name} must be seconds and an 's', as in '3600s', got {duration!r}")
    return float(duration[:-1])


def _check_deep(name: str, value: Any) -> None:
    if isinstance(value, str):
        check_text(name, value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _check_deep(f"{name}.{key}", item)
    elif isinstance(value, list):
        for item in value:
            _check_deep(name, item)
