"""Checks of a run before it starts: bad values are refused in a second, and a study file is read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardline.components.champions import require_shelf
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources import KNOWN_FORMS, check_form, open_source
from shardline.components.train.settings import TrainingSettings
from shardline.components.tune.study import check_tuned, parse_study, read_study
from shardline.components.validate.settings import GateSettings
from shardline.pipelines.check.pipeline import Aim, Pipeline
from shardline.pipelines.check.registry import Finding
from shardline.pipelines.check.schedule import Schedule
from shardline.pipelines.parameters import check_parameters
from shardline.pipelines.settings import load_image
from shardline.pipelines.spec import RETRAIN, TUNE, defaults
from shardline.pipelines.tables import read_toml
from shardline.trainer import plugins
from shardline.trainer.errors import PipelineError, SettingsError, SourceError
from shardline.trainer.models import import_string
from shardline.trainer.records import own_fields, read

#: Names of the pipelines whose parameters are known here.
OURS = (RETRAIN, TUNE)
#: The task that tries on a few examples what comes after it.
REHEARSAL = "rehearse"
#: Its inputs that say how many replicas do what.
_REPLICAS = ("readers", "parameter_servers")
#: How the sources begin that are none of the user's own.
_PREFIXES = tuple(form.partition(":")[0] + ":" for form in KNOWN_FORMS[1:-1])
_RETRAINED = ("source", "model", "preprocess_processes")
_NEEDED = {
    RETRAIN: _RETRAINED,
    TUNE: (*_RETRAINED, "study", "max_trial_count", "trial_epochs", "train_options"),
}


def check_run(
    spec: Mapping[str, Any],
    given: Mapping[str, Any],
    schedule: Schedule | None = None,
    *,
    here: bool = False,
    settings: Path | None = None,
) -> tuple[dict[str, Any], list[Finding]]:
    """Checks a pipeline and the parameters of a run of it, before anything is spent.

    Args:
        spec: The compiled pipeline (IR).
        given: Values by name: as text, as on a command line, or of the declared type already.
        schedule: Schedule of the run, if it has one.
        here: Whether it is to run on this machine, which must then have the data and the model function.
        settings: Settings file, which may say what the image holds.

    Returns:
        The given parameters, of their declared types, and the warnings of `shardline check`.

    Raises:
        PipelineError: When a parameter is unknown, mistyped or missing, `shardline check` finds an error, or
            a run on the platform is given no place for its champion, not even an empty one.
        SettingsError: When a value of one of our own pipelines is out of range.
        SourceError, ModelError: When there is no such source or model.
    """
    from shardline.pipelines.check.checks import refuse_errors  # whose rules look at values with this module

    parameters = check_parameters(spec, given)
    values = defaults(spec) | parameters
    name = spec["pipelineInfo"]["name"]
    if missing := [parameter for parameter in _NEEDED.get(name, ()) if parameter not in values]:
        raise PipelineError(
            f"the pipeline is called {name} as ours is, and has no parameter {', '.join(missing)}; compile "
            "it with this release, or give it another name"
        )
    if name in OURS:
        check_values(name, values, here=here)
    aim = Aim.HERE if here else Aim.SENT
    image = load_image(settings) if settings else None
    findings = refuse_errors(Pipeline(spec, parameters, aim=aim, image=image), schedule)
    if nowhere := next((finding for finding in findings if finding.code == "SL611"), None):
        raise PipelineError(f"{nowhere.why}; {nowhere.fix}")
    return parameters, findings


def check_values(name: str, parameters: Mapping[str, Any], *, here: bool) -> None:
    """Checks the values of all parameters of one of `OURS`; raises as `check_run` does."""
    check_retrain(parameters, here=here)
    if name == TUNE:
        check_tune(parameters)


def to_rehearse(
    spec: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[TrainingSettings, GateSettings, int, int]:
    """Returns what a run of one of our pipelines would rehearse, and its readers and parameter_servers.

    Raises PipelineError when the pipeline has no rehearsal, or a parameter is unknown or mistyped, and
    SettingsError when a value is out of range.
    """
    inputs = [
        task["inputs"]["parameters"]
        for component in (spec["root"], *spec.get("components", {}).values())
        for name, task in component.get("dag", {}).get("tasks", {}).items()
        if name == REHEARSAL and spec["pipelineInfo"]["name"] in OURS
    ]
    if not inputs:
        raise PipelineError(f"the pipeline has no task {REHEARSAL!r}; compile it with this release")
    values = defaults(spec) | check_parameters(spec, given)
    training = read(TrainingSettings, own_fields(TrainingSettings, values), "training")
    gate = read(GateSettings, own_fields(GateSettings, values), "gate")
    readers, servers = (int(inputs[0][name]["runtimeValue"]["constant"]) for name in _REPLICAS)
    return training, gate, readers, servers


def check_tune(parameters: Mapping[str, Any]) -> None:
    """Checks what the tuning pipeline has beside the parameters of the retraining pipeline.

    Raises SettingsError when the study is wrong, or tunes what cannot be tuned.
    """
    for name in ("max_trial_count", "trial_epochs"):
        if parameters[name] < 0:
            raise SettingsError(f"{name} must not be negative, got {parameters[name]}")
    study = read_study(parse_study(parameters["study"]), max_trial_count=parameters["max_trial_count"])
    check_tuned(study.types, parameters["train_options"])


def check_retrain(parameters: Mapping[str, Any], *, here: bool = True) -> None:
    """Checks every parameter of the retraining pipeline; `here`, data and model have to be on this machine.

    The steps check them again where they use them; here they are checked before anything has been spent.
    Loads neither TensorFlow nor the user's own code. Raises as `check_run`.
    """
    values = {**parameters, "processes": parameters["preprocess_processes"]}
    data = read(PreprocessSettings, own_fields(PreprocessSettings, values), "data")
    training = read(TrainingSettings, own_fields(TrainingSettings, values), "training")
    gate = read(GateSettings, own_fields(GateSettings, values), "gate")
    if here and os.path.isdir(gate.champion_uri):
        require_shelf(gate.champion_uri)
    function = import_string(training.model)
    if here:
        plugins.look(function, "model")
        if (run := parameters.get("continue_run", "")) and "/" not in run:
            raise SettingsError(
                f"continue_run is {run!r}, of the platform; here 'shardline run --resume RUN' continues "
                "one, or continue_run names a directory with its checkpoints"
            )
    source = parameters["source"]
    # What {date} is, the run will know; what lies in a bucket need not be within reach of this machine.
    elsewhere = (
        not here
        or "{date" in source
        or "{last " in source
        or "://" in source
        or source.startswith(("images:/gcs/", "text:/gcs/"))
    )
    check_form(source)
    if not elsewhere and (source.startswith(("images:", "text:")) or ":" not in source):
        open_source(data)
    elif here and not source.startswith(_PREFIXES):
        plugins.look(source, "source", SourceError)


def load_study(path: Path) -> str:
    """Returns a study file as JSON, for the parameter "study"; settings/tune.toml shows all of its keys.

    Raises SettingsError when the file is missing or no TOML, or says something that makes no study.
    """
    content = read_toml(path, f"no study file {path}; settings/tune.toml is one to start from")
    try:
        check_tuned(read_study(content).types, {})
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from None
    return json.dumps(content, ensure_ascii=False)
