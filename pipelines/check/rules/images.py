"""Rules about containers: images, what they install, environment variables, and secrets.

A finding never shows the secret.
"""

from __future__ import annotations

import datetime
import re
from collections import Counter
from typing import Any

from shardline.components.vertex.forms import MOST_VARIABLES, PLATFORM_VARIABLE, VARIABLE
from shardline.components.vertex.payload import argv, known_text, lacks, list_at
from shardline.pipelines.check.job import Pool, jobs
from shardline.pipelines.check.pipeline import Executor, Parameter, Pipeline, Task
from shardline.pipelines.check.registry import Found, rules
from shardline.pipelines.check.secrets import kind_of
from shardline.pipelines.image.build import has_registry

#: Vertex AI's prebuilt images: the documentation demands the tag `latest` for them.
_PREBUILT = re.compile(
    r"(us|europe|asia)-docker\.pkg\.dev/vertex-ai(-restricted)?/|gcr\.io/cloud-aiplatform/"
)
#: Images of Google Cloud Pipeline Components: released once under a version, and named by GCPC itself.
_RELEASED = re.compile(r"gcr\.io/ml-pipeline/google-cloud-pipeline-components:")
#: Names of a replica's image, in a container_spec and in a python_package_spec.
_IMAGE_KEYS = ("image_uri", "executor_image_uri")
_TENSORFLOW = re.compile(r"/training/tf-(?:cpu|gpu|tpu)\.(\d+)-(\d+)")
#: End of availability of the prebuilt TensorFlow training images; those before them ended earlier.
_AVAILABLE_UNTIL = {
    (2, 14): datetime.date(2025, 9, 26),
    (2, 15): datetime.date(2025, 11, 14),
    (2, 16): datetime.date(2026, 6, 28),
    (2, 17): datetime.date(2026, 7, 11),
}


@rules(Executor, Pool)
def images(part: Executor | Pool) -> Found:
    """Images of tasks and replicas.

    Another image under the same name changes what a pipeline does, and caching does not notice.

    SL401 error: A container has an image.
        Fix: set the component's base_image or image
        Source: kubeflow/pipelines, pipeline_spec.proto: PipelineContainerSpec.image.
    SL402 error: A worker pool's container has an image.
        Fix: set container_spec.image_uri
        Source: google.cloud.aiplatform_v1.types.ContainerSpec: image_uri is required.
    SL403 warning: A task's image is named with a tag or a digest, not with "latest".
    SL404 warning: A replica's image is named with a tag or a digest, not with "latest".
        Fix: add a tag that is never reused, or better a digest
        Source: docs.cloud.google.com, artifact-registry/docs/docker/names; without a tag, latest is meant.
    SL405 error: A task's image is not a prebuilt TensorFlow image past its end of availability.
    SL406 error: A replica's image is not a prebuilt TensorFlow image past its end of availability.
        Fix: build an image of your own with the TensorFlow that you need
        Source: docs.cloud.google.com, training/pre-built-containers, read on 2026-11-20.
    SL407 warning: A task installs no packages when it starts.
    SL408 warning: A replica installs no packages when it starts.
        Fix: put the packages into the image, and set install_kfp_package=False
        Source: docs.cloud.google.com, general/vpc-service-controls: "no live installation is required during
            a pipeline run" as the practice for production.
    """
    container = part.container
    if isinstance(part, Executor):
        missing, fixed, available, installed = "SL401", "SL403", "SL405", "SL407"
        what, image = "container", known_text(container.get("image"))
        is_missing = not container.get("image")
    else:
        missing, fixed, available, installed = "SL402", "SL404", "SL406", "SL408"
        what, image = "pool", part.image
        is_missing = bool(container) and all(lacks(container, key) for key in _IMAGE_KEYS)
    if is_missing:
        yield missing, f"the {what} has no image"
    if fault := _loose(image):
        yield fixed, f"the image {image} {fault}"
    if end := _end_of(image):
        yield available, f"{image} is not available since {end}"
    if any("pip install" in argument for argument in argv(container)):
        yield installed, "pip install runs at every start"


