"""Rules about container images and what they install.

Rules about environment variables.
"""

from __future__ import annotations

import datetime
import re
from collections import Counter
from collections.abc import Iterator

from shardline.components.vertex.payload import known_text, lacks, list_at
from shardline.pipelines.check.job import Pool, jobs
from shardline.pipelines.check.pipeline import Executor, Pipeline
from shardline.pipelines.check.registry import error, warning
from shardline.pipelines.image import has_registry

#: Vertex AI's prebuilt images: the documentation demands the tag `latest` for them.
_PREBUILT = re.compile(
    r"(us|europe|asia)-docker\.pkg\.dev/vertex-ai(-restricted)?/|gcr\.io/cloud-aiplatform/"
)
#: Images of Google Cloud Pipeline Components: released once under a version, and named by GCPC itself.
_RELEASED = re.compile(r"gcr\.io/ml-pipeline/google-cloud-pipeline-components:")
_TENSORFLOW = re.compile(r"/training/tf-(?:cpu|gpu|tpu)\.(\d+)-(\d+)")
#: End of availability of the prebuilt TensorFlow training images; those before them ended earlier.
_AVAILABLE_UNTIL = {
    (2, 14): datetime.date(2025, 9, 26),
    (2, 15): datetime.date(2025, 11, 14),
    (2, 16): datetime.date(2026, 6, 28),
    (2, 17): datetime.date(2026, 7, 11),
}
_LAST = max(_AVAILABLE_UNTIL)


@error("SL401", Executor, fix="set the component's base_image or image")
def image_is_given(executor: Executor) -> Iterator[str]:
    """A container has an image.

    Source: kubeflow/pipelines, pipeline_spec.proto: PipelineContainerSpec.image.
    """
    if not executor.container.get("image"):
        yield "the container has no image"


@error("SL402", Pool, fix="set container_spec.image_uri")
def replica_image_is_given(pool: Pool) -> Iterator[str]:
    """A worker pool's container has an image.

    Source: google.cloud.aiplatform_v1.types.ContainerSpec: image_uri is required.
    """
    if pool.container and lacks(pool.container, "image_uri") and lacks(pool.container, "executor_image_uri"):
        yield "the pool has no image"


@warning("SL403", Executor, fix="add a tag that is never reused, or better a digest")
def image_is_fixed(executor: Executor) -> Iterator[str]:
    """A task's image is named with a tag or a digest, not with "latest".

    Another image under the same name changes what a pipeline does, and caching does not notice.

    Source: docs.cloud.google.com, artifact-registry/docs/docker/names; without a tag, latest is meant.
    """
    yield from _not_fixed(known_text(executor.container.get("image")))


@warning("SL404", Pool, fix="add a tag that is never reused, or better a digest")
def replica_image_is_fixed(pool: Pool) -> Iterator[str]:
    """A replica's image is named with a tag or a digest, not with "latest".

    Source: docs.cloud.google.com, artifact-registry/docs/docker/names; without a tag, latest is meant.
    """
    yield from _not_fixed(pool.image)


@error("SL405", Executor, fix="build an image of your own with the TensorFlow that you need")
def image_is_available(executor: Executor) -> Iterator[str]:
    """A task's image is not a prebuilt TensorFlow image past its end of availability.

    Source: docs.cloud.google.com, training/pre-built-containers, read on 2026-11-20.
    """
    yield from _ended(known_text(executor.container.get("image")))


@error("SL406", Pool, fix="build an image of your own with the TensorFlow that you need")
def replica_image_is_available(pool: Pool) -> Iterator[str]:
    """A replica's image is not a prebuilt TensorFlow image past its end of availability.

    Source: docs.cloud.google.com, training/pre-built-containers, read on 2026-11-20.
    """
    yield from _ended(pool.image)


@warning("SL407", Executor, fix="put the packages into the image, and set install_kfp_package=False")
def nothing_is_installed(executor: Executor) -> Iterator[str]:
    """A task installs no packages when it starts.

    Source: docs.cloud.google.com, general/vpc-service-controls: "no live installation is required during a
    pipeline run" as the practice for production.
    """
    yield from _installed(list_at(executor.container, "command"))


