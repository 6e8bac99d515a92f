"""Champion evaluation: the champion, measured in the same way and on the same examples as a new model.

A model looks better than it is on examples that it was trained on. So an export stores the keys (hashes) of
its training split, and a later run leaves test examples with these keys out of the comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
import xxhash

from shardline.components import model_store
from shardline.components.model_store import KEYS_FILE, Export, TrainingData, champions
from shardline.components.model_store.champions import Version, open_store, require_store
from shardline.components.text import enumerate_names
from shardline.components.validate.evaluate import Assessment, Examples, collect_outcomes, measure_export
from shardline.components.validate.export.signatures import CALLS, ServedModel
from shardline.components.validate.gate.verdict import NoChampion
from shardline.components.validate.metrics import LOWER_IS_BETTER
from shardline.components.validate.metrics.drift import ReferenceProfile, read_profile
from shardline.components.validate.metrics.evaluation import BestLead, Evaluation, Lead
from shardline.components.validate.metrics.intervals import Ints, Mask
from shardline.components.validate.metrics.outcomes import Outcomes
from shardline.components.validate.rules import BEST, GateRule
from shardline.trainer.base import crash, files
from shardline.trainer.base.errors import DatasetError, ModelError, ShardlineError
from shardline.trainer.base.progress import report
from shardline.trainer.base.settings import initial_model_file
from shardline.trainer.manifest import KEY_BYTES, Manifest

#: Examples that must remain for a comparison with the champion, where others are left out.
MIN_COMPARED = 50

Keys = npt.NDArray[np.uint64]

_KEY = np.dtype(">u8")
# Settings of preprocessing that affect the split, besides shares, salt and key.
_SPLIT_SETTINGS = ("stratify", "group", "split_by_time", "split_gap")


@dataclass(frozen=True)
class ChampionEvaluation:
    """Evaluation of a challenger together with the champion.

    Attributes:
        evaluation: The challenger's, with that of the champion where it could be measured.
        champion: Version of the champion; "" where there is none yet, None where no champion_uri is set.
        missing: Why the champion could not be measured.
        warning: Warning about the comparison; "" for none.
        profile: Profile of the champion's training data, or why there is none.
        training: Record of the champion's training; empty where there is none.
    """

    evaluation: Evaluation
    champion: str | None = None
    missing: NoChampion | None = None
    warning: str = ""
    profile: ReferenceProfile = "there is no champion to compare with"
    training: Mapping[str, Any] = field(default_factory=dict)


def evaluate_champion(
    challenger: Assessment,
    champion_uri: str,
    examples: Examples,
    *,
    calls: int = CALLS,
    rules: Sequence[GateRule] = (),
) -> ChampionEvaluation:
    """Measures the champion, if any, as the challenger was (see `measure_export`), and compares both.

    Where one of the `rules` compares with the best of the last champions, that is measured as well.
    Raises SettingsError or PlatformError when the model store does not exist or cannot be read.
    """
    alone, version, profile = challenger.evaluation, "", ChampionEvaluation.profile
    if not champion_uri:
        return ChampionEvaluation(alone)
    groups = next(iter(challenger.outcomes.values())).groups if examples.manifest.group else None
    require_store(champion_uri)
    try:
        last = champions.last_champions(champion_uri)
        if not last:
            missing = NoChampion(f"there is no champion in {champion_uri} yet", first=True)
            return ChampionEvaluation(alone, "", missing)
        version = last[0].version
        report("validate", f"measuring the champion {version} on the same examples")
        with open_store(champion_uri).fetched(last[0].path) as published:
            profile = read_profile(published, version)
            export = Export.read(published)
            check_comparable(export, version, examples.manifest)
            trained_on = find_training_overlap(published, examples, groups)
            saved_model = published / model_store.SAVED_MODEL
            champion = measure_export(saved_model, examples, min_slice=challenger.min_slice, calls=calls)
    except (ModelError, DatasetError) as error:
        return ChampionEvaluation(alone, version, NoChampion(str(error)), profile=profile)
    compared = compare_models(challenger, champion, trained_on)
    best = compare_with_best(
        challenger, last, rules, lambda version: _predict_earlier(champion_uri, version, examples, groups)
    )
    warning = describe_overlap(trained_on, export.training_data)
    return ChampionEvaluation(
        replace(compared, best=best), version, warning=warning, profile=profile, training=export.settings
    )


def compare_models(ours: Assessment, theirs: Assessment, trained_on: Mask | None = None) -> Evaluation:
    """Returns the challenger's evaluation with that of the champion on the same examples.

    `trained_on` is the mask of the examples that the champion was trained on: both leave these out.
    """
    whole, leads = ours.evaluation, dict[str, Lead]()
    if trained_on is not None and trained_on.any():
        ours, theirs = ours.select(~trained_on), theirs.select(~trained_on)
        whole = replace(whole, left_out=int(trained_on.sum()), compared=ours.evaluation)
    for name, outcomes in ours.outcomes.items():
        prefix, measured = (
            f"{name}." * bool(whole.parts),
            outcomes.leads(theirs.outcomes[name], ours.min_slice),
        )
        leads |= {f"{prefix}{metric}": lead for metric, lead in measured.items()}
    return replace(whole, champion=_only_compared(theirs.evaluation), leads=leads)


def _only_compared(evaluation: Evaluation) -> Evaluation:
    """Returns a champion's evaluation without what is not compared, or not the same when measured second."""
    return replace(
        evaluation,
        # By now the process has had both models in memory.
        metrics={name: value for name, value in evaluation.metrics.items() if name != "peak_memory_mb"},
        intervals={name: ends for name, ends in evaluation.intervals.items() if "[" not in name},
        numbers=tuple(replace(number, points=()) for number in evaluation.numbers),
        parts=tuple(map(_only_compared, evaluation.parts)),
        mistakes=(),
        confusion=(),
        calibration=(),
        roc=(),
        precision_recall=(),
    )


