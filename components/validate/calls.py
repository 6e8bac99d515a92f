"""Calls of an exported model as its report shows them: in Python, of a server, of an endpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from shardline.components.model_store import Export
from shardline.components.validate.answers import name_outputs
from shardline.trainer.data.features import CLASS

_SIGNATURE = "serving_default"

_PYTHON = """\
import tensorflow as tf

call = tf.saved_model.load("saved_model").signatures["serving_default"]
answer = call({arguments})
print({shown})"""

_SERVER = """\
docker run --rm -p 8501:8501 -v "$PWD/saved_model:/models/model/1" tensorflow/serving
# then, in another terminal:"""
_CURL = "curl -d {data} http://localhost:8501/v1/models/model:predict"
_IMAGE_DATA = """printf '{"instances": [{"b64": "%s"}]}' "$(base64 -w0 image.png)" |"""

_PLATFORM = """\
from google.cloud import aiplatform
{image}
endpoint = aiplatform.Endpoint("projects/PROJECT/locations/REGION/endpoints/ENDPOINT")
answer = endpoint.predict(instances=[{instance}]).predictions[0]
print({shown})"""
_IMAGE_IMPORTS = """\
import base64
from pathlib import Path

"""
_IMAGE = """
image = base64.b64encode(Path("image.png").read_bytes()).decode()"""


class Call(NamedTuple):
    """One way to call a model: what it is called from, and the code or the commands."""

    title: str
    code: str


def make_calls(export: Export) -> tuple[Call, ...]:
    """Returns the ways to call a model through `serving_default`; none where its inputs are not known."""
    takes = export.signatures.get(_SIGNATURE, {}).get("inputs", {})
    if not export.labels:
        return ()
    if list(takes) == ["images"]:
        return _of_images(export)
    first = next(iter((export.golden or {}).get("instances", ())), None)
    return (
        _of_columns(export, takes, first)
        if takes and isinstance(first, dict) and takes.keys() <= first.keys()
        else ()
    )


def _of_images(export: Export) -> tuple[Call, ...]:
    curl = f"{_IMAGE_DATA} \\\n  {_CURL.format(data='@-')}"
    code = _PLATFORM.replace("{image}", _IMAGE).replace("{instance}", '{"b64": image}')
    platform = _IMAGE_IMPORTS + code
    return _calls(export, 'images=tf.stack([tf.io.read_file("image.png")])', curl, platform)


def _of_columns(export: Export, takes: dict[str, Any], row: dict[str, Any]) -> tuple[Call, ...]:
    """Returns calls with one row of a table, which is one of the golden examples."""
    values = {name: row[name] for name in takes}
    arguments = ", ".join(
        f'{name}=tf.constant([{value!r}], "{takes[name]["dtype"]}")' for name, value in values.items()
    )
    data = json.dumps({"instances": [values]}, ensure_ascii=False).replace("'", "'\\''")
    platform = _PLATFORM.replace("{image}", "").replace("{instance}", repr(values))
    return _calls(export, arguments, _CURL.format(data=f"'{data}'"), platform)


def _calls(export: Export, arguments: str, curl: str, platform: str) -> tuple[Call, ...]:
    return (
        Call(
            "Python, with TensorFlow alone",
            _PYTHON.replace("{arguments}", arguments).replace("{shown}", ", ".join(_shown(export))),
        ),
        Call("TensorFlow Serving", f"{_SERVER}\n{curl}"),
        Call("An endpoint of Vertex AI", platform.replace("{shown}", ", ".join(_shown_of_rows(export)))),
    )


def _shown(export: Export) -> Iterator[str]:
    """Yields what of TensorFlow's answer is printed: the name of a class, all probabilities and numbers."""
    for label in export.labels:
        names = name_outputs(export.labels)[label.name]
        if label.kind == CLASS:
            yield f'answer["{names[-1]}"].numpy()[0].decode()'
        yield f'answer["{names[0]}"].numpy()[0]'


def _shown_of_rows(export: Export) -> Iterator[str]:
    """Yields what of a row of a server's answer is printed."""
    for label in export.labels:
        names = name_outputs(export.labels)[label.name]
        yield f'answer["{names[-1] if label.kind == CLASS else names[0]}"]'
