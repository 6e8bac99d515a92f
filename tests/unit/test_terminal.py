"""What a person sees of a run: plain lines without a terminal, a bar with one."""

from __future__ import annotations

import datetime
import io
import itertools
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from shardline.components import text as summary
from shardline.components.runs import RunState
from shardline.components.runs.run import Task
from shardline.pipelines.local import foreground
from shardline.pipelines.local import terminal as terminals
from shardline.pipelines.local.run import new_run, outcome_rows
from shardline.trainer.base.progress import Event

_ANSI = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class _Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_are_few_and_a_line_of_its_own_says_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    clock = itertools.count(step=0.25)
    monkeypatch.setattr(terminals.time, "monotonic", lambda: next(clock))
    with foreground(stream) as terminal:
        for done in range(1, 13):
            terminal.show(Event("progress", "train", f"loss {done}", done=done, total=12, unit="steps"))
        terminal.show(Event("line", "train", "epoch 1/1"))
        terminal.line("worker-0", "hello")
    lines = stream.getvalue().splitlines()
    assert 1 <= len(lines[:-2]) <= 4
    assert all("/12 steps  loss" in line for line in lines[:-2])
    assert lines[-2:] == ["train: epoch 1/1", "worker-0 | hello"]


@pytest.mark.parametrize("tty", [False, True])
def test_work_that_stops_short_is_still_seen(tty: bool) -> None:
    stream = _Tty() if tty else io.StringIO()
    with foreground(stream) as terminal:
        terminal.show(Event("progress", "train", "first", done=1, total=9, unit="steps"))
        terminal.show(Event("progress", "train", "second", done=2, total=9, unit="steps"))
    assert "2/9 steps" in stream.getvalue()


@pytest.mark.parametrize("facts", [False, True])
@pytest.mark.parametrize("tty", [False, True])
def test_facts_can_wait_for_the_table(tty: bool, facts: bool) -> None:
    stream = _Tty() if tty else io.StringIO()
    with foreground(stream, facts=facts) as terminal:
        terminal.show(Event("fact", "accuracy", "0.97", value=0.97))
        terminal.show(Event("line", "train", "[bold]not markup[/bold]"))
    assert ("0.97" in stream.getvalue()) == facts
    assert "[bold]not markup[/bold]" in stream.getvalue()


@pytest.mark.parametrize("tty", [False, True])
def test_summary(tty: bool) -> None:
    stream = _Tty() if tty else io.StringIO()
    path = "/runs/" + "x" * 300
    summary.print_rows([("run directory", path), ("accuracy", "0.97")], stream)
    lines = [line.strip() for line in stream.getvalue().splitlines() if line.strip()]
    assert len(lines) == 2
    assert lines[0].endswith(path)  # never folded
    assert lines[1].endswith("0.97")
    if not tty:
        assert lines[0].index(path) == lines[1].index("0.97")


def test_paths_below_the_current_directory_are_short() -> None:
    stream = io.StringIO()
    summary.print_rows(
        [("log", str(Path.cwd() / "runs" / "x" / "run.log")), ("other", "/somewhere/else")], stream
    )
    assert stream.getvalue().split() == ["log", "runs/x/run.log", "other", "/somewhere/else"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")],
)
def test_duration(seconds: float, text: str) -> None:
    assert summary.duration(seconds) == text


def test_silence_is_broken_ever_less_often_and_by_the_task_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(terminals.time, "monotonic", lambda: now)
    stream, heartbeat = io.StringIO(), terminals.Heartbeat()
    with foreground(stream):
        for second in range(1, 41):
            now = float(second)
            if second == 2:
                heartbeat.task = "preprocess"
            if second == 30:
                heartbeat.reset()
                heartbeat.task = ""
            heartbeat.report_if_due()
    assert stream.getvalue().splitlines() == [
        "preprocess: running; no output for 3 s",
        "preprocess: running; no output for 9 s",
        "preprocess: running; no output for 27 s",
        "run: running; no output for 3 s",
        "run: running; no output for 9 s",
    ]


def test_no_word_is_broken_at_80_columns() -> None:
    stream, words = _Tty(), "steps waited for input 14% of the time; " * 4
    path, command = "/runs/" + "x" * 90, ["shardline", "champion", "promote", *("/somewhere/" * 3,) * 3]
    command += ["--param", 'rules=["champion: off", "camera=\'left\' >= 0.9"]']
    with foreground(stream) as terminal:
        terminal.show(Event("line", "train", words + path))
    summary.print_rows([("verdict", words), ("", shlex.join(command))], stream)
    assert all(len(line) <= 80 for line in f"Error: {summary.fitted(words, stream)}".splitlines())
    assert summary.fitted(words, io.StringIO()) == words
    shown = _ANSI.sub("", stream.getvalue())
    assert [line for line in shown.splitlines() if len(line) > 80] == [f"    {path}"]
    assert shown.split()[1 : len(words.split()) + 2] == [*words.split(), path]
    pasted = shown[shown.index("shardline") :]
    assert "\\\n" in pasted
    assert shlex.split(pasted.replace("\\\n", "")) == command  # as a shell does


