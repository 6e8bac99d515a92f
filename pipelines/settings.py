"""Settings, one TOML file per environment: image, machines, training job, and project on the platform."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

from shardline.components.code import CodeSettings, with_imported
from shardline.components.custom_job import (
    BUCKET_PATH,
    IMAGE,
    KMS_KEY,
    NETWORK,
    REGION,
    Cluster,
    CustomJobSettings,
    PreprocessMachine,
    Tags,
    TaskMachine,
    TextFormat,
    WorkerPool,
    other_region,
)
from shardline.components.exit_handler import NotifySettings
from shardline.components.register import Deploy, ModelUpload
from shardline.components.runs import TrackingSettings
from shardline.components.vertex import Platform
from shardline.trainer.base import files, plugins
from shardline.trainer.base.deserialize import check_types, read_dataclass, read_fields
from shardline.trainer.base.errors import SettingsError, ShardlineError, error_prefix

#: The settings of a project, in its directory: the default there.
PROJECT_SETTINGS = Path("settings.toml")
#: Beside them, the parameters of its runs.
PROJECT_PARAMETERS = "params.toml"


def read_settings_file(path: Path, kind: str = "settings") -> dict[str, Any]:
    """Returns the content of a settings file; SettingsError when it is missing or not TOML.

    A file of another `kind` has only tables [KIND.NAME].
    """
    example = Path(f"{path}.example")
    if example.is_file():
        advice = f"copy {example} to it, and edit it"
    elif kind == "settings":
        advice = "check the path, or create a project with one: 'shardline new DIR'"
    else:
        advice = f"it has tables [{kind}.NAME] (TOML)"
    return read_toml(path, f"no {kind} file {path}; {advice}")


def read_toml(path: Path, missing: str) -> dict[str, Any]:
    """Returns the content of a TOML file; SettingsError, with the message `missing` without a file."""
    if not path.exists() and not path.is_symlink():
        raise SettingsError(missing)
    return files.read_toml(path, SettingsError)


def project_settings(path: Path | None = None) -> Path | None:
    """Returns the settings file, by default that of the project in this directory; None without either."""
    return path or (PROJECT_SETTINGS if PROJECT_SETTINGS.is_file() else None)


def split_pairs(
    texts: Iterable[str], option: str, error: type[ShardlineError] = SettingsError, form: str = "NAME=VALUE"
) -> dict[str, str]:
    """Splits texts of the form NAME=VALUE; raises `error` for another form or a name that occurs twice."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise error(f"{option} takes {form}, got {text!r}")
        if name in found:
            raise error(f"{option} {name} is set twice: {found[name]!r} and {value!r}")
        found[name] = value
    return found


#: The tables of pools below [train], which override its keys.
_POOLS = ("chief", "workers", "parameter_servers", "reduction_server", "evaluator")
_OTHER_MACHINE = ("parameter_servers", "reduction_server")