@warning("SL408", Pool, fix="put the packages into the image, and set install_kfp_package=False")
def replicas_install_nothing(pool: Pool) -> Iterator[str]:
    """A replica installs no packages when it starts.

    Source: docs.cloud.google.com, general/vpc-service-controls: "no live installation is required during a
    pipeline run" as the practice for production.
    """
    yield from _installed(pool.argv)


@warning("SL409", Pipeline, fix="leave them out: compile without kfp-kubernetes")
def no_other_platform_is_configured(pipeline: Pipeline) -> Iterator[str]:
    """The file has no settings for another platform.

    Source: kubeflow/pipelines, pipeline_spec.proto: PlatformSpec is read by the platform it names.
    """
    for name in pipeline.platforms:
        yield f"settings for {name} have no effect on Vertex AI"


@warning("SL410", Pipeline, fix="name it with its digest: 'shardline image push' prints it")
def images_are_pinned(pipeline: Pipeline) -> Iterator[str]:
    """Images of a registry are named with their digest.

    A tag can be moved to another image, also while a schedule goes on. Names without a host of a registry are
    left alone: a local run does not look at them.

    Source: docs.cloud.google.com, artifact-registry/docs/docker/names: a tag is mutable, a digest is not.
    """
    of_tasks = (known_text(executor.container.get("image")) for executor in pipeline.executors)
    of_replicas = (pool.image for job in jobs(pipeline) for pool in job.pools)
    for image in sorted({*of_tasks, *of_replicas}):
        yield from _not_pinned(image)


def _not_fixed(image: str) -> Iterator[str]:
    if not image or "@" in image or _PREBUILT.match(image):
        return
    tag = image.rpartition("/")[2].partition(":")[2]
    if not tag:
        yield f"the image {image} has neither tag nor digest"
    elif tag == "latest":
        yield f"the image {image} is whatever is the latest"


def _not_pinned(image: str) -> Iterator[str]:
    fixed = not any(_not_fixed(image))
    if (
        fixed
        and has_registry(image)
        and "@" not in image
        and not any(known.match(image) for known in (_PREBUILT, _RELEASED))
    ):
        yield f"the image {image} is named with a tag, which can be moved"


def _ended(image: str) -> Iterator[str]:
    found = _TENSORFLOW.search(image)
    if not found or not _PREBUILT.match(image):
        return
    version = (int(found[1]), int(found[2]))
    end = _AVAILABLE_UNTIL.get(version, min(_AVAILABLE_UNTIL.values()))
    if version <= _LAST and datetime.date.today() >= end:
        yield f"{image} is not available since {end}"


def _installed(parts: list[str]) -> Iterator[str]:
    if any("pip install" in part for part in parts):
        yield "pip install runs at every start"


_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLATFORMS_OWN = re.compile(r"TF_CONFIG|CLUSTER_SPEC|(AIP|CLOUD_ML)_[A-Z_]+")


@error("SL321", Pool, fix="name it with letters, digits and underscores, not beginning with a digit")
def variable_is_an_identifier(pool: Pool) -> Iterator[str]:
    """An environment variable's name is a C identifier.

    Source: google.cloud.aiplatform_v1.types.EnvVar: "Must be a valid C identifier".
    """
    for name in _names(pool):
        if not _IDENTIFIER.fullmatch(name):
            yield f"the environment variable {name!r} is no identifier"


@warning("SL322", Pool, fix="leave it out: the platform sets it for each replica")
def variable_is_not_the_platforms(pool: Pool) -> Iterator[str]:
    """An environment variable does not take the place of one that the platform sets.

    Source: docs.cloud.google.com, training/distributed-training and training/code-requirements.
    """
    for name in _names(pool):
        if _PLATFORMS_OWN.fullmatch(name):
            yield f"the pool sets {name} itself"


@warning("SL323", Pool, fix="set it once")
def variable_is_set_once(pool: Pool) -> Iterator[str]:
    """An environment variable is set once.

    Source: google.cloud.aiplatform_v1.types.ContainerSpec: env is a list, in which names may repeat.
    """
    for name, count in Counter(_names(pool)).items():
        if count > 1:
            yield f"the environment variable {name} is set {count} times"


def _names(pool: Pool) -> list[str]:
    names = [str(item.get("name", "")) for item in pool.env]
    return [name for name in names if "{{$" not in name]
