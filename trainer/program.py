"""Program: `python -m shardline.trainer.program [-m] PROGRAM ARGS` runs a user's program in a replica.

It handles SIGTERM from the start; in a cluster it creates the strategy first, so that the program may create
tensors and datasets before it trains; an error of Shardline becomes one line and an exit code.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

from shardline.trainer.base import progress
from shardline.trainer.base.errors import EXIT_FAILED, ShardlineError
from shardline.trainer.base.settings import TrainSettings
from shardline.trainer.cluster import read_cluster
from shardline.trainer.preemption import Preemption


def main(arguments: Sequence[str]) -> None:
    """Entry point."""
    try:
        cluster = read_cluster(os.environ)
        with Preemption(TrainSettings.grace_period):
            from shardline.trainer.keras_compat import tensorflow_internals

            tensorflow_internals.keep_freed_memory()
            tensorflow_internals.import_tensorflow()
            if cluster.hosts:
                from shardline.trainer.loop import strategy

                strategy()
            is_module = arguments[0] == "-m"
            sys.argv = list(arguments[is_module:])
            if is_module:
                runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, os.path.dirname(os.path.realpath(sys.argv[0])))
                runpy.run_path(os.path.abspath(sys.argv[0]), run_name="__main__")
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            sys.last_value = error  # as Python sets it: exit handlers then do not wait for peers
        if isinstance(error, ShardlineError):
            progress.fail("train", error)
            raise SystemExit(error.exit_code) from None
        if not isinstance(error, Exception):
            raise
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        raise SystemExit(EXIT_FAILED) from None


if __name__ == "__main__":
    main(sys.argv[1:])
