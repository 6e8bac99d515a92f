"""Rules about a run: names and values of its parameters, the paths that it uses, its code, its schedule."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from shardline.components.changes import plugins_of, read_settings
from shardline.components.code import files_of, is_own
from shardline.components.text import enumerate_names
from shardline.pipelines.check.checks import Found, rules
from shardline.pipelines.check.pipeline import Pipeline, Schedule, Target, Task
from shardline.pipelines.parameters import check_parameters, check_values, convert
from shardline.pipelines.spec import OWN_PIPELINES
from shardline.trainer.base.errors import ShardlineError
from shardline.trainer.base.plugins import BUILT_IN, KERAS_PREFIX


@rules(Pipeline)
def values(pipeline: Pipeline) -> Found:
    """Values of parameters.

    SL601 error: A run passes every parameter that has no default, and no other than the pipeline has, each
        with a value of its type.
        Fix: pass values of the declared types: --param NAME=VALUE
        Source: SDK, PipelineRuntimeConfigBuilder; pipeline_spec.proto.
    SL606 error: A parameter of Shardline's pipelines has a valid value.
        Fix: pass a valid value; 'shardline run' refuses this one, too
        Source: Shardline.
    """
    if pipeline.given is None or pipeline.target is not Target.UNKNOWN:
        return  # `check_run` checks them before a run
    code = "SL601"
    try:
        check_parameters(pipeline.spec, pipeline.given)
        code = "SL606"
        if pipeline.name in OWN_PIPELINES:
            check_values(pipeline.name, _values(pipeline), here=False)
    except ShardlineError as error:
        yield code, error.line


#: Components with settings, and which of them their `options` are.
_COMPONENTS = {
    "preprocess": "data_options",
    "plan_shards": "data_options",
    "train": "train_options",
    "export_validate": "gate_options",
    **dict.fromkeys(("rehearse", "detect_changes"), ""),
}
_FUNCTION = re.compile(r"--function_to_execute', '(\w+)'")


@rules(Task)
def settings(task: Task) -> Found:
    """Settings of Shardline's components in a pipeline of one's own.

    SL613 error: A component of Shardline has valid settings, as far as they are known before a run.
        Fix: pass a valid value; the task refuses this one, too
        Source: Shardline.
    """
    # A custom job has the program in its worker pools.
    program = f"{task.container} {task.value('worker_pool_specs')}"
    found = _FUNCTION.search(program)
    if not found or found[1] not in _COMPONENTS or "from shardline.components." not in program:
        return
    if task.pipeline.name in OWN_PIPELINES:
        return  # their parameters are checked
    given: dict[str, Any] = {"source": "digits", "model_function": "mnist_cnn"}
    given |= {name: {} for name in _COMPONENTS.values()}
    options = _COMPONENTS[found[1]]
    for name, value in _values(task).items():
        if value != "" and "{{$" not in str(value):  # "" may be the default of what a run must pass
            given[options if name == "options" else name] = value
    try:
        read_settings(given)
    except ShardlineError as error:
        yield "SL613", error.line.replace(options, "options") if options else error.line


#: Prefixes of paths that every task can read: buckets, through the mount.
_MOUNTED = ("gs://", "/gcs/")
#: Options of the trainer that are a path, and whether the run writes there.
_OPTIONS = {"initial_model": False, "checkpoint_dir": True, "tensorboard_log_dir": True}


@rules(Pipeline)
def places(pipeline: Pipeline) -> Found:
    """Paths that a run of Shardline's pipelines reads and writes on the platform.

    A container can read buckets, as gs://BUCKET/PATH or /gcs/BUCKET/PATH, and nothing of another machine.
    What it writes elsewhere is deleted with it.

    SL607 error: A run reads nothing from the machine that submits it, and no other kind of URL.
        Fix: copy it into a bucket ('gcloud storage cp --recursive'), and pass gs://BUCKET/PATH
        Source: Shardline.
    SL610 error: What a run writes is in a bucket.
        Fix: pass gs://BUCKET/PATH
        Source: Shardline.
    SL611 warning: A run says where to publish a blessed model.
        Fix: pass champion_uri=gs://BUCKET/PATH, or champion_uri= to publish nothing
        Source: Shardline.
    """
    if pipeline.given is None or pipeline.target is Target.LOCAL or pipeline.name not in OWN_PIPELINES:
        return
    known = _values(pipeline)
    for name, path, written in _places(known):
        if fault := _fault(path, written):
            yield "SL610" if written else "SL607", f"{name} is {path!r}{fault}"
    if known.get("champion_uri") == "" and "champion_uri" not in pipeline.given:
        yield "SL611", "champion_uri is not set: a blessed model is not published"


@rules(Pipeline)
def contents(pipeline: Pipeline) -> Found:
    """Packages of your own that a run names.

    SL612 error: The file holds packages of your own that a run names, or the Dockerfile copies them.
        Fix: name it in [code] packages of the settings, and compile
        Source: Shardline.
    """
    dockerfile = Path("Dockerfile")
    if pipeline.target is Target.LOCAL or pipeline.name not in OWN_PIPELINES or not dockerfile.is_file():
        return
    joined = re.sub(r"\\\s*\n", " ", dockerfile.read_text(encoding="utf-8"))
    copied = "\n".join(re.findall(r"(?im)^\s*(?:COPY|ADD)\s+(.*)", joined))
    for name, reference in plugins_of(_values(pipeline)).items():
        package = re.split("[.:]", reference)[0]
        # A glob, a list in JSON, or the whole directory may have it.
        is_copied = re.search(rf"[*?\[]|(^|\s)\.\s|\b{package}\b", copied)
        if is_own(package) and package not in pipeline.packages and not is_copied:
            yield "SL612", f"{name} is {reference}, and neither the file nor the Dockerfile has {package}"


@rules(Pipeline)
def edited(pipeline: Pipeline) -> Found:
    """Packages of your own that the file holds.

    SL614 warning: The code in the file is that of this machine, where it has these packages.
        Fix: compile again
        Source: Shardline.
    """
    for package in filter(is_own, pipeline.packages):
        here = files_of(package)
        held = {name: pipeline.code[name] for name in pipeline.code if re.split("[/.]", name)[0] == package}
        if changed := [name for name in sorted({*here, *held}) if here.get(name) != held.get(name)]:
            yield "SL614", f"the code here is not that of the file: {enumerate_names(changed, 3)}"


def _values(part: Pipeline | Task) -> dict[str, Any]:
    """Returns the values of the parameters that are known before a run, converted to their types."""
    if isinstance(part, Task):
        declared = part.declared("parameters")
    else:
        declared = {parameter.name: parameter.declaration for parameter in part.parameters}
    found = {}
    for name in declared:
        try:
            found[name] = convert(name, part.value(name), declared[name])
        except (ShardlineError, KeyError):
            continue  # another rule reports it
    return found


def _places(known: Mapping[str, Any]) -> Iterator[tuple[str, str, bool]]:
    known = {**known, **known.get("data_options", {})}
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


def _fault(path: str, written: bool) -> str:
    """Returns what is wrong with a path on the platform; "" if nothing is."""
    if not path or path.startswith(_MOUNTED) or "{{$" in path:
        return ""
    if re.match(r"(?:.*::)?([A-Za-z][\w.+-]*)://", path):
        return "; it takes gs:// and /gcs/"
    if slash := re.match(r"(gs|gcs):/*", path):
        return f"; did you mean gs://{path[slash.end() :]}?"
    if written:
        return ", a directory of the container, which is deleted with it"
    # The image may hold an absolute path.
    return "" if os.path.isabs(path) and not os.path.exists(path) else ", a path on this machine"


def split_zone(expression: str) -> tuple[str, str]:
    """Splits "TZ=ZONE FIELDS" (or CRON_TZ=) into zone and fields; the zone is "" without one."""
    match = re.match(r"(?s)(?:CRON_)?TZ=(\S*)\s*(.*)", expression.strip())
    return (match[1], match[2]) if match else ("", expression)


@rules(Schedule)
def times(schedule: Schedule) -> Found:
    """Times at which a schedule fires. The API itself refuses wrong values in a cron expression at once.

    SL901 error: A cron expression has five fields.
        Fix: write minute, hour, day, month and weekday with a time zone: TZ=Europe/Vienna 0 6 * * 1
        Source: Schedule.cron.
    SL902 error: A cron expression has a time zone of the IANA database.
        Fix: put the zone in front, an IANA name: TZ=Europe/Vienna 0 6 * * 1
        Source: Schedule.cron.
    SL909 warning: A schedule fires at most once an hour.
        Fix: name one minute, and the hours that you mean: TZ=Europe/Vienna 0 6 * * 1
        Source: vertex-ai/pricing: each run costs a fee.
    """
    name, expression = split_zone(schedule.cron)
    fields = expression.split()
    if len(fields) != 5:
        yield "SL901", f"cron {schedule.cron!r} has {len(fields)} fields, not 5"
    elif not fields[0].isdecimal():
        yield "SL909", f"cron {schedule.cron!r} names several minutes of an hour"
    if not name:
        yield "SL902", f"cron {schedule.cron!r} has no time zone"
    elif zone_of(name) is None:
        yield "SL902", f"there is no time zone {name!r}"


def zone_of(name: str) -> ZoneInfo | None:
    """Returns a time zone; None if this machine knows none of this name."""
    try:
        return ZoneInfo(name) if name else None
    except (KeyError, ValueError, OSError):
        return None
