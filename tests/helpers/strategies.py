"""Inputs made by chance, for tests of properties and for benchmarks/fuzz.py, and what reads each kind.

Whatever is read comes to a result or to a `ShardlineError`: `TARGETS` has the readers by name, and what each
is given. An input is a good one with some nodes changed, or a text of the words that its grammar knows.
"""

from __future__ import annotations

import copy
import functools
import json
import tempfile
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from shardline.components.validate.gate import read_gate
from shardline.components.validate.rules import CLASS_METRICS, METRICS, OPERATORS, parse_rule
from shardline.pipelines import settings
from shardline.pipelines.check.checks import check, parse
from shardline.pipelines.preflight import check_run, load_study
from shardline.pipelines.spec import parse_file
from shardline.trainer.cluster import cluster
from tests.helpers import checks

ROOT = Path(__file__).resolve().parents[2]

#: Texts that have harmed readers of text.
_TEXTS = (
    *("", " ", "\0", "\n", "\x1b[31m", "<script>", '"', "'", "\\", "é", "\u202e", "\ud800", "²", "NaN"),
    *("../../x", "/etc/passwd", "gs://", "a:b:c", "{{$.x}}", "{{$.inputs.parameters['p']}}", "x" * 300),
    *("-1", "1e400", "0x10", "99999999999999999999", "true", "null", "2026-01-01", "__class__", "*", "<<"),
)
_NUMBERS = (
    0,
    -1,
    1,
    2**31,
    2**53 + 1,
    2**63,
    2**64,
    -(2**64),
    10**30,
    0.5,
    -0.0,
    1e308,
    float("inf"),
    float("nan"),
)

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(_NUMBERS),
    st.sampled_from(_TEXTS),
    st.integers(),
    st.text(max_size=20),
)
#: Any JSON value, with the numbers and texts that are none.
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_TEXTS), inner, max_size=3),
    max_leaves=6,
)


def places(node: Any) -> list[tuple[Any, Any]]:
    """Returns every (container, key) below a node."""
    keys = list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
    return [(node, key) for key in keys] + [place for key in keys for place in places(node[key])]


@st.composite
def changed(draw: st.DrawFn, good: Any, most: int = 3) -> Any:
    """Draws a JSON value that is a good one with one to `most` of its nodes replaced, deleted or renamed."""
    node = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, most))):
        found = places(node)
        if not found:
            return node
        container, key = found[draw(st.integers(0, len(found) - 1))]
        how = draw(st.sampled_from(("replace", "replace", "delete", "rename")))
        if how == "replace":
            container[key] = draw(values)
        elif how == "rename" and isinstance(container, dict):
            container[draw(st.sampled_from(_TEXTS))] = container.pop(key)
        else:
            del container[key]
    return node


def words(*known: str, most: int = 12) -> st.SearchStrategy[str]:
    """Draws texts put together of words, and now and then of any characters."""
    return st.lists(st.sampled_from(known) | st.sampled_from(_TEXTS), max_size=most).map("".join) | st.text(
        max_size=40
    )


def to_toml(table: Any) -> str:
    """Returns a JSON object as TOML, as well as it can be told: null is left out."""
    return "".join(f"{_key(key)} = {_toml(item)}\n" for key, item in table.items() if item is not None)


def _key(key: Any) -> str:
    return json.dumps(str(key), ensure_ascii=False)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return "1979-05-27" if value is None else str(value).lower()


@functools.cache
def _retrain() -> dict[str, Any]:
    return yaml.load((ROOT / "compiled" / "retrain.yaml").read_bytes(), yaml.CSafeLoader)


def _settings() -> dict[str, Any]:
    """Returns settings with every table."""
    text = (ROOT / "settings" / "vertex.toml.example").read_text(encoding="utf-8")
    return tomllib.loads(text) | {
        "model_upload": {"display_name": "d", "serving_image_uri": "europe-docker.pkg.dev/p/r/serving:1"},
        "deploy": {"endpoint": "projects/p/locations/l/endpoints/1", "machine_type": "n1-standard-2"},
        "notify": {"when": "always", "webhook_secret": "projects/p/secrets/s/versions/latest"},
    }


