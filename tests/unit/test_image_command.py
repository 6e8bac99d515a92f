"""`shardline image`: the command itself, with a docker that writes down what it is asked."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from shardline.pipelines.image.build import Image
from shardline.pipelines.image.contents import LOCKS
from shardline.trainer.base.errors import SettingsError

ROOT = Path(__file__).resolve().parents[2]
NAME = "europe-west4-docker.pkg.dev/my-project/shardline/shardline"
DIGEST = f"sha256:{64 * 'a'}"

#: Answers as docker does: `image inspect` with what it has, all else with the status in $DOCKER_STATUS. It
#: keeps what it is to build from.
DOCKER = """#!/bin/sh
printf '%s\\n' "$*" >> "$DOCKER_CALLS"
for last; do :; done
if [ "$1" = build ]; then cp -r "$last" "$DOCKER_CALLS.context"; fi
if [ "$1 $2" = "image inspect" ]; then exec cat "$DOCKER_HAS"; fi
echo "docker says something"
exit "${DOCKER_STATUS:-0}"
"""

#: Writes an empty wheel at once where pip builds one of Shardline.
PIP = """
import pathlib, sys
pathlib.Path(sys.argv[sys.argv.index("--wheel-dir") + 1], "shardline-0-py3-none-any.whl").touch()
"""


class Clone:
    """A clone with settings, and a PATH on which git and the fake docker are all there is."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "clone"
        self.bin = directory / "bin"
        self.fakes = directory / "fakes"
        self.calls = directory / "calls"
        self.has = directory / "has.json"
        (self.root / "leafnet").mkdir(parents=True)
        (self.root / "leafnet" / "model.py").write_text("def build_model(dataset): ...\n")
        (self.root / "settings.toml").write_text(
            f'[image]\nname = "{NAME}:0.1.0"\npackages = ["leafnet"]\n'
            '[train]\nreplica_count = 1\nmachine_type = "n1-standard-8"\n'
        )
        self.bin.mkdir()
        self.fakes.mkdir()
        (self.fakes / "pip.py").write_text(PIP)
        for tool in ("git", "cat", "cp"):
            found = subprocess.run(["which", tool], capture_output=True, text=True, check=True).stdout.strip()
            (self.bin / tool).symlink_to(found)
        self.git("init", "--quiet")
        self.commit()

    def git(self, *arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        command = ["git", *identity, *arguments]
        return subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=True).stdout

    def commit(self) -> None:
        self.git("add", ".")
        self.git("commit", "--quiet", "--message", "all")

    @property
    def settings(self) -> Path:
        return self.root / "settings.toml"

    @property
    def context(self) -> Path:
        """What docker was to build from."""
        return self.calls.with_name("calls.context")

    @property
    def revision(self) -> str:
        return self.git("rev-parse", "HEAD").strip()

    def install(self, tool: str = "docker") -> None:
        (self.bin / tool).write_text(DOCKER.replace("#!/bin/sh", f"#!{os.path.realpath('/bin/sh')}"))
        (self.bin / tool).chmod(0o755)

    def hold(self, revision: str, *digests: str) -> None:
        """Lets docker have the image, built from a revision and pushed to where the digests say."""
        labels = {"org.opencontainers.image.revision": revision} if revision else None
        self.has.write_text(json.dumps([{"RepoDigests": digests, "Config": {"Labels": labels}}]))

    def called(self) -> list[list[str]]:
        return (
            [shlex.split(line) for line in self.calls.read_text().splitlines()] if self.calls.exists() else []
        )

    def run(self, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                sys.executable,
                "-c",
                "from shardline.pipelines.cli.main import main; main()",
                "image",
                *arguments,
                "--settings",
                "settings.toml",
            ],
            cwd=self.root,
            capture_output=True,
            text=True,
            env={
                "PATH": str(self.bin),
                "PYTHONPATH": f"{self.fakes}{os.pathsep}{ROOT}",
                "DOCKER_CALLS": str(self.calls),
                "DOCKER_HAS": str(self.has),
                "DOCKER_STATUS": str(status),
            },
        )


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_an_image_is_built_of_shardline_and_the_users_package(clone: Clone) -> None:
    clone.install()
    (clone.fakes / "pip.py").unlink()
    done = clone.run("build", "--tag", "1", "--tag", "latest")

    assert done.returncode == 0, done.stderr
    (called,) = clone.called()
    *command, context = called
    assert command == [
        "build",
        *("--platform", "linux/amd64"),
        *("--tag", f"{NAME}:1"),
        *("--tag", f"{NAME}:latest"),
    ]
    assert not Path(context).exists()
    (wheel,) = (clone.context / "wheels").iterdir()
    assert "shardline/pipelines/image/Dockerfile" in zipfile.ZipFile(wheel).namelist()
    assert (clone.context / "projects" / "leafnet" / "leafnet" / "model.py").is_file()
    lines = (clone.context / "Dockerfile").read_text().splitlines()
    assert {'ARG VARIANT="cpu"', f'ARG REVISION="{clone.revision}"'} <= set(lines)
    assert done.stdout == (
        f"built {NAME}:1, {NAME}:latest (cpu) from revision {clone.revision}, with leafnet\n"
    )
    assert "docker says something" in done.stderr


