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
#: TensorFlow for TPUs (tensorflow-tpu) has no release that goes with the others: there is no lock for it yet.
LOCKED = tuple(variant for variant in VARIANTS if variant != "tpu")
LOCKS = ("build", *LOCKED)

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


@pytest.mark.parametrize("variant", LOCKED)
def test_a_lock_holds_what_the_variant_needs_and_nothing_else(variant: str) -> None:
    assert set(locked(variant)) == set(needed(declared(variant))), "make lock"


@pytest.mark.parametrize("variant", LOCKED)
def test_a_lock_fulfils_what_is_declared(variant: str) -> None:
    versions = locked(variant)

    wrong = [
        str(item)
        for item in declared(variant)
        if versions.get(canonicalize_name(item.name), "0") not in item.specifier
    ]
    assert wrong == [], "make lock"


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_has_the_versions_that_the_tests_ran_with(name: str) -> None:
    tested = {name: version for name, version in locked(name).items() if not CUDA.fullmatch(name)}
    constraints = constrained()

    assert tested == {name: constraints.get(name) for name in tested}, "make lock"


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_has_a_hash_for_everything_and_says_nothing_of_where_it_was_made(name: str) -> None:
    lines = (IMAGE / "lock" / f"{name}.txt").read_text().splitlines()

    assert lines
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


def last_stage() -> str:
    return DOCKERFILE.rpartition("\nFROM ")[2]


def test_accelerators_of_the_platform_are_found() -> None:
    """huggingface/Google-Cloud-Containers#167: the driver's files are mounted, and on no path of the base."""
    environment = re.search(r"^ENV (.*?[^\\])\n", last_stage(), re.MULTILINE | re.DOTALL)

    assert environment is not None
    variables = dict(item.split("=", 1) for item in environment[1].replace("\\\n", " ").split())
    assert variables["LD_LIBRARY_PATH"] == "/usr/local/nvidia/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    assert variables["PATH"].split(":") == ["/opt/venv/bin", "$PATH", "/usr/local/nvidia/bin"]
    assert variables["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert variables["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"


def test_it_trains_where_it_is_given_arguments_alone_and_says_its_revision() -> None:
    assert last_stage().endswith('ENTRYPOINT ["python", "-m", "shardline.trainer.task"]\n')
    assert f"LABEL {REVISION_LABEL}=$REVISION" in last_stage()
    assert "SHARDLINE_REVISION=$REVISION" in last_stage()


def test_it_runs_as_root_unless_told_otherwise() -> None:
    """The platform mounts buckets for the user who runs the container; see the comment there."""
    assert re.search(r"^ARG RUN_AS=0$", last_stage(), re.MULTILINE)
    assert re.search(r"^USER \$\{RUN_AS\}$", last_stage(), re.MULTILINE)


def test_the_plug_in_of_reduction_servers_is_in_the_image_with_cuda() -> None:
    (step,) = re.findall(r"^RUN if (.*?)^    fi", DOCKERFILE, re.MULTILINE | re.DOTALL)[:1]

    assert step.startswith('[ "$VARIANT" = gpu ]; then')
    assert "apt-get install --yes --no-install-recommends google-reduction-server" in step


def test_nothing_is_installed_that_is_not_locked() -> None:
    """Each command takes hashes, wheels that are there, or what the command line has looked at before."""
    joined = DOCKERFILE.replace("\\\n", " ")
    commands = re.findall(r"(?:python -m|uv) pip install [^&\n]*", joined)
    # A project is of the user's own code.
    locked = ("--require-hashes", "--no-index", "-r requirements.txt", "{} +")

    assert len(commands) == 5
    assert all(any(word in command for word in locked) for command in commands)
    assert all("--no-deps" in command for command in commands[1:])


def test_an_image_that_begins_from_this_one_installs_into_the_same_environment() -> None:
    assert "python -m venv /opt/venv" in DOCKERFILE
    assert "--without-pip" not in DOCKERFILE
