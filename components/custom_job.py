"""The training job of the platform: the formats of its texts, its settings, and its payload in any pipeline.

Settings are read strictly and build the payload; what is wrong with it is found by the rules of `shardline
check`. The payload is read leniently: a part may be missing, of another type, or a placeholder that is not
filled in yet. The launcher of Google Cloud Pipeline Components receives it as JSON and drops empty values.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from shardline.trainer.base.deserialize import Count, Rule, Within, check_types, restore_integers
from shardline.trainer.base.errors import SettingsError
from shardline.trainer.base.progress import TIMEOUT_VARIABLE
from shardline.trainer.cluster import ACCELERATORS_VARIABLE

if TYPE_CHECKING:
    from kfp import dsl


class TextFormat(NamedTuple):
    """Format of a text: a regular expression for the whole text, and a description for messages."""

    pattern: str
    description: str

    def fits(self, text: str) -> bool:
        """Whether a text has the format."""
        return re.fullmatch(self.pattern, text) is not None

    def allows(self, text: str) -> bool:
        """Whether a setting may have this text: "" and placeholders, too."""
        return not text or "{{$" in text or self.fits(text)


MODEL = TextFormat(
    r"projects/[\w:.-]+/locations/([a-z0-9-]+)/models/[\w-]+",
    "projects/P/locations/L/models/ID, without a version",
)
ENDPOINT = TextFormat(MODEL.pattern.replace("models", "endpoints"), "projects/P/locations/L/endpoints/ID")
TENSORBOARD = TextFormat(
    MODEL.pattern.replace("models", "tensorboards"), "projects/P/locations/L/tensorboards/ID"
)
SECRET = TextFormat(
    r"projects/[^/]+/secrets/[\w-]+/versions/(\d+|latest|[A-Za-z][\w-]*)",
    "projects/PROJECT/secrets/NAME/versions/latest, the name of a secret in Secret Manager",
)
_PART = "[a-z0-9]+([._-]+[a-z0-9]+)*"
#: distribution/reference; gcr.io has projects DOMAIN:PROJECT.
IMAGE = TextFormat(
    rf"([\w.-]+(:\d+)?/)?([a-z0-9.-]+:[a-z0-9-]+/)?({_PART}/)*{_PART}(:\w[\w.-]{{0,127}})?(@sha256:[0-9a-f]{{64}})?",
    "REGISTRY/PATH:TAG or REGISTRY/PATH@sha256:DIGEST",
)
NETWORK = TextFormat(r"projects/[\w:.-]+/global/networks/[\w-]+", "projects/NUMBER/global/networks/NAME")
KMS_KEY = TextFormat(
    r"projects/[\w:.-]+/locations/[a-z0-9-]+/keyRings/[\w-]+/cryptoKeys/[\w-]+",
    "projects/P/locations/L/keyRings/RING/cryptoKeys/KEY",
)
REGION = TextFormat(r"[a-z]+-[a-z]+\d+", "a region such as europe-west4")
BUCKET_PATH = TextFormat("gs://[^/]+(/.*)?", "gs://BUCKET/PATH")
DISPLAY_NAME = TextFormat(r"[^\n]{1,128}", "a text of 1 to 128 characters")
#: google_cloud_pipeline_components, CustomTrainingJobOp: "A duration in seconds with up to nine fractional
#: digits, terminated by 's'".
DURATION = TextFormat(r"\d+(\.\d{1,9})?s", "seconds and an 's', as in '3600s'")
#: docs.cloud.google.com, resource-manager/docs/labels-overview: letters of all alphabets.
_LABEL = re.compile(r"[^\W\d_][\w-]{0,62}=[\w-]{0,63}")


def wrong_label(labels: Mapping[str, Any]) -> str:
    """Returns the first label that the API does not take, KEY=VALUE; "" if it takes all."""
    texts = [f"{key}={value}" for key, value in labels.items() if "{{$" not in str(value)]
    return next((text for text in texts if text != text.lower() or not _LABEL.fullmatch(text)), "")


_TAGS = "names and values of lower-case letters, digits, _ and -, 63 at most"
#: Labels of the API, which the settings call tags.
Tags = Annotated[Mapping[str, str], Rule(_TAGS, lambda labels: not wrong_label(labels))]


def other_region(name: str, region: str) -> str:
    """Returns the region in a resource's name, or of the zone in it, unless it is `region`; else ""."""
    found = re.search(r"/(locations|regions|zones)/([^/]+)/", name)
    place = re.sub("-[a-z]$", "", found[2]) if found else region
    return "" if place == region else place


def duration_seconds(duration: str) -> float | None:
    """Returns the seconds of a duration as the API writes it, "3600s"; None for any other text."""
    return float(duration[:-1]) if DURATION.fits(duration) else None


#: Beginning of every placeholder.
PLACEHOLDER = "{{$"
#: A JSON value of any type that is not known before the run; any other placeholder becomes text.
ANY = "{{$.any}}"

