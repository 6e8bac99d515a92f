"""Pipelines that use KFP alone: Python and container components, an importer, nothing of Shardline.

KFP looks at annotations themselves, not at their texts.
"""

from pathlib import Path
from typing import List, NamedTuple, Optional  # noqa: UP035

from google_cloud_pipeline_components.types.artifact_types import UnmanagedContainerModel
from google_cloud_pipeline_components.v1.bigquery import BigqueryQueryJobOp
from google_cloud_pipeline_components.v1.custom_job import CustomTrainingJobOp
from google_cloud_pipeline_components.v1.model import ModelUploadOp
from kfp import compiler, dsl

IMAGE = "europe-docker.pkg.dev/somebody/images/trainer:1"


@dsl.component(base_image="python:3.11")
def hello(name: str) -> str:
    """Greets."""
    return f"hello {name}"


@dsl.component(base_image="python:3.11", packages_to_install=["numpy>=1.20"])
def write(text: str, out: dsl.Output[dsl.Dataset]) -> None:
    """Writes a text."""
    from pathlib import Path

    Path(out.path).write_text(text)


@dsl.container_component
def count(
    data: dsl.Input[dsl.Dataset], note: str, words: dsl.Output[dsl.Artifact], number: dsl.OutputPath(int)
):
    """Counts characters with a program of any Linux."""
    script = 'wc -c < "$0" > "$1" && echo "$2 python3 $GREETING" > "$3"'
    return dsl.ContainerSpec("alpine:3", ["sh", "-c", script], [data.path, number, note, words.path])


@dsl.component(base_image="python:3.11")
def show(number: int, words: dsl.Input[dsl.Artifact], imported: dsl.Input[dsl.Dataset]) -> None:
    """Prints what the others have made."""
    from pathlib import Path

    print(number, Path(words.path).read_text().strip(), Path(imported.path).read_text())


@dsl.pipeline(name="third-party")
def third_party(uri: str, name: str = "you") -> None:
    """A pipeline of which all parts are on any machine."""
    greeting = hello(name=name).output
    written = write(text=greeting)
    counted = count(data=written.outputs["out"], note=greeting)
    counted.set_env_variable("GREETING", "hi").set_cpu_limit("2").set_retry(3)
    imported = dsl.importer(artifact_uri=uri, artifact_class=dsl.Dataset)
    show(number=counted.outputs["number"], words=counted.outputs["words"], imported=imported.output)


MODEL = "gs://acme/out/model"
_TRAINS = """
import os, pathlib
from shardline.trainer.base.files import local_path
place = local_path(os.environ["AIP_MODEL_DIR"])
place.mkdir(parents=True)
(place / "weights").write_text("trained")
"""


@dsl.component(base_image="python:3.11")
def look(model: dsl.Input[dsl.Artifact], workspace: str) -> None:
    """Reads a model at its second attempt."""
    from pathlib import Path

    seen = Path(workspace, "seen")
    if not seen.exists():
        seen.write_text("once")
        raise SystemExit(1)
    print("read:", Path(model.path, "weights").read_text())


@dsl.pipeline(name="usual", pipeline_config=dsl.PipelineConfig(workspace=dsl.WorkspaceConfig(size="1Gi")))
def usual() -> None:
    """A job trains, an importer names what it has written, and that is uploaded; with a workspace."""
    container = {"image_uri": IMAGE, "command": ["python3", "-c", _TRAINS]}
    pool = {
        "machine_spec": {"machine_type": "n1-standard-4"},
        "replica_count": 1,
        "container_spec": container,
    }
    job = CustomTrainingJobOp(
        display_name="train", base_output_directory=MODEL.removesuffix("/model"), worker_pool_specs=[pool]
    )
    model = dsl.importer(
        artifact_uri=MODEL,
        artifact_class=UnmanagedContainerModel,
        metadata={"containerSpec": {"imageUri": IMAGE}},
    ).after(job)
    ModelUploadOp(display_name="model", unmanaged_container_model=model.output)
    seen = look(model=model.output, workspace=dsl.WORKSPACE_PATH_PLACEHOLDER)
    seen.set_retry(1).set_cpu_limit("2").set_accelerator_type("NVIDIA_TESLA_T4").set_accelerator_limit(1)


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def odd() -> dict:  # type: ignore[type-arg]
    """Puts out null, numbers and a quote."""
    return {"a": None, "b": [1, None, 2.5], "q": 'say "hi"'}


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def same(item: int) -> int:
    """Returns what it gets."""
    return item


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def got(
    mapping: dict,  # type: ignore[type-arg]
    nested: dict,  # type: ignore[type-arg]
    items: List[int],  # noqa: UP006
    text: str,
    rate: float,
    unset: Optional[int] = None,  # noqa: UP045
    usual: Optional[int] = 4,  # noqa: UP045
) -> None:
    """Prints what it gets."""
    import json

    print("got", json.dumps([mapping, nested, items, text, rate, unset, usual], sort_keys=True))


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def mistaken() -> None:
    """Ends as after a mistake."""
    raise SystemExit(2)


