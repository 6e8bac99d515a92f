"""Parameters of a test, of which those that repeat a path with other values are left to `make test-all`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest


def with_matrix(cases: Mapping[str, Any], repeated: Collection[str]) -> list[Any]:
    """Returns cases as parameters, by their names; a tuple holds one argument after the other.

    Args:
        cases: Arguments of the test by the case's name.
        repeated: Names of cases that are marked `matrix`.
    """
    assert cases.keys() >= set(repeated)
    return [
        pytest.param(
            *(given if isinstance(given, tuple) else (given,)),
            id=name,
            marks=[pytest.mark.matrix] if name in repeated else [],
        )
        for name, given in cases.items()
    ]
