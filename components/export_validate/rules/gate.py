"""The gate: the rules that a model must pass, and the policy where a rule cannot be judged."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path

from shardline.components.export_validate.evaluation import MIN_SLICE
from shardline.components.export_validate.rules.rule import Rule, parse_rules
from shardline.trainer.data.manifest import Manifest
from shardline.trainer.errors import SettingsError

FIRST_RUNS = ("bless", "block")


_NO_SLICES = ("image", "label", "key")


@dataclass(frozen=True)
class Gate:
    """Rules and policy.

    Attributes:
        rules: All of them must pass.
        first_run: What becomes of rules about a champion where there is none that can be measured on the
            same examples (none yet, unreadable, of other classes): "bless" skips them, "block" does not let
            the model pass.
        min_slice: A slice with fewer examples is not judged.
        allow_undecided: Whether a model may pass though a rule could not be judged.
    """

    rules: tuple[Rule, ...]
    first_run: str = "block"
    min_slice: int = MIN_SLICE
    allow_undecided: bool = False

    def __post_init__(self) -> None:
        if self.first_run not in FIRST_RUNS:
            raise SettingsError(f"first_run must be {' or '.join(FIRST_RUNS)}, got {self.first_run!r}")
        if not isinstance(self.min_slice, int) or self.min_slice < 1:
            raise SettingsError(f"min_slice must be a whole number from 1 on, got {self.min_slice!r}")
        if not isinstance(self.allow_undecided, bool):
            raise SettingsError(f"allow_undecided must be true or false, got {self.allow_undecided!r}")

    def with_rules(self, texts: Iterable[str]) -> Gate:
        """Returns this gate with more rules.

        Raises:
            SettingsError: When one of them cannot be read.
        """
        return replace(self, rules=(*self.rules, *parse_rules(texts)))

    def check(self, manifest: Manifest, champion_uri: str) -> None:
        """Checks that what the rules are about can be there at all, before any work is done for them.

        Raises:
            SettingsError: When a rule is about a class or a feature that the dataset does not have, or about
                a champion without a place where it could be.
        """
        for rule in self.rules:
            if rule.champion and not champion_uri:
                raise SettingsError(
                    f"the rule {rule.text!r} compares with the champion; say where champions are published"
                )
            feature, _, value = rule.slice.partition("=")
            known = [
                item.name for item in manifest.features if item.name not in _NO_SLICES and not item.shape
            ]
            if feature == "class" and value not in manifest.class_names:
                raise SettingsError(
                    f"the rule {rule.text!r} is about class {value!r}; "
                    f"the dataset has {_enumerate(manifest.class_names)}"
                )
            if feature not in ("", "class", *known):
                raise SettingsError(
                    f"the rule {rule.text!r} is about feature {feature!r}; the dataset can be sliced by "
                    f"{_enumerate(('class', *known))}"
                )


def accuracy_gate(min_accuracy: float) -> Gate:
    """Returns the gate with one rule, a smallest accuracy.

    Raises:
        SettingsError: When it is not within 0..1.
    """
    check_min_accuracy(min_accuracy)
    return Gate(parse_rules([f"accuracy >= {min_accuracy!r}"]))


def check_min_accuracy(min_accuracy: float) -> None:
    """Checks a threshold before any work is done for it.

    Raises:
        SettingsError: When it is not within 0..1.
    """
    if not 0.0 <= min_accuracy <= 1.0:  # NaN fails this too.
        raise SettingsError(f"min_accuracy must be within 0..1, got {min_accuracy}; 0.95 means 95 %")


def read_gate(path: Path) -> Gate:
    """Reads a gate from a TOML or JSON file: `rules`, a list of texts, and optionally its policy.

    Raises:
        SettingsError: When it cannot be read, has unknown names, or one of its rules cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise SettingsError(f"cannot read the rules in {path}: {error}; repair the file") from None
    known = [item.name for item in fields(Gate)]
    if not isinstance(content, dict) or (unknown := [name for name in content if name not in known]):
        named = f"unknown {', '.join(map(repr, unknown))}" if isinstance(content, dict) else "no table"
        raise SettingsError(f"{path} has {named}; it may have {', '.join(known)}")
    rules = content.pop("rules", None)
    if not isinstance(rules, list) or not rules or not all(isinstance(rule, str) for rule in rules):
        raise SettingsError(f"{path} must have rules = [...], a list of texts like 'accuracy >= 0.95'")
    try:
        return Gate(parse_rules(rules), **content)
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from None


def _enumerate(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:20])
    return f"{shown} and {len(names) - 20:,} more" if len(names) > 20 else shown
