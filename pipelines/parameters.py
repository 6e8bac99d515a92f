"""Parameters of a pipeline: checks against its declarations, and of values before a run of our pipelines."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import math
import os
import re
import types
import typing
from collections.abc import Collection, Container, Mapping
from pathlib import Path
from typing import Any

from shardline.components.changes import fill_in_date, read_settings
from shardline.components.code import is_own
from shardline.components.model_store.champions import require_store
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources import is_plugin, open_source
from shardline.components.runs import Run, RunDirectory
from shardline.components.text import quality, truncate
from shardline.components.train import OPTIONS
from shardline.components.tune.study import check_tuned, parse_study, read_study
from shardline.components.validate import Gate
from shardline.pipelines.settings import read_toml
from shardline.pipelines.spec import OWN_PIPELINES, TUNE, all_tasks, declared_parameters, defaults
from shardline.trainer.base import files, plugins
from shardline.trainer.base.deserialize import did_you_mean, field_types
from shardline.trainer.base.errors import (
    ModelError,
    PipelineError,
    SettingsError,
    ShardlineError,
    SourceError,
    error_prefix,
    page,
)
from shardline.trainer.base.settings import TrainSettings

#: Whole numbers travel as doubles, here as on the platform.
_LARGEST_INTEGER = 2**53


def read_parameters(path: Path) -> dict[str, Any]:
    """Returns the parameters in a TOML file: names and values, tables and arrays for objects and lists.

    A file in a directory params/ overrides the params.toml beside this directory, if there is one.

    Raises SettingsError when there is no such file, it is not TOML, or a value cannot be JSON.
    """
    parameters = read_toml(path, f"no parameter file {path}; it has lines NAME = VALUE (TOML)")
    with error_prefix(f"{path}: "):
        check_json(parameters)
    folder = path.absolute().parent
    shared = folder.parent / "params.toml"
    return (read_parameters(shared) if folder.name == "params" and shared.is_file() else {}) | parameters


def check_json(parameters: Mapping[str, Any]) -> None:
    """Checks that values of a TOML file can be JSON; SettingsError when one cannot."""
    for name, value in parameters.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise SettingsError(
                f"{name} is {truncate(str(value), 80)}, which JSON cannot hold; "
                "write finite numbers, and dates and times in quotes"
            ) from None


#: Parameters of our pipelines that hold further fields of a dataclass, and those fields.
_OPTIONS: dict[str, tuple[Any, Collection[str]]] = {
    "data_options": (
        PreprocessSettings,
        [key for key in field_types(PreprocessSettings) if key != "readers"],
    ),
    "train_options": (TrainSettings, OPTIONS),
    "gate_options": (Gate, field_types(Gate)),
}
#: Types of the fields, as those of parameters.
_KINDS: dict[Any, str] = {
    **{str: "STRING", int: "NUMBER_INTEGER", float: "NUMBER_DOUBLE", bool: "BOOLEAN", tuple: "LIST"},
    typing.Literal: "STRING",
    types.UnionType: "STRING_OR_STRUCT",  # no type of KFP: class_weights is balanced, or an object
}


def option_declarations(spec: Mapping[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Returns the options of our own pipelines by name: the parameter that holds it, and its declaration."""
    known, found = declared_parameters(spec), {}
    if spec["pipelineInfo"]["name"] in OWN_PIPELINES:
        for parameter, (kind, names) in _OPTIONS.items():
            for name in [name for name in names if parameter in known and name not in known]:
                found[name] = (parameter, field_declaration(kind, name))
    return found


def field_declaration(kind: Any, name: str, *, item: bool = False) -> dict[str, Any]:
    """Returns the declaration of a parameter for a field of a dataclass, or for an `item` of its mapping."""
    hint = field_types(kind)[name]
    if item and typing.get_origin(hint) is Mapping:
        hint = typing.get_args(hint)[1]
    return {"parameterType": _KINDS.get(typing.get_origin(hint) or hint, "STRUCT")}


