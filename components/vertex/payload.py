"""The launcher's payload: a custom job of any pipeline as the API receives it.

The launcher of Google Cloud Pipeline Components receives the job as JSON and drops empty values before it
sends it. This view is lenient: a part may be missing, of another type, or a placeholder that is not filled in
yet. Settings are read strictly, in `pools` and `job`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardline.trainer.base.deserialize import restore_integers

#: Beginning of every placeholder.
PLACEHOLDER = "{{$"

_PACKAGES = ("google.cloud.aiplatform_v1", "google.cloud.aiplatform_v1.types")
#: What the client's errors mean, which name no field.
_REASONS = {
    "bad argument type": "must be a text, in quotes",
    "as an integer": "must be a number, true or false, without quotes",
    "is not iterable": "must be a list",
    "must be dict": "must be an object",
}


def mapping_at(node: Any, *keys: str) -> dict[str, Any]:
    """Returns the mapping below these keys, empty where there is none."""
    for key in keys:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node if isinstance(node, dict) else {}


def list_at(node: Any, *keys: str) -> list[Any]:
    """Returns the list below these keys, empty where there is none."""
    value = mapping_at(node, *keys[:-1]).get(keys[-1])
    return value if isinstance(value, list) else []


def is_surely_missing(node: Any, *keys: str) -> bool:
    """Whether nothing is below these keys; False where a placeholder may put something there at run time."""
    for key in keys:
        if isinstance(node, str) and PLACEHOLDER in node:
            return False
        node = node.get(key) if isinstance(node, Mapping) else None
    return not node


def literal_string(value: Any) -> str:
    """Returns a string that is known before the run, "" for everything else."""
    return value if isinstance(value, str) and PLACEHOLDER not in value else ""


def argv(container: Mapping[str, Any]) -> list[str]:
    """Returns command and arguments of a container."""
    parts = [*list_at(container, "command"), *list_at(container, "args")]
    return [part for part in parts if isinstance(part, str)]


def whole_number(value: Any) -> int | None:
    """Returns a whole number, which may be written 3, 3.0 or "3", and None for everything else.

    Numbers travel as doubles in a pipeline's parameters, and an int64 may be text in JSON.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return int(number) if number.is_integer() else None


def without_empty(content: Any) -> Any:
    """Returns a payload as the launcher sends it: without zeros, empty texts, lists and objects."""
    # The launcher's own function: the job is the one that the API would receive.
    from google_cloud_pipeline_components.container.v1.gcp_launcher.utils import json_util

    return json_util.recursive_remove_empty(content)


def read_payload(text: str) -> Any:
    """Reads a --payload as the launcher does; raises ValueError when it is not JSON."""
    try:
        return without_empty(json.loads(text, strict=False))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@dataclass(frozen=True)
class PoolSpec:
    """A worker pool of a payload: its WorkerPoolSpec, or the text of its placeholder."""

    spec: Any

    @property
    def is_empty_slot(self) -> bool:
        """Whether it has no replicas: "0" as a text, which the launcher does not drop."""
        return isinstance(self.spec, dict) and set(self.spec) == {"replica_count"} and self.replica_count == 0

    @property
    def container(self) -> dict[str, Any]:
        """The container, or the Python package, that each replica runs."""
        return mapping_at(self.spec, "container_spec") or mapping_at(self.spec, "python_package_spec")

    @property
    def image(self) -> str:
        """The image; "" when it is unknown."""
        return literal_string(self.container.get("image_uri") or self.container.get("executor_image_uri"))

    @property
    def replica_count(self) -> int | None:
        """Number of replicas, 1 by default; None when it is unknown or not a whole number."""
        return whole_number(mapping_at(self.spec).get("replica_count", 1))

    @property
    def machine(self) -> dict[str, Any]:
        """The machine spec."""
        return mapping_at(self.spec, "machine_spec")

    @property
    def machine_type(self) -> str:
        """The machine type; "" when it is unknown."""
        return literal_string(self.machine.get("machine_type"))

    @property
    def accelerator_type(self) -> str:
        """The accelerator type; "" for none, and when it is unknown."""
        kind = literal_string(self.machine.get("accelerator_type"))
        return "" if kind == "ACCELERATOR_TYPE_UNSPECIFIED" else kind

    @property
    def argv(self) -> list[str]:
        """Command and arguments of a replica."""
        return argv(self.container)

    @property
    def env(self) -> list[dict[str, Any]]:
        """The environment variables, each with name and value."""
        return [item for item in list_at(self.container, "env") if isinstance(item, dict)]

    @property
    def replicas(self) -> int:
        """Number of replicas, 0 where it is not known before the run."""
        return self.replica_count or 0

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables by name."""
        return {str(item.get("name", "")): str(item.get("value", "")) for item in self.env}

    @property
    def is_reduction_server(self) -> bool:
        """Whether it runs the platform's Reduction Server."""
        return "training/reductionserver" in self.image


