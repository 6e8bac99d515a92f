"""Runs program.py of the directory RAY_TEST_DIR on a Ray cluster of this machine, and kills workers.

The directory also gets files that say what has happened.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
from pathlib import Path
from typing import Any

#: Epoch, and batch in it, from 0, after which a training worker is killed.
KILLED_AFTER = (2, 7)
#: Parts of preprocessing that are killed, once each.
KILLED_PARTS = (1, 2)


def main(directory: Path) -> None:
    """Starts Ray, runs the program, stops Ray."""
    import ray

    # Ray's own address of this machine, which is not loopback; the proxies of tests answer nobody.
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = f"localhost,127.0.0.1,{ray.util.get_node_ip_address()}"
    ray.init(
        include_dashboard=False,
        num_cpus=2,
        _temp_dir=os.environ["RAY_TMPDIR"],
        runtime_env={"worker_process_setup_hook": f"{__spec__.name}.prepare"},  # type: ignore[name-defined]
    )
    try:
        runpy.run_path(str(directory / "program.py"), run_name="__main__")
    finally:
        ray.shutdown()


def prepare() -> None:
    """Makes this process, a worker of Ray, kill itself once in the middle of its work."""
    import shardline
    from shardline.components.preprocess import run
    from shardline.components.preprocess.write import ShardFile

    directory = Path(os.environ["RAY_TEST_DIR"])
    write = run.write_shards

    def claim(name: str) -> bool:
        with contextlib.suppress(FileExistsError):
            (directory / name).touch(exist_ok=False)
            return True
        return False

    def write_shards(out: Path, part: int, parts: int) -> int:
        if part in KILLED_PARTS and claim(f"killed-part-{part}"):
            written: list[Any] = []

            def kill(self: ShardFile, *_: object) -> None:
                """Closes a shard, and kills the process in the second one, which is not complete."""
                if written:
                    os.kill(os.getpid(), signal.SIGKILL)
                written.append(self)
                closed(self, None)

            closed, ShardFile.__exit__ = ShardFile.__exit__, kill  # type: ignore[method-assign]
        return write(out, part, parts)

    def fit_until_killed(*given: Any, **options: Any) -> Any:
        import keras

        from shardline.trainer.fit import fit

        class Kill(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
            epoch = 0

            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                self.epoch = epoch

            def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
                if (self.epoch, batch) > KILLED_AFTER or not (directory / "killed-worker").exists():
                    return
                with contextlib.suppress(FileExistsError), open(directory / "resumed", "x") as file:
                    json.dump([self.epoch, batch], file)

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
                if rank == 1 and (self.epoch, batch) == KILLED_AFTER and claim("killed-worker"):
                    os.kill(os.getpid(), signal.SIGKILL)

        return fit(*given, callbacks=[Kill()], deterministic=True, **options)

    run.write_shards = write_shards
    shardline.fit = fit_until_killed  # type: ignore[assignment]


if __name__ == "__main__":
    main(Path(os.environ["RAY_TEST_DIR"]))
