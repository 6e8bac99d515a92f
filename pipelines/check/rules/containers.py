"""Rules about containers and paths: images, variables, secrets, and what a run reads and writes.

A finding never shows a secret.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from shardline.components.configure.fingerprint import plugins_of
from shardline.components.vertex.forms import MAX_VARIABLES, PLATFORM_VARIABLE, VARIABLE
from shardline.components.vertex.payload import argv, is_surely_missing, list_at, literal_string
from shardline.pipelines.check.job import Pool, jobs
from shardline.pipelines.check.pipeline import Aim, Executor, Parameter, Pipeline, Task
from shardline.pipelines.check.registry import Found, rules
from shardline.pipelines.image.build import has_registry
from shardline.pipelines.image.contents import missing_from_image
from shardline.pipelines.parameters import OWN_PIPELINES, check_values, convert
from shardline.pipelines.plain_secrets import secret_kind
from shardline.pipelines.settings import placeholder, placeholder_value
from shardline.trainer.base.errors import ShardlineError
from shardline.trainer.base.plugins import BUILT_IN, KERAS_PREFIX

#: Prebuilt images of Vertex AI, for which the documentation requires the tag `latest`.
_PREBUILT = re.compile(
    r"(us|europe|asia)-docker\.pkg\.dev/vertex-ai(-restricted)?/|gcr\.io/cloud-aiplatform/"
)
#: Images of Google Cloud Pipeline Components: each version is released once, and GCPC names it.
_RELEASED = re.compile(r"gcr\.io/ml-pipeline/google-cloud-pipeline-components:")
#: Keys of a replica's image in a container_spec and in a python_package_spec.
_IMAGE_KEYS = ("image_uri", "executor_image_uri")


@rules(Executor, Pool)
def images(part: Executor | Pool) -> Found:
    """Images of tasks and replicas.

    A different image with the same name changes what a pipeline does, and caching does not notice.

    SL401 error: A container has an image.
        Fix: set the component's base_image or image
        Source: pipeline_spec.proto.
    SL402 error: A worker pool's container has an image.
        Fix: set container_spec.image_uri
        Source: ContainerSpec.
    SL403 warning: A task's image has a digest, or a tag other than "latest".
    SL404 warning: A replica's image has a digest, or a tag other than "latest".
        Fix: add a digest, or a tag that is never reused
        Source: artifact-registry/docs/docker/names.
    SL407 warning: A task installs no packages when it starts.
    SL408 warning: A replica installs no packages when it starts.
        Fix: put the packages into the image, and set install_kfp_package=False
        Source: general/vpc-service-controls.
    """
    container = part.container
    if isinstance(part, Executor):
        missing, fixed, installed = "SL401", "SL403", "SL407"
        what, image = "container", literal_string(container.get("image"))
        is_missing = not container.get("image")
    else:
        missing, fixed, installed = "SL402", "SL404", "SL408"
        what, image = "pool", part.image
        is_missing = bool(container) and all(is_surely_missing(container, key) for key in _IMAGE_KEYS)
    if is_missing:
        yield missing, f"the {what} has no image"
    if fault := _loose(image):
        yield fixed, f"the image {image} {fault}"
    if any("pip install" in argument for argument in argv(container)):
        yield installed, "pip install runs at every start"


@rules(Pipeline)
def platforms_and_digests(pipeline: Pipeline) -> Found:
    """Settings for other platforms, and image tags.

    A tag can be moved to another image, even while a schedule is active. Names without a registry are not
    checked: a local run ignores them.

    SL409 error: The file is one YAML document, without settings for another platform.
        Fix: compile without kfp-kubernetes and without a workspace; 'shardline run' takes the file unchanged
        Source: SDK, yaml_utils.
    SL410 warning: An image in a registry is named by digest.
        Fix: name it by digest, which 'shardline image push' prints
        Source: artifact-registry/docs/docker/names.
    """
    for name in pipeline.platforms:
        yield "SL409", f"a second document has settings for {name}, which Vertex AI's SDK refuses to load"
    of_tasks = (literal_string(executor.container.get("image")) for executor in pipeline.executors)
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
        Source: ContainerSpec.
    SL321 error: An environment variable's name is a C identifier.
        Fix: use letters, digits and underscores, with no digit first
        Source: EnvVar.
    SL322 warning: A replica does not set variables that the platform sets.
        Fix: leave it out; the platform sets it for each replica
        Source: training/distributed-training.
    SL323 warning: An environment variable is set once.
        Fix: set it once
        Source: ContainerSpec.
    """
    if len(pool.env) > MAX_VARIABLES:
        yield "SL314", f"the pool sets {len(pool.env)} environment variables"
    names = [str(item.get("name", "")) for item in pool.env]
    for name, count in Counter(name for name in names if "{{$" not in name).items():
        if not VARIABLE.fits(name):
            yield "SL321", f"the environment variable {name!r} is not a C identifier"
        if PLATFORM_VARIABLE.fits(name):
            yield "SL322", f"the pool sets {name} itself"
        if count > 1:
            yield "SL323", f"the environment variable {name} is set {count} times"


