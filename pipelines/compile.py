"""The compiled pipeline: one YAML, the same bytes whenever and wherever it is compiled."""

from __future__ import annotations

import tempfile
from pathlib import Path

from kfp import compiler

from pipelines.check.findings import Finding
from pipelines.check.load import parse
from pipelines.check.run import refuse_errors
from pipelines.retrain import retrain_pipeline
from pipelines.settings import Settings
from trainer import files
from trainer.errors import PipelineError


def compile_pipeline(settings: Settings) -> str:
    """Returns the YAML of the retraining pipeline for one environment."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "pipeline.yaml"
        compiler.Compiler().compile(retrain_pipeline(settings), str(path))
        return path.read_text(encoding="utf-8")


def write(settings: Settings, output: Path) -> tuple[bool, list[Finding]]:
    """Compiles into a file.

    Returns:
        Whether its content changed, and the warnings of `shardline check`.

    Raises:
        PipelineError: When the pipeline has errors that `shardline check` finds.
    """
    text = compile_pipeline(settings)
    warnings = refuse_errors(parse(text, output).spec)
    if output.is_file() and output.read_text(encoding="utf-8") == text:
        return False, warnings
    output.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(output, text)
    return True, warnings


def check(settings: Settings, output: Path) -> None:
    """Checks that a compiled file is what the code compiles to.

    Raises:
        PipelineError: When it is missing or differs.
    """
    text = compile_pipeline(settings)
    if not output.is_file():
        raise PipelineError(f"no compiled pipeline {output}; write it with 'shardline compile'")
    if output.read_text(encoding="utf-8") != text:
        raise PipelineError(f"{output} differs from what the code compiles to; run 'shardline compile'")
