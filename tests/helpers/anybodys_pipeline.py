"""Pipelines as anybody writes them with KFP: Python and container components, an importer, nothing of ours.

KFP looks at annotations themselves, not at their texts.
"""

from pathlib import Path

from google_cloud_pipeline_components.v1.bigquery import BigqueryQueryJobOp
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


@dsl.pipeline(name="anybodys")
def anybodys(place: str, name: str = "you") -> None:
    """A pipeline of which all parts are on any machine."""
    greeting = hello(name=name).output
    written = write(text=greeting)
    counted = count(data=written.outputs["out"], note=greeting)
    counted.set_env_variable("GREETING", "hi").set_cpu_limit("2").set_retry(3)
    imported = dsl.importer(artifact_uri=place, artifact_class=dsl.Dataset)
    show(number=counted.outputs["number"], words=counted.outputs["words"], imported=imported.output)


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


@dsl.container_component
def module():
    """Runs a module of its image."""
    return dsl.ContainerSpec(IMAGE, ["python3", "-u", "-m", "somebodys.task"])


@dsl.container_component
def script():
    """Runs a script of its image."""
    return dsl.ContainerSpec(IMAGE, ["sh"], ["/opt/train.sh", "--fast"])


@dsl.pipeline(name="elsewhere")
def elsewhere(place: str = "gs://somebodys/data") -> None:
    """A pipeline of which nothing can run here."""
    for component in (unmet, baked, entrypoint, program, module, script):
        component()
    dsl.importer(artifact_uri=place, artifact_class=dsl.Dataset)
    BigqueryQueryJobOp(project="p", location="EU", query="select 1")


def write_pipeline(pipeline, path: Path) -> Path:
    """Compiles a pipeline into a file."""
    compiler.Compiler().compile(pipeline, str(path))
    return path
