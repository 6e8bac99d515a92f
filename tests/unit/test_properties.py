"""Whatever is read comes to a result or to an error of ours, within a time: inputs made by chance."""

import contextlib
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardline.trainer.base.errors import ShardlineError
from tests.helpers.strategies import TARGETS

#: Examples by target, for about two seconds each; benchmarks/fuzz.py takes as many as there is time for.
EXAMPLES = {"settings": 150, "parameters": 40, "retrain": 12}
#: Seconds that one input may take.
LIMIT = 5


@pytest.mark.parametrize(("name", "examples"), [(name, EXAMPLES.get(name, 300) // 4) for name in TARGETS])
def test_a_result_or_an_error_of_ours(name, examples):
    target = TARGETS[name]

    @settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def reads(data):
        content = data.draw(target.inputs)
        start = time.monotonic()
        with contextlib.suppress(ShardlineError):
            target.read(content)
        assert time.monotonic() - start < LIMIT

    reads()
