"""Inputs made by chance, for tests of properties and for benchmarks/fuzz.py, and what reads each kind.

Whatever is read comes to a result or to a `ShardlineError`: `TARGETS` has the readers by name, and what each
is given. An input is a good one with some nodes changed, or with words left out or added in one place.
"""

from __future__ import annotations

import functools
import io
import json
import re
import tempfile
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st
from PIL import Image

from shardline.components.preprocess import tfrecord
from shardline.components.preprocess.images.codec import Codec
from shardline.components.validate.metrics import CHECKS, QUALITY, SERVING
from shardline.components.validate.rules import CLASS_METRICS, OPERATORS, Gate, parse_rule
from shardline.pipelines import settings
from shardline.pipelines.check import Pipeline, check_pipeline, check_run
from shardline.pipelines.parameters import load_study
from shardline.pipelines.spec import parse_pipeline
from shardline.trainer import cluster
from tests.helpers import checks, damage
from tests.helpers.mutations import JSON, TEXTS, damaged

ROOT = Path(__file__).resolve().parents[2]


def words(*known: str, most: int = 12) -> st.SearchStrategy[str]:
    """Draws texts put together of words, and now and then of any characters."""
    return st.lists(st.sampled_from(known) | st.sampled_from(TEXTS), max_size=most).map("".join) | st.text(
        max_size=40
    )


@st.composite
def altered(draw: Any, texts: st.SearchStrategy[str], *known: str) -> str:
    """Draws a sound text as it is, or with a word left out, or with known words in one place, or both."""
    pieces = re.findall(r"\w+|\s+|\W", draw(texts))
    place, end = draw(st.integers(0, len(pieces))), draw(st.integers(0, 1))
    added = draw(st.just("") | words(*known, most=3))
    return "".join([*pieces[:place], added, *pieces[place + end :]])


def to_toml(table: Any) -> str:
    """Returns a JSON object as TOML, as well as it can be told: null is left out."""
    if not isinstance(table, dict):
        return _toml(table)
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
        "tracking": {"mlflow_uri": "https://m:1", "token_secret": "projects/p/secrets/s/versions/1"},
    }


_CLUSTER = {
    "cluster": {"chief": ["a:1"], "worker": ["b:1", "b:2"], "ps": ["c:1"], "workerpool3": ["d:1"]},
    "task": {"type": "worker", "index": 1, "trial": "2"},
    "environment": "cloud",
}
METRICS = [metric.name for metric in QUALITY + SERVING + CHECKS]
_RULE_WORDS = (
    *(*METRICS, *CLASS_METRICS, *OPERATORS, "[", "]", "(", ")", "class", "=", "champion"),
    *("worst_slice(", "p <", "0.5", " ", "-"),
)
_RULES = st.builds(
    "".join,
    st.tuples(
        st.sampled_from(METRICS)
        | st.sampled_from(CLASS_METRICS).map("worst_slice({})".format)
        | st.sampled_from(CLASS_METRICS).map("{}[class=healthy]".format)
        | st.just("accuracy[camera = a/b]"),
        st.sampled_from([f" {operator} " for operator in OPERATORS]),
        st.sampled_from(["0.95", "-1e-3", ".5", "champion", "champion - 0.005", "champion +1"]),
    ),
) | st.sampled_from(["accuracy > champion (p < 0.05)", "recall[class=healthy] > champion (p<.01)"])
_YAML_WORDS = (
    *("a: ", "&a ", "*a", "- ", "[", "]", "{", "}", ", ", "\n", "  ", "<<: ", "? ", "!!set ", "!!int "),
    *("---\n", "|\n", "'", "#", "root: ", "pipelineInfo: ", "deploymentSpec: "),
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


def _read_cluster(texts: tuple[str, str]) -> Any:
    environ = {"TF_CONFIG": texts[0], "CLUSTER_SPEC": texts[1]}
    cluster.has_evaluator(environ)
    found = cluster.read_cluster(environ)
    return str(found), found.tasks, found.others, found.num_workers


def _check_parameters(given: dict[str, Any]) -> Any:
    return check_run(_retrain(), given)


def _check(text: str) -> Any:
    return check_pipeline(Pipeline.parse(text, _PATH))


def _damaged_files(*sound: bytes) -> st.SearchStrategy[bytes]:
    """Draws files of bytes that have been damaged as disks, transfers and writers damage them."""
    numbers = st.integers(0, 2**32 - 1)
    drawn = st.tuples(st.sampled_from(sound), numbers)
    return drawn.map(lambda item: next((copy for _, copy in damage.damaged(item[0], 8, item[1])), b""))


@functools.cache
def _records() -> bytes:
    """Returns a TFRecord file of three examples."""
    import google_crc32c

    made = b""
    for size in (10, 100, 1000):
        start, data = size.to_bytes(8, "little"), bytes(range(250)) * 4
        for part in (start, data[:size]):
            made += part + tfrecord.mask(google_crc32c.value(part))
    return made


def _read_records(path: Path) -> Any:
    return list(tfrecord.read_records(path, compression=tfrecord.detect_compression(path)))


def _store_image(encoded: bytes) -> Any:
    stored, kind = Codec(image_size=0, resize_mode="crop", encoding="keep", max_pixels=10**6).store(
        encoded, b"x"
    )
    with Image.open(io.BytesIO(stored)) as image:
        image.load()
    return kind


def _given() -> st.SearchStrategy[dict[str, Any]]:
    declared = _retrain()["root"]["inputDefinitions"]["parameters"]
    plain = JSON | JSON.map(str) | JSON.map(_JSON)
    return st.dictionaries(st.sampled_from(sorted(declared)), plain, max_size=3)


_JSON = functools.partial(json.dumps, ensure_ascii=False)
_STUDY = tomllib.loads((ROOT / "settings" / "tune.toml").read_text(encoding="utf-8"))
_PATH = Path("p.yaml")

TARGETS: dict[str, Target] = {
    "settings": Target(damaged(_settings()).map(to_toml), in_file(settings.load_settings, "s.toml")),
    "study": Target(damaged(_STUDY).map(to_toml), in_file(load_study, "t.toml")),
    "rule": Target(altered(_RULES, *_RULE_WORDS), parse_rule),
    "rules": Target(
        damaged({"rules": ["accuracy >= 0.9"], "first_run": "bless", "min_slice": 3}).map(_JSON),
        in_file(Gate.read, "r.json"),
    ),
    "cluster": Target(
        st.tuples(
            damaged(_CLUSTER).map(_JSON) | words("{", "}", '"cluster":', "[", "]"),
            damaged(_CLUSTER).map(_JSON),
        ),
        _read_cluster,
    ),
    "yaml": Target(
        altered(st.just(yaml.safe_dump(checks.pipeline())), *_YAML_WORDS),
        lambda text: parse_pipeline(text, _PATH),
    ),
    "pipeline": Target(damaged(checks.pipeline()), lambda spec: _check(_JSON(spec))),
    "retrain": Target(damaged(_retrain()).map(_JSON), _check),
    "tfrecord": Target(_damaged_files(_records()), in_file(_read_records, "a.tfrecord")),
    "image": Target(
        _damaged_files(*damage.sound_pngs().values(), *damage.sound_jpegs().values()), _store_image
    ),
    "parameters": Target(_given(), _check_parameters),
}
