"""Rules of the check, one file for each subject; importing this package registers them all.

It may import `check`, and the parameters and settings of `pipelines`.
"""

from shardline.pipelines.check.rules import (  # noqa: F401  # the rules register themselves
    containers,
    jobs,
    parameters,
    schedules,
)
