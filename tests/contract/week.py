"""A working week with Shardline against the fake: `python -m tests.contract.week > docs/week.md`.

Every command is the product's own, in a process of its own, with the platform's own clients. Pipeline jobs
run with the local runner; schedules fire when the week says so. A directory stands in for the bucket.
"""

from __future__ import annotations

import datetime
import hashlib
import re
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
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

HEAD = """\
# A working week

This page shows a working week at the terminal, as `python -m tests.contract.week` printed it.
Every command ran as it stands here, with the platform's own clients, **against a local fake** of Vertex AI,
whose pipeline jobs are run by the local runner. Nothing of it has run on Vertex AI. Lines that begin with #
say what happened besides.
"""

#: A job's end comes within this many seconds on a busy machine.
_PATIENCE_S = 300


@dataclass
class Week:
    """A week that is going on.

    Attributes:
        directory: Where the person works.
        vertex: The fake.
        bucket: What stands in for the bucket.
        said: Everything that was printed, with the commands.
    """

    directory: Path
    vertex: FakeVertex
    bucket: Path
    said: list[str] = field(default_factory=list)

    def day(self, text: str) -> None:
        """Begins something new."""
        self._say(f"\n# {text}")

    def run(self, command: str, code: int = 0) -> str:
        """Runs a command as a person types it, and returns what it printed.

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
        self._say(done.stdout.rstrip() + (f"\n[exit code {done.returncode}]" if done.returncode else ""))
        assert done.returncode == code, f"{command} ended with {done.returncode}:\n{done.stdout}"
        return done.stdout

    def fire(self, at: str) -> str:
        """Lets the schedule's time come, waits for its run, and returns the run's id."""
        self._say(f"# {at}: the schedule fires")
        name = next(iter(self.vertex.services.schedules))
        job = self.vertex.services.fire(name, datetime.datetime.fromisoformat(at))
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
        self._say(f"# in {file}: {old} -> {new}")

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
        self.said.append(text)


@contextmanager
def working_week(directory: Path) -> Iterator[Week]:
    """A directory with settings, schedules and photos, and a fake that runs what it is given."""
    bucket, work = directory / "gcs", directory / "work"
    (bucket / BUCKET).mkdir(parents=True)
    (work / "settings").mkdir(parents=True)
    (work / "settings" / "vertex.toml").write_text(SETTINGS)
    (work / "settings" / "schedules.toml").write_text(SCHEDULES)
    write_photos(bucket / BUCKET / "photos", 80)
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
    week.day("Monday: is everything there? A new version goes up.")
    week.run("shardline doctor --settings settings/vertex.toml", code=1)
    week.day("The image is not there yet.")
    week.run("shardline image build --settings settings/vertex.toml --allow-dirty --dry-run")
    week.run("shardline image push --settings settings/vertex.toml --dry-run")
    week.day("It is built and pushed elsewhere; the push prints the digest, which is pinned.")
    week.vertex.services.registry.add_image(IMAGE)
    digest = hashlib.sha256(IMAGE.encode()).hexdigest()
    week.replace("settings/vertex.toml", "shardline:0.1.0", f"shardline@sha256:{digest}")
    week.run("shardline doctor --settings settings/vertex.toml")
    week.run("shardline compile --settings settings/vertex.toml --output compiled/retrain.yaml")
    week.run("shardline upload compiled/retrain.yaml --settings settings/vertex.toml --tag v1 --tag latest")
    week.run("shardline upload compiled/retrain.yaml --settings settings/vertex.toml --tag v1 --tag latest")
    parameters = _parameters(week)
    week.run(f"shardline submit compiled/retrain.yaml --settings settings/vertex.toml {parameters} --wait")

    week.day("Tuesday: every night from now on.")
    week.run("shardline schedule apply --settings settings/vertex.toml --dry-run")
    week.run("shardline schedule apply --settings settings/vertex.toml")
    week.run("shardline schedule apply --settings settings/vertex.toml")
    run = week.fire("2027-01-13T05:00:00+00:00")
    week.run(f"shardline status {run} --settings settings/vertex.toml")
    week.run(f"shardline explain {run} --settings settings/vertex.toml")
    week.run(f"shardline logs {run} --settings settings/vertex.toml")

    week.day("Wednesday: new photos came in the night.")
    write_photos(week.bucket / BUCKET / "photos", 20, first=80)
    run = week.fire("2027-01-14T05:00:00+00:00")
    week.run(f"shardline status {run} --settings settings/vertex.toml")

    week.day("Thursday: other parameters; a pause.")
    week.replace("settings/schedules.toml", "epochs = 2", "epochs = 3")
    week.run("shardline schedule apply --settings settings/vertex.toml --dry-run")
    week.run("shardline schedule apply --settings settings/vertex.toml")
    week.run("shardline schedule pause retrain-nightly --settings settings/vertex.toml")
    week.run("shardline schedule list --settings settings/vertex.toml")
    week.run("shardline schedule resume retrain-nightly --settings settings/vertex.toml")

    week.day("Friday: a file is broken.")
    (week.bucket / BUCKET / "photos" / "dark" / "0000.png").write_bytes(b"half a file")
    run = week.fire("2027-01-15T05:00:00+00:00")
    week.run("shardline status --settings settings/vertex.toml")
    week.run(f"shardline explain {run} --settings settings/vertex.toml", code=1)

    week.day("And the champion of Wednesday is not wanted after all.")
    week.run("shardline champion show gs://staging/champions/photos")
    week.run("shardline champion rollback gs://staging/champions/photos")


def _parameters(week: Week) -> str:
    """Returns what the schedule gives, as options of `shardline submit`."""
    declared = tomllib.loads((week.directory / "settings" / "schedules.toml").read_text())["schedules"]
    return " ".join(
        f"--param {name}={value}" for name, value in declared["retrain-nightly"]["parameters"].items()
    )


def printable(said: list[str], directory: Path) -> str:
    """Returns a transcript without what is of this machine only."""
    return re.sub(re.escape(str(directory)), "/home/me", "\n".join(said))


def main() -> None:
    """Prints the page."""
    with tempfile.TemporaryDirectory() as made, working_week(Path(made)) as week:
        live(week)
        print(f"{HEAD}\n```\n{printable(week.said, Path(made)).strip()}\n```")


if __name__ == "__main__":
    main()
