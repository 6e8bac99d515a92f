"""Compile-time settings of the upload to the Model Registry and the deployment of a blessed model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardline.components.vertex.forms import MODEL
from shardline.trainer.base.errors import SettingsError


@dataclass(frozen=True, kw_only=True)
class Deploy:
    """Deployment of a blessed model, after its upload to the Model Registry: [deploy].

    settings/vertex.toml.example explains the fields; `endpoint` "" makes a new endpoint in each run.
    """

    machine_type: str
    endpoint: str = ""
    accelerator_type: str = ""
    accelerator_count: int = 0
    min_replica_count: int = 1
    max_replica_count: int = 1
    service_account: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelUpload:
    """Upload of a blessed model to the Vertex AI Model Registry: [model_upload].

    `parent_model` "" registers a new model with each upload.
    """

    display_name: str
    serving_image_uri: str
    parent_model: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.serving_image_uri:
            raise SettingsError("serving_image_uri is empty; give a TensorFlow Serving image")
        if self.parent_model and not MODEL.fits(self.parent_model):
            raise SettingsError(f"parent_model must be {MODEL.description}, got {self.parent_model!r}")
