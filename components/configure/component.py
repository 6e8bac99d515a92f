"""The first and the last step of a run. KFP embeds the text of a function alone, so it imports inside."""

import inspect
import linecache
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any, NamedTuple, get_origin

from kfp import dsl

from shardline.components.configure import Configured
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.train.settings import TrainingSettings
from shardline.components.validate.gate.gate import GateSettings
from shardline.trainer.base.deserialize import field_types

#: Dataclasses of a run's settings, which this task makes from parameters. The pipeline cannot: KFP pastes
#: numbers into a dict as text, and a quote breaks the JSON. An output dict of a task keeps both intact.
OBJECTS = (PreprocessSettings, TrainingSettings, GateSettings)


def parameters() -> Iterator[inspect.Parameter]:
    """Yields the fields of `OBJECTS`, each once, as parameters of the plain types that KFP takes."""
    seen = {"processes"}  # which does not affect a result
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
    {settings},
) -> NamedTuple(
    "Outputs",
    [
        {outputs},
    ],
):
    """Makes three settings objects from a run's parameters, and detects changes since the last run.

    The run trains when data, settings or code have changed since the last run in the history. A result
    depends on `source` and all parameters after it.

    Args:
        history_uri: Directory or gs:// with the history of runs; "" for none, and every run trains.
        force: Whether to train without any change.
        scheduled: Time for which the run was scheduled, RFC 3339; any other text without a schedule.
        created: Time at which the run was created, RFC 3339.

    Returns:
        changed: Whether the run trains.
        source: The source with the date of the run instead of {{date}}.
        fingerprint: Fingerprint of data and code, by which a cached dataset is reused.
        reason: Why the run trains or not, in one line.
        state: State of data, settings and code, for `record_run`.
        still_blessed: Whether the last run's model was blessed, where nothing has changed.
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
    """Returns the function `configure`; KFP reads its source from `linecache`, as for classes of `attrs`."""
    defaults = {"source": "digits", "model": "mnist_cnn"}
    settings = [
        f"{each.name}: {each.annotation.__name__} = {defaults.get(each.name, each.default)!r}"
        for each in parameters()
    ]
    outputs = [f'("{name}", {kind.__name__})' for name, kind in Configured.__annotations__.items()]
    text = _CONFIGURE.format(settings=",\n    ".join(settings), outputs=",\n        ".join(outputs)).lstrip()
    name = f"<configure of {__name__}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"dsl": dsl, "NamedTuple": NamedTuple, "__name__": __name__}
    exec(compile(text, name, "exec"), namespace)  # text of this module alone
    function: Callable[..., Any] = namespace["configure"]
    return function


configure = _make_configure()


def record_run(
    exported: dsl.Input[dsl.Model],
    state: str,
    reason: str,
    history_uri: str,
    champion_uri: str,
    job_name: str,
) -> None:
    """Records a run in the history once its model is validated, and published where it was blessed.

    Args:
        exported: SavedModel with its evaluation and verdict.
        state: Output `state` of `configure`.
        reason: Output `reason` of `configure`.
        history_uri: Directory or gs:// with the history of runs; "" records nothing.
        champion_uri: Model store of blessed models; "" for none.
        job_name: Name of the run.
    """
    from pathlib import Path

    from shardline.trainer.base.progress import exit_on_error

    with exit_on_error("changes"):
        from shardline.components.configure.changes import write_history

        write_history(Path(exported.path), state, reason, history_uri, champion_uri, job_name)
