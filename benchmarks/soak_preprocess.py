"""Kills preprocessing at random moments, runs it again each time, and compares the bytes at the end.

python -m benchmarks.soak_preprocess --kills 30 --processes 2

A moment is drawn over the time that an undisturbed run takes. The whole process group gets SIGKILL, as from
a machine that takes a task away. When a run gets to its end before it is killed, the dataset is compared
with that of the undisturbed run, removed, and the next one begun, until there were so many kills. After each
kill nothing that is half-written may look finished: where there is a manifest all is as in the undisturbed
run, and each shard that has a mark is whole.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_PROGRAM = """
import sys
from pathlib import Path
from shardline.components.preprocess.run import preprocess
from shardline.components.preprocess.settings import PreprocessSettings
preprocess(PreprocessSettings(source=sys.argv[1], processes=int(sys.argv[3]), shards=64), Path(sys.argv[2]))
"""
# A small PNG, to which any number of bytes may be added as a text chunk.
_PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000008000000080800000000e164e1570000001049444154789c6364678000"
    "26068a1800047900175f7fecad"
)
_PNG_END = bytes.fromhex("0000000049454e44ae426082")


def main() -> None:
    """Runs the soak and says what happened; exits with 1 where bytes differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        ended = soak(Path(directory), options)
    sys.exit(0 if ended else 1)


def soak(root: Path, options: argparse.Namespace) -> bool:
    """Returns whether every dataset had the bytes of the undisturbed one."""
    moments = random.Random(options.seed)
    fresh, out = root / "fresh", root / "out"
    write_images(root / "images", options.files, moments)
    started = time.monotonic()
    if _start(root / "images", root / "fresh", options.processes).wait():
        raise SystemExit("the undisturbed run failed")
    whole = time.monotonic() - started
    kills = complete = equal = resumed = 0
    while kills < options.kills or out.exists():
        process = _start(root / "images", root / "out", options.processes)
        try:
            failed = process.wait(moments.uniform(0.0, whole) if kills < options.kills else None)
            if failed:
                raise SystemExit(f"a run ended with status {failed}")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
            resumed += _refuse_half_written(out, fresh)
            if not (out / "manifest.json").exists():
                continue
        complete += 1
        shutil.rmtree(root / "out" / ".shardline", ignore_errors=True)
        equal += _contents(out) == _contents(fresh)
        shutil.rmtree(root / "out")
    print(
        f"{kills} kills over {whole:.2f} s, {resumed} of them with shards already done; "
        f"{complete} datasets, {equal} of them with the bytes of an undisturbed run"
    )
    return complete == equal > 0


def _refuse_half_written(out: Path, fresh: Path) -> bool:
    """Looks at what a kill has left, and returns whether shards are done; exits where one is not whole."""
    manifest, whole = out / "manifest.json", _contents(fresh)
    if manifest.exists() and any(_contents(out).get(name) != data for name, data in whole.items()):
        raise SystemExit("there is a manifest, and the dataset is not the one of the undisturbed run")
    marked = list[str]()
    for mark in (out / ".shardline").rglob("*.mark"):
        with contextlib.suppress(ValueError):  # a mark that was cut off says nothing
            line = mark.read_bytes().partition(b"\n")[0]
            marked.append(json.loads(line)["shard"]["file"])
    for name in marked:
        found = [path.read_bytes() for path in (out / ".shardline" / name, out / name) if path.exists()]
        if whole[name] not in found:
            raise SystemExit(f"{name} has a mark and is not whole")
    return bool(marked)


def write_images(root: Path, files: int, numbers: random.Random) -> None:
    """Writes so many different PNG files of 1..60 kB in five classes."""
    for index in range(files):
        directory = root / f"class{index % 5}"
        directory.mkdir(parents=True, exist_ok=True)
        text = numbers.randbytes(numbers.randrange(1_000, 60_000))
        chunk = len(text).to_bytes(4) + b"tEXt" + text + bytes(4)
        (directory / f"{index:06d}.png").write_bytes(_PNG + chunk + _PNG_END)


def _start(images: Path, out: Path, processes: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, f"images:{images}", str(out), str(processes)],
        cwd=Path(__file__).parents[1],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
    )


def _contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.is_file()}


if __name__ == "__main__":
    main()