#: Role of the replicas of each worker pool, by the pool's index.
ROLES = ("chief", "worker", "ps", "evaluator")

_PACKAGES = ("google.cloud.aiplatform_v1", "google.cloud.aiplatform_v1.types")
#: What the client takes, by FieldDescriptor.cpp_type; a number of 64 bits may be text in JSON.
_SCALARS: Mapping[int, tuple[Any, str]] = {
    **dict.fromkeys((1, 3, 4), (int, "a whole number, without quotes")),
    2: (int | str, "a whole number"),
    **dict.fromkeys((5, 6), (int | float, "a number, without quotes")),
    7: (int, "true or false, without quotes"),
    9: (str, "a text, in quotes"),
}


def mapping_at(node: Any, *keys: str) -> dict[str, Any]:
    """Returns the mapping below these keys, empty where there is none."""
    for key in keys:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node if isinstance(node, dict) else {}


def list_at(node: Any, *keys: str) -> list[Any]:
    """Returns the list below these keys, empty where there is none."""
    value = mapping_at(node, *keys[:-1]).get(keys[-1])
    return value if isinstance(value, list) else []


def is_surely_missing(node: Any, *keys: str) -> bool:
    """Whether nothing is below these keys; False where a placeholder may put something there at run time."""
    for key in keys:
        if isinstance(node, str) and PLACEHOLDER in node:
            return False
        node = node.get(key) if isinstance(node, Mapping) else None
    return not node


def literal_string(value: Any) -> str:
    """Returns a string that is known before the run, "" for everything else."""
    return value if isinstance(value, str) and PLACEHOLDER not in value else ""


def argv(container: Mapping[str, Any]) -> list[str]:
    """Returns command and arguments of a container."""
    parts = [*list_at(container, "command"), *list_at(container, "args")]
    return [part for part in parts if isinstance(part, str)]


def launcher_type(container: Mapping[str, Any]) -> str:
    """Returns what a launcher of Google's starts, its --type such as "CustomJob"; "" for other containers."""
    parts = argv(container)
    is_launcher = any(part.startswith("google_cloud_pipeline_components.container.") for part in parts)
    return parts[parts.index("--type") + 1] if is_launcher and "--type" in parts[:-1] else ""


def whole_number(value: Any) -> int | None:
    """Returns a whole number, which may be written 3, 3.0 or "3", and None for everything else.

    Numbers travel as doubles in a pipeline's parameters, and an int64 may be text in JSON.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return int(number) if number.is_integer() else None


def without_empty(content: Any) -> Any:
    """Returns a payload as the launcher sends it: without zeros, empty texts, lists and objects."""
    # The launcher's own function: the job is the one that the API would receive.
    from google_cloud_pipeline_components.container.v1.gcp_launcher.utils import json_util

    return json_util.recursive_remove_empty(content)


def read_payload(text: str) -> Any:
    """Reads a --payload as the launcher does; raises ValueError when it is not JSON."""
    try:
        return without_empty(json.loads(text, strict=False))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@dataclass(frozen=True)
class PoolSpec:
    """A worker pool of a payload: its WorkerPoolSpec, or the text of its placeholder."""

    spec: Any

    @property
    def is_empty_slot(self) -> bool:
        """Whether it has no replicas: "0" as a text, which the launcher does not drop."""
        return isinstance(self.spec, dict) and set(self.spec) == {"replica_count"} and self.replica_count == 0

    @property
    def container(self) -> dict[str, Any]:
        """The container, or the Python package, that each replica runs."""
        return mapping_at(self.spec, "container_spec") or mapping_at(self.spec, "python_package_spec")

    @property
    def image(self) -> str:
        """The image; "" when it is unknown."""
        return literal_string(self.container.get("image_uri") or self.container.get("executor_image_uri"))

    @property
    def replica_count(self) -> int | None:
        """Number of replicas, 1 by default; None when it is unknown or not a whole number."""
        return whole_number(mapping_at(self.spec).get("replica_count", 1))

    @property
    def machine(self) -> dict[str, Any]:
        """The machine spec."""
        return mapping_at(self.spec, "machine_spec")

    @property
    def machine_type(self) -> str:
        """The machine type; "" when it is unknown."""
        return literal_string(self.machine.get("machine_type"))

    @property
    def accelerator_type(self) -> str:
        """The accelerator type; "" for none, and when it is unknown."""
        kind = literal_string(self.machine.get("accelerator_type"))
        return "" if kind == "ACCELERATOR_TYPE_UNSPECIFIED" else kind

    @property
    def argv(self) -> list[str]:
        """Command and arguments of a replica."""
        return argv(self.container)

    @property
    def env(self) -> list[dict[str, Any]]:
        """The environment variables, each with name and value."""
        return [item for item in list_at(self.container, "env") if isinstance(item, dict)]

    @property
    def replicas(self) -> int:
        """Number of replicas, 0 where it is not known before the run."""
        return self.replica_count or 0

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables by name."""
        return {str(item.get("name", "")): str(item.get("value", "")) for item in self.env}

    @property
    def is_reduction_server(self) -> bool:
        """Whether it runs the platform's Reduction Server."""
        return "training/reductionserver" in self.image


