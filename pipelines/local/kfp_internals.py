"""Internals of KFP that a local run relies on or works around.

Checked with kfp 2.17; tests/e2e/test_kfp_internals.py fails when one of these has changed. Files are in
kfp/local, unless another path is named.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import logging
import os
import re
import sys
import threading
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardline.trainer.base import files
from shardline.trainer.base.deserialize import restore_integers
from shardline.trainer.base.errors import EXIT_BAD_INPUT
from shardline.trainer.base.progress import report

#: Module that runs a component's function.
EXECUTOR = "kfp.dsl.executor_main"
#: Argument that makes kfp.local accept any command: it refuses container components, which lack this word
#: (subprocess_task_handler.py, `validate_not_container_component`).
MARKER = f"--marker={EXECUTOR}"

#: The script that starts a lightweight component, word by word (kfp/dsl/component_factory.py); another before
#: it installs packages.
_SCRIPT = f"""
program_path=$(mktemp -d)
printf "%s" "$0" > "$program_path/ephemeral_component.py"
_KFP_RUNTIME=true python3 -m {EXECUTOR} --component_module_path "$program_path/ephemeral_component.py" "$@"
""".split()


def component_source(command: Sequence[str]) -> str | None:
    """Returns the source of the component that a command runs, None for other commands; arguments follow."""
    if list(command[:2]) == ["sh", "-ec"] and len(command) > 3 and command[2].split() == _SCRIPT:
        return command[3]
    return None


def split_installation(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the packages that a lightweight component installs with pip, and its command without that."""
    if list(command[:2]) != ["sh", "-c"] or component_source(command[3:]) is None:
        return [], list(command)
    quoted = re.findall(r"'([^']*)'", command[2])
    return [word for word in quoted if not word.startswith("-")], list(command[3:])


def keep_python3_in_texts() -> None:
    """Keeps kfp.local from replacing "python3" everywhere in a command, values of parameters included.

    With this interpreter's directory first in PATH, the word already means it (subprocess_task_handler.py,
    `replace_python_executable`).
    """
    here = os.path.dirname(sys.executable)
    if os.access(os.path.join(here, "python3"), os.X_OK):
        os.environ["PATH"] = f"{here}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        sys.executable = "python3"


def hide_directory_docker() -> None:
    """Makes `import docker` fail where it would find no module.

    A mere directory of this name, which a repository often has, is imported as a namespace package and used
    as the Docker client (kubeflow/pipelines#12552; the fix, #12553, catches ImportError only).
    """
    spec = importlib.util.find_spec("docker")
    if spec is not None and spec.origin is None:
        sys.modules["docker"] = None  # type: ignore[assignment]


def skip_client_import() -> None:
    """Keeps `import kfp` from loading its client and that of Kubernetes, over half of its time."""
    client = types.ModuleType("kfp.client")
    client.Client = None  # type: ignore[attr-defined]
    sys.modules.setdefault("kfp.client", client)


def resolve_imports_in(buckets: Path) -> None:
    """Makes importers find objects of buckets in the local directory for /gcs/.

    kfp.local makes /gcs/ of gs://, although tasks write elsewhere (importer_handler.py, `get_importer_uri`).
    Where there is no such object, tasks receive the URI, as from kfp.local, and a line reports it.
    """
    from kfp.local import importer_handler

    stock = importer_handler.get_importer_uri

    def local_uri(*args: Any, **kwargs: Any) -> str:
        uri = str(stock(*args, **kwargs))
        if not re.match(r"(?!gs:|file:)\w+://", uri):
            path = files.local_path(uri.removeprefix("file://"))
            if path.is_relative_to("/gcs") and not path.exists():
                path = buckets / path.relative_to("/gcs")
            if path.exists():
                return str(path)
        report("import", f"{uri} is not on this machine: tasks find nothing at the artifact's path")
        return uri

    importer_handler.get_importer_uri = local_uri


def pass_values_as_the_platform_does() -> None:
    """Makes tasks receive whole numbers, null and resolved texts as such, and unset inputs not at all.

    Otherwise whole numbers inside texts, lists and objects, and items of loops, become floats; null is
    refused; an unset int fails; placeholders inside lists and objects stay (executor_input_utils.py,
    placeholder_utils.py, kfp/compiler/pipeline_spec_builder.py).
    """
    from google.protobuf import json_format, struct_pb2
    from kfp.compiler import pipeline_spec_builder
    from kfp.local import executor_input_utils, placeholder_utils
    from kfp.pipeline_spec import pipeline_spec_pb2

    double = pipeline_spec_pb2.ParameterType.NUMBER_DOUBLE
    stock = pipeline_spec_builder.to_protobuf_value
    resolve = placeholder_utils.recursively_resolve_json_dict_placeholders

    def to_value(value: Any) -> Any:
        return struct_pb2.Value(null_value=struct_pb2.NULL_VALUE) if value is None else stock(value)

    def to_dict(executor_input: Any, component_spec: Any) -> dict[str, Any]:
        content: dict[str, Any] = json_format.MessageToDict(executor_input)
        values = content.get("inputs", {}).get("parameterValues", {})
        declared = component_spec.input_definitions.parameters
        for name in list(values):
            if values[name] is None and name in declared:
                values[name] = json_format.MessageToDict(declared[name].default_value)
            if values[name] is None:
                del values[name]
            elif name not in declared or declared[name].parameter_type != double:
                values[name] = restore_integers(values[name])
        return content

    def resolve_values(executor_input_dict: dict[str, Any], **names: Any) -> dict[str, Any]:
        values = executor_input_dict.get("inputs", {}).get("parameterValues", {})
        for name in values:
            values[name] = resolve(values[name], executor_input_dict=executor_input_dict, **names)
        return executor_input_dict

    pipeline_spec_builder.to_protobuf_value = to_value
    executor_input_utils.executor_input_to_dict = to_dict
    placeholder_utils.resolve_self_references_in_executor_input = resolve_values