def test_what_docker_builds_from_can_be_written_for_another_machine(clone: Clone) -> None:
    done = clone.run("build", "--context", "made")

    assert done.stdout == f"docker builds {NAME}:0.1.0 from made\n", done.stderr
    assert (clone.root / "made" / "lock" / "image.txt").read_bytes() == (LOCKS / "cpu.txt").read_bytes()
    again = clone.run("build", "--context", "made", "--allow-dirty")
    assert again.returncode == 2
    assert "made is not empty; name a new directory" in again.stderr


def test_a_dry_run_says_what_would_be_built_and_runs_nothing(clone: Clone) -> None:
    clone.install()
    planned = json.loads(clone.run("build", "--dry-run").stdout)

    assert planned == {
        "commands": [f"docker build --platform linux/amd64 --tag {NAME}:0.1.0 CONTEXT"],
        "names": [f"{NAME}:0.1.0"],
        "variant": "cpu",
        "packages": ["leafnet"],
        "requirements": 0,
        "apt": [],
        "base": "",
        "user": "",
        "revision": clone.revision,
    }
    assert clone.called() == []


def test_the_variant_is_that_of_the_accelerators(clone: Clone) -> None:
    with clone.settings.open("a") as settings:
        settings.write('accelerator_type = "NVIDIA_TESLA_T4"\naccelerator_count = 1\n')

    assert json.loads(clone.run("build", "--dry-run", "--allow-dirty").stdout)["variant"] == "gpu"
    refused = clone.run("build", "--dry-run", "--allow-dirty", "--variant", "cpu")
    assert refused.returncode == 2
    assert "train.chief has accelerators, 1 NVIDIA_TESLA_T4" in refused.stderr
    control = clone.run("build", "--dry-run", "--allow-dirty", "--variant", "control")
    assert json.loads(control.stdout)["names"] == [f"{NAME}-control:0.1.0"]


def test_json_is_all_that_there_is_on_standard_output(clone: Clone) -> None:
    clone.install()
    clone.hold(clone.revision, f"elsewhere@{DIGEST}", f"{NAME}@{DIGEST}")

    built = json.loads(clone.run("build", "--json").stdout)
    pushed = json.loads(clone.run("push", "--json").stdout)

    names = [f"{NAME}:0.1.0"]
    both = {"names": names, "variant": "cpu", "revision": clone.revision}
    assert built == {**both, "packages": ["leafnet"], "requirements": 0, "apt": [], "base": "", "user": ""}
    assert pushed == {**both, "digest": DIGEST, "pinned": f"{NAME}@{DIGEST}"}


def test_a_dirty_tree_is_refused_unless_it_may_be(clone: Clone) -> None:
    clone.install()
    (clone.root / "leafnet" / "model.py").write_text("")
    (clone.root / "new.py").write_text("")
    refused = clone.run("build")

    assert refused.returncode == 2
    assert "files differ from the git revision: leafnet/model.py and 1 more; commit them" in refused.stderr
    assert clone.called() == []
    assert clone.run("build", "--allow-dirty").returncode == 0
    assert f'ARG REVISION="{clone.revision}-dirty"' in (clone.context / "Dockerfile").read_text()


