"""Build and push of the image with docker or podman, and its digest."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardline.components.text import enumerate_names
from shardline.trainer.base.errors import PlatformError, RunError, SettingsError

#: Label for the revision of the source, of the OCI image specification.
REVISION_LABEL = "org.opencontainers.image.revision"

# The grammar of the distribution specification.
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_PATH = re.compile(r"(?:[A-Za-z0-9.-]+(?::[0-9]+)?/)?[a-z0-9]+(?:(?:[._/]|__|-+)[a-z0-9]+)*")

_TOOLS = ("docker", "podman")
_DIRTY = "-dirty"


@dataclass(frozen=True, kw_only=True)
class Image:
    """An image, REGISTRY/PROJECT/REPOSITORY/NAME, with one or more tags; its variant is in VARIANTS."""

    repository: str
    tags: tuple[str, ...]
    variant: str = "cpu"

    @classmethod
    def of(cls, reference: str, *, tags: Sequence[str] = (), variant: str = "cpu") -> Image:
        """Returns the image of a reference; `tags` replace its own tag.

        The variant without TensorFlow is a separate image, NAME-control: under the name of the full one it
        would break every pipeline. Raises SettingsError when there is no tag.
        """
        name = reference.partition("@")[0]
        path, slash, last = name.rpartition("/")
        last, _, tag = last.partition(":")
        if not _PATH.fullmatch(f"{path}{slash}{last}"):
            raise SettingsError(
                f"{reference!r} is not an image: REGISTRY/PROJECT/REPOSITORY/NAME:TAG, in lower case"
            )
        chosen = tuple(tags) or ((tag,) if tag else ())
        if not chosen:
            raise SettingsError(f"the image {reference!r} has no tag; set one: --tag 0.1.0")
        if wrong := [tag for tag in chosen if not _TAG.fullmatch(tag)]:
            raise SettingsError(
                f"{wrong[0]!r} is not an image tag: up to 128 letters, digits, underscores, hyphens and dots"
            )
        suffix = "-control" if variant == "control" else ""
        return cls(repository=f"{path}{slash}{last}{suffix}", tags=chosen, variant=variant)

    @property
    def names(self) -> tuple[str, ...]:
        """REPOSITORY:TAG for each tag."""
        return tuple(f"{self.repository}:{tag}" for tag in self.tags)


def find_tool(*, needed: bool = True) -> str:
    """Returns the installed program that builds images, docker or podman.

    Without one, raises SettingsError, or returns "docker" where none is `needed`.
    """
    installed = [tool for tool in _TOOLS if shutil.which(tool)]
    if installed or not needed:
        return (installed or _TOOLS)[0]
    raise SettingsError(
        f"neither {' nor '.join(_TOOLS)} is installed here; install one, or let Cloud Build do it: "
        "'shardline image build --context DIR' and 'gcloud builds submit DIR --tag IMAGE'"
    )


def source_revision(*, revision: str = "", allow_dirty: bool) -> str:
    """Returns the revision to record: `revision`, or git's of the working directory.

    The latter ends with "-dirty" where files differ from it. Raises SettingsError without `allow_dirty` when
    they differ or there is no revision.
    """
    if revision:
        if not re.fullmatch(r"[\w./+-]+", revision):
            raise SettingsError(f"--revision is a revision of git, as in 1f2e3d4, got {revision!r}")
        return revision
    try:
        revision, *changed = (
            line
            for arguments in (("rev-parse", "HEAD"), ("status", "--porcelain"))
            for line in subprocess.check_output(
                ["git", *arguments], stderr=subprocess.DEVNULL, text=True
            ).splitlines()
        )
    except (OSError, subprocess.CalledProcessError):
        if allow_dirty:
            return ""
        raise SettingsError(
            "no git revision to record in the image: this is no git repository with a commit, or git is not "
            "installed; commit your code, or add --allow-dirty"
        ) from None
    if changed and not allow_dirty:
        files = enumerate_names([line[3:] for line in changed], 1)
        raise SettingsError(f"files differ from the git revision: {files}; commit them, or add --allow-dirty")
    return revision + (_DIRTY if changed else "")


def build_command(tool: str, image: Image, context: Path | str) -> list[str]:
    """Returns the command that builds an image in a build context."""
    # The lock files are for this platform, that of Vertex AI.
    names = (part for name in image.names for part in ("--tag", name))
    return [tool, "build", "--platform", "linux/amd64", *names, str(context)]


def push_commands(tool: str, image: Image) -> list[list[str]]:
    """Returns the commands that push an image, one for each tag."""
    return [[tool, "push", name] for name in image.names]


def build(tool: str, image: Image, context: Path) -> None:
    """Builds an image in a build context (`assemble`); the tool's output goes to standard error.

    Raises RunError when the build fails.
    """
    command = build_command(tool, image, context)
    # Standard output is for the result alone.
    if status := subprocess.call(command, stdout=sys.stderr.fileno()):
        raise RunError(
            f"the build ended with {status}; see the output of {tool} above: {shlex.join(command)}"
        )


def push(tool: str, image: Image, *, allow_dirty: bool) -> tuple[str, str]:
    """Pushes an image under all of its tags; returns REPOSITORY@sha256:... and its source revision.

    Raises SettingsError when the name has no registry or the image was built from changed files,
    PlatformError when the registry refuses or there is no digest, RunError when there is no image.
    """
    if not has_registry(image.repository):
        raise SettingsError(
            f"the image {image.repository!r} has no registry to push to; use --settings with "
            'image = "LOCATION-docker.pkg.dev/PROJECT/REPOSITORY/NAME:TAG"'
        )
    revision = str((_inspect(tool, image).get("Config", {}).get("Labels") or {}).get(REVISION_LABEL) or "")
    if not allow_dirty and (not revision or revision.endswith(_DIRTY)):
        raise SettingsError(
            f"{image.names[0]} was built from files of no git revision ({revision or 'none known'}); "
            "commit, build again, or add --allow-dirty"
        )
    for command in push_commands(tool, image):
        if status := subprocess.call(command, stdout=sys.stderr.fileno()):
            raise PlatformError(
                f"{shlex.join(command)} ended with {status}, see above; for Artifact Registry: "
                f"gcloud auth configure-docker {image.repository.partition('/')[0]}, and roles/"
                "artifactregistry.writer on the repository"
            )
    for digest in _inspect(tool, image).get("RepoDigests") or ():
        if str(digest).startswith(f"{image.repository}@sha256:"):
            return str(digest), revision
    raise PlatformError(
        f"{tool} has no digest of {image.repository} after the push; look it up in the registry"
    )


def has_registry(repository: str) -> bool:
    """Whether an image's name begins with the host of a registry, by docker's rule."""
    host, slash, _ = repository.partition("/")
    return bool(slash) and ("." in host or ":" in host or host == "localhost")


def _inspect(tool: str, image: Image) -> dict[str, Any]:
    command = [tool, "image", "inspect", image.names[0]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip() or f"status {done.returncode}"
        raise RunError(f"{tool} has no image {image.names[0]} ({reason}); 'shardline image build' builds it")
    description: dict[str, Any] = json.loads(done.stdout)[0]
    return description
