"""Compile-time settings: image, machines and job, one TOML file per environment, with the place of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardline.components.conclude.notification import NotifySettings
from shardline.components.register.settings import BatchPrediction, Deploy, ModelUpload
from shardline.components.vertex.job import CustomJobSettings, TaskMachine
from shardline.components.vertex.pools import Cluster, WorkerPool
from shardline.pipelines.image.settings import ImageSettings
from shardline.pipelines.remote.environment import DEFAULT, NAMES, TABLE
from shardline.pipelines.tables import begun_with, check_tables, read_file, read_one
from shardline.trainer.errors import SettingsError
from shardline.trainer.records import field_types, read_fields

#: The tables below [train], beside its own keys: the pools that differ from these, and the job.
_POOLS = ("chief", "workers", "parameter_servers", "reduction_server", "evaluator")
_OWN_MACHINE = ("parameter_servers", "reduction_server")

#: What parameter servers do not take over from [train]: they need no accelerators.
_MACHINE_KEYS = {
    name
    for name in field_types(WorkerPool)
    if name.startswith(("machine", "accelerator", "tpu", "reservation"))
}

#: Machines of the tasks beside training, where their table leaves them open.
_MACHINES = {
    "preprocess": TaskMachine(cpu=8, memory="32G"),
    "validate": TaskMachine(cpu=8, memory="32G"),
    "register": TaskMachine(),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that is fixed when the pipeline is compiled; all else is a pipeline parameter.

    Attributes:
        image: Container image of all components and of the trainer.
        build: How the image is built, and with what in it; None where the settings name it alone.
        train: The custom job of the training step: its machines, and how the platform runs it.
        preprocess: Machine of each task that makes the dataset.
        validate: Machine of the tasks that rehearse the training, and export and judge the model.
        register: Machine of all other tasks, which compare, upload, deploy and publish.
        model_upload: How a blessed model is uploaded to the Model Registry; None uploads nothing.
        deploy: How an uploaded model is deployed; None deploys nothing.
        batch_predict: What is predicted with an uploaded model; None predicts nothing.
        notify: Who is told how a run came out.
    """

    image: str
    build: ImageSettings | None = None
    train: CustomJobSettings
    preprocess: TaskMachine = _MACHINES["preprocess"]
    validate: TaskMachine = _MACHINES["validate"]
    register: TaskMachine = _MACHINES["register"]
    model_upload: ModelUpload | None = None
    deploy: Deploy | None = None
    batch_predict: BatchPrediction | None = None
    notify: NotifySettings = field(default_factory=NotifySettings)

    def __post_init__(self) -> None:
        if not self.image:
            raise SettingsError("image is empty; give the container image that all components run in")
        if self.model_upload is None and (self.deploy or self.batch_predict):
            table = "deploy" if self.deploy else "batch_predict"
            raise SettingsError(f"{table} needs a model in the Model Registry; add a table [model_upload]")
        if self.register.machine_type:
            raise SettingsError("register.machine_type: these tasks are small; give cpu and memory instead")
        if self.build is not None:
            self.build.fitted(self.accelerators)

    @property
    def accelerators(self) -> dict[str, str]:
        """What the machines have that run the image, "1 NVIDIA_TESLA_T4" or "", by their table."""
        # A pool with an image of its own, as the platform's Reduction Server, does not run this one.
        found = {
            f"train.{key}": pool.accelerators
            for key, pool in vars(self.train.cluster).items()
            if pool and not pool.image_uri and key != "reduction_server"
        }
        for name in _MACHINES:
            machine = getattr(self, name)
            found[name] = (
                f"{machine.accelerator_count} {machine.accelerator_type}" if machine.accelerator_type else ""
            )
        return found


#: The tables that are one dataclass each.
_KINDS: dict[str, type[Any]] = {
    "model_upload": ModelUpload,
    "deploy": Deploy,
    "batch_predict": BatchPrediction,
    "notify": NotifySettings,
}
_TABLES = ("train", *_MACHINES, *_KINDS)
#: Tables that are of no concern to the compiler: `read_table`.
_RUN_TABLES = ("vertex",)


def load(path: Path) -> Settings:
    """Returns the settings of a file; settings/vertex.toml.example shows all of its keys.

    Raises SettingsError when it is missing or no TOML, or a key is unknown, missing or wrong.
    """
    content = read_file(path)
    for name in _RUN_TABLES:
        content.pop(name, None)
    with begun_with(f"{path}: "):
        if build := _read_image(path, content.get("image")):
            content["image"] = build.name
        if isinstance(content.get("image"), str):
            content["image"] = _by_digest(content["image"])
        tables = {name: content.pop(name) for name in _TABLES if name in content}
        check_tables(tables)
        own = read_fields(Settings, content, leave_out=(*_TABLES, "build"), also=_TABLES)
        read = {name: read_one(name, kind, tables[name]) for name, kind in _KINDS.items() if name in tables}
        machines: dict[str, Any] = {name: _read_machine(name, tables.get(name, {})) for name in _MACHINES}
        return Settings(**own, build=build, train=_read_job(tables.get("train", {})), **machines, **read)


def _by_digest(image: str) -> str:
    """Returns an image's name without the tag of NAME:TAG@DIGEST, which is for the next build alone."""
    name, at, digest = image.partition("@")
    path, slash, last = name.rpartition("/")
    return f"{path}{slash}{last.partition(':')[0]}{at}{digest}" if at else image


