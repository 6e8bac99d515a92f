"""Settings of Slurm: the table [engine.slurm], which settings/vertex.toml.example explains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from shardline.components.vertex.forms import Form
from shardline.pipelines.tables import (
    PROJECT_SETTINGS,
    check_tables,
    error_prefix,
    read_settings_file,
)
from shardline.trainer.base.deserialize import check_keys, read_fields
from shardline.trainer.base.errors import SettingsError

#: The tables of pools below [engine.slurm], by their replicas' role; they are those of [train].
POOLS = {"chief": "chief", "worker": "workers", "ps": "parameter_servers", "evaluator": "evaluator"}
#: What a pool may set for itself, because Slurm allocates its nodes by themselves.
_OF_POOLS = (
    *("partition", "account", "qos", "time", "nodes", "cpus_per_task", "mem", "gres", "constraint"),
    "options",
)

#: A word on a line #SBATCH, where a space, quote or # would begin something else.
_WORD = r"[^\s\"'#\\]+"
#: https://slurm.schedmd.com/sbatch.html
_FORMS = {
    "partition": Form(_WORD, "a partition, or several with commas"),
    "account": Form(_WORD, "an account"),
    "qos": Form(_WORD, "a quality of service"),
    "time": Form(r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}", "minutes, HH:MM:SS or DAYS-HH:MM:SS"),
    "nodes": Form(r"[1-9]\d*(-[1-9]\d*)?", 'a number, or the least and the most, "1-4"'),
    "mem": Form(r"\d+[KMGT]?", "a size such as 16G"),
    "gres": Form(_WORD, "resources such as gpu:a100:2"),
    "constraint": Form(_WORD, "features of nodes, as in a100|h100"),
    "container": Form(_WORD, "an image or its file"),
    "modules": Form(_WORD, "names such as cuda/12.2"),
    "options": Form(r"--[a-z][^\n\r]*", "lines such as --exclusive"),
}
_MOST = {"cpus_per_task": 2**16 - 1, "restarts": 100, "grace": 2**16 - 1}


@dataclass(frozen=True, kw_only=True)
class SlurmSettings:
    """What each job asks of Slurm; the first fields are options of sbatch, "" or 0 for Slurm's own default.

    Attributes:
        nodes: Number of nodes, or the least and the most, as in "1-4": a job of such a range has as many
            workers as Slurm gives it nodes.
        modules: Environment modules to load.
        venv: Virtual environment to activate; "" for the Python environment that submits.
        container: Image in which the program runs, for `container_runtime`; "" for none.
        container_runtime: "apptainer", or "pyxis" (srun --container-image).
        options: Further options of sbatch, each a line after #SBATCH.
        lines: Further lines of the script, before the program starts.
        restarts: Restarts of all tasks in the same allocation, after a failure of one, 0 to 100.
        grace: Seconds between SIGTERM and the end of the time limit, 0 to 65,535.
        pools: Options that differ for a worker pool: "chief", "workers", "parameter_servers", "evaluator".
    """

    partition: str = ""
    account: str = ""
    qos: str = ""
    time: str = ""
    nodes: str = ""
    cpus_per_task: int = 0
    mem: str = ""
    gres: str = ""
    constraint: str = ""
    modules: tuple[str, ...] = ()
    venv: str = ""
    container: str = ""
    container_runtime: Literal["apptainer", "pyxis"] = "apptainer"
    options: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    restarts: int = 1
    grace: int = 60
    pools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, form in _FORMS.items():
            value = getattr(self, name)
            for text in [value] if isinstance(value, str) and value else value:
                if not form.fits(text):
                    raise SettingsError(f"{name} must be {form.description}, got {text!r}")
        for name, most in _MOST.items():
            if not 0 <= getattr(self, name) <= most:
                raise SettingsError(f"{name} must be 0 to {most}, got {getattr(self, name)}")
        if self.container and self.venv:
            raise SettingsError("venv and container exclude each other: the container has its own Python")
        for name, values in self.pools.items():
            with error_prefix(f"{name}."):
                replace(self, **values, pools={})

    def for_pool(self, role: str) -> SlurmSettings:
        """Returns the settings of a pool by the role of its replicas."""
        return replace(self, **self.pools.get(POOLS[role], {}), pools={})


def load_slurm(settings: Path | None) -> SlurmSettings:
    """Returns the table [engine.slurm] of a settings file, or of the project's in this directory.

    Without a file or a table these are the defaults. Raises SettingsError when the file is missing or not
    TOML, or a key is unknown or wrong.
    """
    if settings is None and not PROJECT_SETTINGS.is_file():
        return SlurmSettings()
    path = settings or PROJECT_SETTINGS
    content = read_settings_file(path)
    with error_prefix(f"{path}: "):
        return _read_table(content.get("engine", {}))


def _read_table(engine: Any) -> SlurmSettings:
    check_tables({"engine": engine})
    check_keys(engine, ("slurm",), "engine.")
    check_tables(engine, "engine.")
    table = engine.get("slurm", {})
    pools = {name: values for name, values in table.items() if name in POOLS.values()}
    check_tables(pools, "engine.slurm.")
    for name, values in pools.items():
        check_keys(values, _OF_POOLS, f"engine.slurm.{name}.")
        pools[name] = read_fields(SlurmSettings, values, f"engine.slurm.{name}.")
    own = read_fields(SlurmSettings, table, "engine.slurm.", leave_out=("pools",), also=POOLS.values())
    with error_prefix("engine.slurm."):
        return SlurmSettings(**own, pools=pools)
