"""Drift: whether the values of a dataset's features have moved since the champion was trained; no TensorFlow.

A feature has moved when its distance is larger than chance explains for samples of this size, and than
matters in practice. Two samples of the same data raise a false alarm in one of a hundred comparisons, for any
number of features (Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from shardline.components import model_store, text
from shardline.components.preprocess.inspect import Categories, Numbers, Profile, make_profile
from shardline.components.validate.metrics.evaluation import Drift, Evaluation
from shardline.trainer import manifest as manifests
from shardline.trainer.base.errors import ModelError, printable
from shardline.trainer.manifest import Manifest

#: Probability that any feature of two samples of the same data is reported as moved.
FALSE_ALARM_RATE = 0.01

#: Profile of the champion's training data, or why there is none.
ReferenceProfile = Profile | str

#: Smaller distances never count as moved.
MIN_DISTANCE = 0.05

_DRAWS = 1_000
# Categories with fewer examples, in both datasets together, are merged into one.
_MIN_CATEGORY_EXAMPLES = 10
_LONGEST_NAME = 40
_MAX_NAMED = 5


def compare_datasets(before: Path, after: Path, splits: tuple[str, str]) -> tuple[Drift, ...]:
    """Compares a split of each of two dataset directories; raises DatasetError when one cannot be read."""
    pairs = zip((before, after), splits, strict=True)
    return compare_profiles(*(make_profile(path, manifests.load(path), split) for path, split in pairs))


def compare_profiles(before: Profile, after: Profile) -> tuple[Drift, ...]:
    """Compares two profiles, largest distances first; a feature that only one of them has counts as moved."""
    names = [*after.categories, *after.numbers]
    names += [name for name in (*before.categories, *before.numbers) if name not in names]
    chance = FALSE_ALARM_RATE / max(1, len(names))
    drifts = [drift for name in names if (drift := _compare(name, before, after, chance))]
    return tuple(sorted(drifts, key=lambda item: item.threshold - item.distance))


def read_profile(version: Path, name: str) -> ReferenceProfile:
    """Returns the profile in the directory of a published version, or why there is none."""
    if not (version / model_store.PROFILE_FILE).is_file():
        return f"the champion {name} has no {model_store.PROFILE_FILE}"
    try:
        return model_store.read_part(version, model_store.PROFILE_FILE, Profile)
    except ModelError as error:
        return str(error)


def add_drift(
    evaluation: Evaluation,
    directory: Path,
    manifest: Manifest,
    out: Path,
    before: ReferenceProfile,
    *,
    trained_on_it: bool = True,
) -> Evaluation:
    """Writes the training profile to `out`, and adds its drift from `before` to an evaluation."""
    if not trained_on_it:
        return replace(evaluation, no_drift="the model was trained on another dataset")
    if "train" not in manifest.splits:
        return replace(evaluation, no_drift="the dataset has no training split")
    profile = make_profile(directory, manifest)
    profile.write(out / model_store.PROFILE_FILE)
    skew = compare_profiles(profile, make_profile(directory, manifest, evaluation.split))
    if isinstance(before, str):
        return replace(evaluation, skew=skew, no_drift=before)
    drift = compare_profiles(before, profile)
    metrics = {**evaluation.metrics, "drifted": float(sum(item.moved for item in drift))}
    return replace(evaluation, skew=skew, drift=drift, metrics=metrics)


def warnings(evaluation: Evaluation) -> list[str]:
    """Returns the moved features, a sentence for each of the two comparisons."""
    comparisons = {
        "Moved since the champion was trained": evaluation.drift,
        f"Different in the {evaluation.split} split": evaluation.skew,
    }
    moved = {title: [str(item) for item in drift if item.moved] for title, drift in comparisons.items()}
    return [f"{title}: {text.enumerate_names(it, _MAX_NAMED, '; ')}" for title, it in moved.items() if it]


def drift_table(drifts: Sequence[Drift]) -> str:
    """Returns a comparison as a table for a person."""
    rows = [
        (
            *map(printable, (item.feature, item.before, item.after)),
            *(f"{value:.3f}" for value in (item.distance, item.threshold)),
            "moved" if item.moved else "",
        )
        for item in drifts
    ]
    return text.table(("feature", "before", "after", "distance", "threshold", ""), rows, align="lllrrl")


def _compare(name: str, before: Profile, after: Profile, chance: float) -> Drift | None:
    if name in before.numbers and name in after.numbers:
        return _drift_of_numbers(name, before.numbers[name], after.numbers[name], chance)
    if name in before.categories and name in after.categories:
        return _drift_of_categories(name, before.categories[name], after.categories[name], chance)
    # Text that is a category in only one of the profiles is compared by its length.
    if all(f"{name} length" in profile.numbers for profile in (before, after)):
        return None
    is_old, is_new = (name in profile.numbers or name in profile.categories for profile in (before, after))
    kinds = [
        ("numbers" if name in profile.numbers else "text") if has_feature else "not there"
        for profile, has_feature in ((before, is_old), (after, is_new))
    ]
    return Drift(name, 1.0, MIN_DISTANCE, True, *kinds)


def _drift_of_numbers(name: str, before: Numbers, after: Numbers, chance: float) -> Drift:
    from scipy import stats

    values = [[math.inf if item is None else item for item in sample.values] for sample in (before, after)]
    distance = float(stats.ks_2samp(*values, method="asymp").statistic)
    expected = stats.kstwobign.isf(chance) * math.sqrt(1 / before.examples + 1 / after.examples)
    return _with_threshold(name, distance, expected, _describe(before), _describe(after))


def _drift_of_categories(name: str, before: Categories, after: Categories, chance: float) -> Drift:
    from scipy import stats

    names = {**before.counts, **after.counts}
    counts = {value: (before.counts.get(value, 0), after.counts.get(value, 0)) for value in names}
    if rare := [value for value, pair in counts.items() if sum(pair) < _MIN_CATEGORY_EXAMPLES]:
        first, second = zip(*(counts.pop(value) for value in rare), strict=True)
        counts["all others"] = sum(first), sum(second)
    both = np.array(list(counts.values()))
    shares = both / (before.examples, after.examples)
    apart = np.abs(shares[:, 0] - shares[:, 1])
    farthest = int(apart.argmax())
    # Distance by chance: a gamma distribution fitted to the distances of simulated pairs of samples.
    random, pooled = np.random.default_rng(0), both.sum(axis=1) / both.sum()
    drawn = [random.multinomial(each.examples, pooled, _DRAWS) / each.examples for each in (before, after)]
    distances = np.abs(drawn[0] - drawn[1]).sum(axis=1) / 2
    mean, variance = distances.mean(), distances.var()
    expected = 0.0  # there is one category
    if variance:
        expected = float(stats.gamma.isf(chance, mean**2 / variance, scale=variance / mean))
    shown = text.truncate(list(counts)[farthest], _LONGEST_NAME)
    texts = (f"{shown}: {100 * share:.1f} %" for share in shares[farthest])
    return _with_threshold(name, float(apart.sum() / 2), expected, *texts)


def _with_threshold(name: str, distance: float, expected: float, before: str, after: str) -> Drift:
    threshold = min(1.0, max(MIN_DISTANCE, float(expected)))
    return Drift(name, distance, threshold, distance > threshold, before, after)


def _describe(numbers: Numbers) -> str:
    if not numbers.quantiles:
        return "no numbers"
    low, middle, high = numbers.quantiles
    missing = numbers.missing / numbers.examples
    values = f"always {middle:.4g}" if low == high else f"median {middle:.4g} ({low:.4g} to {high:.4g})"
    return values + (f", {100 * missing:.1f} % missing" if missing else "")
