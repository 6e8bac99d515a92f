"""Writes the sample output in README.md and docs/*.md anew: `python docs/outputs.py [PAGE...]`.

A comment `<!-- output: COMMAND -->` on the line before a fenced block says that the block shows what
COMMAND prints. The commands run in bash, each in the same state of one scratch directory: copies of
compiled/ and settings/, in which `shardline run compiled/retrain.yaml` has run once. Its path is shown as
/home/me/shardline.

`--check` writes nothing and says which blocks would change. It ignores what differs from run to run:
times, dates, hashes, speeds and memory.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN = "shardline run compiled/retrain.yaml"

#: Where readers see the scratch directory.
_SHOWN = "/home/me"
_BLOCK = re.compile(
    r"^(?P<indent> *)<!-- output: (?P<command>.+?) -->\n(?P<fence> *`{3,})[^`\n]*\n(?P<text>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)
#: What differs from run to run, in the order in which it is replaced.
_VARIES = (
    (r"^.*: running; no output for .*\n| +input wait \d+%", ""),
    (r"\d{4}-\d\d-\d\d[T ]\d\d[:-]\d\d([:-]\d\d)?(\.\d+)?(Z|[+-]\d\d:\d\d)?|\d{8}T\d{6,}", "TIME"),
    (r"\b(?=[a-f]*\d)[0-9a-f]{8,}(-[0-9a-f]{4})?\b", "HASH"),
    (r"\b[\d,.]+( ?(ms|s|min|h)\b| ?(examples|records|images)/s| ?[KMG]i?B\b|%)", "AMOUNT"),
    (r"(AMOUNT )+AMOUNT", "AMOUNT"),
    (r"[ \t]+", " "),
    (r"[-─]{3,}", "---"),
)


@dataclass(frozen=True)
class Sample:
    """A block of sample output.

    Attributes:
        page: The file.
        line: The line of the comment there, from 1.
        command: What prints it.
        indent: What the lines of page and block begin with, in a list.
        text: The block's lines as they are now.
        start: Offset of `text` in the page.
    """

    page: Path
    line: int
    command: str
    indent: str
    text: str
    start: int

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}: {self.command}"


def samples(page: Path) -> Iterator[Sample]:
    """Yields the blocks of a page, the last first."""
    text = page.read_text(encoding="utf-8")
    for match in reversed(list(_BLOCK.finditer(text))):
        line = text.count("\n", 0, match.start()) + 1
        yield Sample(page, line, match["command"], match["indent"], match["text"], match.start("text"))


def masked(text: str) -> str:
    """Returns output without what differs from run to run."""
    for pattern, name in _VARIES:
        text = re.sub(pattern, name, text, flags=re.MULTILINE)
    return text


class Scratch:
    """The directory in which commands run; they find shardline and python of this environment first."""

    def __init__(self, home: Path) -> None:
        """Runs the pipeline once.

        Args:
            home: An empty directory; the commands run in its `shardline`.
        """
        self._home, self._directory, self._state = home, home / "shardline", home / "state"
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SHARDLINE_")},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(home),
            "COLUMNS": "110",
            "TZ": "UTC",
        }
        for name in ("compiled", "settings"):
            shutil.copytree(ROOT / name, self._directory / name)
        self.output(RUN)
        shutil.move(self._directory, self._state)

    def output(self, command: str) -> str:
        """Returns what a command prints, also to standard error.

        Raises:
            SystemExit: A program of it is not there, or the first run fails.
            subprocess.TimeoutExpired: It takes more than ten minutes.
        """
        if self._state.exists():
            shutil.rmtree(self._directory, ignore_errors=True)
            shutil.copytree(self._state, self._directory, symlinks=True)
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            cwd=self._directory,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
        if done.returncode in (126, 127) or (command == RUN and done.returncode):
            raise SystemExit(f"{command}: exit code {done.returncode}\n{done.stdout}")
        text = done.stdout.replace(str(self._home), _SHOWN)
        return "".join(f"{line.rstrip()}\n" for line in text.strip("\n").splitlines())


def main() -> int:
    """Returns the exit code: 1 where `--check` has found a block that would change."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "pages", metavar="PAGE", nargs="*", type=Path, help="README.md and docs/*.md by default"
    )
    parser.add_argument("--check", action="store_true", help="write nothing; say which blocks would change")
    arguments = parser.parse_args()
    found = [sample for page in arguments.pages or PAGES for sample in samples(page.resolve())]
    changed = 0
    with tempfile.TemporaryDirectory() as home:
        scratch = Scratch(Path(home).resolve()) if found else None
        for sample in found:
            text = textwrap.indent(scratch.output(sample.command), sample.indent) if scratch else ""
            same = masked(text) == masked(sample.text)
            changed += not same
            print(f"{sample}: {'as before' if same else 'would change' if arguments.check else 'changed'}")
            if not arguments.check:
                page = sample.page.read_text(encoding="utf-8")
                end = sample.start + len(sample.text)
                sample.page.write_text(page[: sample.start] + text + page[end:], encoding="utf-8")
    return 1 if arguments.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
