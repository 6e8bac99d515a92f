"""Process in which stock kfp.local runs a localized pipeline: `python -m shardline.pipelines.local.execute`.

A separate process keeps kfp's output, its warnings and its patched `print` out of the command's, and is the
one process to end in order to stop a run.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from shardline.components.runs import RunDirectory
from shardline.pipelines.local import kfp_internals, process
from shardline.trainer.base import files, progress
from shardline.trainer.base.errors import PipelineError, RunError, SettingsError

#: Topic of this process's own errors; a task's error says more.
TOPIC = "pipeline"

#: Codes that colour a text in a terminal.
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def main(pipeline: str, parameters: str, root: str, scratch: str, *modules: str) -> None:
    """Runs the pipeline in a localized YAML file with the parameters in a JSON file.

    Outputs of tasks are below `root`. The directory `scratch` is for temporary files, and removed at the end
    by this process or by the one that created it. The modules are those of the fork server.
    """

    def end(signum: int, _frame: FrameType | None) -> None:
        signal.signal(signum, signal.SIG_IGN)
        process.stop_descendants()
        shutil.rmtree(scratch, ignore_errors=True)
        # Not SystemExit: kfp would wait for its threads, which may start the next task.
        os._exit(128 + signum)

    process.exit_with_parent(os.getppid(), signal.SIGTERM)
    signal.signal(signal.SIGTERM, end)
    # Lightweight components leave their source in temporary files.
    os.environ["TMPDIR"] = tempfile.tempdir = scratch
    kfp_internals.keep_python3_in_texts()
    kfp_internals.hide_directory_docker()
    kfp_internals.skip_client_import()
    try:
        text = files.read_text(Path(pipeline), PipelineError)
        # It loads TensorFlow for later tasks, while the first tasks, without TensorFlow, run.
        with process.adopted_orphans(), progress.exit_on_error(TOPIC), process.start_fork_server(modules):
            _run_localized(text, files.read_json(Path(parameters), PipelineError), root)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run_localized(pipeline: str, parameters: dict[str, Any], root: str) -> None:
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
    kfp_internals.pass_values_as_the_platform_does()
    kfp_internals.run_loops_as_the_platform_does()
    kfp_internals.run_commands_by(_run_command)
    kfp_internals.resolve_imports_in(RunDirectory(Path(root).parent).buckets)
    skipped = kfp_internals.SkippedConditions()
    logging.getLogger().addHandler(skipped)
    try:
        components.load_component_from_text(pipeline)(**parameters)
    except RuntimeError as error:
        text = COLOUR.sub("", str(error))
        task = kfp_internals.failed_task(text)
        raise RunError(f"the task {task} failed" if task else text) from None
    except Exception as error:  # kfp.local raises any exception
        for line in traceback.format_exc().splitlines():
            print(f"kfp.local: {line}")
        raise RunError(f"kfp.local cannot run the pipeline: {type(error).__name__}: {error}") from None
    if skipped.reasons:
        raise RunError(
            f"kfp.local could not evaluate a condition and skipped its tasks: {skipped.reasons[0]}; "
            "conditions on booleans and numbers can be evaluated, free text and unset parameters cannot"
        )


def _run_command(full_command: list[str], env_vars: Mapping[str, str] | None = None) -> int:
    """Runs the command of a task as kfp.local does, but guarded, and forked where that is possible."""
    launch = process.Launch(full_command, {**os.environ, **(env_vars or {})})
    # A job stops its own replicas first.
    task = process.GuardedProcess(launch, lambda line: print(line.replace("\r", "\n")), grace=7)
    code = task.run_to_end()
    print("\n")
    return code


if __name__ == "__main__":
    with progress.exit_on_error(TOPIC):
        if len(sys.argv) < 5:
            raise SettingsError("arguments are PIPELINE PARAMETERS ROOT SCRATCH, as of 'shardline run'")
        main(*sys.argv[1:])
