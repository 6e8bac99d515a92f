"""Registration of a blessed model: publishes it as champion, prepares its upload, and deploys it.

A deployed model without traffic receives no requests (`probe.endpoint_server`). So a model is first deployed
to a temporary endpoint and probed there; only if it passes is it deployed to the configured endpoint, first
without traffic.

The ids of endpoints and deployed models follow from the run: a retry finds what an earlier attempt made.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from shardline.components import model_store
from shardline.components.model_store import Export, catalog, champions, mlflow_registry
from shardline.components.register.probe import endpoint_server, probe
from shardline.components.register.settings import Deploy
from shardline.components.vertex.client import Platform, call_api, wait_for_operation
from shardline.components.vertex.forms import MAX_DISPLAY_NAME
from shardline.components.vertex.refusals import RefusalKind, refusal_kind
from shardline.trainer.base.errors import ModelError, PlatformError, RunError
from shardline.trainer.base.progress import fact, report

_SERVED_NAME = "model"
#: Seconds that the platform may take to start the machines of a model, and seconds between polls.
_DEPLOYMENT_S, _POLL_S = 3600.0, 20.0
#: Smallest id of a deployed model that is made here, and their number; ids have at most ten digits.
_FIRST_ID, _IDS = 1_000_000_000, 9_000_000_000


def share_traffic(present: Mapping[str, int], new: str, percent: int) -> dict[str, int]:
    """Returns the traffic of each deployed model in percent, by id, after a new one got `percent`.

    The others share the rest in their proportions; where none of them has traffic, the new one gets all.
    """
    whole, rest = sum(present.values()), 100 - percent
    shares, upto, used = {new: percent if whole else 100}, 0, 0
    for key, share in sorted(present.items()):
        upto += share
        shares[key] = round(upto * rest / whole) - used if whole else 0
        used += shares[key]
    return {key: share for key, share in shares.items() if share}


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Deployment of one model by one run.

    Attributes:
        platform: The project and region of the pipeline.
        settings: Endpoint, machines and traffic.
        model: Resource name of the registered model's version; "" where nothing was uploaded.
        exported: Directory of the export with its golden examples.
        run: Name of the run.
        labels: Labels of the endpoint on which the model is probed.
        check: Raises ModelError where the model can no longer become champion; called before it gets traffic.
    """

    platform: Platform
    settings: Deploy
    model: str
    exported: Path
    run: str
    labels: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[], None] = lambda: None

    def deploy(self) -> str:
        """Deploys the model if it gives the golden answers of its export; returns the endpoint's name.

        A run on this machine deploys nothing and returns "".

        Raises:
            ModelError: When the export has no golden examples, or of `check`.
            RunError: When the deployed model does not agree with them.
            PlatformError: When the API refuses a call or cannot be reached.
        """
        name = self.settings.endpoint
        if self.platform.location == "local" or not self.model:
            count = f"{self.settings.min_replica_count} to {self.settings.max_replica_count}"
            target = f"to {name}, on {count} {self.settings.machine_type}"
            report("deploy", f"a local run: the model is not deployed; on Vertex AI it would be, {target}")
            return ""
        before = self._deploy_to_endpoint(name)
        try:
            self._undeploy_idle(name, before)
        except PlatformError as error:  # no failure: the model serves, and becomes the champion
            report("deploy", f"warning: {error}; models without traffic stay deployed, and cost machines")
        fact("endpoint", name)
        return name

    @cached_property
    def id(self) -> str:
        """Id of the deployed model, the same on both endpoints."""
        return str(_FIRST_ID + int(self._run_hash, 16) % _IDS)

    @cached_property
    def _run_hash(self) -> str:
        return hashlib.sha256(self.run.encode()).hexdigest()[:32]

    def _deploy_to_endpoint(self, name: str) -> dict[str, int]:
        """Deploys the model after a probe on a temporary endpoint; returns the earlier traffic split."""
        endpoint = self._get(name)
        if self.id in _deployed_ids(endpoint):
            report("deploy", f"{self.model} was deployed to {name} by an earlier attempt of this run")
        else:
            self._probe_on_own_endpoint(endpoint)
        try:
            self._deploy(name, self.settings, {})
            before = _traffic_split(self._get(name))
            if self.id in before:
                return before
            self.check()
            if self.settings.traffic_percent:
                split = share_traffic(before, self.id, self.settings.traffic_percent)
                shares = ", ".join(f"{key} {share} %" for key, share in sorted(split.items()))
                report("deploy", f"traffic of {name}: {shares}")
                # Without an etag: repeated after a lost answer, the call would meet its own change.
                traffic = {"name": name, "traffic_split": split}
                request = {"endpoint": traffic, "update_mask": {"paths": ["traffic_split"]}}
                call_api(f"set the traffic of {name}", self.platform.endpoints.update_endpoint, request)
        except BaseException:
            with contextlib.suppress(PlatformError):
                if self.id not in _traffic_split(self._get(name)):
                    self._undeploy(name, self.id)
            raise
        return before

    def _probe_on_own_endpoint(self, target: Any) -> None:
        """Probes the model on a temporary endpoint with the encryption key of `target`."""
        from google_cloud_pipeline_components.container.v1.gcp_launcher.utils import gcp_labels_util

        parent, endpoint_id = self.platform.parent, f"probe-{self._run_hash}"
        name, key = f"{parent}/endpoints/{endpoint_id}", target.encryption_spec.kms_key_name
        content = {
            "display_name": f"probe for {target.display_name}"[:MAX_DISPLAY_NAME],
            # With the labels that the platform attaches to all resources of a run, for billing.
            "labels": dict(gcp_labels_util.attach_system_labels(dict(self.labels))),
            "encryption_spec": {"kms_key_name": key} if key else None,
        }
        request = {"parent": parent, "endpoint": content, "endpoint_id": endpoint_id}
        make = self.platform.endpoints.create_endpoint
        self._run_operation(f"make the endpoint {name}", make, request, RefusalKind.CONFLICT)
        try:
            single = replace(self.settings, min_replica_count=1, max_replica_count=1)
            self._deploy(name, single, {"0": 100})
            result = probe(endpoint_server(name), self.exported)
            if not result.agrees:
                raise RunError(
                    f"{self.model} on {name} does not answer as it did in validation: {result}; compare the "
                    "serving image's TensorFlow with the one in export.json"
                )
            report("deploy", f"{name} answers as the model did in validation: {result}")
            self.check()
        finally:
            self._undeploy(name, self.id, delete=True)

    def _undeploy_idle(self, name: str, before: Mapping[str, int]) -> None:
        """Undeploys models without traffic, except the newest; those that had some before count as newest."""
        endpoint = self._get(name)
        serving = {self.id, *_traffic_split(endpoint)}
        idle = [model for model in endpoint.deployed_models if model.id not in serving]
        idle.sort(key=lambda model: (model.id in before, str(model.create_time)), reverse=True)
        for model in idle[self.settings.keep :]:
            self._undeploy(name, model.id)
        if kept := [model.id for model in idle[: self.settings.keep]]:
            report("deploy", f"kept without traffic, at the cost of machines: {', '.join(kept)}")

    def _deploy(self, name: str, settings: Deploy, traffic: Mapping[str, int]) -> None:
        if self.id in _deployed_ids(self._get(name)):
            return
        report("deploy", f"deploying {self.model} to {name}; the platform takes some minutes for machines")
        machine: dict[str, Any] = {"machine_type": settings.machine_type}
        if settings.accelerator_type:
            machine["accelerator_type"] = settings.accelerator_type
            machine["accelerator_count"] = settings.accelerator_count
        deployed = {
            "id": self.id,
            "model": self.model,
            "display_name": self.run[:MAX_DISPLAY_NAME],
            "service_account": settings.service_account,
            "dedicated_resources": {
                "machine_spec": machine,
                "min_replica_count": settings.min_replica_count,
                "max_replica_count": settings.max_replica_count,
            },
        }
        request = {"endpoint": name, "deployed_model": deployed, "traffic_split": dict(traffic)}
        action, end = f"deploy {self.model} to {name}", time.monotonic() + _DEPLOYMENT_S
        self._run_operation(action, self.platform.endpoints.deploy_model, request, RefusalKind.CONFLICT)
        while self.id not in _deployed_ids(self._get(name)):  # an earlier attempt is deploying it
            if time.monotonic() > end:
                raise PlatformError(f"cannot {action}: an earlier attempt's deployment does not end")
            time.sleep(_POLL_S)

    def _run_operation(
        self, action: str, method: Callable[..., Any], request: Any, done_kind: RefusalKind
    ) -> None:
        """Runs an operation of the platform and waits; an error of kind `done_kind` means that it is done."""
        try:
            wait_for_operation(action, call_api(action, method, request), _DEPLOYMENT_S)
        except PlatformError as error:
            if refusal_kind(error.__cause__) is not done_kind:
                raise

    def _undeploy(self, name: str, deployed_id: str, *, delete: bool = False) -> None:
        """Undeploys a model, and with `delete` deletes its endpoint; a failure is only reported."""
        endpoints, model = self.platform.endpoints, {"endpoint": name, "deployed_model_id": deployed_id}
        try:
            self._run_operation(
                f"undeploy {deployed_id} from {name}", endpoints.undeploy_model, model, RefusalKind.MISSING
            )
            if delete:
                self._run_operation(
                    f"delete {name}", endpoints.delete_endpoint, {"name": name}, RefusalKind.MISSING
                )
        except PlatformError as error:
            report("deploy", f"warning: {error}; it costs machines until it is gone")

    def _get(self, name: str) -> Any:
        return call_api(f"read the endpoint {name}", self.platform.endpoints.get_endpoint, {"name": name})


