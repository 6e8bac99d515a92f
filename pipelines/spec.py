"""Compiled pipeline: its file, read and validated, and the declarations of its spec (IR)."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import runpy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from google.protobuf import json_format

from shardline.components.custom_job import mapping_at
from shardline.trainer.base import files
from shardline.trainer.base.errors import PipelineError

#: Names of our own pipelines.
OWN_PIPELINES = RETRAIN, TUNE = "retrain", "tune"

#: Names as the compiler makes them; runs, their directories and ids begin with them.
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,127}")

#: Largest file in bytes: larger than any known pipeline (0.6 MB), and read in two seconds.
_MAX_BYTES = 4 * 2**20
#: The parser's C code ends the process where a file is nested some 10,000 times; pipelines are 10 deep.
_MAX_DEPTH = 200


def load_pipeline(path: Path) -> dict[str, Any]:
    """Returns the pipeline spec (IR) of a file to run here; raises as `parse_pipeline` does."""
    return parse_pipeline(read_pipeline(path), path)


def read_pipeline(path: Path) -> bytes:
    """Returns the content of a pipeline's file; PipelineError when it cannot be read, or is too large."""
    if not path.exists() and not path.is_symlink():
        raise PipelineError(f"no pipeline {path}; write it with 'shardline compile'")
    return files.read_text(path, PipelineError, limit=_MAX_BYTES).encode()


def parse_pipeline(content: bytes | str, path: Path, *, sent: bool = False) -> dict[str, Any]:
    """Returns the pipeline spec (IR) in the content of the file `path`, any compiled pipeline.

    A second YAML document may hold settings for other platforms, unless it is `sent` to Vertex AI. Raises
    PipelineError when it is not one, its structure is not the compiler's, or it cannot run by itself.
    """
    spec = next(iter(documents := _documents(content, path)), None)
    if not isinstance(spec, dict):
        raise PipelineError(f"{path} is not a compiled pipeline; write one with 'shardline compile'")
    missing = [key for key in ("pipelineInfo", "root", "deploymentSpec") if not mapping_at(spec, key)]
    if missing:
        kind = f" but a {spec['kind']}" if "kind" in spec else ""
        raise PipelineError(
            f"{path} is not a compiled pipeline{kind}: it has no {', '.join(missing)}; "
            "write one with 'shardline compile', or is it cut off?"
        )
    try:
        messages = _messages()
        json_format.ParseDict(spec, messages["PipelineSpec"](), ignore_unknown_fields=True)
        executors = messages["PipelineDeploymentConfig"]()  # only a Struct in the message above
        json_format.ParseDict(spec["deploymentSpec"], executors, ignore_unknown_fields=True)
    except json_format.ParseError as error:
        raise PipelineError(f"{path} is not a compiled pipeline: {str(error).rstrip('.')}") from None
    for key, entry in _entries(spec):
        if not isinstance(entry, dict):
            raise PipelineError(f"{path} is not a compiled pipeline: {key} must be a mapping, not {entry!r}")
    if (version := spec.get("schemaVersion")) != "2.1.0":
        raise PipelineError(f"{path} has the schemaVersion {version}, not 2.1.0; compile it with KFP 2")
    name = spec["pipelineInfo"].get("name") or ""
    if not _NAME.fullmatch(name):
        raise PipelineError(
            f"{path} has the name {name!r}; a pipeline's name has lower-case letters, digits and hyphens, as "
            "the compiler writes it"
        )
    if artifacts := mapping_at(spec, "root", "inputDefinitions", "artifacts"):
        raise PipelineError(
            f"{path} takes artifacts as inputs ({', '.join(artifacts)}); only parameters can be passed"
        )
    if len(documents) > 1:
        platforms = mapping_at(documents[1], "platforms")
        if len(documents) > 2 or not platforms:
            raise PipelineError(
                f"{path} holds {len(documents)} YAML documents; a pipeline is one, and a second can only "
                "hold its settings for another platform"
            )
        if sent:
            raise PipelineError(
                f"{path} holds 2 YAML documents, the second with settings for {', '.join(platforms)}; "
                "Vertex AI takes one: compile without them"
            )
    return spec


@functools.cache
def _messages() -> dict[str, Any]:
    """Returns the classes of KFP's messages; to import them from `kfp`, which loads all of KFP, is slow."""
    folder = importlib.metadata.distribution("kfp-pipeline-spec")
    return runpy.run_path(str(folder.locate_file("kfp/pipeline_spec/pipeline_spec_pb2.py")))


def _entries(node: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the messages in maps by their paths; the parser takes "" and [] for one without fields."""
    for key, value in node.items():
        if not isinstance(value, dict) or key in ("defaultValue", "runtimeValue", "importer"):
            continue
        if key not in ("components", "tasks", "executors", "parameters", "artifacts"):
            yield from _entries(value, f"{path}{key}.")
            continue
        for name in value:
            yield f"{path}{key}.{name}", value[name]
            if isinstance(value[name], dict) and key not in ("parameters", "artifacts"):
                yield from _entries(value[name], f"{path}{key}.{name}.")


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # a class
    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key, _ in node.value:
            if (word := str(key.value)) in seen:
                raise yaml.YAMLError(f"the key {word!r} is there twice, in line {key.start_mark.line + 1}")
            seen.add(word)
        return super().construct_mapping(node, deep)


def _documents(content: bytes | str, path: Path) -> list[Any]:
    depth = 0
    try:
        # Before any object is built. A few lines with aliases can expand to billions of values.
        for event in yaml.parse(content, Loader=_Loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None) or depth > _MAX_DEPTH:
                raise PipelineError(
                    f"{path} is no pipeline: line {event.start_mark.line + 1} has an alias, a tag or a value "
                    f"that is nested {_MAX_DEPTH} times"
                )
        return list(yaml.load_all(content, Loader=_Loader))
    except (yaml.YAMLError, ValueError) as error:
        raise PipelineError(f"{path} is not YAML: {' '.join(str(error).split())}") from None


def declared_parameters(spec: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the declarations of a pipeline's parameters by name, each with a "parameterType"."""
    declarations = mapping_at(spec, "root", "inputDefinitions", "parameters")
    return {name: {"parameterType": "", **(item or {})} for name, item in declarations.items()}


def defaults(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the defaults of the parameters that have one, whole numbers as int (the IR has 3.0)."""
    return {
        name: _default(name, item["defaultValue"], item["parameterType"])
        for name, item in declared_parameters(spec).items()
        if item.get("defaultValue") is not None
    }


def _default(name: str, value: Any, kind: str) -> Any:
    if kind != "NUMBER_INTEGER":
        return value
    if isinstance(value, (int, float)) and float(value).is_integer():
        return int(value)
    raise PipelineError(f"the default of the parameter {name} is {value!r}, which is not a whole number")


def all_tasks(spec: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the tasks of all DAGs of a pipeline, each after its name."""
    for component in (spec["root"], *mapping_at(spec, "components").values()):
        yield from mapping_at(component, "dag", "tasks").items()
