"""A working week with Shardline against the fake: `python -m tests.contract.week > docs/week.md`.

Every command is the product's own, in a process of its own, with the platform's own clients. Pipeline jobs
run with the local runner; schedules fire when the week says so. A directory stands in for the bucket.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from tests.contract.fake.pipelines import LocalRuns
from tests.contract.fake.vertex import BUCKET, FakeVertex, fake_vertex
from tests.helpers import programs

ROOT = Path(__file__).resolve().parents[2]

IMAGE = "europe-west4-docker.pkg.dev/acme-vision/shardline/shardline:0.1.0"
ACCOUNT = "trainer@acme-vision.iam.gserviceaccount.com"

SETTINGS = f"""\
image = "{IMAGE}"

[vertex]
project = "acme-vision"
location = "europe-west4"
pipeline_root = "gs://staging/runs"
service_account = "{ACCOUNT}"
registry = "https://europe-west4-kfp.pkg.dev/acme-vision/pipelines"

[train]
replica_count = 2
machine_type = "n1-standard-8"

[train.job]
num_retries = 0
"""

SCHEDULES = """\
[schedules.retrain-nightly]
cron = "TZ=Europe/Vienna 0 6 * * 1-5"
pipeline = "../compiled/retrain.yaml"

[schedules.retrain-nightly.parameters]
source = "images:gs://staging/photos"
model = "mnist_cnn"
epochs = 2
min_accuracy = 0.5
champion_uri = "gs://staging/champions/photos"
history_uri = "gs://staging/history/photos"
"""

#: The same parameters, for a run that is submitted by hand.
PARAMETERS = SCHEDULES.partition(".parameters]\n")[2]

HEAD = """\
# A working week

See a working week with one pipeline: what you type, and what you get. [Operate a pipeline](operating.md)
explains the commands. Lines with `#` say what happens in between; `...` replaces output.