def _deployed_ids(endpoint: Any) -> list[str]:
    return [deployed.id for deployed in endpoint.deployed_models]


def _traffic_split(endpoint: Any) -> dict[str, int]:
    return {key: share for key, share in endpoint.traffic_split.items() if share}


def register_model(exported: Path, quality: str, champion_uri: str, run: str = "") -> None:
    """Makes an exported, blessed model the champion; champion_uri "" publishes nothing.

    Repeated in the same `run`, it publishes once.

    Raises:
        ModelError: When `exported` is incomplete or not blessed, the catalog is damaged, or the champion has
            changed since the validation.
        SettingsError, PlatformError: When the model store cannot be reached or written to.
        RunError: When copying fails.
    """
    if not champion_uri:
        report("register", "champion_uri is empty: the blessed model is not published")
        return
    catalog.refuse_container_path("champion_uri", champion_uri)
    try:
        published = champions.publish(exported, champion_uri, quality=quality, run=run)
    except ModelError as error:
        raise ModelError(f"{error}; if this run deployed it, the endpoint serves it") from error
    now = champions.require_current(champion_uri).version
    if now != published.version:
        status = f"was the champion until {now} replaced it"
    elif published.commit.replaced:
        status = f"is the champion, replacing {published.commit.replaced}"
    else:
        status = "is the champion"
    report("register", f"version {published.version} {status}")
    fact("champion", champions.version_location(champion_uri, published.version))
    mlflow_registry.mirror_champion(champion_uri)


