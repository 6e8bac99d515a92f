"""The image: its Dockerfile, and lock files that agree with setup.cfg and constraints.txt."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from shardline.pipelines.image.build import REVISION_LABEL
from shardline.pipelines.image.settings import VARIANTS

ROOT = Path(__file__).resolve().parents[2]
IMAGE = ROOT / "pipelines" / "image"
DOCKERFILE = (IMAGE / "Dockerfile").read_text()
LOCKS = ("build", *VARIANTS)

#: The extra of setup.cfg that a variant installs beside what is always installed.
EXTRAS = {"cpu": "image", "gpu": "gpu", "control": ""}
#: Packages of an extra that no test environment has, and that need nothing beyond one another.
CUDA = re.compile(r"nvidia-[\w-]+-cu12")
#: The image's, whatever the tests run with.
PYTHON = {"python_version": "3.11", "python_full_version": "3.11.0", "platform_machine": "x86_64"}


def locked(name: str) -> dict[str, str]:
    """Returns the versions in a lock file."""
    text = (IMAGE / "lock" / f"{name}.txt").read_text()
    return {canonicalize_name(n): v for n, v in re.findall(r"^([\w.-]+)==(\S+) \\$", text, re.MULTILINE)}


def constrained() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()[1:]
    return {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines}


def declared(variant: str) -> list[Requirement]:
    """Returns what setup.cfg says that a variant needs."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    text = config["options"]["install_requires"]
    if EXTRAS[variant]:
        text += "\n" + config["options.extras_require"][EXTRAS[variant]]
    return [Requirement(line) for line in text.splitlines() if line.strip() and not line.startswith("#")]


def needed(requirements: list[Requirement]) -> dict[str, set[str]]:
    """Returns all packages that requirements lead to, with their extras, as the installed packages say."""
    found: dict[str, set[str]] = {}
    waiting = list(requirements)
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in found and requirement.extras <= found[name]:
            continue
        extras = found.setdefault(name, set())
        extras |= requirement.extras
        if CUDA.fullmatch(name):
            continue
        for text in metadata.requires(name) or ():
            child = Requirement(text)
            if not child.marker or any(
                child.marker.evaluate({**PYTHON, "extra": extra}) for extra in ("", *extras)
            ):
                waiting.append(child)
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_lock_holds_what_the_variant_needs_and_nothing_else(variant: str) -> None:
    versions = locked(variant)

    assert set(versions) == set(needed(declared(variant))), "make lock"
    assert all(versions[canonicalize_name(item.name)] in item.specifier for item in declared(variant))


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_has_the_versions_that_the_tests_ran_with_and_a_hash_for_everything(name: str) -> None:
    lines = (IMAGE / "lock" / f"{name}.txt").read_text().splitlines()
    tested = {item: version for item, version in locked(name).items() if not CUDA.fullmatch(item)}
    constraints = constrained()

    assert tested == {item: constraints.get(item) for item in tested}, "make lock"
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        is_hash = re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line)
        assert is_hash or re.fullmatch(r"[\w.-]+==[\w.+!]+ \\", line), line
        assert after.startswith("    --hash=") == line.endswith("\\"), line


def test_cuda_is_in_one_variant_and_tensorflow_not_in_the_smallest() -> None:
    assert {name for name in locked("gpu") if CUDA.fullmatch(name)} == set(locked("gpu")) - set(locked("cpu"))
    assert {"nvidia-cudnn-cu12", "nvidia-nccl-cu12"} <= set(locked("gpu"))
    assert not {"tensorflow", "keras", "numpy", "matplotlib"} & set(locked("control"))


def test_the_dockerfile_has_nothing_to_object_to() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [hadolint, "--no-color", "--failure-threshold", "info", IMAGE / "Dockerfile"],
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_is_installed_that_is_not_locked() -> None:
    """Each command takes hashes, wheels that are there, or what the command line has looked at before."""
    joined = DOCKERFILE.replace("\\\n", " ")
    commands = re.findall(r"(?:python -m|uv) pip install [^&\n]*", joined)
    # A project is of the user's own code.
    locked = ("--require-hashes", "--no-index", "-r requirements.txt", "{} +")

    assert len(commands) == 5
    assert all(any(word in command for word in locked) for command in commands)
    assert all("--no-deps" in command for command in commands[1:])


@pytest.mark.parametrize(
    "line",
    [
        'ENTRYPOINT ["python", "-m", "shardline.trainer.task"]',
        f"LABEL {REVISION_LABEL}=$REVISION",
        "SHARDLINE_REVISION=$REVISION",
        # The platform mounts buckets for the user who runs the container.
        "ARG RUN_AS=0\n",
        "USER ${RUN_AS}\n",
        # huggingface/Google-Cloud-Containers#167: the driver's files are mounted, and on no path of the base.
        "PATH=/opt/venv/bin:$PATH:/usr/local/nvidia/bin",
        "LD_LIBRARY_PATH=/usr/local/nvidia/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}",
        "NVIDIA_VISIBLE_DEVICES=all",
    ],
)
def test_the_image_itself_says(line: str) -> None:
    assert line in DOCKERFILE.rpartition("\nFROM ")[2]
