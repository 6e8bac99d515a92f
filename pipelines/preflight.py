"""What is known before a run starts: bad values, refused in a second, the study, and earlier runs here."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardline.components.model_store.catalog import require_store
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources import check_form, is_plugin, open_source
from shardline.components.run_directory import local_runs
from shardline.components.run_record import SUCCEEDED, RunRecord
from shardline.components.text import quality, short
from shardline.components.train.settings import TrainingSettings
from shardline.components.tune.study import check_tuned, parse_study, read_study
from shardline.components.validate.gate import GateSettings
from shardline.pipelines.parameters import check_parameters
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
#: Parameters that pipelines of our names have to have.
_RETRAINED = ("source", "model", "preprocess_processes")
NEEDED = {
    RETRAIN: _RETRAINED,
    TUNE: (*_RETRAINED, "study", "max_trial_count", "trial_epochs", "train_options"),
}


def check_values(name: str, parameters: Mapping[str, Any], *, here: bool) -> None:
    """Checks the values of all parameters of one of `OURS`.

    `here`, data and model have to be on this machine. Raises SettingsError when a value is out of range, and
    SourceError or ModelError when there is no such source or model.
    """
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
    Loads neither TensorFlow nor the user's own code. Raises as `check_values`.
    """
    values = {**parameters, "processes": parameters["preprocess_processes"]}
    data = read(PreprocessSettings, own_fields(PreprocessSettings, values), "data")
    training = read(TrainingSettings, own_fields(TrainingSettings, values), "training")
    gate = read(GateSettings, own_fields(GateSettings, values), "gate")
    if here and os.path.isdir(gate.champion_uri):
        require_store(gate.champion_uri)
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
    elif here and is_plugin(source):
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


#: Runs of a directory that are looked at, the newest first.
_MOST = 1000
#: Parameters that a local run has of its own, and those that name a place of this machine.
_OWN = ("champion_uri",)
#: Characters of a value that are shown.
_LONGEST = 40


@dataclass(frozen=True)
class Proofs:
    """Where runs on this machine are, and whether a pipeline has to have succeeded in one of them."""

    runs_dir: Path
    required: bool = False

    def of(self, content: bytes, spec: Mapping[str, Any]) -> str:
        """Returns in one line whether a file of this content has run here, and how that came out.

        The run that is named is the newest that succeeded, and where there is none the newest. Raises
        PipelineError where a success is required and there is none.
        """
        digest = hashlib.sha256(content).hexdigest()
        same = [record for record in local_runs(self.runs_dir, _MOST) if record.sha256 == digest]
        # One that found nothing changed has proved least.
        succeeded = sorted(
            (record for record in same if record.state == SUCCEEDED),
            key=lambda record: record.verdict == "unchanged",
        )
        if not same:
            line = f"this file (sha256 {digest[:12]}) has not run here, in {self.runs_dir}"
        else:
            times = "once" if len(same) == 1 else f"{len(same)} times"
            line = f"this file has run here {times}: {_words([*succeeded, *same][0], spec)}"
        if self.required and not succeeded:
            raise PipelineError(f"{line}; --proven wants a run that succeeded: 'shardline run' makes one")
        return line


def _words(record: RunRecord, spec: Mapping[str, Any]) -> str:
    usual = defaults(spec)
    changed = [
        f"{name}={short(value, _LONGEST)}"
        for name, value in record.parameters.items()
        if value != usual.get(name) and name not in _OWN
    ]
    given = f"with {', '.join(changed)}" if changed else "with all defaults"
    figures = f", {figures}" if (figures := quality(record.metrics)) else ""
    verdict = f" ({record.verdict}{figures})" if record.verdict else ""
    return f"{record.name} {record.state}{verdict}, {given}"
