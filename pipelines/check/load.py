"""Files to check: compiled pipelines, ours or anybody's, and our settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardline.pipelines.check.ir import at
from shardline.pipelines.check.pipeline import Pipeline
from shardline.pipelines.spec import read_documents, read_pipeline
from shardline.trainer.errors import PipelineError

#: Larger than any pipeline that was seen (0.6 MB), and read in two seconds.
_LARGEST = 4 * 2**20


def load(path: Path, given: Mapping[str, Any] | None = None) -> Pipeline:
    """Reads a file for a check.

    Args:
        path: A pipeline as YAML or JSON, alone or in a PipelineJob; or settings (TOML), which are compiled.
        given: Parameters of the run, if they are known.

    Raises:
        PipelineError: When the file cannot be read, is too large, or is not a pipeline.
        SettingsError: When settings cannot be read.
    """
    if {".toml", ".example"} & {path.suffix}:
        return parse(_compiled(path), path, given)
    try:
        size = path.stat().st_size
    except OSError:
        size = 0  # the reader says what is wrong
    if size > _LARGEST:
        raise PipelineError(
            f"{path} is too large for a pipeline: {size:,} bytes, at most {_LARGEST:,}; is it the right file?"
        )
    return parse(read_pipeline(path), path, given)


def parse(content: bytes | str, path: Path, given: Mapping[str, Any] | None = None) -> Pipeline:
    """Reads the content of the pipeline file `path`; raises as `load` does."""
    documents = read_documents(content, path)
    first = documents[0] if documents else None
    if not isinstance(first, dict):
        raise PipelineError(f"{path} is not a compiled pipeline; write one with 'shardline compile'")
    runtime = at(first, "runtimeConfig")
    wrapped = at(first, "pipelineSpec")
    spec = wrapped or first
    missing = [key for key in ("pipelineInfo", "root", "deploymentSpec") if not at(spec, key)]
    if missing:
        kind = f" but a {first['kind']}" if "kind" in first else ""
        raise PipelineError(
            f"{path} is not a compiled pipeline{kind}: it has no {', '.join(missing)}; "
            "write one with 'shardline compile', or is it cut off?"
        )
    if given is None and "parameterValues" in runtime:
        given = at(runtime, "parameterValues")
    platforms = [name for document in documents[1:] for name in at(document, "platforms")]
    labels = at(first, "labels") if wrapped else None
    try:
        return Pipeline(spec, given, tuple(platforms), labels)
    except PipelineError as error:
        raise PipelineError(f"{path} is not a compiled pipeline: {error}") from None


def _compiled(path: Path) -> str:
    from shardline.pipelines import settings
    from shardline.pipelines.compile import compile_pipeline

    return compile_pipeline(settings.load(path))