def fold_options(spec: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Puts a value whose name is an option, encoding=jpeg, into the parameter that holds it, data_options.

    For our own pipelines. A value of another type stays as it is: `check_parameters` reports it.
    """
    known, folded = declared_parameters(spec), dict(given)
    for name, (parameter, declaration) in option_declarations(spec).items():
        if name in given:
            with contextlib.suppress(PipelineError):
                value = convert(name, given[name], declaration)
                before = folded.get(parameter, known[parameter].get("defaultValue", {}))
                folded[parameter] = {**convert(parameter, before, known[parameter]), name: value}
                del folded[name]
    return folded


def check_parameters(spec: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters converted to their declared types: str, int, float, bool, dict or list.

    Values are texts, as on a command line, or of the declared type; options are folded as by `fold_options`.
    Raises PipelineError when one is unknown, mistyped, not one of its literals, or missing.
    """
    known, given = declared_parameters(spec), fold_options(spec, parameters)
    takes = known | {name: declaration for name, (_, declaration) in option_declarations(spec).items()}
    if (unknown := next((name for name in given if name not in takes), None)) is not None:
        listing = ", ".join(f"{other} ({_type_of(item)})" for other, item in known.items())
        hint = did_you_mean(unknown, takes) or f"it has {listing or 'none'}"
        raise PipelineError(f"the pipeline has no parameter {unknown!r}; {hint}")
    for name, declaration in known.items():
        if name not in given and "defaultValue" not in declaration and not declaration.get("isOptional"):
            raise PipelineError(
                f"the parameter {name} ({_type_of(declaration)}) has no default and must be set"
            )
    return {name: convert(f"the parameter {name}", value, takes[name]) for name, value in given.items()}


#: Type of each kind of parameter, and its name in messages; either of two is a text unless it begins with {.
_TYPES: dict[str, tuple[Any, str]] = {
    "STRING": (str, "str"),
    "NUMBER_INTEGER": (int, "int"),
    "NUMBER_DOUBLE": (float, "float"),
    "BOOLEAN": (bool, "bool"),
    "STRUCT": (dict, "a JSON object"),
    "STRING_OR_STRUCT": (None, "str or a JSON object"),
    "LIST": (list, "a JSON array"),
}


def convert(name: str, value: Any, declaration: Mapping[str, Any]) -> Any:
    """Returns the value of a named parameter or option with its declared type; PipelineError for another."""
    kind = declaration["parameterType"]
    if kind not in _TYPES:
        raise PipelineError(f"{name} is of type {kind}, which cannot be passed")
    shown = truncate(repr(value), 80)
    try:
        converted = _convert(_TYPES[kind][0], value)
    except (ValueError, OverflowError, PipelineError) as error:
        reason = f" ({error})" if str(error) else ""
        raise PipelineError(f"{name} is declared as {_type_of(declaration)}, got {shown}{reason}") from None
    literals = declaration.get("literals")
    if literals and converted not in literals:
        raise PipelineError(f"{name} is one of {', '.join(map(str, literals))}, got {shown}")
    return converted


def _convert(kind: Any, value: Any) -> Any:
    """Returns a value, or what a text of a command line says, as of a type; else an error with the reason."""
    if kind is None:
        kind = str if isinstance(value, str) and not value.lstrip().startswith("{") else dict
    if isinstance(value, str):
        if kind is str and "\0" in value:
            raise ValueError("a NUL character cannot be passed on")
        if kind is str and value.encode(errors="ignore").decode() != value:
            raise ValueError("it is not valid UTF-8")
        if kind in (dict, list):
            value = files.parse_json(value, "it", PipelineError)
        elif kind is bool:
            value = {"true": True, "false": False}.get(value.strip().lower(), value)
        elif kind is float or (kind is int and re.fullmatch(r"\s*[+-]?[0-9]+\s*", value)):
            with contextlib.suppress(ValueError):
                value = kind(value)  # int() alone takes 1_000
    if kind in (int, float) and type(value) in (int, float):
        if not math.isfinite(value):
            raise ValueError("it must be finite")
        if kind is int and abs(value) > _LARGEST_INTEGER:
            raise ValueError("whole numbers are exact up to 2**53 only")
        if kind is float or value == int(value):
            return kind(value)
    elif kind not in (int, float) and isinstance(value, kind):
        return value
    raise ValueError("write true or false" if kind is bool and isinstance(value, str) else "")


def _type_of(declaration: Mapping[str, Any]) -> str:
    kind = str(declaration["parameterType"])
    return _TYPES[kind][1] if kind in _TYPES else kind


def check_values(
    name: str, parameters: Mapping[str, Any], *, here: bool, packed: Container[str] = ()
) -> None:
    """Checks the values of all parameters of one of `OWN_PIPELINES`.

    With `here`, data and model must be on this machine, but for plug-ins of `packed` packages; plug-ins that
    are here are checked in any case. The steps check the values again; this check comes before any cost.
    Loads neither TensorFlow nor the user's own code.

    Raises:
        PipelineError: When a pipeline of this name lacks parameters.
        SettingsError: When a value is out of range, or the study is wrong.
        SourceError, ModelError: When there is no such source or model.
    """
    data, training, gate = _settings(parameters)
    function = plugins.import_string(training.model)
    absent = packed if here else None
    _check_plugin(function, "model", ModelError, absent)
    if here:
        if os.path.exists(gate.champion_uri) or gate.champion_uri.startswith("models:/"):
            require_store(gate.champion_uri)
        if (run := parameters.get("continue_run", "")) and "/" not in run:
            raise SettingsError(
                f"continue_run is {run!r}, a run on the platform; here use 'shardline run --resume RUN', "
                "or a directory with checkpoints as continue_run"
            )
    source = parameters["source"]
    fill_in_date(source, datetime.datetime.now(datetime.UTC))
    # {date} is known at run time only, and a bucket may not be accessible from this machine.
    is_remote = any(part in source for part in ("{date", "{last ", "://", ":/gcs/"))
    if here and not is_remote and (source.startswith(("images:", "text:")) or ":" not in source):
        open_source(data)
    elif is_plugin(source):
        _check_plugin(source, "source", SourceError, absent)
    if name == TUNE:
        for count in ("max_trial_count", "trial_epochs"):
            if parameters[count] < 0:
                raise SettingsError(f"{count} must not be negative, got {parameters[count]}")
        study = read_study(parse_study(parameters["study"]), max_trial_count=parameters["max_trial_count"])
        check_tuned(study.types, training.tuning_metric)


def _check_plugin(
    reference: str, kind: str, error: type[ShardlineError], absent: Container[str] | None
) -> None:
    """Checks a plug-in whose package is here; it may be absent, where None any package."""
    package = re.split("[.:]", reference)[0]
    if is_own(package) or (absent is not None and package not in absent):  # an installed one may be older
        plugins.check_reference(reference, kind, error)


def _settings(parameters: Mapping[str, Any]) -> tuple[PreprocessSettings, TrainSettings, Gate]:
    try:
        return read_settings({**parameters, "model_function": parameters["model"], "readers": 1})
    except KeyError as missing:
        raise PipelineError(
            f"the pipeline is named as one of Shardline's ({', '.join(OWN_PIPELINES)}), and has no parameter "
            f"{missing.args[0]}; compile it with this release, or rename it"
        ) from None


def rehearsal_arguments(
    spec: Mapping[str, Any], parameters: Mapping[str, Any]
) -> tuple[TrainSettings, Gate, int, int]:
    """Returns the inputs of a rehearsal of one of our pipelines: settings, readers and parameter_servers.

    Raises PipelineError when the pipeline has no rehearsal, or a parameter is unknown or mistyped, and
    SettingsError when a value is out of range.
    """
    inputs = [
        task["inputs"]["parameters"]
        for name, task in all_tasks(spec)
        if name == "rehearse" and spec["pipelineInfo"]["name"] in OWN_PIPELINES
    ]
    if not inputs:
        raise PipelineError("the pipeline has no task 'rehearse'; compile it with this release")
    _, training, gate = _settings(defaults(spec) | check_parameters(spec, parameters))
    names = ("readers", "parameter_servers")
    readers, servers = (int(inputs[0][name]["runtimeValue"]["constant"]) for name in names)
    return training, gate, readers, servers


def load_study(path: Path) -> str:
    """Returns a study file as JSON, for the parameter "study"; settings/tune.toml shows all of its keys.

    Raises SettingsError when the file is missing, is not TOML, or is not a valid study.
    """
    content = read_toml(path, f"no study file {path}; {page('tuning')} shows one to start from")
    with error_prefix(f"{path}: "):
        check_tuned(read_study(content).types)
    return json.dumps(content, ensure_ascii=False)


def describe_proof(
    runs_dir: Path, required: bool, content: bytes, values: Mapping[str, Any] | None = None
) -> str:
    """Returns in one line whether a file of this content has run on this machine, and the outcome.

    It names the run that succeeded with most of `values` (all parameters of the run to come), or else the
    newest, and the parameters that had other values. Raises PipelineError where a success is `required`
    (--proven) and there is none.
    """
    digest = hashlib.sha256(content).hexdigest()
    same = [run for run in RunDirectory.newest(runs_dir, 1000) if run.sha256 == digest]

    def others(run: Run) -> list[str]:
        return [key for key, value in sorted((values or {}).items()) if run.parameters.get(key) != value]

    # Runs that ended as unchanged come last: they prove least.
    succeeded = sorted(
        (run for run in same if run.state == "succeeded"),
        key=lambda run: (run.verdict == "unchanged", len(others(run))),
    )
    if not same:
        line = f"this file (sha256 {digest[:12]}) has not run here, in {runs_dir}"
    else:
        times = "once" if len(same) == 1 else f"{len(same)} times"
        run = [*succeeded, *same][0]
        outcome = ", ".join(filter(None, (run.verdict, quality(run.metrics))))
        line = f"this file has run here {times}: {run.name} {run.state} ({outcome or 'no verdict'})"
        line += f", with other values of {', '.join(named)}" if (named := others(run)) else ""
    if required and not succeeded:
        raise PipelineError(
            f"{line}; --proven requires a run that succeeded: 'shardline run PIPELINE' starts one"
        )
    return line
