"""Rules about containers and places: images, variables and secrets, and what a run reads and writes.

A finding never shows the secret.
"""

from __future__ import annotations

import datetime
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from shardline.components.configure.fingerprint import plugins_of
from shardline.components.vertex.forms import MOST_VARIABLES, PLATFORM_VARIABLE, VARIABLE
from shardline.components.vertex.payload import argv, known_text, lacks, list_at
from shardline.pipelines.check.job import Pool, jobs
from shardline.pipelines.check.pipeline import Aim, Executor, Parameter, Pipeline, Task
from shardline.pipelines.check.registry import Found, rules
from shardline.pipelines.check.secrets import kind_of
from shardline.pipelines.image.build import has_registry
from shardline.pipelines.image.contents import missing_from_image
from shardline.pipelines.parameters import OURS, check_values, convert
from shardline.pipelines.settings import placeholder, placeholder_value
from shardline.trainer.errors import ShardlineError
from shardline.trainer.models import BUILT_IN, KERAS_PREFIX

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


#: How a path begins that every task sees: buckets, through the mount.
_MOUNTED = ("gs://", "/gcs/")
#: Forms of a source that have a path behind the colon.
_FILES = ("images", "text", "tfrecord", "table")
#: Options of the trainer that are a path, and whether they are written.
_OPTIONS = {"initial_model": False, "checkpoint_dir": True, "tensorboard_log_dir": True}
_SCHEME = re.compile(r"(?:.*::)?([A-Za-z][\w.+-]*)://")
_OURS = re.compile(r"shardline[:@-]|shardline$")
#: The image of KFP's own components, which Docker Hub has.
_OF_KFP = "python:"


class _Place(NamedTuple):
    """A path in a parameter: which, its text, and whether it is written."""

    name: str
    path: str
    written: bool = False


@rules(Pipeline)
def values(pipeline: Pipeline) -> Found:
    """Values of the parameters of our own pipelines.

    SL606 error: A parameter of our own pipelines has a value that the pipeline takes.
        Fix: give another value; 'shardline run' would refuse it as well
        Source: trainer/records.py; the first task of the run refuses it.
    """
    if pipeline.given is None or pipeline.aim is not Aim.ASKED or pipeline.name not in OURS:
        return  # before a run they are checked as such
    try:
        check_values(pipeline.name, _values(pipeline), here=False)
    except ShardlineError as error:
        yield "SL606", error.line


@rules(Pipeline)
def places(pipeline: Pipeline) -> Found:
    """Places that a run of our own pipelines reads and writes on the platform.

    A container sees buckets, as gs://BUCKET/PATH or /gcs/BUCKET/PATH, and nothing of another machine.
    What is written anywhere else is thrown away with the container.

    SL607 error: What a run reads is not on the machine that submits it.
        Fix: copy it into a bucket ('gcloud storage cp --recursive') and give gs://BUCKET/PATH
        Source: components/preprocess/storage.py; a task runs in a container of its own.
    SL608 warning: What a run reads is in a bucket.
        Fix: give gs://BUCKET/PATH, unless the image holds it at this path
        Source: components/preprocess/storage.py.
    SL609 error: A URL is of a kind that the parameter takes.
        Fix: copy it into a bucket and give gs://BUCKET/PATH, or read it in a source class of your own
        Source: components/preprocess/storage.py: no other URL is read.
    SL610 error: What a run writes is in a bucket.
        Fix: give gs://BUCKET/PATH
        Source: components/model_store, components/configure; a container's disk ends with it.
    SL611 warning: A run has a place where a blessed model is published.
        Fix: give champion_uri=gs://BUCKET/PATH, or champion_uri= to publish nothing
        Source: components/register: an empty champion_uri publishes nothing.
    """
    if pipeline.given is None or pipeline.aim is Aim.HERE or pipeline.name not in OURS:
        return
    known = _values(pipeline)
    for place in _places(known):
        if fault := _fault(place):
            yield fault
    if known.get("champion_uri") == "" and "champion_uri" not in pipeline.given:
        yield "SL611", "champion_uri is not given: a blessed model is published nowhere"


@rules(Pipeline)
def contents(pipeline: Pipeline) -> Found:
    """What the image holds of what a run names: modules of one's own.

    SL612 error: The image holds the modules, and these the names, that a run gives.
        Fix: name what it has, or name its directory in [image] packages (a path from the settings file) or
            its distribution in [image] requirements, which say what the image holds
        Source: pipelines/image/contents.py: the table [image] of the settings says what the image holds.
    SL614 warning: It is known what the image holds that has to hold a run's own modules.
        Fix: give --settings FILE, whose table [image] says it
        Source: pipelines/image/contents.py.
    """
    if pipeline.given is None or pipeline.aim is Aim.HERE or pipeline.name not in OURS:
        return
    known = _values(pipeline)
    if pipeline.image is not None:
        for line in missing_from_image(pipeline.image, known):
            yield "SL612", line.partition("; ")[0]
    elif own := [name for name, value in plugins_of(known).items() if not value.startswith("shardline.")]:
        yield "SL614", f"what the image holds is not known, and {', '.join(own)} is not looked for in it"