@dsl.pipeline(name="values")
def values(
    count: int = 3,
    rate: float = 2.0,
    quoted: str = 'a "q"',
    missing: Optional[int] = None,  # noqa: UP045
    items: List[int] = [],  # noqa: B006, UP006
    mistake: bool = False,
) -> None:
    """Values of all kinds, into a component and into a job."""
    with dsl.ParallelFor(items) as item:
        each = same(item=item)
    got(
        mapping=odd().output,
        nested={"n": count, "t": f"{count} {quoted}", "in": {"one": 1}},
        items=dsl.Collected(each.output),
        text=f"{count} epochs",
        rate=rate,
        unset=missing,
        usual=missing,
    )
    program = "import os, sys; print('args', sys.argv[1:], os.environ['RATE'])"
    container = {
        "image_uri": IMAGE,
        "command": ["python3", "-c", program],
        "args": ["--epochs", count, f"--note={count}-{quoted}", same(item=count).output],
        "env": [{"name": "RATE", "value": rate}],
    }
    pool = {
        "machine_spec": {"machine_type": "n1-standard-4"},
        "replica_count": 1,
        "container_spec": container,
    }
    CustomTrainingJobOp(display_name="train", worker_pool_specs=[pool])
    with dsl.If(mistake == True):  # noqa: E712
        mistaken().set_retry(2)


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def lists() -> NamedTuple("Lists", [("numbers", List[int]), ("rows", list)]):  # type: ignore[valid-type]  # noqa: UP006
    """Puts out two lists."""
    return [1, 2], [{"words": ["a"]}, {"words": ["b", "c"]}]  # type: ignore[return-value]


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def tell(number: int, word: str, outer: int) -> None:
    """Prints what it gets."""
    print("told", number, word, outer)


@dsl.pipeline(name="loops")
def loops() -> None:
    """Loops inside loops over outputs of any name, a condition on an item, and an output of before."""
    made, outer = lists(), same(item=9)
    with (
        dsl.ParallelFor(made.outputs["numbers"]) as number,
        dsl.If(number == 2),
        dsl.ParallelFor(made.outputs["rows"]) as row,
        dsl.ParallelFor(row.words) as word,
    ):
        tell(number=number, word=word, outer=outer.output)


@dsl.component(base_image="python:3.11", packages_to_install=["no-such-package==1", "numpy<1"])
def unmet() -> None:
    """Needs packages that are not here."""


@dsl.component(base_image=IMAGE, target_image=IMAGE)
def baked() -> None:
    """Has its code in an image."""


@dsl.container_component
def entrypoint():
    """Leaves it to the image what runs."""
    return dsl.ContainerSpec(IMAGE, args=["--epochs", "3"])


@dsl.container_component
def program():
    """Runs a program of its image."""
    return dsl.ContainerSpec(IMAGE, ["somebodys-trainer"])


@dsl.pipeline(name="elsewhere")
def elsewhere() -> None:
    """A pipeline of which nothing can run here."""
    for component in (unmet, baked, entrypoint, program):
        component()
    BigqueryQueryJobOp(project="p", location="EU", query="select 1")


def write_pipeline(pipeline, path: Path) -> Path:
    """Compiles a pipeline into a file."""
    compiler.Compiler().compile(pipeline, str(path))
    return path
