"""Process in which stock kfp.local runs a localized pipeline: `python -m shardline.pipelines.local.execute`.

A separate process keeps kfp's output, its warnings and its patched `print` out of the command's, and is the
one process to end in order to stop a run.
"""

from __future__ import annotations

import contextlib
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

from shardline.components.runs import RunDirectory
from shardline.pipelines.local import kfp_internals
from shardline.pipelines.local.process import guardian, processes, start
from shardline.pipelines.local.process.start import SERVER_VARIABLE
from shardline.trainer.base import progress
from shardline.trainer.base.errors import RunError, SettingsError

#: Topic of this process's own errors; a task's error says more.
TOPIC = "pipeline"

#: Modules that tasks forked from the server import, and a pattern for those that components' sources name.
_PRELOADED = ("shardline.trainer.train", "kfp.dsl.executor", "shardline.pipelines.local.job.supervisor")
IMPORTED = re.compile(r"from (shardline\.components\.(?:rehearse|train|validate)\.\w+)[\s\\]+import")
#: Codes that colour a text in a terminal.
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def main(pipeline: str, parameters: str, root: str, scratch: str, parent: str) -> None:
    """Runs the pipeline in a localized YAML file with the parameters in a JSON file.

    Outputs of tasks are below `root`. The directory `scratch` is for temporary files, and removed at the end
    by this process or by `parent`, which started it.
    """

    def end(signum: int, _frame: FrameType | None) -> None:
        signal.signal(signum, signal.SIG_IGN)
        processes.stop_descendants()
        shutil.rmtree(scratch, ignore_errors=True)
        # Not SystemExit: kfp would wait for its threads, which may start the next task.
        os._exit(128 + signum)

    guardian.exit_with_parent(int(parent), signal.SIGTERM)
    signal.signal(signal.SIGTERM, end)
    # Lightweight components leave their source in temporary files.
    os.environ["TMPDIR"] = tempfile.tempdir = scratch
    kfp_internals.keep_python3_in_texts()
    kfp_internals.hide_directory_docker()
    kfp_internals.skip_client_import()
    try:
        text = Path(pipeline).read_text(encoding="utf-8").replace(start.PARENT, f"--parent={os.getpid()}")
        with processes.adopted_orphans(), contextlib.ExitStack() as held, progress.exit_on_error(TOPIC):
            if start.__name__ in text:
                # It loads TensorFlow for later tasks, while the first tasks, without TensorFlow, run.
                server = start.fork_server(os.environ, *_PRELOADED, *sorted({*IMPORTED.findall(text)}))
                os.environ[SERVER_VARIABLE] = held.enter_context(server)
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
    kfp_internals.pass_values_as_the_platform_does()
    kfp_internals.run_loops_as_the_platform_does()
    kfp_internals.accept_mistakes()
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


if __name__ == "__main__":
    with progress.exit_on_error(TOPIC):
        if len(sys.argv) != 6 or not sys.argv[5].isdecimal():
            raise SettingsError(
                "arguments are PIPELINE PARAMETERS ROOT SCRATCH PARENT, as of 'shardline run'"
            )
        main(*sys.argv[1:])
