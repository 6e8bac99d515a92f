"""The report and the model card in a browser: from disk, and framed as the console's artifact viewer does."""

import dataclasses
import html
import io
import json
import re
import shutil
import subprocess

import pytest
from PIL import Image

from shardline.components.validate.metrics.evaluation import Mistake
from shardline.components.validate.report import make_card
from shardline.trainer.manifest import Feature
from tests.helpers.labels import LABELLED
from tests.helpers.reports import (
    EXPORT,
    TRAINING,
    make_blessing,
    make_evaluation,
    make_kind,
    make_manifest,
    make_report,
    with_champion,
)

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on the PATH")

DARK = "--blink-settings=preferredColorScheme=0"

# The viewer's frame: the page may neither run scripts nor load anything.
FRAME = """<!DOCTYPE html><meta charset="utf-8">
<iframe sandbox="allow-same-origin" style="width:WIDTHpx;height:800px;border:0" srcdoc="PAGE"></iframe>
<pre></pre>
<script>
// What is drawn of data is clipped to the axes, or an image; ticks and frames are neither.
const hasMarks = svg => [...svg.querySelectorAll("[clip-path], image")].some(one => {
  const { width, height } = one.getBoundingClientRect();
  return width > 0 || height > 0;
});
onload = () => {
  const page = document.querySelector("iframe").contentDocument, root = page.documentElement;
  const style = getComputedStyle(page.body);
  const label = page.querySelector("svg text");
  document.querySelector("pre").textContent = JSON.stringify({
    width: root.clientWidth,
    needs: root.scrollWidth,
    broken: [...page.images].filter(one => !one.complete || !one.naturalWidth).length,
    pictures: page.images.length,
    flat: [...page.querySelectorAll("svg")].filter(one => one.getBoundingClientRect().height < 100).length,
    plots: page.querySelectorAll("svg").length,
    empty: [...page.querySelectorAll("svg")].filter(one => !hasMarks(one)).length,
    back: style.backgroundColor,
    ink: style.color,
    label: label && getComputedStyle(label).fill,
  });
};
</script>"""


def browse(path, directory, *options):
    """Opens a page; returns what it became, and what the browser wrote on its console."""
    quiet = "--disable-gpu --disable-quic --disable-background-networking --disable-component-update"
    usual = f"--headless --no-sandbox --no-first-run --disable-sync --enable-logging=stderr {quiet}"
    profile = f"--user-data-dir={directory / 'profile'}"
    command = [CHROMIUM, *usual.split(), profile, *options, "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.fixture(scope="module")
def report():
    Image.effect_noise((640, 480), 60).save(photo := io.BytesIO(), "JPEG")
    Image.new("L", (8, 8), 99).save(digit := io.BytesIO(), "PNG")
    names = [f"a class with the long name {i}" for i in range(60)]
    mistakes = [
        Mistake("a", names[0], names[1], 0.9, photo.getvalue()),
        Mistake("b", *names[:2], None, digit.getvalue()),
    ]
    return make_report(with_champion(make_evaluation(names, mistakes=mistakes)))


@pytest.fixture(scope="module")
def card():
    names = [f"a class with the long name {i}" for i in range(60)]
    blessing = make_blessing(headline="Blessed: accuracy")
    return make_card(make_manifest(names), EXPORT, TRAINING, make_evaluation(names), blessing).to_html()


@pytest.mark.parametrize(
    ("page", "words"), [("report", "✗ Not blessed"), ("card", "Blessed: accuracy")], ids=["report", "card"]
)
def test_it_opens_from_disk_without_a_word_on_the_console(page, words, request, tmp_path):
    (tmp_path / "page.html").write_text(request.getfixturevalue(page), encoding="utf-8")

    content, console = browse(tmp_path / "page.html", tmp_path)

    assert console == []
    assert words in content


def test_the_report_of_a_table_fits_a_phone_folded_or_not(tmp_path):
    names = ("no", "yes")
    columns = (Feature("age", "float32"), Feature("city" * 20, "string"), Feature("label", "int64"))
    manifest = make_manifest(names, columns)
    page = make_report(make_evaluation(names), manifest=manifest, created="now", run="r" * 99)

    found = measure_framed(page.replace("<details>", "<details open>"), 390, tmp_path)

    assert "<details>" in page
    assert found["needs"] <= found["width"] <= 390
    assert found["flat"] == 0


def test_a_model_card_fits_a_phone_folded_or_not(card, tmp_path):
    found = measure_framed(card.replace("<details>", "<details open>"), 390, tmp_path)

    assert "<details>" in card
    assert found["needs"] <= found["width"] <= 390


def measure_framed(page, width, directory, *options):
    """Opens a page in a frame of a width and returns what was measured of it there."""
    frame = FRAME.replace("WIDTH", str(width)).replace("PAGE", html.escape(page))
    (directory / "frame.html").write_text(frame, encoding="utf-8")
    content, console = browse(directory / "frame.html", directory, *options)
    assert console == []
    return json.loads(html.unescape(re.search(r"<pre>(.*?)</pre>", content, re.DOTALL)[1]))


@pytest.mark.parametrize(
    ("width", "options"), [pytest.param(390, (), id="light-390"), pytest.param(1200, (DARK,), id="dark-1200")]
)
def test_framed_it_fits_a_phone_and_a_desk_in_light_and_dark(width, options, report, tmp_path):
    found = measure_framed(report, width, tmp_path, *options)

    assert found["needs"] <= found["width"] <= width
    assert (found["pictures"], found["broken"], found["flat"]) == (2, 0, 0)
    assert found["label"] == found["ink"]
    assert (brightness(found["back"]) < brightness(found["ink"])) == bool(options)


@pytest.mark.parametrize(("kind", "plots"), [("numbers", 4), ("multilabel", 2), ("two", 7)])
def test_reports_of_every_kind_of_label_are_drawn(kind, plots, tmp_path):
    labels = LABELLED[kind]
    manifest = dataclasses.replace(make_manifest(("a", "b")), labels=labels)
    export = dataclasses.replace(EXPORT, labels=labels)
    page = make_report(make_kind(kind), manifest=manifest, export=export)

    found = measure_framed(page.replace("<details>", "<details open>"), 1200, tmp_path)

    assert found["needs"] <= found["width"] <= 1200
    assert (found["plots"], found["flat"], found["empty"]) == (plots, 0, 0)
    assert found["label"] == found["ink"]


def brightness(colour):
    return sum(map(int, re.findall(r"\d+", colour)[:3]))
