"""The machines of a training job: from a KFP component to a CustomJob with worker pools."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google_cloud_pipeline_components.v1.custom_job import (
    CustomTrainingJobOp,
    create_custom_training_job_from_component,
)
from kfp.dsl.base_component import BaseComponent

from trainer.errors import SettingsError


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The machines of a training job, all alike; fixed when the pipeline is compiled.

    Attributes:
        replica_count: Machines in all: pool 0 is one chief, pool 1 the other workers.
        machine_type: Compute Engine machine type.
        accelerator_type: Vertex AI accelerator type; "" for none.
        accelerator_count: Accelerators on each machine.
    """

    replica_count: int
    machine_type: str
    accelerator_type: str = ""
    accelerator_count: int = 0

    def __post_init__(self) -> None:
        if self.replica_count < 1:
            raise SettingsError(f"replica_count must be at least 1, got {self.replica_count}")
        if not self.machine_type:
            raise SettingsError("machine_type is empty; give a Compute Engine machine type: n1-standard-8")
        if bool(self.accelerator_type) != (self.accelerator_count > 0):
            raise SettingsError(
                "accelerator_type and accelerator_count go together, got "
                f"{self.accelerator_type!r} and {self.accelerator_count}"
            )


def custom_job(component: BaseComponent, cluster: Cluster) -> Callable[..., Any]:
    """Expands a component into a Vertex AI CustomJob that runs it on every replica of the cluster.

    Args:
        component: A lightweight component whose body is one replica's program.
        cluster: The machines.

    Raises:
        SettingsError: When the component has a parameter of the CustomJob's own name, which would be
            overridden without a word.
    """
    clashes = set(component.component_spec.inputs or ()) & set(CustomTrainingJobOp.component_spec.inputs)
    if clashes:
        raise SettingsError(
            f"component {component.name!r} has parameters that a CustomJob has too: {sorted(clashes)}; "
            "rename them"
        )
    job: Callable[..., Any] = create_custom_training_job_from_component(
        component,
        display_name=component.name,
        replica_count=cluster.replica_count,
        machine_type=cluster.machine_type,
        accelerator_type=cluster.accelerator_type,
        accelerator_count=cluster.accelerator_count,
        # All-reduce cannot go on without a peer: the job restarts as a whole and resumes.
        restart_job_on_worker_restart=True,
    )
    return job
