"""The upload of a blessed model to the Model Registry: what is fixed when the pipeline is compiled."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardline.components.train.pools.job import check_labels
from shardline.components.train.pools.texts import check_pasted_text
from shardline.trainer.errors import SettingsError

_PARENT = re.compile(r"projects/[\w:.-]+/locations/([a-z0-9-]+)/models/[\w-]+")
_ALIAS = re.compile(r"[a-z][a-zA-Z0-9-]{0,126}[a-z0-9]")
_LONGEST_NAME = 128


@dataclass(frozen=True, kw_only=True)
class ModelUpload:
    """How a blessed model is entered in the Vertex AI Model Registry.

    Attributes:
        display_name: Of the model, at most 128 characters.
        serving_image_uri: TensorFlow Serving, in an Artifact Registry that Vertex AI can read.
        parent_model: The registered model that gets a new version,
            projects/P/locations/L/models/ID; "" to register a new model with each upload.
        version_aliases: Names that the new version takes over; with "default" it is the one that is
            deployed where no version is named.
        labels: Labels of the model.
    """

    display_name: str
    serving_image_uri: str
    parent_model: str = ""
    version_aliases: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_pasted_text("display_name", self.display_name)
        if not 1 <= len(self.display_name) <= _LONGEST_NAME:
            raise SettingsError(
                f"display_name must have 1 to {_LONGEST_NAME} characters, got {len(self.display_name)}"
            )
        if not self.serving_image_uri:
            raise SettingsError("serving_image_uri is empty; give a TensorFlow Serving image")
        if self.parent_model and not _PARENT.fullmatch(self.parent_model):
            raise SettingsError(
                "parent_model must be projects/P/locations/L/models/ID, without a version, got "
                f"{self.parent_model!r}"
            )
        for alias in self.version_aliases:
            if not _ALIAS.fullmatch(alias):
                raise SettingsError(
                    "version_aliases: an alias is 2 to 128 letters, digits and '-', begins with a lowercase "
                    f"letter and ends with one or a digit, got {alias!r}"
                )
        check_labels(self.labels)

    @property
    def parent_uri(self) -> str:
        """The parent model as the URI of an artifact, or "" where there is none."""
        parent = _PARENT.fullmatch(self.parent_model)
        return f"https://{parent[1]}-aiplatform.googleapis.com/v1/{self.parent_model}" if parent else ""
