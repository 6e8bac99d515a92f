"""Settings of the upload to the Model Registry, the deployment and the batch prediction of a blessed model.

They are fixed when the pipeline is compiled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardline.components.vertex.forms import (
    BUCKET_PATH,
    ENDPOINT,
    LONGEST_NAME,
    MODEL,
    check_accelerators,
    check_labels,
    check_pasted_text,
)
from shardline.trainer.errors import SettingsError

_ALIAS = re.compile(r"[a-z][a-zA-Z0-9-]{0,126}[a-z0-9]")
_FORMATS = {
    "instances_format": ("jsonl", "tf-record", "csv", "file-list"),
    "predictions_format": ("jsonl", "csv"),
}


@dataclass(frozen=True, kw_only=True)
class ServingMachines:
    """Machines that serve a model; [deploy] in settings/vertex.toml.example explains the fields."""

    machine_type: str
    accelerator_type: str = ""
    accelerator_count: int = 0
    min_replica_count: int = 1
    max_replica_count: int = 1
    service_account: str = ""

    def __post_init__(self) -> None:
        for name in ("machine_type", "accelerator_type", "service_account"):
            check_pasted_text(name, getattr(self, name))
        if not self.machine_type:
            raise SettingsError("machine_type is empty; give one, for example n1-standard-2")
        check_accelerators(self.accelerator_type, self.accelerator_count)
        if not 1 <= self.min_replica_count <= self.max_replica_count:
            raise SettingsError(
                "replicas must be 1 <= min_replica_count <= max_replica_count, got "
                f"{self.min_replica_count} and {self.max_replica_count}"
            )


@dataclass(frozen=True, kw_only=True)
class Deploy(ServingMachines):
    """Deployment of a blessed model, after its upload to the Model Registry: [deploy].

    `endpoint` is in the region of the run; `display_name` makes a new endpoint in every run, whose only model
    gets all of the traffic. The models deployed before keep the rest in their proportions. `keep` is how many
    models without traffic stay deployed.
    """

    endpoint: str = ""
    display_name: str = ""
    traffic_percent: int = 100
    keep: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.endpoint) == bool(self.display_name):
            raise SettingsError(
                "give either endpoint, one that is there, or display_name, of a new one for every run"
            )
        if self.endpoint and not ENDPOINT.fits(self.endpoint):
            raise SettingsError(f"endpoint must be {ENDPOINT.words}, got {self.endpoint!r}")
        _check_display_name(self.display_name or "of the endpoint")
        if not 0 <= self.traffic_percent <= 100:
            raise SettingsError(f"traffic_percent must be from 0 to 100, got {self.traffic_percent}")
        if self.display_name and self.traffic_percent != 100:
            raise SettingsError("traffic_percent: the only model of a new endpoint gets all; give endpoint")
        if self.keep < 0:
            raise SettingsError(f"keep must be 0 or more, got {self.keep}")


@dataclass(frozen=True, kw_only=True)
class BatchPrediction(ServingMachines):
    """Batch prediction with each blessed model, after its upload: [batch_predict].

    In `gcs_source_uris` a last * stands for any characters; every run makes a directory of its own in
    `gcs_destination_output_uri_prefix`.
    """

    gcs_source_uris: tuple[str, ...]
    gcs_destination_output_uri_prefix: str
    instances_format: str = "jsonl"
    predictions_format: str = "jsonl"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.gcs_source_uris:
            raise SettingsError("gcs_source_uris is empty; give the files with the instances")
        for name, uris in (
            ("gcs_source_uris", self.gcs_source_uris),
            ("gcs_destination_output_uri_prefix", (self.gcs_destination_output_uri_prefix,)),
        ):
            for uri in uris:
                check_pasted_text(name, uri)
                if not BUCKET_PATH.fits(uri):
                    raise SettingsError(f"{name} must be {BUCKET_PATH.words}, got {uri!r}")
        for name, known in _FORMATS.items():
            if getattr(self, name) not in known:
                raise SettingsError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")


@dataclass(frozen=True, kw_only=True)
class ModelUpload:
    """Upload of a blessed model to the Vertex AI Model Registry: [model_upload].

    `parent_model` "" registers a new model with each upload; with the alias "default" the new version is the
    one that is deployed where none is named.
    """

    display_name: str
    serving_image_uri: str
    parent_model: str = ""
    version_aliases: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_display_name(self.display_name)
        if not self.serving_image_uri:
            raise SettingsError("serving_image_uri is empty; give a TensorFlow Serving image")
        if self.parent_model and not MODEL.fits(self.parent_model):
            raise SettingsError(f"parent_model must be {MODEL.words}, got {self.parent_model!r}")
        for alias in self.version_aliases:
            if not _ALIAS.fullmatch(alias):
                raise SettingsError(
                    "version_aliases: an alias is 2 to 128 letters, digits and '-', begins with a lowercase "
                    f"letter and ends with one or a digit, got {alias!r}"
                )
        check_labels(self.labels)


def _check_display_name(text: str) -> None:
    check_pasted_text("display_name", text)
    if not 1 <= len(text) <= LONGEST_NAME:
        raise SettingsError(f"display_name must have 1 to {LONGEST_NAME} characters, got {len(text)}")