def load_image(path: Path) -> ImageSettings | None:
    """Returns the image of a settings file, None where there is none; raises as `load`.

    One that is only named holds nothing beside Shardline, as far as is known. The variant of a table is the
    one that is built, "" where there are no machines.
    """
    with begun_with(f"{path}: "):
        content = read_file(path)
        image = content.get("image")
        read = ImageSettings(name=image) if image and isinstance(image, str) else _read_image(path, image)
    if read is None or isinstance(image, str) or "train" not in content:
        return read
    return read.fitted(load(path).accelerators)


def _read_image(path: Path, image: Any) -> ImageSettings | None:
    if not isinstance(image, dict):
        return None
    return read_one("image", ImageSettings, image).below(path.parent)


def _read_machine(name: str, table: dict[str, Any]) -> TaskMachine:
    given = read_fields(TaskMachine, table, f"{name}.", whole=False)
    with begun_with(f"{name}."):
        return replace(TaskMachine() if "machine_type" in given else _MACHINES[name], **given)


def _read_job(train: dict[str, Any]) -> CustomJobSettings:
    tables = {name: train.pop(name) for name in (*_POOLS, "job") if name in train}
    check_tables(tables, "train.")
    shared = read_fields(WorkerPool, train, "train.", also=(*_POOLS, "job"), whole=False)
    if "replica_count" not in shared:
        raise SettingsError("train.replica_count is missing")
    total = shared.pop("replica_count")
    if total < 1:
        raise SettingsError(f"train.replica_count must be at least 1, got {total}")
    counts = {"chief": 1, **({"workers": total - 1} if total > 1 else {})}
    cluster = Cluster(
        **{
            name: _read_pool(name, tables.get(name, {}), shared, counts.get(name))
            for name in _POOLS
            if name in counts or name in tables
        }
    )
    job = read_fields(CustomJobSettings, tables.get("job", {}), "train.job.", leave_out=("cluster",))
    with begun_with("train.job."):
        return CustomJobSettings(cluster=cluster, **job)


def _read_pool(name: str, table: dict[str, Any], shared: dict[str, Any], count: int | None) -> WorkerPool:
    prefix = f"train.{name}."
    own = read_fields(WorkerPool, table, prefix, whole=False)
    if name in ("chief", "workers"):
        if "replica_count" in own:
            raise SettingsError(f"{prefix}replica_count follows from train.replica_count; leave it out")
        if count is None:
            raise SettingsError("train.workers: there are none; raise train.replica_count to 2 or more")
        own["replica_count"] = count
    if name == "reduction_server":
        shared = {}
    elif name in _OWN_MACHINE:
        shared = {key: value for key, value in shared.items() if key not in _MACHINE_KEYS}
    merged = {**shared, **own, "env": {**shared.get("env", {}), **own.get("env", {})}}
    if "machine_type" not in merged:
        raise SettingsError(f"{prefix if name in _OWN_MACHINE else 'train.'}machine_type is missing")
    with begun_with(prefix):
        return WorkerPool(**merged)


#: Name, value, and where it came from.
Row = tuple[str, Any, str]


def environment_rows(values: Mapping[str, Any], origins: Mapping[str, str]) -> list[Row]:
    """Returns the values that say where on the platform things are done, from those of `read_values`."""
    return [(f"{TABLE}.{name}", values.get(name, ""), origins.get(name, DEFAULT)) for name in NAMES]


def compile_time_rows(path: Path) -> list[Row]:
    """Returns the values that are fixed when a pipeline is compiled; none for a file without an image.

    Raises SettingsError when the file is no settings file.
    """
    written = read_file(path)
    if "image" not in written:
        return []
    return [
        (".".join(places[0]), _shown(places[0], value), _origin(path, written, places, value))
        for field, value in _leaves(load(path))
        for places in [_places(field)]
    ]


def _shown(name: tuple[str, ...], value: Any) -> Any:
    """Returns a value as it may be printed: of variables only the names, since they may hold secrets."""
    return sorted(value) if name[-1] == "env" else value


def _leaves(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields each value below a dataclass, under the names of its fields."""
    for item in dataclasses.fields(node):
        value, name = getattr(node, item.name), (*path, item.name)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, name)
        elif name in (("build",), ("build", "name")):
            continue  # the image's own name, which is shown as such
        elif name[:2] != ("train", "cluster") or value is not None or len(name) > 3:
            yield name, value


def _places(field: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Returns where a settings file may have a field, the place that counts most first."""
    if field[:2] == ("train", "cluster"):
        _, _, pool, key = field
        return [("train", pool, key), ("train", key)]
    if field[0] == "train":
        return [("train", "job", field[1])]
    if field == ("image",):
        return [field, ("image", "name")]
    return [("image", *field[1:])] if field[0] == "build" else [field]


def _origin(path: Path, written: Mapping[str, Any], places: list[tuple[str, ...]], value: Any) -> str:
    for *tables, key in places:
        table: Any = written
        for name in tables:
            table = table.get(name, {}) if isinstance(table, dict) else {}
        # Some pools take over nothing of [train]; replicas and variables are put together from both.
        if (
            isinstance(table, dict)
            and key in table
            and (_same(table[key], value) or key in ("replica_count", "env"))
        ):
            return f"{path} [{'.'.join(tables)}]" if tables else str(path)
    return DEFAULT


def _same(written: Any, value: Any) -> bool:
    return bool(written == (list(value) if isinstance(value, tuple) else value)) or isinstance(written, list)