def _predict_earlier(uri: str, version: Version, examples: Examples, groups: Ints | None) -> Earlier | str:
    """Returns the predictions of an earlier champion, or why there are none; nothing else is measured."""
    report("validate", f"measuring the earlier champion {version.version} on the same examples")
    try:
        with open_store(uri).fetched(version.path) as published:
            check_comparable(Export.read(published), version.version, examples.manifest)
            trained_on = find_training_overlap(published, examples, groups)
            model = ServedModel(published / model_store.SAVED_MODEL, examples.manifest)
            return collect_outcomes(model, examples)[0], trained_on
    except (ModelError, DatasetError, FileNotFoundError) as error:
        return str(error).partition("; ")[0]  # without the remedy


def check_comparable(export: Export, version: str, manifest: Manifest) -> None:
    """Raises ModelError when a published version has other labels, classes or inputs than a dataset."""
    theirs, ours = (
        tuple(f"{label.kind} {label.name}" for label in source.labels) for source in (export, manifest)
    )
    inputs = (tuple(sorted(source.inputs)) for source in (export, manifest))
    compared = [("labels", theirs, ours), ("inputs", *inputs)]
    if theirs == ours:
        pairs = zip(export.labels, manifest.labels, strict=True)
        compared += [("classes" if a.class_names else "numbers", a.outputs, b.outputs) for a, b in pairs]
    for kind, present, wanted in compared:
        if present != wanted:
            raise ModelError(
                f"the champion {version} has other {kind} ({enumerate_names(present)}) than the dataset "
                f"({enumerate_names(wanted)}); publish this model to another champion_uri"
            )


