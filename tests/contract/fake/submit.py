"""A user's own program with google-cloud-aiplatform: `python -m tests.contract.fake.submit JSON`.

The JSON object holds: init (of aiplatform.init), job (of CustomJob) or script (of
CustomJob.from_local_script), submit (of CustomJob.submit). Prints the job's name and state.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from google.auth.credentials import AnonymousCredentials
from google.cloud import aiplatform


def main(request: dict[str, Any]) -> None:
    """Submits a job and looks at it."""
    init = request["init"]
    if init.get("api_transport") == "rest":
        init["credentials"] = AnonymousCredentials()
    aiplatform.init(**init)
    if "script" in request:
        job = aiplatform.CustomJob.from_local_script(**request["script"])
    else:
        job = aiplatform.CustomJob(**request["job"])
    job.submit(**request.get("submit", {}))
    print(
        json.dumps(
            {"name": job.resource_name, "state": aiplatform.CustomJob.get(job.resource_name).state.name}
        )
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
