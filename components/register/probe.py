"""Probe: golden examples of an export, sent to a server, whose answers are compared and timed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from shardline.components import model_store
from shardline.components.model_store import Export, Measured, read_part
from shardline.components.register.servers import Answer, Server
from shardline.components.validate.golden import compare, is_answer
from shardline.trainer.errors import ModelError, SettingsError
from shardline.trainer.progress import say

#: Another machine rounds differently, in 16 bits by a percent.
TOLERANCE = 0.01
#: Requests of one example each that are timed.
REQUESTS = 32

# The platform takes 1.5 MB a request.
_LARGEST_REQUEST = 1_000_000


@dataclass(frozen=True)
class Probe:
    """Outcome of a probe.

    Attributes:
        difference: Largest difference of an answer from a golden one, as in `Agreement`.
        words: What differs most; "" where nothing does.
        examples: Number of golden examples that were sent.
        tolerance: Largest difference with which they agree.
        models: Ids of the deployed models that answered; none where the server does not say.
        latency_ms: Median ("p50") and 95th percentile ("p95") of requests of one example, in milliseconds.
        judged_ms: The same as it was when the model was judged, where that is known: without a network.
    """

    difference: float
    words: str
    examples: int
    tolerance: float
    models: tuple[str, ...] = ()
    latency_ms: Mapping[str, float] = field(default_factory=dict)
    judged_ms: Mapping[str, float] = field(default_factory=dict)

    @property
    def agrees(self) -> bool:
        """Whether the server gives the golden answers."""
        return self.difference <= self.tolerance

    def to_json(self) -> dict[str, Any]:
        """Returns what --json prints."""
        return {"agrees": self.agrees, **asdict(self)}

    def __str__(self) -> str:
        what = f"largest difference {self.difference:.2g} on {self.examples} golden examples"
        limit = f"tolerance {self.tolerance:g}"
        return f"{what} ({limit})" + ("" if self.agrees or not self.words else f": {self.words}")


def read_golden(exported: Path) -> Export:
    """Reads an export whose golden examples a server can be sent; raises ModelError when there are none.

    An example with a number that is not finite is left out: JSON has no such number.
    """
    export = Export.read(exported)
    golden = export.golden or {}
    instances, predictions = golden.get("instances"), golden.get("predictions")
    named, remedy = exported / model_store.EXPORT_FILE, "validate the model again"
    if not instances or not predictions:
        raise ModelError(f"{named} has no golden examples; {remedy}")
    both = (
        isinstance(instances, list) and isinstance(predictions, list) and len(instances) == len(predictions)
    )
    if not both or not all(is_answer(row, export) for row in predictions):
        raise ModelError(f"the golden examples in {named} are damaged; {remedy}")
    pairs = [pair for pair in zip(instances, predictions, strict=True) if not _has_none(pair[0])]
    if not pairs:
        raise ModelError(f"no golden example in {named} has finite numbers only, and JSON has no others")
    sent, expected = zip(*pairs, strict=True)
    return replace(export, golden={"instances": list(sent), "predictions": list(expected)})


def probe(server: Server, exported: Path, *, tolerance: float = TOLERANCE, requests: int = REQUESTS) -> Probe:
    """Sends the golden examples to a server, together and one by one, and compares the answers.

    Raises:
        ModelError: When the export has no golden examples.
        PlatformError: When the server fails or is not reached.
        SettingsError: When `tolerance` is no number from 0 to 1.
    """
    if not 0 <= tolerance <= 1:
        raise SettingsError(f"the tolerance must be from 0 to 1, got {tolerance}; 0.01 is a percent")
    export = read_golden(exported)
    instances = (export.golden or {})["instances"]
    say("probe", f"sending {len(instances)} golden examples, together and in {requests} single requests")
    answers = [server(some) for some in _requests(instances)]
    together = len(answers)
    agreements = [compare(export, [row for answer in answers for row in _rows(answer)])]
    for place in range(requests):
        number = place % len(instances)
        answers.append(server(instances[number : number + 1]))
        alone = compare(_only(export, number), answers[-1].predictions)
        agreements.append(replace(alone, words=alone.words.replace("example 0", f"example {number} alone")))
    worst = max(agreements, key=lambda agreement: agreement.difference)
    return Probe(
        difference=worst.difference,
        words=worst.words,
        examples=len(instances),
        tolerance=tolerance,
        models=tuple(sorted({answer.model for answer in answers} - {""})),
        latency_ms=_percentiles([answer.seconds for answer in answers[together:]]),
        judged_ms=_judged(exported),
    )


def _rows(answer: Answer) -> Sequence[Any]:
    return answer.predictions if isinstance(answer.predictions, list) else ()


def _requests(instances: Sequence[Any]) -> Iterator[list[Any]]:
    """Yields the instances in as few requests as the platform takes."""
    some: list[Any] = []
    size = 0
    for instance in instances:
        length = len(json.dumps(instance))
        if some and size + length > _LARGEST_REQUEST:
            yield some
            some, size = [], 0
        some.append(instance)
        size += length
    yield some


def _only(export: Export, number: int) -> Export:
    golden = export.golden or {}
    return replace(export, golden={"predictions": golden["predictions"][number : number + 1]})


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {f"p{p}": round(ordered[(len(ordered) - 1) * p // 100] * 1e3, 3) for p in (50, 95) if ordered}


def _judged(exported: Path) -> dict[str, float]:
    try:
        metrics = read_part(exported, model_store.EVALUATION_FILE, Measured).metrics
    except ModelError:  # an export that was never judged can be probed as well
        return {}
    named = {name: metrics.get(f"latency_{name}_ms") for name in ("p50", "p95")}
    return {name: round(value, 3) for name, value in named.items() if value is not None}


def _has_none(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_none, value.values()))
    return value is None or (isinstance(value, list) and any(map(_has_none, value)))
