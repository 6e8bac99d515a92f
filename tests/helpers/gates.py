"""Gates with a user's rules alone."""

from __future__ import annotations

from typing import Any

from shardline.components.validate.rules import DEFAULT_RULES, Gate


def only(*rules: str, **settings: Any) -> Gate:
    """A gate whose default rules are off."""
    return Gate(rules=(*(f"{rule.name}: off" for rule in DEFAULT_RULES), *rules), **settings)