_CLUSTER = {
    "cluster": {"chief": ["a:1"], "worker": ["b:1", "b:2"], "ps": ["c:1"], "workerpool3": ["d:1"]},
    "task": {"type": "worker", "index": 1, "trial": "2"},
    "environment": "cloud",
}
_RULE_WORDS = (
    *METRICS,
    *CLASS_METRICS,
    *OPERATORS,
    "[",
    "]",
    "(",
    ")",
    "class",
    "=",
    "champion",
    "worst_slice(",
    "p <",
    "0.5",
    " ",
    "-",
)
_YAML_WORDS = (
    "a: ",
    "&a ",
    "*a",
    "- ",
    "[",
    "]",
    "{",
    "}",
    ", ",
    "\n",
    "  ",
    "<<: ",
    "? ",
    "!!set ",
    "!!int ",
    "---\n",
    "|\n",
    "'",
    "#",
    "root: ",
    "pipelineInfo: ",
    "deploymentSpec: ",
)


@dataclass(frozen=True)
class Target:
    """A reader: what it is given, and the call, which returns or raises a `ShardlineError`."""

    inputs: st.SearchStrategy[Any]
    read: Callable[[Any], Any]


def in_file(read: Callable[[Path], Any], name: str) -> Callable[[str | bytes], Any]:
    """Returns a reader of a content: it is written to a file of this name, whose path `read` takes."""

    def call(content: str | bytes) -> Any:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / name
            path.write_bytes(
                content if isinstance(content, bytes) else content.encode(errors="surrogatepass")
            )
            return read(path)

    return call


def _read_settings(path: Path) -> Any:
    settings.load(path)
    return settings.compile_time_rows(path)


def _read_cluster(texts: tuple[str, str]) -> Any:
    environ = {"TF_CONFIG": texts[0], "CLUSTER_SPEC": texts[1]}
    cluster.has_evaluator(environ)
    found = cluster.read_cluster(environ)
    return str(found), found.tasks, found.others, found.num_workers


def _check_parameters(given: dict[str, Any]) -> Any:
    return check_run(_retrain(), given)


def _given() -> st.SearchStrategy[dict[str, Any]]:
    declared = _retrain()["root"]["inputDefinitions"]["parameters"]
    plain = values | scalars.map(str) | values.map(functools.partial(json.dumps, ensure_ascii=False))
    return st.dictionaries(st.sampled_from(sorted(declared)), plain, max_size=3)


_JSON = functools.partial(json.dumps, ensure_ascii=False)
_STUDY = tomllib.loads((ROOT / "settings" / "tune.toml").read_text(encoding="utf-8"))
_PATH = Path("p.yaml")

TARGETS: dict[str, Target] = {
    "settings": Target(changed(_settings()).map(to_toml), in_file(_read_settings, "s.toml")),
    "study": Target(changed(_STUDY).map(to_toml), in_file(load_study, "t.toml")),
    "rule": Target(words(*_RULE_WORDS), parse_rule),
    "rules": Target(
        changed({"rules": ["accuracy >= 0.9"], "first_run": "bless", "min_slice": 3}).map(_JSON),
        in_file(read_gate, "r.json"),
    ),
    "cluster": Target(
        st.tuples(
            changed(_CLUSTER).map(_JSON) | words("{", "}", '"cluster":', "[", "]"),
            changed(_CLUSTER).map(_JSON),
        ),
        _read_cluster,
    ),
    "yaml": Target(words(*_YAML_WORDS, most=40), lambda text: parse_file(text, _PATH)),
    "pipeline": Target(changed(checks.pipeline()), lambda spec: check(parse(_JSON(spec), _PATH))),
    "retrain": Target(changed(_retrain()).map(_JSON), lambda text: check(parse(text, _PATH))),
    "parameters": Target(_given(), _check_parameters),
}
