"""What the fake runs for a custom job: a process on this machine for each of its replicas."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from google.cloud.aiplatform_v1.types import CustomJob
from google.protobuf import json_format
from google.rpc import code_pb2

from shardline.trainer.base.errors import EXIT_BAD_INPUT
from tests.contract.fake.api import Outcome
from tests.helpers import programs

#: What the replicas must not see: to them there is no fake, and no network.
_CLIENTS_ONLY = ("proxy", "ssl_roots", "ca_bundle", "credentials", "emulator")


def run_replicas(job: CustomJob, directory: Path) -> Outcome:
    """Runs the job that the API has received with the local custom-job runner."""
    content = json_format.MessageToDict(CustomJob.pb(job), preserving_proto_field_name=True)
    for pool in content["job_spec"]["worker_pool_specs"]:
        # The runner reads a payload as the launcher does; text, since it is an int64, survives that.
        pool.setdefault("replica_count", "0")
    directory.mkdir(parents=True)
    environment = {
        name: value
        for name, value in os.environ.items()
        if not any(word in name.lower() for word in _CLIENTS_ONLY)
    }
    done = programs.run(
        [
            *(sys.executable, "-m", "shardline.pipelines.local.launcher_stubs", "CustomJob"),
            *("--executor_input", "{}"),
            *("--payload", json.dumps(content), "--gcp_resources", str(directory / "gcp_resources")),
        ],
        env=environment,
        capture_output=True,
        text=True,
    )
    (directory / "log").write_text(done.stdout + done.stderr)
    if done.returncode == 0:
        return Outcome()
    code = code_pb2.INVALID_ARGUMENT if done.returncode == EXIT_BAD_INPUT else code_pb2.INTERNAL
    return Outcome(code, done.stderr[-1000:])
