"""What training costs on NVIDIA GPUs: `python -m benchmarks.gpu DIRECTORY`.

Needs a machine with an NVIDIA driver and Python 3.11 or later, and nothing installed: the environment of the
image's gpu variant is made in DIRECTORY from its lock file. Then the main job, precisions, XLA, and the share
of the input pipeline are measured, each in a process of its own, and a table is printed and kept in
DIRECTORY/gpu.md. Where there is no GPU it says so and ends with 0. `--here` measures in this environment, on
whatever devices it has; with `--quick` a small model on little data, which shows that the script works and
nothing else.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "pipelines" / "image" / "lock" / "gpu.txt"

#: Cases by name: dataset, model, and the trainer's other options.
CASES: Mapping[str, tuple[str, str, str]] = {
    "main job": ("digits", "mnist_cnn", "--per-replica-batch-size 64"),
    "ResNet50, float32": ("photos", "resnet50", ""),
    "ResNet50, bfloat16": ("photos", "resnet50", "--precision bfloat16"),
    "ResNet50, float16": ("photos", "resnet50", "--precision float16"),
    "ResNet50, float32, no XLA": ("photos", "resnet50", "--jit-compile off"),
    "ResNet50, float16, no XLA": ("photos", "resnet50", "--precision float16 --jit-compile off"),
    "ResNet50, float16, JPEG decoded in each epoch": (
        "photos",
        "resnet50",
        "--precision float16 --cache off",
    ),
    "ResNet50, float16, raw pixels read in each epoch": (
        "raw",
        "resnet50",
        "--precision float16 --cache off",
    ),
}
#: Photos, their side, and examples a step; with --quick.
_WORK, _QUICK = (4_000, 160, 64), (60, 64, 8)
_EPOCHS = 4
_HEAD = "| case | device | examples/s | ms a step | input wait |\n|---|---|---|---|---|"


@dataclass(frozen=True)
class Row:
    """A measured case: device in words, examples in a second, examples a step, and the wait for input."""

    case: str
    device: str
    rate: float
    batch: int
    waited: str

    def __str__(self) -> str:
        step = 1000 * self.batch / self.rate
        return f"| {self.case} | {self.device} | {self.rate:,.0f} | {step:,.1f} | {self.waited} |"


def gpus() -> list[str]:
    """Returns the NVIDIA GPUs of this machine as its driver names them; none without a driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return re.findall(r"^GPU \d+: (.*?) \(", done.stdout, re.MULTILINE) if done.returncode == 0 else []


def make_environment(directory: Path) -> Path:
    """Returns the Python of an environment with what the gpu image holds, which is made once."""
    python = directory / "bin" / "python"
    if not (directory / "done").exists():
        print(f"installing {LOCK.name} into {directory} (about 5 GB)", flush=True)
        venv.create(directory, clear=True, with_pip=True)
        options = ["--no-deps", "--require-hashes", "--quiet", "-r", str(LOCK)]
        subprocess.run([python, "-m", "pip", "install", *options], check=True)
        (directory / "done").touch()
    return python


def write_datasets(directory: Path, python: Path, photos: int, side: int) -> None:
    """Writes what the cases train on: the digits, and photos of noise as JPEG and as raw pixels."""
    program = (
        "import sys, numpy, pathlib\n"
        "from PIL import Image\n"
        "draw = numpy.random.default_rng(0)\n"
        f"for number in range({photos}):\n"
        f"    folder = pathlib.Path({str(directory / 'jpg')!r}, 'ab'[number % 2])\n"
        "    folder.mkdir(parents=True, exist_ok=True)\n"
        f"    small = draw.integers(0, 256, ({side // 8}, {side // 8}, 3), numpy.uint8)\n"
        f"    Image.fromarray(small).resize(({side}, {side})).save(folder / f'{{number}}.jpg')\n"
    )
    _run(python, "-c", program)
    command = "from shardline.pipelines.cli.main import main; main()"
    images = f"images:{directory / 'jpg'}"
    raw = ["--encoding", "raw", "--image-size", str(side)]
    for name, source in (("digits", ["digits"]), ("photos", [images]), ("raw", [images, *raw])):
        _run(python, "-c", command, "preprocess", source[0], str(directory / name), *source[1:])


def _run(python: Path, *arguments: str) -> str:
    done = subprocess.run(
        [python, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)[:200]} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout


def measure(directory: Path, python: Path, batch: int, *, quick: bool) -> Iterator[Row]:
    """Yields a row for each case, the first epoch, which traces and compiles, left out."""
    for number, (case, (dataset, model, options)) in enumerate(CASES.items()):
        out = directory / f"case-{number}"
        shutil.rmtree(out, ignore_errors=True)
        arguments = [
            "--dataset",
            str(directory / dataset),
            "--model",
            "mnist_cnn" if quick else model,
            "--model-dir",
            str(out),
        ]
        arguments += ["--epochs", str(_EPOCHS), "--per-replica-batch-size", str(batch), *options.split()]
        log = _run(python, "-m", "shardline.trainer.task", *arguments)
        yield read(case, log, (out / "history.csv").read_text())


def read(case: str, log: str, history: str) -> Row:
    """Returns the row of a case from the trainer's log and its history.csv."""
    rows = list(csv.DictReader(history.splitlines()))[1:]
    examples, seconds = (sum(float(row[name]) for row in rows) for name in ("examples", "seconds"))
    device = re.search(r"device: (.*)", log)
    batch = re.search(r"global batch (\d+)", log)
    waited = re.search(r"steps waited for input (\d+%)", log)
    if device is None or batch is None:
        raise SystemExit(f"the trainer's log names no device or batch:\n{log[-2000:]}")
    share = waited[1] if waited else "below 10%"
    return Row(case, device[1], examples / seconds, int(batch[1]), share)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("directory", type=Path, help="where environment, data, models and the table go")
    parser.add_argument("--here", action="store_true", help="measure in this environment, on its devices")
    parser.add_argument(
        "--quick", action="store_true", help="a small model and little data: the numbers mean nothing"
    )
    options = parser.parse_args(arguments)
    found = gpus()
    if not found and not options.here:
        print("there is no NVIDIA GPU on this machine (nvidia-smi names none): nothing is measured")
        return
    directory = options.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    python = Path(sys.executable) if options.here else make_environment(directory / "environment")
    photos, side, batch = _QUICK if options.quick else _WORK
    if not (directory / "raw").exists():
        write_datasets(directory, python, photos, side)
    lines = [
        f"{', '.join(found) or 'no GPU'}; {platform.platform()}; {_EPOCHS} epochs, the first left out",
        "",
        _HEAD,
    ]
    print("\n".join(lines), flush=True)
    for row in measure(directory, python, batch, quick=options.quick):
        lines.append(str(row))
        print(row, flush=True)
    (directory / "gpu.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
