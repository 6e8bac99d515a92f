"""One replica's program in a trial: `python -m shardline.components.tune.trial JSON --NAME=VALUE ...`.

The JSON object holds the path of the dataset, the other arguments of `components.train.replica.run`, and the
types of the parameters. The platform adds a flag for each parameter to the arguments of every replica. The
model goes to AIP_MODEL_DIR, which is another directory for each trial.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from kfp import dsl

from shardline.components.train.replica import run
from shardline.components.tune.study import read_value, with_parameters
from shardline.trainer.errors import SettingsError
from shardline.trainer.progress import errors_end_the_process


def main(argument: str, flags: Sequence[str]) -> None:
    """Trains with the parameters of this trial."""
    values = json.loads(argument)
    with errors_end_the_process("train"):
        chosen = read_flags(flags, values.pop("parameters"))
    dataset, model = dsl.Dataset(uri=values.pop("dataset")), dsl.Model(uri="")
    run(dataset=dataset, model=model, **with_parameters(values, chosen))


def read_flags(flags: Sequence[str], types: Mapping[str, str]) -> dict[str, Any]:
    """Returns the parameters by name.

    Args:
        flags: --NAME=VALUE for each parameter.
        types: The types of the parameters.

    Raises:
        SettingsError: When a parameter is unknown, missing or no number.
    """
    chosen = {}
    for flag in flags:
        name, _, text = flag.removeprefix("--").partition("=")
        if name not in types:
            raise SettingsError(f"the study has no parameter {name!r}; there are {', '.join(types)}")
        chosen[name] = read_value(types[name], text)
    if missing := [name for name in types if name not in chosen]:
        raise SettingsError(
            f"no value for {', '.join(missing)}: a trial gets --NAME=VALUE from its tuning job"
        )
    return chosen


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
