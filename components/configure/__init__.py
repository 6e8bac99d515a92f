"""The first task of a run: it checks the parameters and detects changes since the last run.

It may import the settings of the components that it configures, the sources, and `model_store`.
"""

from typing import Any, NamedTuple


class Configured(NamedTuple):
    """Outputs of the first step, as the component `configure` describes them."""

    changed: bool
    source: str
    fingerprint: str
    reason: str
    state: str
    still_blessed: bool
    data: dict[str, Any]
    training: dict[str, Any]
    gate: dict[str, Any]
