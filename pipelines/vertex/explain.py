"""Why a run on the platform failed."""

from __future__ import annotations

from shardline.components.conclude import platform
from shardline.components.conclude.outcome import Outcome
from shardline.pipelines.vertex.calls import platform_errors
from shardline.pipelines.vertex.environment import Environment
from shardline.pipelines.vertex.status import resource_name
from shardline.trainer import progress


def read_outcome(environment: Environment, run: str) -> Outcome:
    """Returns how a run came out, as far as it has come.

    Args:
        environment: Where it is.
        run: Its id, or its resource name.

    Raises:
        SettingsError: When it is neither.
        PlatformError: When there is no such run, or the platform refuses or is not reached.
    """
    name = resource_name(environment, run)
    with platform_errors(f"look at the run {run}"):
        return platform.read_outcome(
            name,
            platform.connect(environment.project, environment.location, environment.api_endpoint),
            note=lambda text: progress.say("explain", text),
        )
