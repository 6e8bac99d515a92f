"""What can be known of a retraining run before it starts: values are refused here, in a second."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from components.export_validate.gates import check_min_accuracy
from components.preprocess.run import PreprocessSettings
from components.preprocess.sources import open_source
from trainer.models import import_string
from trainer.settings import TrainSettings


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
    PreprocessSettings(
        source=parameters["source"],
        data_dir=parameters["data_dir"],
        image_size=parameters["image_size"],
        seed=parameters["seed"],
    )
    TrainSettings(
        dataset="",
        model=parameters["model"],
        epochs=parameters["epochs"],
        per_replica_batch_size=parameters["per_replica_batch_size"],
        learning_rate=parameters["learning_rate"],
        seed=parameters["seed"],
    )
    import_string(parameters["model"])
    if parameters["source"].startswith("images:") or ":" not in parameters["source"]:
        open_source(parameters["source"])
