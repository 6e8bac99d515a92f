"""What a local run relies on, or works around, in kfp.local: a failure here says that it has changed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shardline.pipelines.local import kfp_internals

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]


@pytest.mark.parametrize(
    ("call", "loaded"), [("kfp_internals", True), ("kfp_internals.skip_client_import()", False)]
)
def test_kfp_loads_its_client_unless_it_is_left_out(call: str, loaded: bool) -> None:
    program = f"""
import sys
from shardline.pipelines.local import kfp_internals
{call}
from kfp import components, local
print("kubernetes" in sys.modules, callable(components.load_component_from_text))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == f"{loaded} True\n"


def test_kfp_local_takes_commands_that_name_its_executor() -> None:
    from kfp import local
    from kfp.local.subprocess_task_handler import SubprocessTaskHandler

    def accept(command: list[str]) -> None:
        SubprocessTaskHandler("python:3.11", command, "/root", local.SubprocessRunner(use_venv=False))

    accept(["python3", "-u", "-m", "shardline.pipelines.local.launcher_stubs", kfp_internals.MARKER])
    with pytest.raises(RuntimeError, match="Container Component"):
        accept(["python3", "-u", "-m", "shardline.pipelines.local.launcher_stubs"])


def test_kfp_local_replaces_python3_in_values() -> None:
    from kfp.local.subprocess_task_handler import replace_python_executable

    assert replace_python_executable(["-m", "a python3 here"], "/bin/x") == ["-m", "a /bin/x here"]


def test_kfp_local_finds_named_outputs_by_two_hyphens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "docker", None)
    from kfp.local.orchestrator.enhanced_dag_orchestrator import ConditionEvaluator

    class Outputs:
        def get_task_output(self, task: str, name: str) -> bool:
            return {("judge", "blessed"): True}[task, name]

        def get_parent_input(self, name: str) -> bool:
            raise KeyError(name)

    find = ConditionEvaluator._resolve_pipeline_channel
    assert find("pipelinechannel--judge--blessed", Outputs()) is True
    assert find("pipelinechannel--judge-blessed", Outputs()) is None


def test_kfp_local_imports_a_bucket_by_its_address_and_orders_tasks_by_what_is_written_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "docker", None)
    from kfp.local import graph_utils, importer_handler
    from kfp.pipeline_spec import pipeline_spec_pb2

    importer = pipeline_spec_pb2.PipelineDeploymentConfig.ImporterSpec()
    importer.artifact_uri.constant.string_value = "gs://b/x"
    with pytest.warns(UserWarning, match="remote file"):
        assert importer_handler.get_importer_uri(importer, pipeline_spec_pb2.ExecutorInput()) == "gs://b/x"

    taker, maker = pipeline_spec_pb2.PipelineTaskSpec(), pipeline_spec_pb2.PipelineTaskSpec()
    taker.inputs.parameters["x"].task_output_parameter.producer_task = "maker"
    assert graph_utils.topological_sort_tasks({"taker": taker, "maker": maker}) == [
        "maker",
        "taker",
    ]  # a stack


def test_kfp_local_takes_any_module_docker_for_the_client() -> None:
    program = "import sys, types\nsys.modules['docker'] = types.ModuleType('docker')\n"
    load = "import kfp.local.task_dispatcher"
    done = subprocess.run([sys.executable, "-c", program + load], capture_output=True, text=True)
    assert "AttributeError" in done.stderr