`python -m tests.contract.week` writes this page, with Google's own clients **against a local fake** of Vertex
AI; the jobs run on one machine ([limits](limits.md)).
"""

#: A job's end comes within this many seconds on a busy machine.
_PATIENCE_S = 300


@dataclass
class Day:
    """A part of the week.

    Attributes:
        name: Its heading.
        text: What happens, in a sentence or two.
        lines: Commands and their output.
    """

    name: str
    text: str
    lines: list[str] = field(default_factory=list)


@dataclass
class Week:
    """A week that is going on.

    Attributes:
        directory: Where the person works.
        vertex: The fake.
        bucket: What stands in for the bucket.
        days: The days so far.
    """

    directory: Path
    vertex: FakeVertex
    bucket: Path
    days: list[Day] = field(default_factory=list)

    def day(self, name: str, text: str) -> None:
        """Begins a day."""
        self.days.append(Day(name, text))

    def run(self, command: str, code: int = 0, shown: str = "") -> None:
        """Runs a command as a person types it.

        Args:
            command: The command line.
            code: Its exit code.
            shown: Pattern of the lines that the page shows; default: all.

        Raises:
            AssertionError: When it ends with another code.
        """
        self._say(f"$ {command}")
        program = [sys.executable, "-c", "from shardline.pipelines.cli.main import main; main()"]
        done = programs.run(
            [*program, *shlex.split(command)[1:]],
            cwd=self.directory,
            env={**self.vertex.environment, "PYTHONPATH": str(ROOT), "SHARDLINE_GCS_ROOT": str(self.bucket)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == code, f"{command} ended with {done.returncode}:\n{done.stdout}"
        self._say(shortened(done.stdout.rstrip(), shown))
        if code:
            self._say(f"[exit code {code}]")

    def fire(self, at: str) -> str:
        """Lets the schedule's time come, waits for its run, and returns the run's id."""
        self.note(f"{at} UTC: the schedule fires")
        name = next(iter(self.vertex.services.schedules))
        job = self.vertex.services.fire(name, datetime.datetime.fromisoformat(f"{at}+00:00"))
        assert job is not None
        self.wait(job.name)
        return str(job.name.rpartition("/")[2])

    def wait(self, name: str) -> None:
        """Returns when a job has ended."""
        deadline = time.monotonic() + _PATIENCE_S
        while not self.vertex.services.pipeline_jobs[name].end_time:
            assert time.monotonic() < deadline, f"{name} does not end"
            time.sleep(0.2)

    def replace(self, file: str, old: str, new: str) -> None:
        """Edits a file."""
        path = self.directory / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        self.note(f"in {file}: {old} -> {new}")

    def note(self, text: str) -> None:
        """Says what happens between two commands."""
        self._say(f"# {text}")

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
        self.days[-1].lines.append(text)


def shortened(output: str, shown: str) -> str:
    """Returns the lines that a pattern finds, with `...` for those left out."""
    lines = [line if re.search(shown, line) else "..." for line in output.splitlines() if line]
    return "\n".join(line for line, _ in itertools.groupby(lines))


@contextmanager
def working_week(directory: Path) -> Iterator[Week]:
    """A directory with settings, schedules and photos, and a fake that runs what it is given."""
    bucket, work = directory / "gcs", directory / "work"
    (bucket / BUCKET).mkdir(parents=True)
    (work / "settings").mkdir(parents=True)
    (work / "settings" / "vertex.toml").write_text(SETTINGS)
    (work / "settings" / "schedules.toml").write_text(SCHEDULES)
    (work / "params.toml").write_text(PARAMETERS)
    write_photos(bucket / BUCKET / "photos", 160)
    # Runs keep their directories outside the person's own.
    runs = LocalRuns(directory / "jobs", {"SHARDLINE_GCS_ROOT": str(bucket), "PYTHONPATH": str(ROOT)})
    with fake_vertex(directory, run_pipeline=runs) as vertex:
        vertex.services.project.service_accounts[ACCOUNT] = True
        yield Week(work, vertex, bucket)


def write_photos(directory: Path, count: int, first: int = 0) -> None:
    """Writes small PNG files of two classes that are easy to tell apart."""
    random = np.random.default_rng(first)
    for index in range(first, first + count):
        label = index % 2
        pixels = random.integers(0, 100, (16, 16, 3), dtype=np.uint8) + np.uint8(140 * label)
        folder = directory / ("bright" if label else "dark")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{index:04d}.png")


def live(week: Week) -> None:
    """Goes through the week."""
    week.day("Monday", "A new version goes up. `doctor` finds that its image is missing.")
    week.run("shardline doctor --settings settings/vertex.toml", code=1, shown="ERROR|bucket|permissions")
    week.vertex.services.registry.add_image(IMAGE)
    week.note("the image is built and pushed; the settings pin its digest")
    digest = hashlib.sha256(IMAGE.encode()).hexdigest()
    week.replace("settings/vertex.toml", "shardline:0.1.0", f"shardline@sha256:{digest}")
    week.run("shardline doctor --settings settings/vertex.toml", shown="image")
    week.run("shardline compile --settings settings/vertex.toml")
    week.run("shardline upload compiled/retrain.yaml --settings settings/vertex.toml --tag v1 --tag latest")
    submit = (
        "shardline submit compiled/retrain.yaml --settings settings/vertex.toml --params params.toml --wait"
    )
    week.run(submit, shown="submitted|^https|^TASK|  succeeded  |^retrain-")

    week.day("Tuesday", "The run becomes a schedule. The next morning it finds no change and ends.")
    week.run("shardline schedule apply --settings settings/vertex.toml", shown="^retrain")
    week.run("shardline schedule apply --settings settings/vertex.toml", shown="^retrain")
    run = week.fire("2027-01-13 05:00")
    week.run(f"shardline explain {run} --settings settings/vertex.toml", shown="^retrain")

    week.day("Wednesday", "New photos arrive. The run of the next morning trains on them.")
    write_photos(week.bucket / BUCKET / "photos", 20, first=80)
    run = week.fire("2027-01-14 05:00")
    week.run(
        f"shardline status {run} --settings settings/vertex.toml", shown="TASK|train|register|: succeeded"
    )

    week.day("Thursday", "The schedule gets another parameter.")
    week.replace("settings/schedules.toml", "epochs = 2", "epochs = 3")
    week.run(
        "shardline schedule apply --settings settings/vertex.toml --dry-run", shown="retrain-|parameters"
    )
    week.run("shardline schedule apply --settings settings/vertex.toml", shown="retrain-|parameters")

    week.day("Friday", "A photo is broken. The last model disappoints, so you roll back.")
    (week.bucket / BUCKET / "photos" / "dark" / "0000.png").write_bytes(b"half a file")
    run = week.fire("2027-01-15 05:00")
    week.run("shardline status --settings settings/vertex.toml")
    week.run(f"shardline explain {run} --settings settings/vertex.toml", code=1)
    week.run("shardline champion list gs://staging/champions/photos")
    week.run("shardline champion rollback gs://staging/champions/photos")


def page(week: Week, directory: Path) -> str:
    """Returns the page, without paths that only this machine has."""
    days = ["\n".join([f"## {day.name}\n", f"{day.text}\n", "```", *day.lines, "```\n"]) for day in week.days]
    return "\n".join([HEAD, *days]).replace(str(directory), "/home/me")


def main() -> None:
    """Prints the page."""
    with tempfile.TemporaryDirectory() as made, working_week(Path(made)) as week:
        live(week)
        sys.stdout.write(page(week, Path(made)))


if __name__ == "__main__":
    main()
