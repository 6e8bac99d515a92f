"""Performs the RUN steps of docker/Dockerfile in a clean directory, where no image can be built.

    python -m benchmarks.rehearse_image --variant control

Virtual environments take the place of the two stages: their Python is the one that this runs with. It needs a
package index, minutes, and for the larger variants some gigabytes; it ends with the figures of the result.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

#: What each variant has to be able to do.
_PROOFS = {
    "control": ["shardline --help", "shardline compile --settings local.toml --output retrain.yaml"],
    "cpu": ["python -m shardline.trainer.task --help", "shardline preprocess digits data --shards 1"],
    "gpu": ["python -m shardline.trainer.task --help"],
}


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """Returns the instructions of a Dockerfile with their arguments, one line each, without comments."""
    lines = [line for line in dockerfile.splitlines() if line and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(line.split(maxsplit=1)[0], " ".join(line.split()[1:])) for line in joined]


def build_stage(variant: str) -> list[tuple[str, str]]:
    """Returns the instructions of the stage that installs, for one variant."""
    given = instructions((ROOT / "docker" / "Dockerfile").read_text().replace("${VARIANT}", variant))
    stages = [index for index, (name, _) in enumerate(given) if name == "FROM"]
    return given[stages[0] + 1 : stages[1]]


def perform(variant: str, directory: Path) -> Path:
    """Performs the stage; returns the virtual environment that the image gets."""
    work, tools, installed = directory / "build", directory / "tools", directory / "venv"
    work.mkdir()
    subprocess.run([sys.executable, "-m", "venv", tools], check=True)
    environ = {**os.environ, "PATH": f"{tools / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    for name, argument in build_stage(variant):
        if name == "COPY":
            copy(argument, work)
        elif name == "RUN":
            command = argument.replace("/opt/venv", str(installed))
            print(f"$ {command}", file=sys.stderr)
            subprocess.run(command, shell=True, check=True, cwd=work, env=environ)
    return installed


def copy(argument: str, work: Path) -> None:
    """Copies as COPY does, from the root of the repository to the working directory."""
    *sources, target = argument.split()
    for source in sources:
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, work / target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (work / target).mkdir(exist_ok=True)
            shutil.copy(ROOT / source, work / target)


def main() -> None:
    """Rehearses a build and tries what it made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--variant", choices=tuple(_PROOFS), default="control")
    variant = parser.parse_args().variant
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        installed = perform(variant, Path(name))
        seconds = time.monotonic() - started
        environ = {"PATH": f"{installed / 'bin'}{os.pathsep}{os.environ['PATH']}", "HOME": name}
        shutil.copy(ROOT / "settings" / "local.toml", name)
        for proof in _PROOFS[variant]:
            subprocess.run(proof, shell=True, check=True, cwd=name, env=environ, stdout=subprocess.DEVNULL)
        megabytes = sum(path.lstat().st_size for path in installed.rglob("*")) / 1e6
    print(f"{variant}: {seconds:.0f} s, {megabytes:,.0f} MB installed; {'; '.join(_PROOFS[variant])}: works")


if __name__ == "__main__":
    main()
