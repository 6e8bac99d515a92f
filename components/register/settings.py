"""Compile-time settings of the upload to the Model Registry and the deployment of a blessed model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardline.components.vertex.forms import (
    DISPLAY_NAME,
    ENDPOINT,
    IMAGE,
    MODEL,
    Form,
    check_forms,
    check_labels,
)
from shardline.trainer.base.errors import SettingsError

#: Label of uploaded models: the name of their pipeline, which alone replaces them.
PIPELINE_LABEL = "shardline-pipeline"
#: The platform inserts texts between the quotes of JSON unescaped.
_TEXT = Form(r'[^"\\\n]+', "a text without quotes, backslashes and line breaks")
_OPTIONAL = {"endpoint": ENDPOINT, "parent_model": MODEL, "accelerator_type": _TEXT, "service_account": _TEXT}


def _check_texts(settings: Deploy | ModelUpload) -> None:
    for name, value in vars(settings).items():
        form = _OPTIONAL.get(name, _TEXT)
        if isinstance(value, str) and (value or name not in _OPTIONAL) and not form.fits(value):
            raise SettingsError(f"{name} must be {form.description}, got {value!r}")
    check_forms({"display_name": DISPLAY_NAME, "serving_image_uri": IMAGE}, vars(settings))


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

    def __post_init__(self) -> None:
        _check_texts(self)
        if bool(self.accelerator_type) != (self.accelerator_count > 0):
            raise SettingsError("accelerator_type and accelerator_count go together; set both or neither")
        if not 1 <= self.min_replica_count <= self.max_replica_count:
            raise SettingsError(f"min_replica_count is 1 to max_replica_count, got {self.min_replica_count}")


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
        _check_texts(self)
        check_labels(self.tags)
