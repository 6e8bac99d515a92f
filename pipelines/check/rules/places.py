"""Rules about places: what a run of our own pipelines reads and writes, images, and placeholders."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from shardline.components.configure.fingerprint import plugins_of
from shardline.components.vertex.payload import known_text
from shardline.pipelines import preflight
from shardline.pipelines.check.job import jobs
from shardline.pipelines.check.pipeline import Aim, Pipeline
from shardline.pipelines.check.registry import Found, rules
from shardline.pipelines.image.build import has_registry
from shardline.pipelines.image.contents import missing_from_image
from shardline.pipelines.parameters import convert
from shardline.pipelines.remote.environment import placeholder, placeholder_value
from shardline.trainer.errors import ShardlineError
from shardline.trainer.models import BUILT_IN, KERAS_PREFIX

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
    if pipeline.given is None or pipeline.aim is not Aim.ASKED or pipeline.name not in preflight.OURS:
        return  # before a run they are checked as such
    try:
        preflight.check_values(pipeline.name, _values(pipeline), here=False)
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
    if pipeline.given is None or pipeline.aim is Aim.HERE or pipeline.name not in preflight.OURS:
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
    if pipeline.given is None or pipeline.aim is Aim.HERE or pipeline.name not in preflight.OURS:
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
        if pipeline.name in preflight.OURS or _OURS.match(image):
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
