"""What can be known of a retraining run before it starts: values are refused here, in a second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from components.export_validate.rules import Gate, check_min_accuracy, parse_rules
from components.preprocess.artifact import make_settings
from components.preprocess.settings import PreprocessSettings
from components.preprocess.sources import open_source
from components.train.run import check_options
from trainer.models import import_string
from trainer.settings import TrainSettings

_TRAINING = ("epochs", "per_replica_batch_size", "learning_rate", "seed")


def check_retrain(parameters: Mapping[str, Any]) -> None:
    """Checks the values of the retraining pipeline's parameters.

    The steps check them again where they use them; here they are checked before anything has been spent.
    Loads neither TensorFlow nor the user's own code.

    Args:
        parameters: Every parameter of the pipeline, of its declared type.

    Raises:
        SettingsError: When a value is out of range.
        SourceError: When there is no such source.
        ModelError: When there is no such model.
    """
    check_min_accuracy(parameters["min_accuracy"])
    Gate(parse_rules(parameters["rules"]), first_run=parameters["first_run"])
    known = {field.name for field in fields(PreprocessSettings)}
    settings = make_settings(
        {name: value for name, value in parameters.items() if name in known}
        | {"processes": parameters["preprocess_processes"]}
    )
    own = {name: parameters[name] for name in _TRAINING}
    if own["per_replica_batch_size"] == 0:  # chosen when the data is known
        del own["per_replica_batch_size"]
    options = check_options(parameters["train_options"], taken=_TRAINING)
    TrainSettings(dataset="", model=parameters["model"], **own, **options)
    import_string(parameters["model"])
    if parameters["source"].startswith("images:") or ":" not in parameters["source"]:
        open_source(settings)
