"""The command `probe` against a server that really serves an export, or answers wrongly."""

import json
import shutil

import pytest
from click.testing import CliRunner

from shardline.components import model_store
from shardline.components.register import probe as probes
from shardline.pipelines.cli import main as cli
from tests.helpers.model_server import serve_model


@pytest.fixture
def server(exported, clean_process):
    with serve_model(exported, clean_process) as found:
        yield found


def probe(*arguments):
    return CliRunner().invoke(cli.main, ["probe", *map(str, arguments)])


ANSWER = {"probabilities": [0.5, 0.3, 0.2], "label": 0, "label_name": "top"}


def error(result):
    (line,) = [line for line in result.output.splitlines() if line.startswith("Error: ")]
    assert "Traceback" not in result.output
    return line


def test_a_server_of_the_same_model_agrees(server, exported):
    result = probe(server.url, exported)

    assert result.exit_code == 0, result.output
    assert "agrees    yes: largest difference " in result.output
    assert "on 16 golden examples (tolerance 0.01)" in result.output
    assert len(server.requests) == 1


def test_examples_that_are_too_long_for_one_request_are_sent_one_by_one(server, exported, monkeypatch):
    monkeypatch.setattr(probes, "_LARGEST_REQUEST", 1000)
    result = probe(f"{server.url}:predict", exported, "--json")

    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["agrees"] is True
    assert len(server.requests) == 16


def roll(rows):
    return [{**row, "probabilities": [*row["probabilities"][1:], row["probabilities"][0]]} for row in rows]


def rename(rows):
    return [{**row, "label_name": "other"} for row in rows]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (roll, "no: largest difference "),
        (
            rename,
            "no: largest difference 1 on 16 golden examples (tolerance 0.01): example 0: 'other' instead of",
        ),
        (lambda rows: rows[1:], "15 answers to 16 examples"),
        (lambda rows: [{"output": 1.0}] * len(rows), "example 0: no probabilities, label, label_name"),
        (lambda rows: [row["probabilities"] for row in rows], "example 0: no outputs"),
        (lambda rows: "abc", "0 answers to 16 examples"),
    ],
    ids=["other model", "other labels", "an answer is missing", "other outputs", "one output", "text"],
)
def test_a_server_of_another_model_does_not_agree(server, exported, change, words):
    server.change = change
    result = probe(server.url, exported)

    assert result.exit_code == 1
    assert words in result.output


@pytest.mark.parametrize(
    ("status", "body", "code", "words"),
    [
        (500, b"", 3, "refuses the golden examples (status 500)"),
        (503, b'{"error": "Servable not found"}', 3, "(status 503): Servable not found"),
        (404, b"<html>", 3, "refuses the golden examples (status 404)"),
        (400, b'{"error": "input\\nhas other shape"}', 1, "(status 400): input has other shape"),
        (200, b"<html>\x1b[31mhello</html>", 3, "answers with no predictions: '<html>\\x1b[31mhello</html>'"),
        (200, b'{"outputs": []}', 3, "answers with no predictions"),
        (200, b"[" * 100_000, 3, "answers with no predictions"),
        (302, b"there", 3, "refuses the golden examples (status 302)"),
    ],
)
def test_a_server_that_fails_is_one_line(server, exported, status, body, code, words):
    server.status, server.body = status, body
    result = probe(server.url, exported)

    assert result.exit_code == code, result.output
    assert words in error(result)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("hangs", "words"),
    [
        ("before", "gave no answer for 0.3 s"),
        ("middle", "gave no answer for 0.3 s"),
        ("bytes", "gave no answer for 0.3 s"),
        ("continue", "gave no answer for 0.3 s"),
        ("drops", "cannot be reached (ProtocolError)"),
    ],
)
def test_a_server_that_hangs_is_left_in_time(server, exported, hangs, words):
    server.hangs, server.body = hangs, b" " * 1000
    result = probe(server.url, exported, "--timeout", "0.3")

    assert result.exit_code == 3
    assert words in error(result)


@pytest.mark.parametrize("change", [{"label_name": "z" * 10**4}, {"label_name": "\ud800"}])
def test_words_of_a_server_are_short_and_can_be_printed(server, exported, change):
    server.change = lambda rows: [{**row, **change} for row in rows]
    result = probe(server.url, exported, "--json")

    assert result.exit_code == 1, result.output
    assert len(json.loads(result.stdout)["words"].encode()) < 300


def test_a_number_without_end_is_not_finite(server, exported):
    server.change = lambda rows: [
        {**row, "probabilities": [10**400, *row["probabilities"][1:]]} for row in rows
    ]
    result = probe(server.url, exported)

    assert result.exit_code == 1, result.output
    assert "largest difference 1 on" in result.output


def test_a_server_that_is_not_there_is_one_line(exported):
    result = probe("http://127.0.0.1:9/v1/models/digits", exported)

    assert result.exit_code == 3
    assert "http://127.0.0.1:9/v1/models/digits:predict cannot be reached (NewConnectionError)" in error(
        result
    )


def test_no_password_of_this_machine_is_sent(server, exported, tmp_path, monkeypatch):
    (tmp_path / ".netrc").write_text("default login me password T0PS3CRET\n")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    result = probe(server.url, exported)

    assert result.exit_code == 0, result.output
    assert not any("Authorization" in headers for headers in server.requests)


@pytest.mark.parametrize(
    ("url", "options", "words"),
    [
        ("http://me:T0PS3CRET@host/v1/models/m", [], "is no REST predict endpoint"),
        ("http://host:8501", [], "is no REST predict endpoint; write http://HOST:8501/v1/"),
        ("http://host/v1/models/m?token=a", [], "is no REST predict endpoint"),
        ("ftp://host/v1/models/m", [], "is no REST predict endpoint"),
        (f"http://{'a' * 64}.b/v1/models/m", [], "names no host"),
        ("http://host:99999/v1/models/m", [], "names no host"),
        ("projects/p/locations/l/models/1", [], "ENDPOINT must be projects/P/locations/L/endpoints/ID"),
        ("http://h/v1/models/m", ["--tolerance", "nan"], "the tolerance must be from 0 to 1, got nan"),
        ("http://h/v1/models/m", ["--timeout", "0"], "--timeout must be from 0 to 3600 seconds, got 0"),
    ],
)
def test_a_mistake_is_one_line_and_asks_nobody(exported, url, options, words):
    result = probe(url, exported, *options)

    assert result.exit_code == 2, result.output
    assert words in error(result)
    assert "T0PS3CRET" not in result.output


@pytest.mark.parametrize(
    ("golden", "words"),
    [
        (None, "has no golden examples; validate the model again"),
        ({"instances": [], "predictions": []}, "has no golden examples"),
        ({"instances": [{"x": 1}], "predictions": [{}]}, "golden examples in"),
        ({"instances": [{"x": None}], "predictions": [ANSWER]}, "finite numbers only"),
    ],
)
def test_an_export_without_golden_examples_is_one_line(exported, tmp_path, golden, words):
    out = shutil.copytree(exported, tmp_path / "copy")
    content = json.loads((out / model_store.EXPORT_FILE).read_text())
    (out / model_store.EXPORT_FILE).write_text(json.dumps({**content, "golden": golden}))

    result = probe("http://127.0.0.1:9/v1/models/m", out)

    assert result.exit_code == 2
    assert words in error(result)
    assert probe("http://127.0.0.1:9/v1/models/m", tmp_path / "missing").exit_code == 2
