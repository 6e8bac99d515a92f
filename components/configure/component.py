"""The first and the last step of a run. KFP embeds the text of a function alone, so it imports inside."""

import inspect
import linecache
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any, NamedTuple, get_origin

from kfp import dsl

from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.train.settings import TrainingSettings
from shardline.components.validate.gate.gate import GateSettings
from shardline.trainer.base.deserialize import field_types

#: The objects of a run, each one dataclass. A pipeline cannot make one of its own parameters: KFP pastes
#: numbers into a dict as text, and a quote breaks the JSON. A dict that a task puts out keeps both.
OBJECTS = (PreprocessSettings, TrainingSettings, GateSettings)
#: Fields that are no settings of a result.
_NO_SETTINGS = ("processes",)


def parameters() -> Iterator[inspect.Parameter]:
    """Yields the fields of a run's objects, each once, as parameters of the plain types that KFP wants."""
    seen = set(_NO_SETTINGS)
    for kind in OBJECTS:
        for field in fields(kind):
            if field.name not in seen:
                seen.add(field.name)
                yield _parameter(field, field_types(kind)[field.name])


def _parameter(field: Any, kind: Any) -> inspect.Parameter:
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    plain = {Mapping: dict, tuple: list}
    annotation = next((plain[known] for known in plain if issubclass(get_origin(kind) or kind, known)), kind)
    return inspect.Parameter(
        field.name,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=inspect.Parameter.empty if default is MISSING else annotation(default),
        annotation=annotation,
    )


_CONFIGURE = '''
def configure(
    history_uri: str = "",
    force: bool = False,
    scheduled: str = dsl.PIPELINE_JOB_SCHEDULE_TIME_UTC_PLACEHOLDER,
    created: str = dsl.PIPELINE_JOB_CREATE_TIME_UTC_PLACEHOLDER,
    job_name: str = dsl.PIPELINE_JOB_NAME_PLACEHOLDER,
    {settings},
) -> NamedTuple(
    "Outputs",
    [
        ("changed", bool),
        ("source", str),
        ("fingerprint", str),
        ("reason", str),
        ("state", str),
        ("still_blessed", bool),
        ("data", dict),
        ("training", dict),
        ("gate", dict),
    ],
):
    """Makes three objects of a run's parameters, and finds out whether there is anything to do.

    There is when data, settings or code have changed since the last run that is remembered. Everything from
    `source` on is a setting: a result depends on it.

    Args:
        history_uri: Directory or gs:// that remembers; "" remembers nothing, and everything is new.
        force: Whether the run shall train whatever is found.
        scheduled: Time for which the run was scheduled, RFC 3339; anything else where it was not.
        created: Time at which the run was created, RFC 3339.
        job_name: Name of the run.

    Returns:
        changed: Whether there is something to do.
        source: The source with the date of the run in the place of {{date}}.
        fingerprint: Of data and code: a cached dataset of the same fingerprint is the same dataset.
        reason: Why there is something to do or not, in one line.
        state: What was found, for `record_run`.
        still_blessed: Whether the last run's model was blessed, where there is nothing to do.
        data: Fields of `shardline.components.preprocess.settings.PreprocessSettings`.
        training: Fields of `shardline.components.train.settings.TrainingSettings`.
        gate: Fields of `shardline.components.validate.gate.gate.GateSettings`.
    """
    arguments = dict(locals())
    from shardline.trainer.base.progress import exit_on_error

    with exit_on_error("changes"):
        from shardline.components.configure.changes import detect_changes

        return detect_changes(**arguments)
'''


def _make_configure() -> Callable[..., Any]:
    """Returns the function of the first step, whose text KFP asks `linecache` for, as of those of `attrs`."""
    defaults = {"source": "digits", "model": "mnist_cnn"}
    settings = [
        f"{each.name}: {each.annotation.__name__} = {defaults.get(each.name, each.default)!r}"
        for each in parameters()
    ]
    text = _CONFIGURE.format(settings=",\n    ".join(settings)).lstrip()
    name = f"<configure of {__name__}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"dsl": dsl, "NamedTuple": NamedTuple, "__name__": __name__}
    exec(compile(text, name, "exec"), namespace)  # text of this module alone
    made: Callable[..., Any] = namespace["configure"]
    return made


configure = _make_configure()


def record_run(
    exported: dsl.Input[dsl.Model],
    state: str,
    reason: str,
    history_uri: str,
    champion_uri: str,
    job_name: str,
) -> None:
    """Remembers a run whose model was judged, and published where it was blessed.

    Args:
        exported: SavedModel with its evaluation and verdict.
        state: What `configure` found.
        reason: Why it found something to do.
        history_uri: Directory or gs:// that remembers; "" remembers nothing.
        champion_uri: Where a blessed model was published; "" published nothing.
        job_name: Name of the run.
    """
    from pathlib import Path

    from shardline.trainer.base.progress import exit_on_error

    with exit_on_error("changes"):
        from shardline.components.configure.changes import write_history

        write_history(Path(exported.path), state, reason, history_uri, champion_uri, job_name)