@rules(Parameter, Task, Pool, Executor)
def secrets(part: Parameter | Task | Pool | Executor) -> Found:
    """Secrets that are readable in the console, in logs or in the file.

    SL811 error: A pipeline parameter holds no secret.
    SL812 error: A task's constant input holds no secret.
    SL814 error: A container's environment, command and source hold no secret.
    SL813 error: A replica's environment variables hold no secret.
        Fix: read it from Secret Manager at run time, remove it here, and revoke it
        Source: secret-manager/docs/best-practices.
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
        if kind := secret_kind(name, value):
            yield code, f"{name} holds {kind}"


def _variables(env: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(str(item.get("name", "")), item.get("value")) for item in env]


def _loose(image: str) -> str:
    """Returns why another image may have the same name tomorrow; "" when none can."""
    if not image or "@" in image or _PREBUILT.match(image):
        return ""
    tag = image.rpartition("/")[2].partition(":")[2]
    return {"": "has neither tag nor digest", "latest": "has the tag latest, which moves"}.get(tag, "")


#: Prefixes of paths that every task can read: buckets, through the mount.
_MOUNTED = ("gs://", "/gcs/")
#: Options of the trainer that are a path, and whether the run writes there.
_OPTIONS = {"initial_model": False, "checkpoint_dir": True, "tensorboard_log_dir": True}


@rules(Pipeline)
def values(pipeline: Pipeline) -> Found:
    """Values of the parameters of Shardline's pipelines.

    SL606 error: A parameter of Shardline's pipelines has a valid value.
        Fix: pass a valid value; 'shardline run' refuses this one, too
        Source: Shardline: the run's first task refuses it.
    """
    if pipeline.given is None or pipeline.aim is not Aim.ASKED or pipeline.name not in OWN_PIPELINES:
        return  # `check_run` checks them before a run
    try:
        check_values(pipeline.name, _values(pipeline), here=False)
    except ShardlineError as error:
        yield "SL606", error.line


@rules(Pipeline)
def places(pipeline: Pipeline) -> Found:
    """Paths that a run of Shardline's pipelines reads and writes on the platform.

    A container can read buckets, as gs://BUCKET/PATH or /gcs/BUCKET/PATH, and nothing of another machine.
    What it writes elsewhere is deleted with it.

    SL607 error: A run reads nothing from the machine that submits it.
        Fix: copy it into a bucket ('gcloud storage cp --recursive'), and pass gs://BUCKET/PATH
        Source: Shardline: a task runs in a container of its own.
    SL608 warning: What a run reads is in a bucket.
        Fix: pass gs://BUCKET/PATH, unless the image holds this path
        Source: Shardline: a task runs in a container of its own.
    SL609 error: The parameter takes this kind of URL.
        Fix: copy it into a bucket and pass gs://BUCKET/PATH, or read it in your own source class
        Source: Shardline: the run's first task refuses it.
    SL610 error: What a run writes is in a bucket.
        Fix: pass gs://BUCKET/PATH
        Source: Shardline: a container's disk is deleted with it.
    SL611 warning: A run says where to publish a blessed model.
        Fix: pass champion_uri=gs://BUCKET/PATH, or champion_uri= to publish nothing
        Source: Shardline: an empty champion_uri publishes nothing.
    """
    if pipeline.given is None or pipeline.aim is Aim.HERE or pipeline.name not in OWN_PIPELINES:
        return
    known = _values(pipeline)
    for name, path, written in _places(known):
        if fault := _fault(name, path, written):
            yield fault
    if known.get("champion_uri") == "" and "champion_uri" not in pipeline.given:
        yield "SL611", "champion_uri is not set: a blessed model is not published"


@rules(Pipeline)
def contents(pipeline: Pipeline) -> Found:
    """Modules of your own that a run uses, and that the image must hold.

    SL612 error: The image has the modules and names that a run uses.
        Fix: name what it has, or add its directory to [image] packages (relative to the settings file) or
            its distribution to [image] requirements
        Source: Shardline: the table [image] says what the image holds.
    SL614 warning: The settings say what the image holds.
        Fix: pass --settings FILE with a table [image]; 'shardline check FILE' checks with it
        Source: Shardline: the table [image] says what the image holds.
    """
    if pipeline.given is None or pipeline.aim is Aim.HERE or pipeline.name not in OWN_PIPELINES:
        return
    known = _values(pipeline)
    if pipeline.image is not None:
        for line in missing_from_image(pipeline.image, known):
            yield "SL612", line.partition("; ")[0]
    elif own := [name for name, value in plugins_of(known).items() if not value.startswith("shardline.")]:
        yield "SL614", f"the settings do not say what the image holds, so {', '.join(own)} is not checked"


def _values(pipeline: Pipeline) -> dict[str, Any]:
    """Returns the parameters of a run with their defaults, converted to the declared types."""
    found = {}
    for parameter in pipeline.parameters:
        value = pipeline.value(parameter.name)
        try:
            found[parameter.name] = convert(parameter.name, value, parameter.declaration)
        except (ShardlineError, KeyError):
            continue  # another rule reports it
    return found


def _places(known: Mapping[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """Yields the paths in parameters: the parameter, the path, and whether the run writes there."""
    form, _, path = str(known.get("source", "")).partition(":")
    if form in ("images", "text", "tfrecord", "table"):
        yield "source", path, False
    for name in ("labels", "schema", "data_dir"):
        yield name, str(known.get(name, "")), False
    for name in ("champion_uri", "history_uri"):
        yield name, str(known.get(name, "")), True
    options = known.get("train_options") or {}
    for name, written in _OPTIONS.items():
        yield f"train_options.{name}", str(options.get(name) or ""), written
    model, weights = str(known.get("model", "")), str((known.get("hparams") or {}).get("weights") or "")
    if (model in BUILT_IN or model.startswith(KERAS_PREFIX)) and weights not in ("imagenet", "none"):
        yield "hparams.weights", weights, False


def _fault(name: str, path: str, written: bool) -> tuple[str, str] | None:
    """Returns the code of the rule that a path breaks, and what was found."""
    if not path or path.startswith(_MOUNTED) or "{{$" in path:
        return None
    is_path = f"{name} is {path!r}"
    if re.match(r"(?:.*::)?([A-Za-z][\w.+-]*)://", path):
        return "SL609", f"{is_path}; it takes gs:// and /gcs/"
    if slash := re.match(r"(gs|gcs):/*", path):
        return "SL609", f"{is_path}; did you mean gs://{path[slash.end() :]}?"
    if written:
        return "SL610", f"{is_path}, a directory of the container, which is deleted with it"
    if not os.path.isabs(path) or os.path.exists(path):
        return "SL607", f"{is_path}, a path on this machine"
    return "SL608", f"{is_path}, which is not in a bucket"


@rules(Pipeline)
def sent(pipeline: Pipeline) -> Found:
    """Images and placeholders of a pipeline that is sent to the platform.

    SL411 error: Your own image names its registry.
        Fix: name it LOCATION-docker.pkg.dev/PROJECT/REPOSITORY/NAME:TAG in the settings (in your own
            pipeline: with_image), and compile
        Source: artifact-registry/docs/docker/names.
    SL413 warning: Another pipeline's image names its registry.
        Fix: write docker.io/NAME:TAG if you mean Docker Hub, or the registry that has it
        Source: artifact-registry/docs/docker/names.
    SL412 error: The placeholders of the example settings are replaced.
        Fix: write your own project and bucket
        Source: settings/vertex.toml.example.
    """
    if pipeline.aim is Aim.HERE:
        return
    of_tasks = {literal_string(executor.container.get("image")) for executor in pipeline.executors}
    custom_jobs = jobs(pipeline)
    images = of_tasks | {pool.image for job in custom_jobs for pool in job.pools}
    for image in sorted(filter(None, images)):
        if pipeline.aim is not Aim.SENT or has_registry(image):
            continue
        if pipeline.name in OWN_PIPELINES or re.match(r"shardline[:@-]|shardline$", image):
            yield "SL411", f"the image {image} has no registry, so the platform cannot pull it"
        elif not image.startswith("python:"):  # KFP's own components have it, from Docker Hub
            yield "SL413", f"the image {image} has no registry, which means Docker Hub"
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
