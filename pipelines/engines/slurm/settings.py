"""Settings of Slurm: the table [engine.slurm], which settings/vertex.toml.example explains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
        options: Further lines after #SBATCH.
        lines: Further lines of the script, before the program starts.
        restarts: Restarts of all tasks in the same allocation, after a failure of one.
        grace: Seconds between SIGTERM and the end of the time limit.
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
    container_runtime: str = "apptainer"
    options: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    restarts: int = 1
    grace: int = 60
    pools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
