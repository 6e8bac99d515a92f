"""Settings of the container image, the table [image]: its contents in addition to Shardline, and its base."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shardline.trainer.base.errors import SettingsError

#: Sets of packages in the image; pipelines/image/Dockerfile says what each is for.
VARIANTS = ("cpu", "gpu", "control")


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """Settings of `shardline image build`.

    Attributes:
        name: Name of the image, REGISTRY/PROJECT/REPOSITORY/NAME:TAG.
        packages: Directories of your code, relative to the settings file: packages, which are copied, or
            projects with a pyproject.toml, setup.cfg or setup.py, which are installed.
        requirements: File with locked requirements of your code, relative to the settings file; "" for none.
        apt: Debian packages.
        base: Base image with Python; "" for Shardline's own, by digest.
        variant: One of VARIANTS; "" for gpu where a machine has GPUs, else cpu.
        user: User of its processes, UID or UID:GID; "" for root, as in the platform's own training images.
    """

    name: str
    packages: tuple[str, ...] = ()
    requirements: str = ""
    apt: tuple[str, ...] = ()
    base: str = ""
    variant: str = ""
    user: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            raise SettingsError("name is empty; set the container image of all components")
        if "" in self.packages:
            raise SettingsError('packages holds ""; list directories of your code, as in ["../leafnet"]')
        if self.variant not in ("", *VARIANTS):
            raise SettingsError(f"variant is one of {', '.join(VARIANTS)}, got {self.variant!r}")
        # These are inserted into lines of a Dockerfile that a shell reads.
        for package in self.apt:
            if not re.fullmatch(r"[a-z0-9][a-z0-9+.-]+(=[A-Za-z0-9.+:~-]+)?", package):
                raise SettingsError(
                    f"apt holds {package!r}, which is not a Debian package: NAME or NAME=VERSION"
                )
        if self.user and not re.fullmatch(r"\d+(:\d+)?", self.user):
            raise SettingsError(f"user is a number, UID or UID:GID, got {self.user!r}")
        if self.base and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*", self.base):
            raise SettingsError(f"base is not the name of an image, NAME:TAG@sha256:DIGEST: {self.base!r}")

    def below(self, directory: Path) -> ImageSettings:
        """Returns the settings with paths below `directory`, that of the settings file."""
        return replace(
            self,
            packages=tuple(str(directory / package) for package in self.packages),
            requirements=str(directory / self.requirements) if self.requirements else "",
        )

    def with_variant_for(self, accelerators: Mapping[str, str]) -> ImageSettings:
        """Returns the settings with the variant that the machines need; SettingsError when another is set.

        `accelerators` has those of the machines that run this image, by table, "1 NVIDIA_TESLA_T4" or "";
        without those of training where they are known only at run time.
        """
        machine = next((machine for machine, found in accelerators.items() if found), "")
        if machine and self.variant not in ("", "gpu"):
            raise SettingsError(
                f"{machine} has accelerators, {accelerators[machine]}, which the image's variant "
                f"{self.variant} does not support; leave variant out of the table [image], or write "
                'variant = "gpu"'
            )
        training = any(table.startswith("train.") for table in accelerators)
        if self.variant == "gpu" and training and not machine:
            raise SettingsError(
                f"the image's variant is gpu, and no machine has accelerators ({', '.join(accelerators)}"
                "); leave variant out of the table [image], or add accelerators to a machine"
            )
        if self.variant == "control":
            raise SettingsError(
                "the image's variant control has no TensorFlow; leave it out of the table [image], and build "
                "that image separately: 'shardline image build --variant control'"
            )
        return replace(self, variant=self.variant or ("gpu" if machine else "cpu"))
