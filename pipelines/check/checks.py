"""Registry of the rules of a check, their findings, and the checks of a pipeline and of a run against all.

A function of `job_rules`, `container_rules` or `run_rules` checks one kind of part of a pipeline and yields
the code of a rule with what it found. Its docstring declares its rules; consecutive rules may share a fix and
a source:

    SL103 error: What is right.
        Fix: What to do about a finding.
        Source: Where this is documented.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from shardline.pipelines.check.pipeline import Pipeline, Schedule, Target
from shardline.pipelines.parameters import check_parameters, check_values, fold_options
from shardline.pipelines.spec import OWN_PIPELINES, defaults
from shardline.trainer.base.errors import PipelineError

#: An error: the platform refuses it, or it fails or does something other than was meant. A warning: it works,
#: and will probably be regretted.
Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """A mistake in a task, worker pool, parameter or schedule, and what to do about it.

    `why` says in one line what was found; it never has the value of a secret.
    """

    code: str
    severity: Severity
    where: str
    why: str
    fix: str


@dataclass(frozen=True)
class Rule:
    """A rule: its code, which is never reused, what is right, what to do about a finding, and the source."""

    code: str
    severity: Severity
    demand: str
    fix: str
    source: str


#: Codes of rules, and what was found.
Found = Iterator[tuple[str, str]]
Check = Callable[[Any], Found]
C = TypeVar("C", bound=Check)

#: All rules by code.
RULES: dict[str, Rule] = {}
#: Functions that find mistakes, with the class of the parts that they check.
_CHECKS: list[tuple[type[Any], Check]] = []
_FLAGS = re.DOTALL | re.MULTILINE
_RULES = re.compile(r"^(SL\d{3} .+?)\n    Fix: (.+?)\n    Source: (.+?)(?=\n\S|\Z)", _FLAGS)
_RULE = re.compile(r"^(SL\d{3}) (error|warning): (.+?)(?=\nSL|\Z)", _FLAGS)


def rules(*subjects: type[Any]) -> Callable[[C], C]:
    """Registers a function, and the rules in its docstring, for parts of these classes."""

    def register(check: C) -> C:
        for head, *below in _RULES.findall(inspect.getdoc(check) or ""):
            for code, severity, demand in _RULE.findall(head):
                if code in RULES:
                    raise ValueError(f"two rules have the code {code}")
                texts = (" ".join(text.split()) for text in (demand, *below))
                RULES[code] = Rule(code, severity, *texts)
        _CHECKS.extend((subject, check) for subject in subjects)
        return check

    return register


def apply_rules(subjects: Sequence[Any]) -> Iterator[Finding]:
    """Applies every rule to the parts of a pipeline of its class; each part has a `where`."""
    for kind, check in _CHECKS:
        for subject in subjects:
            if type(subject) is kind:
                for code, why in check(subject):
                    yield Finding(code, RULES[code].severity, subject.where, why, RULES[code].fix)


def check_pipeline(pipeline: Pipeline, schedule: Schedule | None = None) -> list[Finding]:
    """Returns what is wrong with a pipeline, and with its schedule; errors first."""
    # A secret is reported alone: other rules quote values.
    pools = [pool for job in pipeline.jobs for pool in job.pools]
    found = list(apply_rules(pipeline.parameters)) or apply_rules(
        [pipeline, *pipeline.tasks, *pipeline.executors, *pipeline.jobs, *pools, schedule]
    )
    return sorted(
        dict.fromkeys(found),
        key=lambda finding: (finding.severity != "error", finding.code, finding.why),
    )


def refuse_errors(findings: list[Finding]) -> list[Finding]:
    """Returns findings that are only warnings; PipelineError names the first error."""
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        first = errors[0]
        count = len(errors) - 1
        more = f" (and {count} more: 'shardline check FILE' lists all, with --params those of a run)"
        raise PipelineError(f"{first.code} {first.where}: {first.why}; {first.fix}{more if count else ''}")
    return findings


def check_run(
    spec: Mapping[str, Any],
    given: Mapping[str, Any],
    schedule: Schedule | None = None,
    *,
    here: bool = False,
    location: str = "",
    uri: str = "",
) -> tuple[dict[str, Any], list[Finding]]:
    """Checks a pipeline (IR), the parameters of a run and its schedule, before the run starts.

    `given` has values by name: texts, as on a command line, or values of the declared type. A run `here`, on
    this machine, needs the data and the model function here; any other is in the region `location`. A version
    in the registry, at `uri`, may hold older code than this machine. Returns the parameters, converted to
    their declared types, and the warnings of `shardline check`.

    Raises:
        PipelineError: When a parameter is unknown, mistyped or missing, `shardline check` finds an error, the
            file holds other code than this machine, or a run on the platform has no champion_uri, not even an
            empty one.
        SettingsError: When a value of one of our own pipelines is out of range.
        SourceError, ModelError: When there is no such source or model.
    """
    given = fold_options(spec, given)
    refuse_errors(list(apply_rules(Pipeline(spec, given).parameters)))  # before a value is quoted
    parameters = check_parameters(spec, given)
    if spec["pipelineInfo"]["name"] in OWN_PIPELINES:
        packed = Pipeline(spec).packages
        check_values(spec["pipelineInfo"]["name"], defaults(spec) | parameters, here=here, packed=packed)
    pipeline = Pipeline(spec, parameters, target=Target.LOCAL if here else Target.PLATFORM, location=location)
    findings = refuse_errors(check_pipeline(pipeline, schedule))
    refused = ("SL611",) if uri else ("SL611", "SL614")
    if found := next((finding for finding in findings if finding.code in refused), None):
        raise PipelineError(f"{found.why}; {found.fix}")
    return parameters, findings
