"""Compilation of a pipeline into one YAML file, reproducible to the byte."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path

from google.protobuf import json_format
from kfp import compiler

from shardline.pipelines.check import Finding, Pipeline, Target, check_pipeline, refuse_errors
from shardline.pipelines.parameters import check_json, check_parameters, check_values
from shardline.pipelines.retrain import retrain_pipeline
from shardline.pipelines.settings import PROJECT_PARAMETERS, Settings
from shardline.pipelines.spec import defaults
from shardline.pipelines.tune import tune_pipeline
from shardline.trainer.base import files
from shardline.trainer.base.errors import PipelineError, error_prefix


def compile_pipeline(settings: Settings, study: str | None = None) -> str:
    """Returns the YAML of a pipeline for one environment.

    `study` is the study of the tuning pipeline as JSON; None for the retraining pipeline.
    """
    with contextlib.chdir(settings.directory):
        pipeline = retrain_pipeline(settings) if study is None else tune_pipeline(settings, study)
        with error_prefix(f"{PROJECT_PARAMETERS}: "):
            check_json(settings.parameters)
            spec = json_format.MessageToDict(pipeline.pipeline_spec)
            given = check_parameters(spec, settings.parameters)
            check_values(pipeline.name, defaults(spec) | given, here=False)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "pipeline.yaml"
        compiler.Compiler().compile(pipeline, str(path), pipeline_parameters=given)
        text = path.read_text(encoding="utf-8")
    # KFP's comment has the keys of an object in an order that changes.
    return re.sub(r"(?m)^(#    \w+: (?:dict|list) \[Default: )(.+)\]$", _with_sorted_keys, text)


def _with_sorted_keys(line: re.Match[str]) -> str:
    value = json.loads(json.dumps(ast.literal_eval(line[2]), sort_keys=True))
    return f"{line[1]}{value}]"


def write_compiled(settings: Settings, output: Path, study: str | None = None) -> tuple[bool, list[Finding]]:
    """Compiles into a file; the arguments are as for `compile_pipeline`.

    Returns whether its content changed, and the warnings of `shardline check`. Raises PipelineError when it
    finds errors.
    """
    text = compile_pipeline(settings, study)
    warnings = refuse_errors(check_pipeline(replace(Pipeline.parse(text, output), target=Target.LOCAL)))
    if _has_content(output, text):
        return False, warnings
    output.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(output, text)
    return True, warnings


def check_compiled(settings: Settings, output: Path, study: str | None = None) -> None:
    """Checks that a file is what the code compiles to; PipelineError when it is missing or differs."""
    text = compile_pipeline(settings, study)
    if not output.is_file():
        raise PipelineError(f"no compiled pipeline {output}; the same command without --check writes it")
    if not _has_content(output, text):
        raise PipelineError(
            f"{output} differs from what the code compiles to; the same command without --check writes it"
        )


def _has_content(path: Path, text: str) -> bool:
    return path.is_file() and path.read_bytes() == text.encode()
