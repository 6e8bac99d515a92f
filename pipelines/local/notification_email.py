"""Stand-in for GCPC's e-mail component: `python -m shardline.pipelines.local.notification_email`.

`localize` puts it into the pipeline in the component's place. It says who would get an e-mail; none is sent.
"""

from __future__ import annotations

import argparse
import json

from shardline.trainer.progress import say


def main(argv: list[str] | None = None) -> None:
    """Says who would get an e-mail."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--executor_input", required=True)
    for ignored in ("--marker", "--type", "--payload"):
        parser.add_argument(ignored)
    inputs = json.loads(parser.parse_args(argv).executor_input)["inputs"]["parameterValues"]
    recipients = ", ".join(inputs["recipients"])
    say("conclude", f"a local run: no e-mail is sent; on Vertex AI {recipients} would get one")


if __name__ == "__main__":
    main()
