"""A pipeline whose training step is a custom job with an empty slot among its pools."""

from pathlib import Path
from typing import Any

import yaml
from kfp import compiler, dsl

from shardline.components.custom_job import Cluster, CustomJobSettings, WorkerPool
from shardline.components.train.component import custom_job

SMALL = WorkerPool(machine_type="n1-standard-4", env={"NOTE": 'a "quoted" \\ {{ x }}\n☃'})
GPU = WorkerPool(machine_type="n1-standard-8", accelerator_type="NVIDIA_TESLA_T4", accelerator_count=2)

#: Chief, one worker, no parameter server, one evaluator.
SETTINGS = CustomJobSettings(
    cluster=Cluster(chief=SMALL, workers=GPU, evaluator=SMALL),
    num_retries=0,
    base_output_directory="gs://staging/{{$.pipeline_job_name}}",
    tags={"team": "vision"},
)


@dsl.component(base_image="image:1", install_kfp_package=False)
def prepare(out: dsl.Output[dsl.Dataset], text: str) -> None:
    """Writes the text into a dataset."""
    from pathlib import Path

    Path(out.path).write_text(text)


@dsl.component(base_image="image:1", install_kfp_package=False)
def train(dataset: dsl.Input[dsl.Dataset], model: dsl.Output[dsl.Model], note: str, count: int) -> str:
    """Every replica leaves a file; the chief waits for all of them and describes the model."""
    import json
    import os
    import time
    from pathlib import Path

    cluster = json.loads(os.environ["CLUSTER_SPEC"])["cluster"]
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    directory = Path(model.path)
    directory.mkdir(parents=True, exist_ok=True)
    seen = {
        "note": note,
        "count": count,
        "env": os.environ["NOTE"] if task["type"] != "worker" else "",
        "text": Path(dataset.path).read_text(),
        "pools": sorted(cluster),
    }
    (directory / f"{task['type']}.part").write_text(json.dumps(seen))
    (directory / f"{task['type']}.part").rename(directory / f"{task['type']}.json")
    deadline = time.monotonic() + 60
    while task["type"] == "chief" and len(list(directory.glob("*.json"))) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    model.metadata["trained_by"] = task["type"]
    return f"trained by {task['type']}"


@dsl.component(base_image="image:1", install_kfp_package=False)
def judge(model: dsl.Input[dsl.Model], word: str, result: str) -> None:
    """Writes down what the next step sees of the training."""
    import json
    from pathlib import Path

    seen = {path.stem: json.loads(path.read_text()) for path in Path(model.path).glob("*.json")}
    Path(result).write_text(json.dumps({"word": word, "metadata": model.metadata, "replicas": seen}))


def compile_toy(path: Path) -> dict[str, Any]:
    """Compiles the pipeline into a file and returns it."""
    train_op = custom_job(train, SETTINGS)

    @dsl.pipeline(name="toy")
    def toy(note: str, count: int, result: str) -> None:
        data = prepare(text=note).set_caching_options(False)
        trained = train_op(dataset=data.outputs["out"], note=note, count=count)
        judge(model=trained.outputs["model"], word=trained.outputs["Output"], result=result)

    compiler.Compiler().compile(toy, str(path))
    return yaml.safe_load(path.read_text())