def test_a_push_says_how_to_pin(clone: Clone) -> None:
    clone.install()
    clone.hold(clone.revision, f"{NAME}@{DIGEST}")
    done = clone.run("push", "--tag", "1", "--tag", "latest")

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"pushed {NAME}:1, {NAME}:latest",
        f'pin it in the settings, as image or as the name in [image]: "{NAME}:1@{DIGEST}"',
    ]
    # The next build takes the tag of the pinned name.
    clone.settings.write_text(clone.settings.read_text().replace(f"{NAME}:0.1.0", f"{NAME}:1@{DIGEST}"))
    assert json.loads(clone.run("build", "--dry-run", "--allow-dirty").stdout)["names"] == [f"{NAME}:1"]
    assert [call for call in clone.called() if call[0] == "push"] == [
        ["push", f"{NAME}:1"],
        ["push", f"{NAME}:latest"],
    ]


@pytest.mark.parametrize(
    ("built", "status", "code", "words"),
    [
        (("REVISION",), 1, 3, f"docker push {NAME}:0.1.0 ended with 1"),
        (("REVISION", f"elsewhere@{DIGEST}"), 0, 3, f"docker has no digest of {NAME} after the push"),
        (("", f"{NAME}@{DIGEST}"), 0, 2, "built from files of no git revision (none known)"),
        (("abc-dirty", f"{NAME}@{DIGEST}"), 0, 2, "built from files of no git revision (abc-dirty)"),
        ((), 0, 1, f"docker has no image {NAME}:0.1.0"),
    ],
)
def test_what_cannot_be_pushed(
    clone: Clone, built: tuple[str, ...], status: int, code: int, words: str
) -> None:
    clone.install()
    if built:
        clone.hold(built[0].replace("REVISION", clone.revision), *built[1:])
    done = clone.run("push", status=status)

    assert (done.returncode, done.stdout) == (code, "")
    assert words in done.stderr


def test_builds_that_are_refused_and_their_messages(clone: Clone) -> None:
    assert "neither docker nor podman is installed here" in clone.run("build").stderr
    clone.install("podman")
    failed = clone.run("build", status=17)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "the build ended with 17" in failed.stderr

    (clone.root / ".gitignore").write_text("*.h5\n")
    (clone.root / "leafnet" / "first.h5").touch()
    clone.settings.write_text(clone.settings.read_text().replace("[train]", 'base = "python:3.11"\n[train]'))
    done = clone.run("build", "--allow-dirty")
    assert "left out of the image: 1 file of leafnet that git ignores: first.h5" in done.stderr
    assert "the base python:3.11 is named with a tag" in done.stderr

    (clone.root / ".git").rename(clone.root.parent / "git")
    assert "this is no git repository with a commit" in clone.run("build").stderr
    assert "from revision unknown" in clone.run("build", "--allow-dirty").stdout
    clone.settings.write_text(clone.settings.read_text().replace(NAME, "shardline"))
    assert "has no registry to push to" in clone.run("push").stderr


@pytest.mark.parametrize(
    ("reference", "tags", "names"),
    [
        ("shardline:0.1.0", [], ("shardline:0.1.0",)),
        # A port is no tag.
        ("localhost:5000/shardline", ["1"], ("localhost:5000/shardline:1",)),
        (f"{NAME}@{DIGEST}", ["2"], (f"{NAME}:2",)),
        (f"{NAME}:1@{DIGEST}", [], (f"{NAME}:1",)),
    ],
)
def test_names(reference: str, tags: list[str], names: tuple[str, ...]) -> None:
    assert Image.of(reference, tags=tags).names == names
    assert Image.of(reference, tags=["1"], variant="control").repository.endswith("shardline-control")
    with pytest.raises(SettingsError, match="has no tag; set one: --tag"):
        Image.of(f"{NAME}@{DIGEST}")