#: The tables of the tasks other than training.
_MACHINES = ("preprocess", "validate", "register")
_WRITERS = PreprocessMachine(cpu=8, memory="32G")
_LARGE, _SMALL = TaskMachine(cpu=8, memory="32G"), TaskMachine()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that is fixed when the pipeline is compiled; all else is a pipeline parameter.

    The fields are the tables of a settings file, which settings/vertex.toml.example explains. `parameters`
    are the defaults of the pipeline, those in params.toml beside the settings of a project; `directory` has
    its packages.
    """

    image: Annotated[str, IMAGE]
    train: CustomJobSettings
    preprocess: PreprocessMachine = _WRITERS
    validate: TaskMachine = _LARGE
    register: TaskMachine = _SMALL
    model_upload: ModelUpload | None = None
    deploy: Deploy | None = None
    notify: NotifySettings = field(default_factory=NotifySettings)
    tracking: TrackingSettings = field(default_factory=TrackingSettings)
    code: CodeSettings = field(default_factory=CodeSettings)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    directory: Path = Path()

    def __post_init__(self) -> None:
        if not self.image:
            raise SettingsError("image is empty; set the container image of all components")
        check_types(self)
        if self.deploy and self.model_upload is None:
            raise SettingsError("deploy needs a model in the Model Registry; add a table [model_upload]")
        if self.register.machine_type:
            raise SettingsError("register.machine_type: these tasks are small; set cpu and memory instead")
        if self.tracking.mlflow_uri and self.notify.emails:
            raise SettingsError(
                "notify.emails takes the place of the task that logs a run to MLflow, [tracking]"
            )


#: The table of the platform, which the compiler ignores.
TABLE = "vertex"


def load_settings(path: Path) -> Settings:
    """Returns the settings of a file; settings/vertex.toml.example shows all of its keys.

    Raises SettingsError when it is missing or not TOML, or a key is unknown, missing or wrong.
    """
    content, apart = read_settings_file(path), ("train", *_MACHINES)
    content.pop(TABLE, None)
    with error_prefix(f"{path}: "):
        if isinstance(content.get("image"), str):
            # The tag of NAME:TAG@DIGEST is for the next build.
            content["image"] = re.sub(":[^:/@]*@", "@", content["image"])
        project = path.with_name(PROJECT_PARAMETERS)
        parameters, directory = {}, Path()
        if project.is_file():
            parameters, directory = read_toml(project, ""), path.parent
        with contextlib.chdir(directory):
            content.setdefault("code", {"packages": _project_packages(parameters)})
        own = read_fields(Settings, content, leave_out=(*apart, "parameters", "directory"), also=apart)
        own |= {name: _read_machine(name, content[name]) for name in _MACHINES if name in content}
        train = _read_job(content.get("train", {}))
        return Settings(**own, train=train, parameters=parameters, directory=directory)


def _project_packages(parameters: Mapping[str, Any]) -> list[str]:
    """Returns the packages of models and sources that `parameters` and the files in params/ name."""
    from shardline.components.changes import plugins_of  # with all forms of data

    given = [parameters, *(read_toml(path, "") for path in sorted(Path("params").glob("*.toml")))]
    # An option of the training is in its object, or a parameter of its own.
    given += [{"train_options": each} for each in given]
    named = (reference for each in given for reference in plugins_of(each).values())
    return with_imported(plugins.packages(named))


def _read_machine(name: str, table: Any) -> Any:
    default = getattr(Settings, name)
    values = read_fields(type(default), table, name, whole=False)
    with error_prefix(f"{name}."):
        return replace(type(default)() if "machine_type" in values else default, **values)


def _read_job(train: Any) -> CustomJobSettings:
    shared = read_fields(WorkerPool, train, "train", also=(*_POOLS, "job"), whole=False)
    if not (total := shared.pop("replica_count", 0)):
        raise SettingsError("train.replica_count is missing")
    counts = {"chief": 1, "workers": total - 1}
    pools = {
        name: _read_pool(name, train.get(name, {}), shared, counts.get(name))
        for name in _POOLS
        if counts.get(name) or name in train
    }
    return read_dataclass(CustomJobSettings, train.get("job", {}), "train.job", cluster=Cluster(**pools))


def _read_pool(name: str, table: Any, shared: dict[str, Any], count: int | None) -> WorkerPool:
    own = read_fields(WorkerPool, table, f"train.{name}", whole=False)
    if count is not None and "replica_count" in own:
        raise SettingsError(f"train.{name}.replica_count follows from train.replica_count; leave it out")
    if count == 0:
        raise SettingsError(f"train.{name}: there are none; raise train.replica_count to 2 or more")
    own |= {"replica_count": count} if count else {}
    if name == "reduction_server":
        shared = {}
    elif name in _OTHER_MACHINE:
        shared = {key: shared[key] for key in shared if not key.startswith(("machine", "accelerator"))}
    merged = {**shared, **own, "env": {**shared.get("env", {}), **own.get("env", {})}}
    if "machine_type" not in merged:
        raise SettingsError(f"train.{f'{name}.' * (name in _OTHER_MACHINE)}machine_type is missing")
    with error_prefix(f"train.{name}."):
        return WorkerPool(**merged)


#: Placeholders in settings/vertex.toml.example for a user's own names: as a bucket, or as the project of a
#: resource, an image, a registry or an account.
_PLACEHOLDER = re.compile(
    r"(?:\bgc?s://|(?<![\w-])/gcs/)(?P<bucket>my-bucket)(?![\w.-])"
    r"|(?:(?:^|googleapis\.com/(?:v\w+/)?)projects/|\bpkg\.dev/)(?P<project>my-project)(?![\w-])"
    r"|@(?P<account>my-project)\.iam\b"
)
#: The registry receives this account's token.
_REGISTRY = TextFormat(
    r"https://[a-z0-9-]+-kfp\.pkg\.dev/[^/\s]+/[^/\s]+/?",
    "a KFP repository, https://LOCATION-kfp.pkg.dev/PROJECT/REPOSITORY",
)


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Project, region and accounts: the table [vertex], which settings/vertex.toml.example explains.

    `file` is the settings file, if there is one.
    """

    project: str
    location: Annotated[str, REGION]
    pipeline_root: Annotated[str, BUCKET_PATH] = ""
    service_account: str = ""
    network: Annotated[str, NETWORK] = ""
    encryption_spec_key_name: Annotated[str, KMS_KEY] = ""
    tags: Tags = field(default_factory=dict)
    registry: Annotated[str, _REGISTRY] = ""
    file: Path | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.location and (place := other_region(self.encryption_spec_key_name, self.location)):
            raise SettingsError(
                f"encryption_spec_key_name is in {place}, and location is {self.location}; use one there"
            )

    @property
    def platform(self) -> Platform:
        """The platform's services there; clients are created when used."""
        # gRPC prints a line for each connection that fails.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        return Platform(self.project, self.location)


