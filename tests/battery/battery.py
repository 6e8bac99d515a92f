"""The battery: commands with bad and hostile inputs, and what must come of them.

`table/` has the rows, a file for each family of verbs: `EXIT CODE | KIND | COMMAND`, and after => what the
command may leave behind. `inputs` says what @ means; \\n and \\xNN are characters. A row with @* is one row
for each of `inputs.DAMAGED`; one of the kind `process` has a process of its own. `answers.txt` has the last
line that each prints. `python -m tests.battery.battery` runs all of them and counts the faults by kind, and
with --write writes answers.txt anew.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from shardline.trainer.base.errors import printable
from tests.battery import inputs
from tests.helpers import programs

HERE = Path(__file__).parent
ANSWERS = HERE / "answers.txt"
#: Seconds within which a command must have ended.
LIMIT = 20

#: Becomes the command, with two GiB above what is loaded already.
_PROGRAM = """
import resource, runpy, sys
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2 * 2**30,) * 2)
resource.setrlimit(resource.RLIMIT_FSIZE, (2**28,) * 2)
sys.argv[:] = sys.argv[1:]
if sys.argv[0] == "shardline":
    from shardline.pipelines.cli.main import main
    main()
else:
    sys.modules.pop(sys.argv[0], None)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
#: Taken once: pytest changes the environment while inputs are played in threads.
_KEPT = {name: value for name, value in os.environ.items() if not name.startswith(("VERTEX_", "SHARDLINE_"))}


@dataclass(frozen=True)
class Row:
    """One input: the exit code that it must have, the kind of attack, the command, and what it may leave."""

    code: int
    kind: str
    command: str
    leaves: tuple[str, ...] = ()

    @property
    def verb(self) -> str:
        """The verb of the command line, or the module that is run."""
        program, *words = [w for w in shlex.split(self.command) if not re.match(r"[A-Z_]+=", w)]
        return words[0] if program == "shardline" else words[1]  # python -m MODULE


@dataclass(frozen=True)
class Outcome:
    """What came of a row: exit code (None when it had to be killed), all output, and what was left behind."""

    code: int | None
    output: str
    left: tuple[str, ...]
    seconds: float

    @property
    def answer(self) -> str:
        """The last line of the output."""
        lines = [line for line in self.output.splitlines() if line.strip()]
        return lines[-1].rstrip() if lines else ""

    def faults(self, row: Row) -> list[str]:
        """Returns what is wrong with it: hang, traceback, leftover, exit code."""
        found = []
        if self.code is None:
            found.append("hang")
        if "Traceback (most recent call last)" in self.output or self.code == 70:
            found.append("traceback")
        if self.left:
            found.append("leftover")
        if self.code is not None and self.code != row.code and "traceback" not in found:
            found.append("accepted" if self.code == 0 else "exit code")
        return found


def rows() -> list[Row]:
    """Returns the rows of all tables; one that is there twice is as it is there last."""
    found: dict[str, Row] = {}
    for path in sorted((HERE / "table").glob("*.txt")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.strip() and not line.startswith("#"):
                code, kind, command = line.split(" | ", 2)
                command, _, leaves = command.partition(" => ")
                given = _rows(int(code), kind.strip(), command.strip(), tuple(leaves.split()))
                found.update((row.command, row) for row in given)
    return list(found.values())


def _rows(code: int, kind: str, command: str, leaves: tuple[str, ...]) -> Iterator[Row]:
    for star in ("@*", "{<*"):
        if star in command:
            for name in inputs.DAMAGED:
                yield Row(code, name, command.replace(star, star.replace("*", name)), leaves)
            return
    yield Row(code, kind, command, leaves)


def prepare(made: Path) -> None:
    """Makes what the good inputs are copies of, in an empty directory."""
    program = (
        "import sys; from pathlib import Path; from tests.helpers.datasets import write_dataset; "
        "write_dataset(Path(sys.argv[1]), records=dict(train=36, validation=3, test=3), shards=1)"
    )
    command = [sys.executable, "-c", program, str(made / "dataset")]
    programs.run(command, check=True, env=_environment(made), cwd=inputs.ROOT)
    inputs.make_good(made)


def play(row: Row, made: Path) -> Outcome:
    """Runs a row in a directory of its own."""
    with tempfile.TemporaryDirectory(prefix="battery-") as name:
        home = Path(name).resolve()
        work = home / "here"
        for directory in (work, home / "tmp", home / "home"):
            directory.mkdir()
        shutil.copy(HERE / "hostile.py", work)
        words = [inputs.place(_characters(word), work, made) for word in shlex.split(row.command)]
        environment = _environment(home)
        while re.match(r"[A-Z_]+=", words[0]):
            variable, _, value = words.pop(0).partition("=")
            environment[variable] = value
        program = words[:1] if words[0] == "shardline" else words[2:3]  # python -m MODULE
        arguments = words[1:] if words[0] == "shardline" else words[3:]
        before = _tree(home)
        command = [*program, *arguments]
        code, output, seconds = _run(command, work, environment, plain=row.kind == "process")
        left = [f"process {name}" for name in _end_processes(home)]
        left += sorted(path for path in _tree(home) ^ before if not _is_named(path, row.leaves))
        return Outcome(code, _normal(output, home), tuple(left), seconds)


def _run(
    command: list[str], work: Path, environment: dict[str, str], *, plain: bool
) -> tuple[int | None, str, float]:
    start = time.monotonic()
    process = (subprocess.Popen if plain else programs.Popen)(
        [sys.executable, "-c", _PROGRAM, *command],
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="backslashreplace",
    )
    try:
        output, _ = process.communicate(timeout=LIMIT)
        return process.returncode, output, time.monotonic() - start
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)
        _end_processes(work.parent)
        output, _ = process.communicate()
        return None, output, time.monotonic() - start


