"""Challenge: the champion, measured in the same way and on the same examples as a new model."""

from __future__ import annotations

from dataclasses import dataclass

from shardline.components import model_store
from shardline.components.model_store import Export, champions
from shardline.components.validate.comparison import compare
from shardline.components.validate.drift import Before, read_profile
from shardline.components.validate.evaluate import Examples, Measured, measure
from shardline.components.validate.evaluation import Evaluation
from shardline.components.validate.served import CALLS
from shardline.components.validate.training_keys import describe_overlap, find_trained_on
from shardline.components.validate.verdict import Absence
from shardline.trainer.data.manifest import Manifest
from shardline.trainer.errors import DatasetError, ModelError

_MOST_NAMES = 5


@dataclass(frozen=True)
class Challenge:
    """A challenger beside the champion.

    Attributes:
        evaluation: The challenger's, with that of the champion where it could be measured.
        champion: Version of the champion; "" where there is none yet or it cannot be told, None where no
            place for champions was given.
        absence: Why the champion could not be measured; None where it was, or was not asked for.
        warning: What a person should know of the comparison, in one sentence; "" for nothing.
        export: Description of the champion; None where it was not read.
        profile: Profile of its training data, or why there is none.
    """

    evaluation: Evaluation
    champion: str | None = None
    absence: Absence | None = None
    warning: str = ""
    export: Export | None = None
    profile: Before = "there is no champion to compare with"


def challenge_champion(
    challenger: Measured, champion_uri: str, examples: Examples, *, min_slice: int, calls: int = CALLS
) -> Challenge:
    """Measures the champion in the same way as the challenger (see `measure`), and puts it beside it.

    Raises:
        SettingsError, PlatformError: When the place for champions is not there or cannot be read, so that
            it cannot be said whether it has one.
    """
    alone, version, export, profile = challenger.evaluation, "", None, Challenge.profile
    champions.require_store(champion_uri)
    try:
        present = champions.current(champion_uri)
        if present is None:
            return Challenge(alone, "", Absence(f"there is no champion in {champion_uri} yet", first=True))
        version = present.version
        with champions.fetched(champion_uri, present) as published:
            profile = read_profile(published, version)
            export = Export.read(published)
            check_comparable(export, version, examples.manifest)
            trained_on = find_trained_on(published, examples)
            saved_model = published / model_store.SAVED_MODEL
            champion = measure(saved_model, examples, min_slice=min_slice, calls=calls)
    except (ModelError, DatasetError) as error:
        return Challenge(alone, version, Absence(str(error)), export=export, profile=profile)
    compared = compare(challenger, champion, trained_on)
    warning = describe_overlap(trained_on, export.training_data)
    return Challenge(compared, version, warning=warning, export=export, profile=profile)


def check_comparable(export: Export, version: str, manifest: Manifest) -> None:
    """Refuses a published version with other classes or inputs than a dataset; raises ModelError."""
    theirs, ours = (tuple(f"{one.kind} {one.name}" for one in all.labels) for all in (export, manifest))
    compared = [
        ("labels", theirs, ours),
        ("inputs", tuple(sorted(export.inputs)), tuple(sorted(manifest.inputs))),
    ]
    if theirs == ours:
        pairs = zip(export.labels, manifest.labels, strict=True)
        compared += [("classes" if a.class_names else "numbers", a.outputs, b.outputs) for a, b in pairs]
    for kind, found, wanted in compared:
        if found != wanted:
            raise ModelError(
                f"the champion {version} has other {kind} ({_enumerate(found)}) than the dataset "
                f"({_enumerate(wanted)}); publish this model to another champion_uri"
            )


def _enumerate(names: tuple[str, ...]) -> str:
    return ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")