@dataclass(frozen=True)
class TrainingKeys:
    """Keys of the examples that a model was trained on, sorted, and the record of them for export.json.

    Attributes:
        data: The record; None where the model was trained on another dataset.
        warning: Warning about the training data; "" for none.
    """

    data: TrainingData | None
    keys: Keys
    warning: str = ""

    @classmethod
    def of(
        cls, directory: Path, manifest: Manifest, *, start: str = "", trained_on: str = ""
    ) -> TrainingKeys:
        """Returns the keys of a dataset's training split and of the model that the training started from.

        `start` is the trainer's option `initial_model`, `trained_on` the fingerprint of the training's
        dataset, "" where it is not known. Raises DatasetError when the dataset's keys are damaged.
        """
        if trained_on not in ("", manifest.fingerprint):
            warning = (
                f"The model was trained on another dataset (fingerprint {trained_on}): whether it has "
                "seen the test examples is not known"
            )
            return cls(None, _NO_KEYS, warning)
        settings = manifest.settings
        salt, shares = settings.get("split_salt"), settings.get("split")
        train = read_split(directory, manifest, "train")
        earlier = _keys_of_initial_model(start, settings.get("key", "")) if start else _NO_KEYS
        keys = np.unique(np.concatenate([part for part in (_NO_KEYS, train, earlier) if part is not None]))
        data = TrainingData(
            salt=salt if isinstance(salt, int) else None,
            shares=dict(shares) if isinstance(shares, Mapping) else {},
            key=str(settings.get("key", "")),
            rules={name: settings[name] for name in _SPLIT_SETTINGS if settings.get(name)},
            records=len(keys),
            keys="" if train is None else _digest(keys),
            complete=earlier is not None,
        )
        warning = f"The training data of initial_model ({start}) are not known: they may have test examples"
        return cls(data, keys, "" if data.complete else warning)

    def write(self, out: Path) -> None:
        """Writes the keys, if any are known, to the directory of an export."""
        if self.data and self.data.keys:
            files.write_bytes(out / KEYS_FILE, self.keys.astype(_KEY).tobytes())

    def describe_leak(self, examples: Examples) -> str:
        """Returns a warning where the model was trained on examples that it is measured on, else ""."""
        tested = read_split(examples.directory, examples.manifest, examples.name)
        seen = 0 if tested is None else int(np.isin(tested, self.keys).sum())
        if tested is None or not seen:
            return ""
        return (
            f"Trained on {seen:,} of the {len(tested):,} {examples.name} examples, through the initial model "
            "or equal examples in both splits: its metrics are too good"
        )


def read_split(directory: Path, manifest: Manifest, split: str) -> Keys | None:
    """Returns the keys of a split's examples in the order of its shards; None where the dataset has none.

    Raises DatasetError when their file is missing or damaged.
    """
    if manifest.keys is None or split not in manifest.splits:
        return None
    path = directory / manifest.keys.file
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise DatasetError(f"cannot read {path}: {error.strerror}; preprocess the data again") from None
    if (len(data), f"{google_crc32c.value(data):08x}") != (manifest.keys.bytes, manifest.keys.crc32c):
        raise DatasetError(f"{path} does not match the manifest; preprocess the data again")
    names = list(manifest.splits)
    first = sum(manifest.splits[name].records for name in names[: names.index(split)])
    return _as_keys(data[KEY_BYTES * first :][: KEY_BYTES * manifest.splits[split].records])


def find_training_overlap(published: Path, examples: Examples, groups: Ints | None = None) -> Mask | None:
    """Returns the mask of the examples that the champion in `published` was trained on; None if not known.

    `groups` is the group of each example, such as a patient: one that it was trained on is there as a whole.

    Raises DatasetError when the keys of the dataset are damaged, ModelError when those of the model are, or
    when too few other examples remain.
    """
    export, manifest = Export.read(published), examples.manifest
    data, keys = export.training_data, read_split(examples.directory, manifest, examples.name)
    if keys is None or data is None or not data.keys or data.key != manifest.settings.get("key", ""):
        fingerprint = export.settings.get("fingerprint") or export.fingerprint
        is_same = fingerprint == manifest.fingerprint and (data is None or data.complete)
        return np.zeros(examples.split.records, np.bool_) if is_same else None
    trained_on, of = np.isin(keys, read_published(published, data)), ""
    if groups is not None:
        trained_on, of = np.isin(groups, groups[trained_on]), " or their groups"
    if trained_on.any() and (remaining := int((~trained_on).sum())) < MIN_COMPARED:
        raise ModelError(
            f"the champion was trained on {trained_on.sum():,} of the {len(keys):,} {examples.name} "
            f"examples{of}, and the other {remaining:,} are too few to compare on (at least "
            f"{MIN_COMPARED}); go back to its split_salt ({data.salt}) and split, or publish this model to "
            "another champion_uri"
        )
    return trained_on


def describe_overlap(trained_on: Mask | None, data: TrainingData | None = None) -> str:
    """Returns a warning about a comparison with a champion trained on `data`; "" for none."""
    if trained_on is None:
        return (
            "It is not known which examples the champion was trained on, because it or the dataset has no "
            "keys: if its split was different, the comparison favours it"
        )
    sentences = []
    if trained_on.any():
        of = " or their groups" if data and data.rules.get("group") else ""
        sentences.append(
            f"Compared with the champion on {(~trained_on).sum():,} of the {len(trained_on):,} examples: it "
            f"was trained on the other {trained_on.sum():,}{of}"
        )
    if data and not data.complete:
        sentences.append("The training data of the champion's initial model are not known")
    return "; ".join(sentences)


