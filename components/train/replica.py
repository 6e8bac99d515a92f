"""One replica's program where the pools are given at run time: `python -m shardline.components.train.replica JSON`.

The JSON object holds the paths of dataset and model, and the other arguments of `shardline.components.train.run.run`.
"""

from __future__ import annotations

import json
import sys

from kfp import dsl

from shardline.components.train.run import run


def main(argument: str) -> None:
    """Trains."""
    values = json.loads(argument)
    dataset, model = dsl.Dataset(uri=values.pop("dataset")), dsl.Model(uri=values.pop("model"))
    run(dataset=dataset, model=model, **values)


if __name__ == "__main__":
    main(sys.argv[1])
