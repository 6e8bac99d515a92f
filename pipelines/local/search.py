"""The search of a tuning job on this machine, by Optuna in the place of the platform's own service."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import optuna

#: Rules of early stopping, for all of which Optuna's median rule stands.
_STOPPING = ("median_automated_stopping_spec", "decay_curve_stopping_spec", "convex_automated_stopping_spec")
_REVERSE_LOG = "UNIT_REVERSE_LOG_SCALE"

Values = dict[str, float | int | str]


class Search:
    """Chooses the parameters of one trial after the other, and says when to stop one early.

    The same study, seed and results give the same choices.
    """

    def __init__(self, spec: Mapping[str, Any], seed: int) -> None:
        """Begins a study.

        Args:
            spec: StudySpec in snake_case, as the launcher sends it: without what is empty or zero.
            seed: Of the search.
        """
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._specs = {item["parameter_id"]: item for item in spec["parameters"]}
        self._space = {name: _distribution(item) for name, item in self._specs.items()}
        self._algorithm = spec.get("algorithm", "")
        self._grid = _grid(self._space) if self._algorithm == "GRID_SEARCH" else None
        by_chance = self._grid or self._algorithm == "RANDOM_SEARCH"
        sampler = optuna.samplers.RandomSampler(seed) if by_chance else optuna.samplers.TPESampler(seed=seed)
        stops = any(rule in spec for rule in _STOPPING)
        self._study = optuna.create_study(
            direction="minimize" if spec["metrics"][0].get("goal") == "MINIMIZE" else "maximize",
            sampler=sampler,
            pruner=optuna.pruners.MedianPruner(n_startup_trials=1) if stops else optuna.pruners.NopPruner(),
        )
        self._trial: optuna.Trial | None = None

    @property
    def name(self) -> str:
        """What chooses, in words."""
        what = {"RANDOM_SEARCH": "random search", "GRID_SEARCH": "grid search"}.get(self._algorithm, "TPE")
        return f"Optuna {optuna.__version__}, {what}"

    def ask(self) -> Values | None:
        """Returns the parameters of the next trial; None when there is nothing left to try."""
        if self._grid is not None:  # Optuna's own grid needs its own loop
            point = next(self._grid, None)
            if point is None:
                return None
            self._study.enqueue_trial(point)
        self._trial = self._study.ask(self._space)
        return {name: self._value(name, value) for name, value in self._trial.params.items()}

    def is_hopeless(self, values: Sequence[float]) -> bool:
        """Whether the trial in hand should be stopped.

        Args:
            values: All that it has measured so far. They are compared by their number, epoch with epoch:
                steps differ between trials whose batches do.
        """
        assert self._trial is not None
        known = self._study.trials[self._trial.number].intermediate_values
        for index in range(len(known), len(values)):
            self._trial.report(values[index], index)
        return bool(values) and self._trial.should_prune()

    def tell(self, value: float | None) -> None:
        """Ends the trial in hand with its measurement; None when it has failed."""
        assert self._trial is not None
        state = optuna.trial.TrialState.FAIL if value is None else optuna.trial.TrialState.COMPLETE
        self._study.tell(self._trial, value, state=state)

    def _value(self, name: str, value: Any) -> Any:
        if self._specs[name].get("scale_type") != _REVERSE_LOG or "discrete_value_spec" in self._specs[name]:
            return value
        distribution: Any = self._space[name]
        return distribution.low + distribution.high - value


def _distribution(spec: Mapping[str, Any]) -> optuna.distributions.BaseDistribution:
    # What is dense at the bottom when it is chosen is mirrored afterwards.
    log = spec.get("scale_type") in ("UNIT_LOG_SCALE", _REVERSE_LOG)
    if item := spec.get("double_value_spec"):
        return optuna.distributions.FloatDistribution(*_range(item), log=log)
    if item := spec.get("integer_value_spec"):
        low, high = _range(item)
        return optuna.distributions.IntDistribution(int(low), int(high), log=log)
    item = spec.get("discrete_value_spec") or spec["categorical_value_spec"]
    return optuna.distributions.CategoricalDistribution(item["values"])


def _range(item: Mapping[str, Any]) -> tuple[float, float]:
    return item.get("min_value", 0), item.get("max_value", 0)


def _grid(space: Mapping[str, optuna.distributions.BaseDistribution]) -> Iterator[Values]:
    """Yields all combinations, in order."""
    for values in itertools.product(*map(_choices, space.values())):
        yield dict(zip(space, values, strict=True))


def _choices(item: Any) -> Sequence[Any]:
    is_choice = isinstance(item, optuna.distributions.CategoricalDistribution)
    return item.choices if is_choice else range(item.low, item.high + 1)
