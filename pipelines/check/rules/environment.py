"""Rules about environment variables."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from shardline.pipelines.check.job import Pool
from shardline.pipelines.check.registry import error, warning

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLATFORMS_OWN = re.compile(r"TF_CONFIG|CLUSTER_SPEC|(AIP|CLOUD_ML)_[A-Z_]+")


@error("SL321", Pool, fix="name it with letters, digits and underscores, not beginning with a digit")
def variable_is_an_identifier(pool: Pool) -> Iterator[str]:
    """An environment variable's name is a C identifier.

    Source: google.cloud.aiplatform_v1.types.EnvVar: "Must be a valid C identifier".
    """
    for name in _names(pool):
        if not _IDENTIFIER.fullmatch(name):
            yield f"the environment variable {name!r} is no identifier"


@warning("SL322", Pool, fix="leave it out: the platform sets it for each replica")
def variable_is_not_the_platforms(pool: Pool) -> Iterator[str]:
    """An environment variable does not take the place of one that the platform sets.

    Source: docs.cloud.google.com, training/distributed-training and training/code-requirements.
    """
    for name in _names(pool):
        if _PLATFORMS_OWN.fullmatch(name):
            yield f"the pool sets {name} itself"


@warning("SL323", Pool, fix="set it once")
def variable_is_set_once(pool: Pool) -> Iterator[str]:
    """An environment variable is set once.

    Source: google.cloud.aiplatform_v1.types.ContainerSpec: env is a list, in which names may repeat.
    """
    for name, count in Counter(_names(pool)).items():
        if count > 1:
            yield f"the environment variable {name} is set {count} times"


def _names(pool: Pool) -> list[str]:
    names = [str(item.get("name", "")) for item in pool.env]
    return [name for name in names if "{{$" not in name]