@dataclass(frozen=True)
class JobSpec:
    """A custom job, or the trial of a tuning job: the payload as the launcher sends it."""

    content: Mapping[str, Any]

    @property
    def spec(self) -> dict[str, Any]:
        """The CustomJobSpec."""
        return mapping_at(self.content, "job_spec") or mapping_at(self.content, "trial_job_spec")

    @property
    def scheduling(self) -> dict[str, Any]:
        """Strategy, timeout and restarts."""
        return mapping_at(self.spec, "scheduling")

    @property
    def base_output_directory(self) -> str:
        """Directory of AIP_MODEL_DIR and its siblings, placeholders included; "" for none."""
        return str(mapping_at(self.spec, "base_output_directory").get("output_uri_prefix", ""))


@functools.cache
def _message(kind: str) -> Any:
    """Returns the class of a message without importing the clients of all services, which takes a second."""
    module = "hyperparameter_tuning_job" if kind == "HyperparameterTuningJob" else "custom_job"
    missing = [name for name in _PACKAGES if name not in sys.modules]
    for name in missing:
        if spec := importlib.util.find_spec(name):
            sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        return getattr(importlib.import_module(f"{_PACKAGES[1]}.{module}"), kind)
    finally:
        for name in missing:
            del sys.modules[name]


def refusals(content: Mapping[str, Any]) -> Iterator[str]:
    """Yields what the launcher's client refuses of a payload; values that are not known yet may fit.

    A text in the place of a list is refused, too: the client makes a list of its letters.
    """
    message = _message("HyperparameterTuningJob" if "trial_job_spec" in content else "CustomJob")
    known = restore_integers(dict(content))
    found = [*_refused_fields(message.meta.pb.DESCRIPTOR, known, "")]
    yield from found
    if not found and PLACEHOLDER not in str(known):
        try:
            message(known)
        except Exception as error:  # the client raises any
            yield f"it is refused ({str(error).rpartition('Underlying error: ')[2] or type(error).__name__})"


def _refused_fields(kind: Any, content: Mapping[str, Any], path: str) -> Iterator[str]:
    for name, value in content.items():
        field = kind.fields_by_name.get(name)
        if field is None:
            yield f"{path}{name}: {kind.name} has no such field"
        elif field.is_repeated and not (field.message_type and field.message_type.GetOptions().map_entry):
            if isinstance(value, list):
                for index, item in enumerate(value):
                    yield from _refused(field, item, f"{path}{name}[{index}]")
            elif value != ANY:
                yield _must(f"{path}{name}", "a list", value)
        elif field.is_repeated and isinstance(value, dict):
            for key, item in value.items():
                yield from _refused(field.message_type.fields_by_name["value"], item, f"{path}{name}.{key}")
        else:
            yield from _refused(field, value, f"{path}{name}")


def _refused(field: Any, value: Any, path: str) -> Iterator[str]:
    is_unknown = PLACEHOLDER in str(value)
    scalar, what = _SCALARS.get(field.cpp_type, (object, ""))
    if value == ANY:
        return
    if field.message_type and field.message_type.name == "Duration":
        if not is_unknown and not DURATION.fits(str(value)):
            yield _must(path, DURATION.description, value)
    elif field.message_type and not field.message_type.full_name.startswith("google.protobuf."):
        if isinstance(value, dict):
            yield from _refused_fields(field.message_type, value, f"{path}.")
        else:
            yield _must(path, "an object", value)
    elif field.enum_type and isinstance(value, str):
        if not is_unknown and value not in field.enum_type.values_by_name:
            yield _must(path, f"a name of the API's {field.enum_type.name}", value)
    elif not isinstance(value, scalar):
        yield _must(path, what, value)


def _must(path: str, what: str, value: Any) -> str:
    is_known = PLACEHOLDER not in str(value)
    return f"{path} must be {what}, got {repr(value) if is_known else 'a parameter or output, as text'}"


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
_TIMEOUT = Rule(f"{DURATION.description}, more than 0s", lambda text: bool(duration_seconds(text)))
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
    timeout: Annotated[str, DURATION] = "604800s"
    restart_job_on_worker_restart: bool | None = None
    num_retries: Annotated[int, _RETRIES] = 2
    service_account: str = "{{$.pipeline_service_account}}"
    network: Annotated[str, NETWORK] = "{{$.pipeline_network}}"
    encryption_spec_key_name: Annotated[str, KMS_KEY] = "{{$.pipeline_encryption_key_name}}"
    tensorboard: Annotated[str, TENSORBOARD] = ""
    base_output_directory: str = ""
    tags: Tags = field(default_factory=dict)
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