@dataclass(frozen=True)
class JobSpec:
    """A custom job, or the trial of a tuning job: the payload as the launcher sends it."""

    content: Mapping[str, Any]

    @property
    def spec(self) -> dict[str, Any]:
        """The CustomJobSpec."""
        return mapping_at(self.content, "job_spec") or mapping_at(self.content, "trial_job_spec")

    @property
    def scheduling(self) -> dict[str, Any]:
        """Strategy, timeout and restarts."""
        return mapping_at(self.spec, "scheduling")

    @property
    def base_output_directory(self) -> str:
        """Directory of AIP_MODEL_DIR and its siblings, placeholders included; "" for none."""
        return str(mapping_at(self.spec, "base_output_directory").get("output_uri_prefix", ""))


@functools.cache
def _message(kind: str) -> Callable[[Any], Any]:
    """Returns the class of a message without importing the clients of all services, which takes a second."""
    module = "hyperparameter_tuning_job" if kind == "HyperparameterTuningJob" else "custom_job"
    missing = [name for name in _PACKAGES if name not in sys.modules]
    for name in missing:
        if spec := importlib.util.find_spec(name):
            sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        return getattr(importlib.import_module(f"{_PACKAGES[1]}.{module}"), kind)  # type: ignore[no-any-return]
    finally:
        for name in missing:
            del sys.modules[name]


def _error(kind: str, content: Any) -> str:
    try:
        _message(kind)(content)
    except Exception as error:  # the client raises any
        return str(error).rpartition("Underlying error: ")[2] or type(error).__name__
    return ""


def refusals(content: Mapping[str, Any]) -> Iterator[str]:
    """Yields what the launcher's client refuses of a payload; a text with a placeholder may become anything.

    A text in the place of a list is refused, too: the client makes a list of its letters.
    """
    kind = "HyperparameterTuningJob" if "trial_job_spec" in content else "CustomJob"
    yield from _refusals(kind, restore_integers(dict(content)), "", lambda value: value)


def _refusals(kind: str, value: Any, path: str, wrap: Callable[[Any], Any]) -> Iterator[str]:
    parts: list[Any] = []
    if isinstance(value, dict):
        parts = [
            (item, f"{path}.{key}".lstrip("."), lambda part, key=key: wrap({key: part}))
            for key, item in value.items()
        ]
    elif isinstance(value, list):
        parts = [(item, f"{path}[{index}]", lambda part: wrap([part])) for index, item in enumerate(value)]
    error = _error(kind, wrap(value))
    name = path.rpartition(".")[2]
    if error.startswith("Unknown field for ") and error.endswith(f": {name}"):
        yield f"{path}: {error[18:].partition(':')[0]} has no such field"
        return
    is_object = isinstance(value, dict) and error.endswith(f".{name} is not iterable")
    found = [] if is_object else [why for part in parts for why in _refusals(kind, *part)]
    yield from found
    if found or (PLACEHOLDER in str(value) and not is_object):
        return
    if error:
        reason = next((text for word, text in _REASONS.items() if word in error), f"is refused ({error})")
        yield f"{path} {reason}, got {value!r}"
    elif isinstance(value, str) and not path.endswith("]") and not _error(kind, wrap([value])):
        yield f"{path} must be a list, got {value!r}"
