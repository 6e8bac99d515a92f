"""Pipeline files and pipeline parameters are checked before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardline.pipelines.parameters import check_parameters, read_parameters
from shardline.pipelines.spec import load_pipeline, parse_pipeline
from shardline.trainer.base.errors import EXIT_BAD_INPUT, PipelineError, SettingsError

_TYPES = {
    **{"text": "STRING", "count": "NUMBER_INTEGER", "rate": "NUMBER_DOUBLE"},
    **{"flag": "BOOLEAN", "hparams": "STRUCT", "layers": "LIST"},
}


def _spec(**extra: dict[str, Any]) -> dict[str, Any]:
    parameters = {name: {"parameterType": kind, "isOptional": True} for name, kind in _TYPES.items()}
    return {
        "pipelineInfo": {"name": "p"},
        "schemaVersion": "2.1.0",
        "root": {
            "dag": {"tasks": {"t": {"componentRef": {"name": "comp-t"}}}},
            "inputDefinitions": {"parameters": {**parameters, **extra}},
        },
        "components": {"comp-t": {"executorLabel": "exec-t"}},
        "deploymentSpec": {"executors": {"exec-t": {}}},
    }


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("text", "12", "12"),  # what looks like a number stays text where text is declared
        ("text", 'it\'s "q" \\ {x}\né', 'it\'s "q" \\ {x}\né'),
        ("count", " 7 ", 7),
        ("count", 7.0, 7),  # a YAML default is a double
        ("rate", "1e-3", 0.001),
        ("flag", "True", True),
        ("flag", False, False),
        ("hparams", '{"a": [1, "x"]}', {"a": [1, "x"]}),
        ("layers", [1], [1]),
    ],
)
def test_values_get_their_declared_type(name: str, given: Any, expected: Any) -> None:
    value = check_parameters(_spec(), {name: given})[name]
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("text", 3, "text is declared as str, got 3"),
        ("text", "a\0b", "NUL character"),
        ("text", "\udcff", "not valid UTF-8"),
        ("count", "3.5", "count is declared as int, got '3.5'"),
        ("count", True, "declared as int, got True"),
        ("count", str(2**53 + 1), "exact up to"),
        ("rate", "fast", "rate is declared as float, got 'fast'"),
        ("rate", "nan", "must be finite"),
        ("flag", "yes", "write true or false"),
        ("hparams", "[]", r"hparams is declared as a JSON object, got '\[\]'"),
        ("hparams", '{"a": NaN}', "NaN is not a JSON number"),
    ],
)
def test_mistyped(name: str, given: Any, message: str) -> None:
    with pytest.raises(PipelineError, match=message) as caught:
        check_parameters(_spec(), {name: given})
    assert caught.value.exit_code == EXIT_BAD_INPUT


def test_an_unknown_parameter_is_refused_with_the_nearest_or_all() -> None:
    with pytest.raises(PipelineError, match=r"no parameter 'cout'; did you mean count\?$"):
        check_parameters(_spec(), {"cout": "1"})
    with pytest.raises(PipelineError, match=r"no parameter 'x'; it has text \(str\), count \(int\)"):
        check_parameters(_spec(), {"x": "1"})


def test_missing_required() -> None:
    with pytest.raises(PipelineError, match=r"source \(str\) has no default and must be set"):
        check_parameters(_spec(source={"parameterType": "STRING"}), {})


def test_literals() -> None:
    spec = _spec(mode={"parameterType": "STRING", "isOptional": True, "literals": ["fast", "slow"]})
    assert check_parameters(spec, {"mode": "fast"}) == {"mode": "fast"}
    with pytest.raises(PipelineError, match="mode is one of fast, slow, got 'medium'"):
        check_parameters(spec, {"mode": "medium"})


def test_a_file_gives_values_of_every_type_and_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "local.toml"
    file.write_text('text = "a"\ncount = 3\nrate = 1\nflag = true\nlayers = [1, 2]\n[hparams]\nunits = 8\n')
    given = read_parameters(file) | {"count": "4"}
    lists = {"layers": [1, 2], "hparams": {"units": 8}}
    assert check_parameters(_spec(), given) == {"text": "a", "count": 4, "rate": 1.0, "flag": True, **lists}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("count = ", r"local\.toml is not TOML"),
        ("text = 2026-01-31", r"local\.toml: text is 2026-01-31, which .* times in quotes"),
        ("[hparams]\nrates = [1.0, inf]", r"local\.toml: hparams is {'rates': \[1\.0, inf\]}, which"),
    ],
)
def test_a_wrong_file_is_named_with_the_key(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "local.toml"
    file.write_text(content)
    with pytest.raises((PipelineError, SettingsError), match=message):
        check_parameters(_spec(), read_parameters(file))


def test_platform_specific_documents_run_here_and_are_refused_for_the_platform(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    content = f"{_spec()!r}\n---\nplatforms: {{kubernetes: {{}}}}\n".replace("True", "true").encode()
    path.write_bytes(content)
    assert load_pipeline(path)["pipelineInfo"]
    with pytest.raises(PipelineError, match="2 YAML documents, the second with settings for kubernetes"):
        parse_pipeline(content, path, sent=True)