#: The values of an environment: keys of the table, and variables VERTEX_NAME.
NAMES = tuple(item.name for item in fields(Environment) if item.name != "file")


def read_environment(path: Path) -> dict[str, Any]:
    """Returns the table of a settings file, which may lack anything; raises as `load_environment`."""
    content = read_settings_file(path).get(TABLE, {})
    with error_prefix(f"{path}: "):
        return read_fields(Environment, content, TABLE, leave_out=("file",), whole=False)


def load_environment(
    settings: Path | None,
    flags: Mapping[str, str],
    environ: Mapping[str, str],
    *,
    needed: Iterable[str] = ("project", "location"),
) -> Environment:
    """Reads an environment: the table [vertex] of a settings file, overridden by VERTEX_*, then by flags.

    Without `settings` they are those of the project in this directory, if there is one. A flag that is not
    set is "". Raises SettingsError when a value in `needed` is missing, one is malformed, or one is still a
    placeholder of the example.
    """
    settings = project_settings(settings)
    values = read_environment(settings) if settings else {}
    for name in NAMES:
        if value := flags.get(name) or environ.get(f"VERTEX_{name.upper()}"):
            tags = filter(None, map(str.strip, value.split(",")))
            values[name] = split_pairs(tags, "VERTEX_TAGS", form="KEY=VALUE") if name == "tags" else value
    for name in needed:
        if not values.get(name):
            raise missing_error(name)
    environment = Environment(**{"project": "", "location": ""} | values, file=settings)
    for name, value in values.items():
        if found := placeholder(name, str(value)):
            raise SettingsError(f"{name} is {value!r}, where {found} is a placeholder; write your own")
    return environment


def missing_error(name: str) -> SettingsError:
    """Returns the error for a missing value, with the ways to set it."""
    flag = f", or --{name}" if name in ("project", "location") else ""
    return SettingsError(
        f"{name} is missing: set it as {name} in the table [{TABLE}] of a settings file (--settings), "
        f"in the variable VERTEX_{name.upper()}{flag}"
    )


def is_filled_in(settings: Path | None) -> bool:
    """Whether a settings file names a platform's project, and has no placeholder left in [vertex]."""
    values = read_environment(settings) if settings else {}
    return bool(values.get("project")) and not any(
        placeholder(name, str(value)) for name, value in values.items()
    )


def placeholder(name: str, text: str) -> str:
    """Returns the placeholder of the example settings in a named text, or "".

    Only at the position of a bucket or a project: a directory may have that name.
    """
    found = _PLACEHOLDER.search(f"projects/{text}" if name == "project" else text)
    return str(found[found.lastgroup or 0]) if found else ""
