"""Rules of the check, one file for each subject; importing this package registers them all.

It may import `check`, and the parameters and settings of `pipelines`.
"""

# They register themselves.
from shardline.pipelines.check.rules import containers, jobs, parameters, schedules  # noqa: F401
