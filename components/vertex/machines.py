"""Machines of a pipeline's tasks: what a task asks of the platform, and how it is tried again and cached."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardline.components.vertex import forms
from shardline.components.vertex.forms import check_accelerators, check_text, seconds
from shardline.trainer.errors import SettingsError
from shardline.trainer.progress import TIMEOUT_VARIABLE

if TYPE_CHECKING:
    from kfp import dsl

_MEMORY = re.compile(r"[1-9]\d*[GM]i?")
_MOST_RETRIES = 10


@dataclass(frozen=True, kw_only=True)
class TaskMachine:
    """Machine of a task: a table such as [preprocess], which settings/vertex.toml.example explains.

    Without `machine_type` the platform chooses a machine that has as much; with it the task runs as a custom
    job of one replica, whose boot disk has `disk` GB: a task as such has no disk of one's own size.

    Attributes:
        cpu: Cores; 0 leaves it to the platform.
        memory: Memory as in "32G"; "" leaves it to the platform.
        machine_type: As in [train].
        disk: GB of the boot disk of a machine_type; 0 is the least, 100.
        accelerator_type: As in [train].
        accelerator_count: As in [train].
        retries: How often the task is tried again after a failure.
        timeout: Seconds after which the task ends itself, as in "3600s".
        cache: Whether the result of an earlier run with the same inputs is taken.
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
            raise SettingsError(f"machine_type must be {forms.MACHINE_TYPE.words}, got {self.machine_type!r}")
        if self.machine_type and (self.cpu or self.memory):
            raise SettingsError(
                "machine_type says how many cores and how much memory; leave out cpu and memory"
            )
        if self.disk and not self.machine_type:
            raise SettingsError("disk is that of a machine_type; give one, in the place of cpu and memory")
        if self.disk and self.disk < 100:
            raise SettingsError(f"disk must be at least 100 GB, got {self.disk}")
        if not 0 <= self.retries <= _MOST_RETRIES:
            raise SettingsError(f"retries must be 0 to {_MOST_RETRIES}, got {self.retries}")
        if not seconds(self.timeout):
            raise SettingsError(f"timeout must be {forms.DURATION.words}, more than 0s, got {self.timeout!r}")

    def uncached(self) -> TaskMachine:
        """Returns the same for a task whose result depends on more than its inputs."""
        return replace(self, cache=False)

    def ask(self, task: dsl.PipelineTask) -> dsl.PipelineTask:
        """Asks for the machine of a task of a container of its own, and returns the task."""
        if self.cpu:
            task.set_cpu_limit(str(self.cpu))
        if self.memory:
            task.set_memory_limit(self.memory)
        if self.accelerator_type:
            task.set_accelerator_type(self.accelerator_type).set_accelerator_limit(self.accelerator_count)
        task.set_env_variable(TIMEOUT_VARIABLE, self.timeout.removesuffix("s"))
        return self.schedule(task)

    def schedule(self, task: dsl.PipelineTask) -> dsl.PipelineTask:
        """Has a task tried again and cached as the table says, and returns the task."""
        if self.retries:
            task.set_retry(self.retries, backoff_duration="30s")
        if not self.cache:
            task.set_caching_options(False)
        return task