def read_published(published: Path, data: TrainingData) -> Keys:
    """Returns the keys of a published model; raises ModelError when they are missing or damaged."""
    path = published / KEYS_FILE
    try:
        keys = _as_keys(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}; publish the model again") from None
    if (len(keys), _digest(keys)) != (data.records, data.keys):
        raise ModelError(f"{path} is damaged: it does not match export.json; publish the model again")
    return keys


def _keys_of_initial_model(uri: str, key: str) -> Keys | None:
    try:
        published = initial_model_file(uri).parent
        data = Export.read(published).training_data
        known = data and data.keys and data.complete and data.key == key
        return read_published(published, data) if data and known else None
    except (ShardlineError, OSError) as error:
        if crash.is_machine_failure(error):
            raise
        return None


def _as_keys(data: bytes) -> Keys:
    return np.frombuffer(data[: len(data) - len(data) % KEY_BYTES], _KEY).astype(np.uint64)


def _digest(keys: Keys) -> str:
    return "xxh3:" + xxhash.xxh3_128_hexdigest(keys.astype(_KEY).tobytes())


_NO_KEYS: Keys = np.zeros(0, np.uint64)


#: Predictions of an earlier champion by label, and the mask of the examples that it was trained on, if known.
Earlier = tuple[Mapping[str, Outcomes], Mask | None]


def compare_with_best(
    challenger: Assessment,
    last: Sequence[Version],
    rules: Iterable[GateRule],
    predict: Callable[[Version], Earlier | str],
) -> dict[str, BestLead]:
    """Returns the lead over the best of the `last` champions, newest first, by each rule's expression.

    `predict` returns predictions of an earlier champion, or why there are none; it is called once each.
    """
    predict = cache(predict)
    of_best = (rule for rule in rules if rule.reference == BEST)
    return {rule.expression: _compare_with_best(challenger, last, rule, predict) for rule in of_best}


def _compare_with_best(
    challenger: Assessment,
    last: Sequence[Version],
    rule: GateRule,
    predict: Callable[[Version], Earlier | str],
) -> BestLead:
    """Returns the lead over the best of so many champions, the first of which is the present one.

    They are those 1, 2, 4, 8 ... before it, and no further back than the oldest. The best is that with the
    best recorded metric, which is measured again unless it is the present one. One that cannot be measured is
    left out.
    """
    places = {0, *(min(2**power, len(last) - 1) for power in range(rule.last - 1))}
    last, name, notes = [last[place] for place in sorted(places)], rule.expression, list[str]()
    values = {each: value for each in last if (value := each.metrics.get(name)) is not None}
    if unknown := len(last) - len(values):
        notes.append(f"{unknown:,} of {len(last)} champions have no recorded {name}")
    compared = len(values)
    # Of equal ones, the newest.
    for version in sorted(values, key=values.__getitem__, reverse=rule.metric not in LOWER_IS_BETTER):
        if version is last[0]:
            best = f"the champion is the best of {compared}"
            notes.insert(0, best if compared > 1 else "there is no other champion to compare with")
            break
        earlier = predict(version)
        found = earlier if isinstance(earlier, str) else _lead_over(earlier, challenger, rule)
        if isinstance(found, BestLead):
            note = "; ".join(filter(None, [*notes, found.note]))
            return replace(found, version=version.version, compared=compared, note=note)
        notes.append(f"{version.version} is left out: {found}")
        compared -= 1
    return BestLead(compared=compared, note="; ".join(notes))


def _lead_over(earlier: Earlier, ours: Assessment, rule: GateRule) -> BestLead | str:
    """Returns the metric of an earlier champion and the lead over it, or why they are not known."""
    outcomes, seen = earlier
    theirs, note = outcomes[rule.label or next(iter(outcomes))], ""
    if seen is None:
        note = "it is not known which examples it was trained on"
    elif seen.any():
        ours, theirs = ours.select(~seen), theirs.select(~seen)
        note = f"on {(~seen).sum():,} of the {len(seen):,} examples: it was trained on the others"
    lead = ours.outcomes[theirs.label.name].leads(theirs).get(rule.metric)
    value = ours.evaluation.metrics.get(rule.expression)
    if lead is None or value is None:
        return f"no {rule.expression} of both on the same examples"
    return BestLead(value=value - lead.difference, lead=lead, note=note)