def test_a_bar_shows_how_far_it_is_at_80_columns() -> None:
    stream, text = _Tty(), "epoch 1/20  loss 1.6021  accuracy 0.3594  2,989/s  ETA 118 s"
    with foreground(stream) as terminal:
        terminal.show(Event("progress", "train", text, done=80, total=160, unit="steps"))
    bar = re.sub("[━╸╺ ]+", " ", _ANSI.sub("", stream.getvalue()))
    assert "train 80/160 steps epoch 1/20 loss 1.6021 accuracy 0.3594 ETA 118 s" in bar
    assert _ANSI.sub("", stream.getvalue()).count("━") >= 7


_FIRST = "first champion"
_SAID = f"published as the champion: {_FIRST}"
_PUBLISHED = {"blessed": _FIRST, "report": "/r.html", "champion": "/store/versions/v1"}
_BLOCKED = {"blessed": "1 < 2", "report": "/r.html", "next": "keep the champion"}


@pytest.mark.parametrize(
    ("state", "blessed", "facts", "first", "command"),
    [
        ("succeeded", True, _PUBLISHED, _SAID, "shardline check retrain.yaml"),
        ("succeeded", False, _BLOCKED, "not published: 1 < 2", ""),
        ("succeeded", True, {"blessed": "alone"}, "blessed, but not published: alone", ""),
        ("succeeded", None, {}, "in 0 s", ""),
        ("failed", True, {"blessed": "alone"}, "in 0 s", ""),
    ],
)
def test_a_run_ends_with_its_verdict_first_and_checksums_last(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: RunState,
    blessed: bool | None,
    facts: dict[str, str],
    first: str,
    command: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    now, parameters = datetime.datetime.now(datetime.UTC), {"epochs": 20, "champion_uri": "/store"}
    given = {"pipeline": "retrain", "yaml": "retrain.yaml", "parameters": parameters}
    with new_run(tmp_path / "runs", b"", now, **given) as begun:
        outputs = {} if blessed is None else {"blessed": blessed}
        judge = Task(name="judge", path="judge", state="succeeded", parameters=outputs)
        run = replace(begun, state=state, duration_s=0.0, tasks=(judge,))
    own = {"dataset": f"sha256:{'0' * 64}", "fact of a pipeline": "7"}
    rows = outcome_rows(run, {**own, **facts}, can_continue=True)

    assert rows[0][1] == first
    assert dict(rows).get("", "") == command
    if "next" in facts:
        assert ("next", "open /r.html; keep the champion") in rows
    assert ("dataset", f"sha256:{'0' * 12}") in rows
    assert ("fact of a pipeline", "7") in rows
    assert rows[-1][0] == "pipeline"
    if "champion" in facts:
        assert [name for name, _ in rows[:4]] == ["verdict", "next", "", "fact of a pipeline"]
        assert [name for name, _ in rows[-2:]] == ["version", "pipeline"]


def test_a_bar_ends_with_its_task() -> None:
    stream = _Tty()
    with foreground(stream) as terminal:
        terminal.show(Event("progress", "preprocess", "written", done=2, total=9, unit="records"))
        terminal.end_work()
        stream.truncate(0)
        terminal.show(Event("line", "train", "starting"))
        assert "records" not in stream.getvalue()


@pytest.mark.parametrize(
    ("text", "published"),
    [
        ("table:/home/ann/rides.csv", "table:…/rides.csv"),
        ("table:/home/ann smith/rides.csv", "table:…/rides.csv"),
        ("see /home/ann/rides.csv and a/b", "see …/rides.csv and a/b"),
        ("tfrecord:/data/*/x-*.gz", "tfrecord:…/x-*.gz"),
        ("no champion in /home/ann/runs/champions/table-home-ann yet", "no champion in …/champions yet"),
        ("/gcs/acme/rides.csv", "gs://acme/rides.csv"),
        ("gs://acme/a/b", "gs://acme/a/b"),
        ("data/rides.csv, km/h and 1 / 2", "data/rides.csv, km/h and 1 / 2"),
    ],
)
def test_a_text_to_publish_has_no_directories_of_this_machine(text: str, published: str) -> None:
    assert summary.hide_directories(text) == published
