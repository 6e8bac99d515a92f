"""Preprocessing on the machines of a Ray cluster: the same bytes as in one process.

    python examples/ray/preprocess.py images:/shared/photos /shared/dataset --parts 8

All machines of the cluster see source and output. Ray starts a part again that was interrupted; its complete
shards stay.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import ray

from shardline.components.preprocess.run import finish, plan_dataset, write_shards
from shardline.components.preprocess.settings import PreprocessSettings


@ray.remote(max_retries=3)
def write_part(out: Path, part: int, parts: int) -> int:
    """Writes one part on one CPU, and returns the number of its records."""
    return write_shards(out, part, parts)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("source", help="source string, as of shardline preprocess")
    parser.add_argument("out", type=lambda path: Path(path).absolute())
    parser.add_argument("--parts", type=int, default=8)
    given = parser.parse_args()
    plan_dataset(PreprocessSettings(source=given.source, processes=1), given.out)
    written = [write_part.remote(given.out, part, given.parts) for part in range(given.parts)]
    print(f"{sum(ray.get(written)):,} records written")
    finish(given.out)


if __name__ == "__main__":
    main()