def _values(pipeline: Pipeline) -> dict[str, Any]:
    """Returns what a run is given, of the declared types, and the defaults of the rest."""
    found = {}
    for parameter in pipeline.parameters:
        value = pipeline.value(parameter.name)
        try:
            found[parameter.name] = convert(parameter.name, value, parameter.declaration)
        except (ShardlineError, KeyError):
            continue  # a finding of its own
    return found


def _places(known: Mapping[str, Any]) -> Iterator[_Place]:
    form, _, path = str(known.get("source", "")).partition(":")
    if form in _FILES:
        yield _Place("source", path)
    for name in ("labels", "schema", "data_dir"):
        yield _Place(name, str(known.get(name, "")))
    for name in ("champion_uri", "history_uri"):
        yield _Place(name, str(known.get(name, "")), written=True)
    options = known.get("train_options") or {}
    for name, written in _OPTIONS.items():
        yield _Place(f"train_options.{name}", str(options.get(name) or ""), written)
    model, weights = str(known.get("model", "")), str((known.get("hparams") or {}).get("weights") or "")
    if (model in BUILT_IN or model.startswith(KERAS_PREFIX)) and weights not in ("imagenet", "none"):
        yield _Place("hparams.weights", weights)


def _fault(place: _Place) -> tuple[str, str] | None:
    """Returns the code of the rule that a path breaks, and what was found."""
    name, path, written = place
    if not path or path.startswith(_MOUNTED) or "{{$" in path:
        return None
    is_path = f"{name} is {path!r}"
    if _SCHEME.match(path):
        return "SL609", f"{is_path}; it takes gs:// and /gcs/"
    if slash := re.match(r"(gs|gcs):/*", path):
        return "SL609", f"{is_path}; did you mean gs://{path[slash.end() :]}?"
    if written:
        return "SL610", f"{is_path}, a directory of the container, which is thrown away with it"
    if not os.path.isabs(path) or os.path.exists(path):
        return "SL607", f"{is_path}, a path of this machine"
    return "SL608", f"{is_path}, which is in no bucket"


@rules(Pipeline)
def sent(pipeline: Pipeline) -> Found:
    """Images and placeholders of a pipeline that goes to the platform.

    SL411 error: An image of one's own in a pipeline that is sent is named with its registry.
        Fix: name it as in LOCATION-docker.pkg.dev/PROJECT/REPOSITORY/NAME:TAG in the settings (in a pipeline
            of your own: with_image), and compile
        Source: docs.cloud.google.com, artifact-registry/docs/docker/names; without one, Docker Hub is meant.
    SL413 warning: An image in a pipeline of others that is sent is named with its registry.
        Fix: write docker.io/NAME:TAG if Docker Hub's is meant, or the registry that has it
        Source: docs.cloud.google.com, artifact-registry/docs/docker/names; without one, Docker Hub is meant.
    SL412 error: The example's placeholders have been replaced.
        Fix: write your own project and bucket in its place
        Source: settings/vertex.toml.example.
    """
    if pipeline.aim is Aim.HERE:
        return
    of_tasks = {known_text(executor.container.get("image")) for executor in pipeline.executors}
    custom_jobs = jobs(pipeline)
    images = of_tasks | {pool.image for job in custom_jobs for pool in job.pools}
    for image in sorted(filter(None, images)):
        if pipeline.aim is not Aim.SENT or has_registry(image):
            continue
        if pipeline.name in OURS or _OURS.match(image):
            yield "SL411", f"the image {image} has no registry, and is on no machine of the platform"
        elif not image.startswith(_OF_KFP):
            yield "SL413", f"the image {image} has no registry: that of Docker Hub is meant"
    texts = [("the image", image) for image in sorted(images)]
    texts += [(str(name), str(value)) for name, value in (pipeline.given or {}).items()]
    texts += [
        (key, value) for job in custom_jobs for key, value in job.spec.items() if isinstance(value, str)
    ]
    found = [
        (f"vertex.{name}", str(value), placeholder_value(value))
        for name, value in pipeline.environment.items()
    ]
    found += [(name, text, placeholder(text)) for name, text in texts]
    for name, text, word in dict.fromkeys(found):
        if word:
            yield "SL412", f"{name} is {text!r}, where {word} stands for your own"
