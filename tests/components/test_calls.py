"""The ways to call a model that its report shows do call it, and the page about them has them."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import re
import subprocess
from pathlib import Path

import pytest

from shardline.components.model_store import Export
from shardline.components.validate.report.report import make_calls
from tests.helpers.labels import class_label
from tests.helpers.model_server import serve_model
from tests.helpers.reports import EXPORT, make_evaluation, make_report

PAGE = Path(__file__).parents[2] / "docs" / "call-your-model.md"
COLUMNS = Export(
    labels=(class_label(("rain", "sun")),),
    signatures={"serving_default": {"inputs": {"width": {"dtype": "float32"}, "city": {"dtype": "string"}}}},
    golden={"instances": [{"city": "L'Aquila", "width": 0.2}]},
)


@pytest.fixture
def here(exported: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of an export, with an image in it."""
    image = base64.b64decode(Export.read(exported).golden["instances"][0]["b64"])
    (exported / "image.png").write_bytes(image)
    monkeypatch.chdir(exported)
    return exported


def test_python_with_tensorflow_alone(here: Path) -> None:
    export = Export.read(here)
    shown = io.StringIO()

    with contextlib.redirect_stdout(shown):
        exec(make_calls(export)["Python, with TensorFlow alone"], {})

    assert repr(export.golden["predictions"][0]["label_name"].encode()) in shown.getvalue()


def test_curl_asks_a_server_of_models(here: Path, clean_process) -> None:
    export = Export.read(here)
    _, command = make_calls(export)["TensorFlow Serving"].split("\n", 1)

    with serve_model(here, clean_process) as url:
        command = re.sub(r"http://localhost:8501/\S+(?=:predict)", url, command)
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60)

    (answer,) = json.loads(done.stdout)["predictions"]
    assert answer["label_name"] == export.golden["predictions"][0]["label_name"]


def test_a_row_of_a_table_is_one_of_the_golden_examples() -> None:
    python, curl = make_calls(COLUMNS).values()

    assert (
        '    width=tf.constant([0.2], "float32"),\n    city=tf.constant(["L\'Aquila"], "string"),\n' in python
    )
    command = curl.split("\n", 1)[1].replace("curl -d", "printf %s%.0s")
    data = subprocess.check_output(["bash", "-c", command])
    assert json.loads(data) == {"instances": [{"width": 0.2, "city": "L'Aquila"}]}


def test_a_model_whose_inputs_are_not_known_has_no_calls() -> None:
    assert make_calls(Export()) == {}


def test_the_report_shows_them() -> None:
    page = make_report(make_evaluation(("top", "middle", "bottom")))

    assert EXPORT.signatures
    assert "<h2>Call this model</h2>" in page
    assert "tf.saved_model.load(&#34;saved_model&#34;)" in page


@pytest.mark.parametrize(("title", "code"), make_calls(EXPORT).items())
def test_the_page_has_the_calls_of_a_model_of_images(title, code) -> None:
    text = PAGE.read_text()

    assert f"## {title}\n" in text
    assert code in re.sub("(?m)^    ", "", text)