def _environment(home: Path) -> dict[str, str]:
    return _KEPT | {
        "HOME": str(home / "home"),
        "TMPDIR": str(home / "tmp"),
        "PYTHONPATH": str(inputs.ROOT),
        "COLUMNS": "200",
    }


def _characters(word: str) -> str:
    return re.sub(r"\\(n|x[0-9a-f]{2})", lambda m: "\n" if m[1] == "n" else chr(int(m[1][1:], 16)), word)


def _tree(home: Path) -> set[str]:
    """Returns all files and directories below a directory, with what shows that a file was written."""
    found = set()
    for directory, folders, files in os.walk(home):
        for name in (*folders, *files):
            path = Path(directory, name)
            status = path.lstat()
            mark = "" if path.is_dir() and not path.is_symlink() else f" {status.st_size} {status.st_mode:o}"
            if "__pycache__" not in str(path):
                found.add(f"{path.relative_to(home)}{mark}")
    return found


def _is_named(path: str, leaves: tuple[str, ...]) -> bool:
    return any(f"{path.partition(' ')[0]}/".startswith(f"here/{leaf}/") for leaf in leaves)


def _end_processes(home: Path) -> list[str]:
    """Ends the processes that work in or below a directory, and returns their commands."""
    ended = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(entry.name) == os.getpid() or not str((entry / "cwd").readlink()).startswith(str(home)):
                continue
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if not command:
                continue  # it has ended, and nobody has asked how
            os.kill(int(entry.name), signal.SIGKILL)
            ended.append(command[:80])
    return ended


def _normal(output: str, home: Path) -> str:
    for text, other in (
        (f"{home}/here/", ""),
        (f"{home}/here", "."),
        (str(home), "HOME"),
        (str(inputs.ROOT), "ROOT"),
    ):
        output = output.replace(text, other)
    return output


def read_answers() -> dict[str, str]:
    """Returns the last lines that rows must have, by command."""
    lines = ANSWERS.read_text(encoding="utf-8").splitlines() if ANSWERS.is_file() else []
    found: dict[str, str] = {}
    for line in lines:
        if line.startswith("$ "):
            command = line[2:]
        elif line:
            found[command] = line[4:]
    return found


def shown(answer: str) -> str:
    """Returns a last line as it is written down; lines of our own modules move with every change."""
    text = re.sub(r"(\.py), line \d+\)", r"\1, line N)", printable(answer))
    return text if len(text) <= 400 else f"{text[:400]}... ({len(text)} characters)"


def main() -> None:
    """Runs all rows, or those whose command holds the words given, and says what is wrong with each."""
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    chosen = [row for row in rows() if all(word in row.command for word in words)]
    with tempfile.TemporaryDirectory(prefix="battery-made-") as name, ThreadPoolExecutor(2) as pool:
        made = Path(name)
        prepare(made)
        start = time.monotonic()
        _report(chosen, pool.map(lambda row: play(row, made), chosen), start)


def _report(chosen: list[Row], outcomes: Iterable[Outcome], start: float) -> None:
    faults: collections.Counter[str] = collections.Counter()
    answers = read_answers()
    for row, outcome in zip(chosen, outcomes, strict=True):
        answers[row.command] = shown(outcome.answer)
        found = outcome.faults(row)
        faults.update(found[:1])
        if found or "--verbose" in sys.argv:
            _show(row, outcome, found)
    seconds = time.monotonic() - start
    print(f"{len(chosen)} inputs in {seconds:.0f} s, {sum(faults.values())} with a fault: {dict(faults)}")
    if "--write" in sys.argv:
        lines = [f"$ {row.command}\n{row.code:>3} {answers[row.command]}\n" for row in rows()]
        ANSWERS.write_text("\n".join(lines), encoding="utf-8")


def _show(row: Row, outcome: Outcome, faults: list[str]) -> None:
    print(f"{', '.join(faults)} $ {row.command}".lstrip())
    print(f"    {outcome.code} (wanted {row.code}), {outcome.seconds:.1f} s: {shown(outcome.answer)}")
    for path in outcome.left[:5]:
        print(f"    left: {path}")


if __name__ == "__main__":
    main()
