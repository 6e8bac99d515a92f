"""Rules about containers: images, arguments, variables and secrets. A finding never shows a secret."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from shardline.components.vertex.payload import argv, list_at, literal_string
from shardline.pipelines.check.job import Job, Pool, jobs
from shardline.pipelines.check.pipeline import Aim, Executor, Parameter, Pipeline, Task
from shardline.pipelines.check.registry import Found, rules
from shardline.pipelines.parameters import OWN_PIPELINES
from shardline.pipelines.plain_secrets import secret_kind
from shardline.pipelines.settings import placeholder

#: Images whose tags do not matter: prebuilt ones of Vertex AI, for which the documentation requires the tag
#: `latest`, and those of Google Cloud Pipeline Components, which names each version once.
_RELEASED = re.compile(
    r"(us|europe|asia)-docker\.pkg\.dev/vertex-ai(-restricted)?/|gcr\.io/cloud-aiplatform/"
    r"|gcr\.io/ml-pipeline/google-cloud-pipeline-components:"
)


@rules(Pipeline)
def images(pipeline: Pipeline) -> Found:
    """Names of images.

    A different image with the same name changes what a pipeline does, and caching does not notice. A local
    run ignores names without a registry.

    SL403 warning: An image is named by digest.
        Fix: name it by digest, NAME@sha256:..., which a push prints
        Source: artifact-registry/docs/docker/names.
    SL411 error: Your own image names its registry.
        Fix: name it LOCATION-docker.pkg.dev/PROJECT/REPOSITORY/NAME:TAG in the settings (in your own
            pipeline: with_image), and compile
        Source: artifact-registry/docs/docker/names.
    SL412 error: The placeholders of the example settings are replaced.
        Fix: write your own project and bucket
        Source: settings/vertex.toml.example.
    """
    custom_jobs = jobs(pipeline)
    of_tasks = {literal_string(executor.container.get("image")) for executor in pipeline.executors}
    found = sorted(filter(None, of_tasks | {pool.image for job in custom_jobs for pool in job.pools}))
    for image in found:
        tag = image.rpartition("/")[2].partition(":")[2]
        if (
            "@" not in image
            and not _RELEASED.match(image)
            and (_has_registry(image) or tag in ("", "latest"))
        ):
            yield "SL403", f"the image {image} is named without a digest, and can be moved"
    if pipeline.aim is Aim.HERE:
        return
    for image in found:
        is_own = pipeline.name in OWN_PIPELINES or re.match(r"shardline([:@-]|$)", image)
        if pipeline.aim is Aim.SENT and is_own and not _has_registry(image):
            yield "SL411", f"the image {image} has no registry, so the platform cannot pull it"
    texts = [("the image", image) for image in found]
    texts += [(str(name), str(value)) for name, value in (pipeline.given or {}).items()]
    texts += [
        (key, value) for job in custom_jobs for key, value in job.spec.items() if isinstance(value, str)
    ]
    for name, text in dict.fromkeys(texts):
        if word := placeholder(text):
            yield "SL412", f"{name} is {text!r}, where {word} stands for your own"


def _has_registry(image: str) -> bool:
    """Whether the name of an image begins with a host."""
    first, slash, _ = image.partition("/")
    return bool(slash) and ("." in first or ":" in first or first == "localhost")


#: Limit of Linux for one argument of a process, in bytes, with its final NUL (MAX_ARG_STRLEN).
ARGUMENT_BYTES = 128 * 1024


@rules(Executor, Pool, Job)
def arguments(part: Executor | Pool | Job) -> Found:
    """Arguments of tasks and replicas.

    SL310 error: An argument of a container, component source and payload included, has less than 128 KiB.
        Fix: move sources and long lists into the image or into files
        Source: execve(2), MAX_ARG_STRLEN.
    SL407 warning: A container installs no packages when it starts.
        Fix: put the packages into the image, and set install_kfp_package=False
        Source: general/vpc-service-controls.
    """
    # A payload may be short in the template, and long with what the parameters put into it.
    found = [part.payload] if isinstance(part, Job) else argv(part.container)
    for argument in found:
        size = len(argument.encode(errors="replace"))
        if size >= ARGUMENT_BYTES:
            yield "SL310", f"an argument has {size:,} bytes: {argument.strip()[:40]!r}..."
    if not isinstance(part, Job) and any("pip install" in argument for argument in found):
        yield "SL407", "pip install runs at every start"


_PLATFORM_VARIABLE = re.compile(r"TF_CONFIG|CLUSTER_SPEC|(AIP|CLOUD_ML)_\w+")


@rules(Pool)
def variables(pool: Pool) -> Found:
    """Environment variables of replicas.

    SL322 error: A replica sets a variable once, and none that the platform sets.
        Fix: set it once; leave out what the platform sets for each replica
        Source: training/distributed-training; ContainerSpec.
    """
    names = [str(item.get("name", "")) for item in pool.env]
    for name, count in Counter(name for name in names if "{{$" not in name).items():
        if _PLATFORM_VARIABLE.fullmatch(name):
            yield "SL322", f"the pool sets {name} itself"
        if count > 1:
            yield "SL322", f"the environment variable {name} is set {count} times"


@rules(Parameter, Task, Pool, Executor)
def secrets(part: Parameter | Task | Pool | Executor) -> Found:
    """Secrets that are readable in the console, in logs or in the file.

    SL811 error: No parameter, constant, variable, command or source holds a secret.
        Fix: read it from Secret Manager at run time (pass projects/PROJECT/secrets/NAME/versions/latest),
            remove it here, and revoke it
        Source: secret-manager/docs/best-practices.
    """
    match part:
        case Parameter():
            values = [(part.name, part.pipeline.value(part.name))]
        case Task():
            given = part.inputs("parameters").items()
            values = [(name, part.value(name)) for name, item in given if item and "runtimeValue" in item]
        case Pool():
            values = _variables(part.env)
        case Executor():
            commands = [("command", argument) for argument in argv(part.container)]
            values = [*_variables(list_at(part.container, "env")), *commands]
    for name, value in values:
        if kind := secret_kind(name, value):
            yield "SL811", f"{name} holds {kind}"


def _variables(env: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(str(item.get("name", "")), item.get("value")) for item in env]
