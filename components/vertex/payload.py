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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardline.components.vertex.forms import DURATION
from shardline.trainer.base.deserialize import restore_integers

#: Beginning of every placeholder.
PLACEHOLDER = "{{$"
#: A JSON value of any type that is not known before the run; any other placeholder becomes text.
ANY = "{{$.any}}"

#: Role of the replicas of each worker pool, by the pool's index.
ROLES = ("chief", "worker", "ps", "evaluator")

_PACKAGES = ("google.cloud.aiplatform_v1", "google.cloud.aiplatform_v1.types")
#: What the client takes, by FieldDescriptor.cpp_type; a number of 64 bits may be text in JSON.
_SCALARS: Mapping[int, tuple[Any, str]] = {
    **dict.fromkeys((1, 3, 4), (int, "a whole number, without quotes")),
    2: (int | str, "a whole number"),
    **dict.fromkeys((5, 6), (int | float, "a number, without quotes")),
    7: (int, "true or false, without quotes"),
    9: (str, "a text, in quotes"),
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


def launcher_type(container: Mapping[str, Any]) -> str:
    """Returns what a launcher of Google's starts, its --type such as "CustomJob"; "" for other containers."""
    parts = argv(container)
    is_launcher = any(part.startswith("google_cloud_pipeline_components.container.") for part in parts)
    return parts[parts.index("--type") + 1] if is_launcher and "--type" in parts[:-1] else ""


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
def _message(kind: str) -> Any:
    """Returns the class of a message without importing the clients of all services, which takes a second."""
    module = "hyperparameter_tuning_job" if kind == "HyperparameterTuningJob" else "custom_job"
    missing = [name for name in _PACKAGES if name not in sys.modules]
    for name in missing:
        if spec := importlib.util.find_spec(name):
            sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        return getattr(importlib.import_module(f"{_PACKAGES[1]}.{module}"), kind)
    finally:
        for name in missing:
            del sys.modules[name]


def refusals(content: Mapping[str, Any]) -> Iterator[str]:
    """Yields what the launcher's client refuses of a payload; values that are not known yet may fit.

    A text in the place of a list is refused, too: the client makes a list of its letters.
    """
    message = _message("HyperparameterTuningJob" if "trial_job_spec" in content else "CustomJob")
    known = restore_integers(dict(content))
    found = [*_refused_fields(message.meta.pb.DESCRIPTOR, known, "")]
    yield from found
    if not found and PLACEHOLDER not in str(known):
        try:
            message(known)
        except Exception as error:  # the client raises any
            yield f"it is refused ({str(error).rpartition('Underlying error: ')[2] or type(error).__name__})"


def _refused_fields(kind: Any, content: Mapping[str, Any], path: str) -> Iterator[str]:
    for name, value in content.items():
        field = kind.fields_by_name.get(name)
        if field is None:
            yield f"{path}{name}: {kind.name} has no such field"
        elif field.is_repeated and not (field.message_type and field.message_type.GetOptions().map_entry):
            if isinstance(value, list):
                for index, item in enumerate(value):
                    yield from _refused(field, item, f"{path}{name}[{index}]")
            elif value != ANY:
                yield _must(f"{path}{name}", "a list", value)
        elif field.is_repeated and isinstance(value, dict):
            for key, item in value.items():
                yield from _refused(field.message_type.fields_by_name["value"], item, f"{path}{name}.{key}")
        else:
            yield from _refused(field, value, f"{path}{name}")


def _refused(field: Any, value: Any, path: str) -> Iterator[str]:
    is_unknown = PLACEHOLDER in str(value)
    scalar, what = _SCALARS.get(field.cpp_type, (object, ""))
    if value == ANY:
        return
    if field.message_type and field.message_type.name == "Duration":
        if not is_unknown and not DURATION.fits(str(value)):
            yield _must(path, DURATION.description, value)
    elif field.message_type and not field.message_type.full_name.startswith("google.protobuf."):
        if isinstance(value, dict):
            yield from _refused_fields(field.message_type, value, f"{path}.")
        else:
            yield _must(path, "an object", value)
    elif field.enum_type and isinstance(value, str):
        if not is_unknown and value not in field.enum_type.values_by_name:
            yield _must(path, f"a name of the API's {field.enum_type.name}", value)
    elif not isinstance(value, scalar):
        yield _must(path, what, value)


def _must(path: str, what: str, value: Any) -> str:
    is_known = PLACEHOLDER not in str(value)
    return f"{path} must be {what}, got {repr(value) if is_known else 'a parameter or output, as text'}"
