"""Preprocessing as a Beam pipeline: the same bytes as in one process.

    python examples/beam/preprocess.py images:/shared/photos /shared/dataset --parts 8

Options that are not listed are Beam's: --runner and those of the runner. All workers see source and output.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

from shardline.components.preprocess.run import finish, plan_dataset, write_shards
from shardline.components.preprocess.settings import PreprocessSettings


def write_part(part: int, out: str, parts: int) -> int:
    """Writes one part, and returns the number of its records; may run again, or twice at once."""
    return write_shards(Path(out), part, parts)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("source", help="source string, as of shardline preprocess")
    parser.add_argument("out", type=lambda path: Path(path).absolute())
    parser.add_argument("--parts", type=int, default=8)
    given, options = parser.parse_known_args()
    plan_dataset(PreprocessSettings(source=given.source, processes=1), given.out)
    with beam.Pipeline(options=PipelineOptions(options)) as pipeline:
        parts = pipeline | beam.Create(range(given.parts)) | beam.Reshuffle()
        parts | beam.Map(write_part, out=str(given.out), parts=given.parts)
    finish(given.out)


if __name__ == "__main__":
    main()
