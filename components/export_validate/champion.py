"""The present champion as a challenger's opponent: found, and measured again on the same examples."""

from __future__ import annotations

import json
from pathlib import Path

from shardline.components.export_validate import layout
from shardline.components.export_validate.evaluate import Measured, compare, measure
from shardline.components.export_validate.evaluation import Evaluation
from shardline.components.register.champion import champion_directory, current
from shardline.trainer.data import manifest as manifests
from shardline.trainer.data.manifest import Manifest
from shardline.trainer.errors import ModelError, ShardlineError

_FEW = 5


def challenge(
    challenger: Measured, champion_uri: str, dataset: Path, split: str, *, min_slice: int
) -> tuple[Evaluation, str]:
    """Measures the champion as the challenger was measured.

    Args:
        challenger: What was measured of the new model.
        champion_uri: Where champions are published: a directory or gs://.
        dataset: Dataset directory.
        split: Name of the split that the challenger was measured on.
        min_slice: Smallest slice that a rule may be judged on.

    Returns:
        The challenger's evaluation with that of the champion; or, where the champion cannot be measured, the
        challenger's alone and the reason.
    """
    try:
        saved_model = find_champion(champion_directory(champion_uri), manifests.load(dataset))
        champion = measure(saved_model, dataset, split, min_slice=min_slice)
    except ShardlineError as error:
        return challenger.evaluation, str(error)
    return compare(challenger, champion), ""


def find_champion(directory: Path, manifest: Manifest) -> Path:
    """Returns the directory of the champion's SavedModel, if it can be measured on a dataset.

    Args:
        directory: Where champions are published.
        manifest: Of the dataset.

    Raises:
        ModelError: When there is no champion yet, it is damaged, or it is for other classes or other input.
    """
    published = current(directory)
    if published is None:
        raise ModelError(f"there is no champion in {directory} yet")
    path = directory / published.path
    try:
        export = json.loads((path / layout.EXPORT_FILE).read_text(encoding="utf-8"))
        names, inputs = tuple(export["class_names"]), set(export["inputs"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"cannot read {path / layout.EXPORT_FILE} of the champion: {error!r}") from None
    for kind, found, wanted in (
        ("classes", names, manifest.class_names),
        ("inputs", tuple(sorted(inputs)), tuple(sorted(manifest.inputs))),
    ):
        if found != wanted:
            raise ModelError(
                f"the champion {published.version} has other {kind} ({_enumerate(found)}) than the dataset "
                f"({_enumerate(wanted)})"
            )
    return path / layout.SAVED_MODEL


def _enumerate(names: tuple[str, ...]) -> str:
    return ", ".join(map(str, names[:_FEW])) + (", ..." if len(names) > _FEW else "")
