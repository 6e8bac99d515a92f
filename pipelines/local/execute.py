"""Process in which stock kfp.local runs a localized pipeline: `python -m shardline.pipelines.local.execute`.

It is a process of its own so that kfp's chatter, its warnings and its patched `print` stay out of the
command's own, and so that all of a run can be stopped at one place.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

from shardline.pipelines.local import preloaded, processes, start
from shardline.pipelines.local.custom_job import EXECUTOR_VARIABLE
from shardline.trainer import progress
from shardline.trainer.errors import RunError

#: Topic of the error that this process itself reports; a task's own error says more.
TOPIC = "pipeline"

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_INNER_TASK = re.compile(r"Inner task failed: (.*?)\.?$", re.DOTALL)


def main(pipeline: str, parameters: str, root: str, scratch: str, parent: str) -> None:
    """Runs the pipeline.

    Args:
        pipeline: Path of the localized YAML.
        parameters: Path of a JSON object: the pipeline parameters.
        root: Directory for the outputs of the tasks.
        scratch: Directory for temporary files; removed at the end, as the parent does, whoever is left.
        parent: Process id of the process that started this one.
    """
    processes.die_with_parent(int(parent))
    signal.signal(signal.SIGTERM, _ending(scratch))
    # Lightweight components leave their source behind among the temporary files.
    os.environ["TMPDIR"] = tempfile.tempdir = scratch
    os.environ[EXECUTOR_VARIABLE] = str(os.getpid())
    _keep_python3_in_texts()
    _hide_directory_docker()
    try:
        text = Path(pipeline).read_text(encoding="utf-8")
        forks = preloaded.loading(scratch) if start.__name__ in text else contextlib.nullcontext()
        with processes.adopted_orphans(), forks, progress.errors_end_the_process(TOPIC):
            _run(text, json.loads(Path(parameters).read_text()), root)
    finally:
        processes.stop_descendants()
        shutil.rmtree(scratch, ignore_errors=True)


def _run(pipeline: str, parameters: dict[str, Any], root: str) -> None:
    from kfp import components, local

    # Images, resources and display names have no effect here, and kfp says so for each task.
    warnings.filterwarnings("ignore", category=RuntimeWarning, message="You may be attemping to run")
    warnings.filterwarnings("ignore", category=UserWarning, message=".*no effect in the current local runner")
    local.init(
        local.SubprocessRunner(use_venv=False),
        pipeline_root=root,
        # kfp deletes it when the pipeline has ended.
        workspace_root=tempfile.mkdtemp(prefix="workspace-"),
        raise_on_error=True,
    )
    skipped = _SkippedConditions()
    logging.getLogger().addHandler(skipped)
    try:
        components.load_component_from_text(pipeline)(**parameters)
    except RuntimeError as error:
        text = _COLOUR.sub("", str(error))
        inner = _INNER_TASK.search(text)
        raise RunError(f"the task {inner.group(1)} failed" if inner else text) from None
    except Exception as error:  # kfp.local raises whatever it stumbles over
        for line in traceback.format_exc().splitlines():
            print(f"kfp.local: {line}")
        raise RunError(f"kfp.local cannot run the pipeline: {type(error).__name__}: {error}") from None
    if skipped.reasons:
        raise RunError(
            f"kfp.local could not evaluate a condition and skipped its tasks: {skipped.reasons[0]}; "
            "conditions on booleans and numbers can be evaluated, free text cannot"
        )


class _SkippedConditions(logging.Handler):
    """Notes where kfp.local takes a condition that it cannot evaluate for false, and goes on."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.reasons: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps what kfp's orchestrator says of a condition."""
        text = record.getMessage()
        if text.startswith(("Could not resolve", "Condition evaluation failed")):
            self.reasons.append(text)


def _hide_directory_docker() -> None:
    """Hides a mere directory called docker, which a repository often has, from kfp.local.

    Where it can be imported, as a namespace package, kfp.local takes it for the Docker client and fails.
    """
    found = importlib.util.find_spec("docker")
    if found is not None and found.origin is None:
        sys.modules["docker"] = None  # type: ignore[assignment]


def _keep_python3_in_texts() -> None:
    """Makes kfp.local leave "python3" alone.

    It replaces that word by the path of the interpreter wherever it stands in a task's command, the
    values of parameters included. With its own directory first in PATH the word already means this
    interpreter.
    """
    here = os.path.dirname(sys.executable)
    if os.access(os.path.join(here, "python3"), os.X_OK):
        os.environ["PATH"] = f"{here}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        sys.executable = "python3"


def _ending(scratch: str) -> Any:
    def end(signum: int, _frame: FrameType | None) -> None:
        signal.signal(signum, signal.SIG_IGN)
        processes.stop_descendants()
        shutil.rmtree(scratch, ignore_errors=True)
        # Not SystemExit: kfp would wait for its threads, which may start the next task meanwhile.
        os._exit(128 + signum)

    return end


if __name__ == "__main__":
    main(*sys.argv[1:])
