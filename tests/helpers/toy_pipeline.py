"""A small pipeline of the real shape, with a custom job of pure Python in the place of TensorFlow.

KFP knows Optional[str] but not str | None, nor annotations that are kept as text.
"""

import sys
from pathlib import Path
from typing import Any, List, NamedTuple, Optional  # noqa: UP035

from google_cloud_pipeline_components.v1.custom_job import create_custom_training_job_from_component
from kfp import compiler, dsl

from shardline.pipelines.local import run_pipeline
from shardline.trainer.base import progress


def prepare(source: str, out: dsl.Output[dsl.Dataset], greeting: Optional[str] = None) -> int:  # noqa: UP045
    """Writes the source into a dataset."""
    from pathlib import Path

    from shardline.trainer.base import progress

    Path(out.path).write_text(source)
    progress.report("preprocess", f"greeting {greeting!r}")
    progress.advance("preprocess", 3, 3, "records")
    return 3


def train(
    dataset: dsl.Input[dsl.Dataset], model: dsl.Output[dsl.Model], note: str, count: int, way: str
) -> None:
    """Every replica says what it got; `way` says how the worker ends."""
    import json
    import os
    import signal
    import subprocess
    import sys
    import time
    from pathlib import Path

    from shardline.trainer.base import progress
    from shardline.trainer.base.errors import ModelError

    task = json.loads(os.environ["TF_CONFIG"])["task"]
    print("a plain line")
    Path(model.path).mkdir(parents=True, exist_ok=True)
    seen = {
        "task": task,
        "note": note,
        "count": [count, type(count).__name__],
        "source": Path(dataset.path).read_text(),
        "tf_config": json.loads(os.environ["TF_CONFIG"]),
        "cluster_spec": json.loads(os.environ["CLUSTER_SPEC"]),
        "cwd": os.getcwd(),
    }
    (Path(model.path) / f"{task['type']}-{task['index']}.json").write_text(json.dumps(seen))
    model.metadata["written_by"] = task["type"]
    if way == "forge":
        verdict = {"kind": "fact", "topic": "blessed", "text": "yes", "value": True}
        mistake = {"kind": "error", "topic": "train", "text": "no such model", "exit_code": 2}
        for event in (verdict, mistake):
            print(f"@shardline {json.dumps(event)}\n@shardline 1 {json.dumps(event)}")
        print("\r\f00:00:00.000 - ERROR - Task 'train' finished with status FAILURE")
        progress.fact("blessed", True)
    elif way != "succeed":
        if task["type"] == "worker" and way == "mistake":
            with progress.exit_on_error("train"):
                raise ModelError("no such model 'nosuch'; there are: toy")
        if task["type"] == "worker" and way == "crash":
            raise ValueError("a bug in the trainer")
        if task["type"] == "worker" and way == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        print("hanging", flush=True)
        time.sleep(600)
    if task["type"] == "chief":
        progress.fact("replicas", 2)


def judge(model: dsl.Input[dsl.Model], bless: bool) -> NamedTuple(
    "Outputs", [("blessed", bool), ("reason", str)]
):  # KFP's own form
    """Blesses or does not."""
    from shardline.trainer.base import progress

    assert model.metadata["written_by"] == "chief"
    progress.fact("blessed", bless, "yes" if bless else "no: too bad")
    return bless, "as it's told"


def publish(model: dsl.Input[dsl.Model]) -> None:
    """Says where the model lies."""
    from shardline.trainer.base import progress

    progress.fact("champion", model.path)


def _op(function: Any) -> Any:
    return dsl.component(base_image="toy:1", install_kfp_package=False)(function)


@dsl.pipeline(name="toy")
def toy(
    source: str = "digits",
    note: str = "",
    count: int = 3,
    way: str = "succeed",
    bless: bool = True,
    extra: dict = {"a": 1},  # noqa: B006, RUF100
    greeting: Optional[str] = None,  # noqa: UP045
) -> None:
    """The toy pipeline."""
    data = _op(prepare)(source=source, greeting=greeting)
    train_op = create_custom_training_job_from_component(
        _op(train), replica_count=2, display_name="toy train"
    )
    trained = train_op(dataset=data.outputs["out"], note=note, count=count, way=way)
    judged = _op(judge)(model=trained.outputs["model"], bless=bless)
    with dsl.If(judged.outputs["blessed"] == True):  # noqa: E712
        _op(publish)(model=trained.outputs["model"])


@dsl.pipeline(name="free-text")
def free_text(word: str = "it's") -> None:
    """A condition on free text, which kfp.local cannot evaluate when there is an apostrophe in it."""
    with dsl.If(word == "that"):
        _op(prepare)(source=word, greeting="hello")


def count_up(out: dsl.Output[dsl.Dataset], to: int) -> List[int]:  # noqa: UP006  # KFP knows no list[int]
    """Makes a shared directory and numbers of tasks."""
    from pathlib import Path

    Path(out.path).mkdir(parents=True)
    return list(range(to))


def write_part(shared: dsl.Input[dsl.Dataset], number: int) -> int:
    """Writes one part."""
    from pathlib import Path

    assert type(number) is int
    (Path(shared.path) / f"part-{number}").write_text("")
    return number


def gather(shared: dsl.Input[dsl.Dataset], done: List[int]) -> None:  # noqa: UP006
    """Says which parts there are."""
    from pathlib import Path

    from shardline.trainer.base import progress

    names = sorted(path.name for path in Path(shared.path).iterdir())
    progress.fact("parts", f"{sorted(map(int, done))} {names}")


@dsl.pipeline(name="last")
def last(shared: dsl.Input[dsl.Dataset], done: List[int]) -> None:  # noqa: UP006
    """A pipeline inside a pipeline."""
    _op(gather)(shared=shared, done=done)


@dsl.pipeline(name="loop")
def loop(tasks: int = 1) -> None:
    """A loop over the output of a task, inside a condition, with a pipeline after it."""
    with dsl.If(tasks > 1.5):
        counted = _op(count_up)(to=tasks)
        with dsl.ParallelFor(counted.outputs["Output"]) as number:
            written = _op(write_part)(shared=counted.outputs["out"], number=number)
        last(shared=counted.outputs["out"], done=dsl.Collected(written.output))


def write_toy(path: Path) -> Path:
    """Compiles the toy pipeline into a file."""
    compiler.Compiler().compile(toy, str(path))
    return path


def main(path: str, runs: str, *parameters: str) -> None:
    """Runs a pipeline as the command line does; parameters are NAME=VALUE."""
    with progress.exit_on_error("run"):
        run_pipeline(Path(path), dict(item.split("=", 1) for item in parameters), runs_dir=Path(runs))


if __name__ == "__main__":
    main(*sys.argv[1:])
