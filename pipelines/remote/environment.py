"""Environment on the platform: project, region, bucket and account of what is done there, and its sources."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from shardline.components.vertex import forms
from shardline.components.vertex.client import Platform, check_host
from shardline.pipelines.tables import read_table
from shardline.trainer.errors import SettingsError

TABLE = "vertex"
#: Words of settings/vertex.toml.example that stand for a user's own.
_WORDS = ("my-project", "my-bucket")
#: Where they stand for it: as a bucket, or as the project of a resource, an image, a registry or an account.
_PLACEHOLDER = re.compile(
    r"(?:\bgc?s://|(?<![\w-])/gcs/)(?P<bucket>my-bucket)(?![\w.-])"
    r"|(?:(?:^|googleapis\.com/(?:v\w+/)?)projects/|\bpkg\.dev/)(?P<project>my-project)(?![\w-])"
    r"|@(?P<account>my-project)\.iam\b"
)
#: Origin of a value that was not given.
DEFAULT = "default"

#: Fields of an environment that are no values of the table.
_OWN = ("origins", "file")
#: The form of each value.
_FORMS = {
    "project": forms.PROJECT,
    "location": forms.LOCATION,
    "pipeline_root": forms.BUCKET_PATH._replace(words="a directory in Cloud Storage, gs://BUCKET/PATH"),
    "service_account": forms.SERVICE_ACCOUNT,
    "network": forms.NETWORK,
    "encryption_spec_key_name": forms.ENCRYPTION_KEY,
    "registry": forms.Form(
        r"https://[a-z0-9-]+-kfp\.pkg\.dev/[^/\s]+/[^/\s]+/?",
        "a KFP repository, https://LOCATION-kfp.pkg.dev/PROJECT/REPOSITORY",
    ),
    "api_endpoint": forms.Form(r"[\w.-]+(:\d+)?", "a host such as europe-west4-aiplatform.googleapis.com"),
}


@dataclass(frozen=True, kw_only=True)
class Environment:
    """One place on the platform: the table [vertex], which settings/vertex.toml.example explains.

    Attributes:
        origins: Where each value came from.
        file: The settings file, if there is one.
    """

    project: str
    location: str
    pipeline_root: str = ""
    service_account: str = ""
    network: str = ""
    encryption_spec_key_name: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    registry: str = ""
    api_endpoint: str = ""
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    file: Path | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, form in _FORMS.items():
            value = getattr(self, name)
            if value and not form.fits(value):
                raise SettingsError(f"{name} must be {form.words}, got {value!r}{self._origin(name)}")
        if self.api_endpoint:
            try:
                check_host(self.api_endpoint)
            except SettingsError as error:
                raise SettingsError(f"api_endpoint: {error}{self._origin('api_endpoint')}") from None
        forms.check_labels(self.labels, self._origin("labels"))

    @property
    def platform(self) -> Platform:
        """The platform's services there; nothing is loaded or reached before one is used."""
        return Platform(self.project, self.location, self.api_endpoint)

    def _origin(self, name: str) -> str:
        return f" (from {self.origins[name]})" if name in self.origins else ""


#: The values of an environment, and those that can be given as an option as well.
NAMES = tuple(item.name for item in fields(Environment) if item.compare)
FLAGS = ("project", "location", "pipeline_root", "service_account", "registry")


def read_environment(path: Path) -> dict[str, Any]:
    """Returns the table of a settings file, whose values may still be wrong; raises as `load_environment`."""
    return read_table(path, TABLE, Environment, leave_out=_OWN)


def load_environment(
    settings: Path | None,
    flags: Mapping[str, str],
    environ: Mapping[str, str],
    *,
    needed: Iterable[str] = ("project", "location"),
) -> Environment:
    """Reads an environment: the table [vertex] of a settings file, overridden by VERTEX_*, then by flags.

    A flag that is not given is "". The values in `needed` must be given.

    Raises:
        SettingsError: When a needed value is missing, one has the wrong form, or where some are needed one is
            still a placeholder of the example.
    """
    values, origins = read_values(settings, flags, environ)
    for name in needed:
        if not values.get(name):
            raise missing(name)
    environment = Environment(**{"project": "", "location": ""} | values, origins=origins, file=settings)  # type: ignore[arg-type]  # each is of its field's type
    for name, value in values.items() if needed else ():
        if found := placeholder_value(value):
            raise SettingsError(
                f"{name} is {value!r} (from {origins[name]}), where {found} stands for your own; write yours"
            )
    return environment


def placeholder(text: str) -> str:
    """Returns the word of the example settings that a text still has in the place of a user's own, or "".

    A directory may be called so, and a text that is no place.
    """
    found = _PLACEHOLDER.search(text)
    return str(found[found.lastgroup or 0]) if found else ""


def placeholder_value(value: Any) -> str:
    """Returns the word that a value of the table [vertex] still has, or is, as `placeholder` does."""
    return str(value) if value in _WORDS else placeholder(str(value))


def read_values(
    settings: Path | None, flags: Mapping[str, str], environ: Mapping[str, str]
) -> tuple[dict[str, str | Mapping[str, str]], dict[str, str]]:
    """Returns what has been given, as `load_environment` reads it, and where each value came from."""
    values = read_environment(settings) if settings else {}
    origins = dict.fromkeys(values, str(settings))
    for name in NAMES:
        variable = variable_of(name)
        for given, origin in ((environ.get(variable), variable), (flags.get(name), flag_of(name))):
            if given:
                values[name] = _labels(given, origin) if name == "labels" else given
                origins[name] = origin
    return values, origins


def variable_of(name: str) -> str:
    """Returns the environment variable that gives a value."""
    return f"VERTEX_{name.upper()}"


def flag_of(name: str) -> str:
    """Returns the option that gives a value."""
    return f"--{name.replace('_', '-')}"


def _labels(text: str, origin: str) -> dict[str, str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if "=" not in part:
            raise SettingsError(f"{origin} takes NAME=VALUE,NAME=VALUE, got {text!r}")
    return {name: value for name, _, value in (part.partition("=") for part in parts)}


def missing(name: str) -> SettingsError:
    """Returns the error that says how to give a value that is missing."""
    flag = f", or {flag_of(name)}" if name in FLAGS else ""
    return SettingsError(
        f"{name} is missing: give it as {name} in the table [{TABLE}] of a settings file (--settings), "
        f"in the variable {variable_of(name)}{flag}"
    )