def run_loops_as_the_platform_does() -> None:
    """Makes loops run over any list, with their item in the place of their item alone.

    In orchestrator/, a loop over an output that is not named "Output" fails, its item takes the place of all
    outputs of other tasks and of outer loops' items, a condition on it sees the whole list, and a loop
    without items has no outputs.
    """
    from kfp.compiler import pipeline_spec_builder
    from kfp.local.orchestrator import enhanced_dag_orchestrator, orchestrator_utils, task_spec_utils

    stock = enhanced_dag_orchestrator._run_parallel_for_task
    evaluator = enhanced_dag_orchestrator.ConditionEvaluator
    resolve = evaluator._resolve_pipeline_channel

    def run_loop(*, task_name: str, task_spec: Any, components: Any, io_store: Any, **others: Any) -> Any:
        outputs = components[task_spec.component_ref.name].output_definitions
        for name in [*outputs.parameters, *outputs.artifacts]:
            io_store.put_task_output(task_name, name, [])
        loop, name = copy.deepcopy(task_spec), task_spec.parameter_iterator.items.input_parameter
        if name in loop.inputs.parameters:
            given = orchestrator_utils.OrchestratorUtils.make_task_arguments(loop.inputs, io_store)
            loop.parameter_iterator.items.raw = json.dumps(given[name])
        return stock(task_name=task_name, task_spec=loop, components=components, io_store=io_store, **others)

    def iteration(loop: Any, item: Any, _: str) -> Any:
        made = copy.deepcopy(loop)
        value = made.inputs.parameters[loop.parameter_iterator.item_input].runtime_value.constant
        value.CopyFrom(pipeline_spec_builder.to_protobuf_value(item))
        made.ClearField("parameter_iterator")
        return made

    def resolve_input(name: str, io_store: Any) -> Any:
        try:
            return io_store.get_parent_input(name)
        except ValueError:
            return resolve(name, io_store)

    enhanced_dag_orchestrator._run_parallel_for_task = run_loop
    task_spec_utils.create_parameter_loop_iteration_task_spec = iteration
    evaluator._resolve_pipeline_channel = staticmethod(resolve_input)


class _MistakeError(Exception):
    """Ends the attempts of a task."""


def run_commands_by(start: Callable[..., int]) -> None:
    """Makes `start` run tasks' commands; a task that ended with EXIT_BAD_INPUT is not tried again.

    Its arguments are those of `run_local_subprocess` in subprocess_task_handler.py; the attempts are made in
    orchestrator/task_executor.py.
    """
    from kfp.local import status, subprocess_task_handler
    from kfp.local.orchestrator import task_executor

    execute, sleep = task_executor.execute_single_task, task_executor.time.sleep
    last = threading.local()

    def run_command(**options: Any) -> int:
        last.code = start(**options)
        return int(last.code)

    def pause(seconds: float) -> None:
        if last.code == EXIT_BAD_INPUT:
            raise _MistakeError
        sleep(seconds)

    def execute_once(**options: Any) -> Any:
        try:
            return execute(**options)
        except _MistakeError:
            return {}, status.Status.FAILURE

    subprocess_task_handler.run_local_subprocess = run_command
    task_executor.time = types.SimpleNamespace(sleep=pause)
    task_executor.execute_single_task = execute_once


class SkippedConditions(logging.Handler):
    """Collects the conditions that kfp.local cannot evaluate, and takes for false."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.reasons: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the orchestrator's warnings about conditions."""
        text = record.getMessage()
        if text.startswith(("Could not resolve", "Condition evaluation failed")):
            self.reasons.append(text)


def failed_task(text: str) -> str | None:
    """Returns the name of the task of a nested pipeline whose failure an error of kfp.local reports."""
    match = re.search(r"(?s)Inner task failed: (.*?)\.?$", text)
    return match[1] if match else None


def adapt_condition(task: dict[str, Any]) -> None:
    """Writes `pipelinechannel--TASK-NAME` in a task's condition as `pipelinechannel--TASK--NAME`.

    Otherwise only an output named "Output" is found, a condition on another counts as false, and the pipeline
    succeeds without its tasks (orchestrator/enhanced_dag_orchestrator.py; kubeflow/pipelines#13313). It is
    evaluated in Python, which has no `double()`, by which a whole number is compared with another.
    """
    policy = task.get("triggerPolicy", {})
    if "condition" not in policy:
        return
    for name, item in task.get("inputs", {}).get("parameters", {}).items():
        if output := item.get("taskOutputParameter"):
            channel = f"pipelinechannel--{output['producerTask']}--{output['outputParameterKey']}"
            policy["condition"] = policy["condition"].replace(f"['{name}']", f"['{channel}']")
    policy["condition"] = re.sub(r"\bdouble\(", "float(", policy["condition"])
