"""Rules about the pipeline's parameters and the values that a run gives them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from shardline.pipelines.check.pipeline import Parameter, Pipeline
from shardline.pipelines.check.registry import error, warning
from shardline.pipelines.parameters import check_parameters
from shardline.trainer.errors import PipelineError

#: Types that a parameter has in IR 2.1; it was `type: STRING` up to 2.0.
_TYPES = ("STRING", "NUMBER_INTEGER", "NUMBER_DOUBLE", "BOOLEAN", "LIST", "STRUCT")


@error("SL601", Pipeline, fix="give only parameters that the pipeline has")
def given_parameters_are_declared(pipeline: Pipeline) -> Iterator[str]:
    """A run gives only parameters that the pipeline has.

    Source: google.cloud.aiplatform, PipelineRuntimeConfigBuilder: it raises on a name it does not know.
    """
    known = [parameter.name for parameter in pipeline.parameters]
    for name in pipeline.given or ():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known) or 'none'}"
            yield f"the pipeline has no parameter {name!r}; {hint}"


@error("SL602", Parameter, fix="give a value of the declared type")
def given_value_has_its_type(parameter: Parameter) -> Iterator[str]:
    """A value is of the type that its parameter declares.

    Source: kubeflow/pipelines, pipeline_spec.proto: ParameterType; the SDK does not compare types.
    """
    given = parameter.pipeline.given or {}
    if parameter.name in given:
        yield from _mistyped(parameter, given[parameter.name])


@error("SL603", Parameter, fix="give it: --param NAME=VALUE")
def required_parameter_is_given(parameter: Parameter) -> Iterator[str]:
    """A run gives every parameter that has no default.

    Source: kubeflow/pipelines, pipeline_spec.proto: ComponentInputsSpec; the SDK does not look.
    """
    given = parameter.pipeline.given
    declaration = parameter.declaration
    required = declaration.get("defaultValue") is None and not declaration.get("isOptional")
    if given is not None and required and parameter.name not in given:
        yield f"the parameter {parameter.name} has no default and is not given"


@error("SL604", Parameter, fix="give the parameter a default of its type")
def default_has_its_type(parameter: Parameter) -> Iterator[str]:
    """A default is of the type that its parameter declares.

    Source: kubeflow/pipelines, pipeline_spec.proto: ComponentInputsSpec.ParameterSpec.
    """
    if parameter.declaration.get("defaultValue") is not None:
        yield from _mistyped(parameter, parameter.declaration["defaultValue"])


@warning("SL605", Parameter, fix="annotate it with str, int, float, bool, list or dict")
def type_is_known(parameter: Parameter) -> Iterator[str]:
    """A parameter is of a type that a run can be given.

    Source: kubeflow/pipelines, pipeline_spec.proto: ParameterType.
    """
    kind = parameter.declaration.get("parameterType")
    if kind is not None and kind not in _TYPES:
        yield f"the parameter {parameter.name} is of type {kind}"


def _mistyped(parameter: Parameter, value: Any) -> Iterator[str]:
    declaration = dict(parameter.declaration)
    if declaration.get("parameterType") not in _TYPES:
        return
    alone = {"root": {"inputDefinitions": {"parameters": {parameter.name: declaration}}}}
    try:
        check_parameters(alone, {parameter.name: value})
    except PipelineError as error_found:
        yield str(error_found)