@rules(Pipeline)
def platforms_and_digests(pipeline: Pipeline) -> Found:
    """Settings for other platforms, and tags.

    A tag can be moved to another image, also while a schedule goes on. Names without a host of a registry are
    left alone: a local run does not look at them.

    SL409 error: The file is one YAML document, without settings for another platform.
        Fix: compile without kfp-kubernetes and without a workspace; 'shardline run' takes the file as it is
        Source: google.cloud.aiplatform.utils.yaml_utils: yaml.safe_load refuses a second document.
    SL410 warning: Images of a registry are named with their digest.
        Fix: name it with its digest: 'shardline image push' prints it
        Source: docs.cloud.google.com, artifact-registry/docs/docker/names: a tag is mutable, a digest is not.
    """
    for name in pipeline.platforms:
        yield "SL409", f"a second document has settings for {name}, which Vertex AI's SDK refuses to load"
    of_tasks = (known_text(executor.container.get("image")) for executor in pipeline.executors)
    of_replicas = (pool.image for job in jobs(pipeline) for pool in job.pools)
    for image in sorted({*of_tasks, *of_replicas}):
        known = _PREBUILT.match(image) or _RELEASED.match(image)
        if has_registry(image) and "@" not in image and not known and not _loose(image):
            yield "SL410", f"the image {image} is named with a tag, which can be moved"


@rules(Pool)
def variables(pool: Pool) -> Found:
    """Environment variables of replicas.

    SL314 error: A container has at most 100 environment variables.
        Fix: pass settings as arguments or in a file
        Source: google.cloud.aiplatform_v1.types.ContainerSpec: env, "Maximum limit is 100".
    SL321 error: An environment variable's name is a C identifier.
        Fix: name it with letters, digits and underscores, not beginning with a digit
        Source: google.cloud.aiplatform_v1.types.EnvVar: "Must be a valid C identifier".
    SL322 warning: An environment variable does not take the place of one that the platform sets.
        Fix: leave it out: the platform sets it for each replica
        Source: docs.cloud.google.com, training/distributed-training and training/code-requirements.
    SL323 warning: An environment variable is set once.
        Fix: set it once
        Source: google.cloud.aiplatform_v1.types.ContainerSpec: env is a list, in which names may repeat.
    """
    if len(pool.env) > MOST_VARIABLES:
        yield "SL314", f"the pool sets {len(pool.env)} environment variables"
    names = [str(item.get("name", "")) for item in pool.env]
    for name, count in Counter(name for name in names if "{{$" not in name).items():
        if not VARIABLE.fits(name):
            yield "SL321", f"the environment variable {name!r} is no identifier"
        if PLATFORM_VARIABLE.fits(name):
            yield "SL322", f"the pool sets {name} itself"
        if count > 1:
            yield "SL323", f"the environment variable {name} is set {count} times"


@rules(Parameter, Task, Pool, Executor)
def secrets(part: Parameter | Task | Pool | Executor) -> Found:
    """Secrets where everybody can read them.

    SL811 error: A pipeline's parameter holds no secret.
        Fix: read it from Secret Manager at run time, take it out, and revoke it
        Source: docs.cloud.google.com, secret-manager/docs/best-practices; parameters are shown in the
            console.
    SL812 error: A constant that a task is given holds no secret.
    SL814 error: A container's environment, command and source hold no secret.
        Fix: read it from Secret Manager at run time, take it out, and revoke it
        Source: docs.cloud.google.com, secret-manager/docs/best-practices.
    SL813 error: A replica's environment variables hold no secret.
        Fix: read it from Secret Manager at run time, take it out, and revoke it
        Source: docs.cloud.google.com, secret-manager/docs/best-practices: not in environment variables.
    """
    match part:
        case Parameter():
            code, values = "SL811", [(part.name, part.pipeline.value(part.name))]
        case Task():
            given = part.inputs("parameters").items()
            constants = [name for name, item in given if item and "runtimeValue" in item]
            code, values = "SL812", [(name, part.value(name)) for name in constants]
        case Pool():
            code, values = "SL813", _variables(part.env)
        case Executor():
            commands = [("command", argument) for argument in argv(part.container)]
            code, values = "SL814", [*_variables(list_at(part.container, "env")), *commands]
    for name, value in values:
        if kind := kind_of(name, value):
            yield code, f"{name} holds {kind}"


def _variables(env: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(str(item.get("name", "")), item.get("value")) for item in env]


def _loose(image: str) -> str:
    """Returns why a name may stand for another image tomorrow; "" when it does not."""
    if not image or "@" in image or _PREBUILT.match(image):
        return ""
    tag = image.rpartition("/")[2].partition(":")[2]
    return {"": "has neither tag nor digest", "latest": "is whatever is the latest"}.get(tag, "")


def _end_of(image: str) -> datetime.date | None:
    """Returns the end of a prebuilt image's availability, if it has passed."""
    found = _TENSORFLOW.search(image) if _PREBUILT.match(image) else None
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    if not found or version > max(_AVAILABLE_UNTIL):
        return None
    end = _AVAILABLE_UNTIL.get(version, min(_AVAILABLE_UNTIL.values()))
    return end if datetime.date.today() >= end else None
