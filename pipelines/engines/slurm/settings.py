"""Settings of Slurm: the table [engine.slurm], which settings/vertex.toml.example explains."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from shardline.components.vertex.forms import Form
from shardline.pipelines.tables import read_table
from shardline.trainer.base.deserialize import read_fields
from shardline.trainer.base.errors import SettingsError

#: The tables of pools below [engine.slurm], by their replicas' role; they are those of [train].
POOLS = {"chief": "chief", "worker": "workers", "ps": "parameter_servers", "evaluator": "evaluator"}
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
class PoolSettings:
    """Options of sbatch, "" or 0 for Slurm's own default; a worker pool may have others, on nodes of its own.

    Attributes:
        nodes: Number of nodes, or the least and the most, as in "1-4": a job of such a range has as many
            workers as Slurm gives it nodes.
        options: Further options, each a line after #SBATCH.
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
    options: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SlurmSettings(PoolSettings):
    """What each job asks of Slurm: the table [engine.slurm].

    Attributes:
        modules: Environment modules to load.
        venv: Virtual environment to activate; "" for the Python environment that submits.
        container: Image in which the program runs, for `container_runtime`; "" for none.
        container_runtime: "apptainer", or "pyxis" (srun --container-image).
        lines: Further lines of the script, before the program starts.
        restarts: Restarts of all tasks in the same allocation, after a failure of one, 0 to 100.
        grace: Seconds between SIGTERM and the end of the time limit, 0 to 65,535.
        chief: `PoolSettings` that differ for a worker pool; so also `workers` and the others.
    """

    modules: tuple[str, ...] = ()
    venv: str = ""
    container: str = ""
    container_runtime: Literal["apptainer", "pyxis"] = "apptainer"
    lines: tuple[str, ...] = ()
    restarts: int = 1
    grace: int = 60
    chief: Mapping[str, Any] = field(default_factory=dict)
    workers: Mapping[str, Any] = field(default_factory=dict)
    parameter_servers: Mapping[str, Any] = field(default_factory=dict)
    evaluator: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_values(vars(self), "engine.slurm.")
        if self.container and self.venv:
            raise SettingsError("venv and container exclude each other: the container has its own Python")
        for name in POOLS.values():
            prefix = f"engine.slurm.{name}."
            _check_values(read_fields(PoolSettings, getattr(self, name), prefix), prefix)

    @property
    def python(self) -> str:
        """The Python of the tasks: that of the container or venv, else this one."""
        return "python" if self.container or self.venv else sys.executable

    def for_pool(self, role: str) -> SlurmSettings:
        """Returns the settings of a pool by the role of its replicas."""
        return replace(self, **read_fields(PoolSettings, getattr(self, POOLS[role])))


def _check_values(values: Mapping[str, Any], prefix: str) -> None:
    for name, form in _FORMS.items():
        value = values.get(name, ())
        for text in value if isinstance(value, tuple) else filter(None, [value]):
            if not form.fits(text):
                raise SettingsError(f"{prefix}{name} must be {form.description}, got {text!r}")
    for name, most in _MOST.items():
        if not 0 <= values.get(name, 0) <= most:
            raise SettingsError(f"{prefix}{name} must be 0 to {most}, got {values[name]}")


@dataclass(frozen=True)
class _Engines:
    """The table [engine]."""

    slurm: SlurmSettings = field(default_factory=SlurmSettings)


def load_slurm(settings: Path | None) -> SlurmSettings:
    """Returns the table [engine.slurm] of a settings file, or of the project's in this directory.

    Without a file or a table these are the defaults. Raises SettingsError when the file is missing or not
    TOML, or a key is unknown or wrong.
    """
    return _Engines(**read_table(settings, "engine", _Engines)).slurm
