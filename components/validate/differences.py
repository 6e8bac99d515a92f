"""Differences of a model and the champion: in data, code and parameters, as far as their exports tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shardline.components.html import fact_rows
from shardline.components.model_store import Export, TrainingData
from shardline.components.text import short

# Places, which are others in each run, and facts of a training beside its settings.
_PLACES = ("dataset", "model_dir", "checkpoint_dir", "tensorboard_log_dir")
_FACTS = ("strategy", "replicas", "global_batch_size")

_DIGITS, _LONGEST = 19, 80


class Difference(NamedTuple):
    """One difference: whether of data, code or parameters, of what, and both values as text."""

    kind: str
    what: str
    before: str
    now: str


def find_differences(before: Export, now: Export) -> list[Difference]:
    """Returns in what two exported models differ."""
    found = []
    for kind, tell in (("data", _data), ("code", _code), ("parameters", _parameters)):
        earlier, later = tell(before), tell(now)
        for what in {**later, **earlier}:
            old, new = (short(values.get(what, ""), _LONGEST) or "none" for values in (earlier, later))
            if earlier.get(what, "") != later.get(what, ""):
                found.append(Difference(kind, what, old, new))
    return found


def _data(export: Export) -> dict[str, str]:
    data = export.training_data or TrainingData()
    return {
        # The fingerprint is also of the order in which the same examples are stored.
        "dataset as it is stored": export.fingerprint[:_DIGITS],
        "training examples": f"{data.records:,} ({data.keys.partition(':')[2][:8]})" if data.keys else "",
        **_labels(export),
        "split": ", ".join(f"{name} {share}" for name, share in data.shares.items()),
        "split_salt": "" if data.salt is None else str(data.salt),
        "key": data.key,
        **{name: str(value) for name, value in data.rules.items()},
    }


def _labels(export: Export) -> dict[str, str]:
    several = len(export.labels) > 1
    return {
        f"{'classes' if label.class_names else 'numbers'}{f' of {label.name}' if several else ''}": (
            f"{len(label.outputs):,}"
        )
        for label in export.labels
    }


def _code(export: Export) -> dict[str, str]:
    trained = export.settings.get("versions")
    in_training = {f"{name} in training": str(version) for name, version in _items(trained)}
    return {"git revision": export.git_revision or "", **export.versions, **in_training}


def _parameters(export: Export) -> dict[str, str]:
    settings = {name: value for name, value in _items(export.settings.get("settings")) if name not in _PLACES}
    facts = {name: export.settings[name] for name in _FACTS if name in export.settings}
    return dict(fact_rows({**settings, **facts}))


def _items(value: object) -> list[tuple[str, object]]:
    return list(value.items()) if isinstance(value, Mapping) else []