def copy_saved_model(exported: Path, target: Path) -> None:
    """Copies an exported model to `target`/1; `target` is a base path for TensorFlow Serving.

    Raises:
        ModelError: When `exported` holds no complete export.
        RunError: When copying fails.
    """
    Export.read(exported)  # written last: the export is complete
    saved_model = exported / model_store.SAVED_MODEL
    if not saved_model.is_dir():
        raise ModelError(f"no {model_store.SAVED_MODEL} in {exported}; validate the model again")
    try:
        # Contents only: a Cloud Storage mount keeps neither modes nor times. TF Serving wants a number.
        shutil.copytree(saved_model, target / "1", copy_function=shutil.copyfile, dirs_exist_ok=True)
    except OSError as error:
        raise RunError(
            f"cannot copy to {target}: {error.strerror or error}; upload the model again"
        ) from error


def container_spec(image_uri: str) -> dict[str, Any]:
    """Returns the ModelContainerSpec that serves a model over REST, in the API's camel case.

    The platform sets AIP_STORAGE_URI to the directory of the model, and sends requests to port 8080 by
    default. A deployed model never changes: the server does not poll for newer versions.

    Source: https://cloud.google.com/vertex-ai/docs/predictions/custom-container-requirements
    """
    return {
        "imageUri": image_uri,
        "command": ["/usr/bin/tensorflow_model_server"],
        "args": [
            "--port=8500",
            "--rest_api_port=8080",
            f"--model_name={_SERVED_NAME}",
            "--model_base_path=$(AIP_STORAGE_URI)",
            f"--file_system_poll_wait_seconds={365 * 86_400}",
        ],
        "predictRoute": f"/v1/models/{_SERVED_NAME}:predict",
        "healthRoute": f"/v1/models/{_SERVED_NAME}",
    }


def describe_model(exported: Path, quality: str) -> str:
    """Returns a line that describes an exported model in the registry.

    It is escaped as in JSON: the launcher's payload pastes it between quotes.
    """
    export = Export.read(exported)
    text = f"{quality}, {export.parameters:,} parameters, dataset {export.fingerprint}"
    return json.dumps(text)[1:-1]
