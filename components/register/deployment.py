"""Deployment of a registered model: probed where nobody else asks it, then given traffic in steps.

No request can ask for a deployed model that has no traffic (`servers.endpoint_server`). So a model is first
deployed to an endpoint of its own, which is removed after the probe; only one that agrees is deployed to the
endpoint that others use, without traffic, and then gets it step by step, with a probe after each; one that
does not agree is taken off, and the traffic is as it was.

Endpoints and deployed models have ids that follow from the run: what an earlier attempt has made is found.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from shardline.components.register.probe import probe
from shardline.components.register.registry import LOCAL, labels_of, run_mark
from shardline.components.register.servers import endpoint_server
from shardline.components.register.settings import Deploy
from shardline.components.vertex.client import Platform, ask, wait
from shardline.components.vertex.forms import LONGEST_NAME
from shardline.components.vertex.refusals import Kind, kind_of
from shardline.trainer.errors import PlatformError, RunError, ShardlineError
from shardline.trainer.progress import fact, say

#: Seconds that the platform may take to start the machines of a model, and how often it is asked meanwhile.
_DEPLOYMENT_S, _POLL_S = 3600.0, 20.0
#: The ids of deployed models have ten digits at most; those of this size are ours.
_FIRST_ID, _IDS = 1_000_000_000, 9_000_000_000
#: How the name of a deployed model begins that says how the traffic was shared before it came.
_BEFORE = "traffic before: "


def scale(shares: Mapping[str, int], total: int) -> dict[str, int]:
    """Returns whole shares in the same proportions that add up to `total`; those of nothing are left out.

    The largest remainders are rounded up. Where `total` suffices each has 1 or more, from the largest.
    """
    serving, whole = {key: share for key, share in shares.items() if share}, sum(shares.values())
    scaled = {key: share * total // whole for key, share in serving.items()}
    by_remainder = sorted(serving, key=lambda key: (-(serving[key] * total % whole), key))
    for key in by_remainder[: total - sum(scaled.values())] if serving else ():
        scaled[key] += 1
    for key in [key for key, share in scaled.items() if not share] if total >= len(scaled) else ():
        scaled[max(scaled, key=scaled.__getitem__)] -= 1
        scaled[key] = 1
    return {key: share for key, share in scaled.items() if share}


def share_traffic(present: Mapping[str, int], new: str, percent: int) -> dict[str, int]:
    """Returns the traffic of each deployed model in percent, by id, once a new one has its share.

    The others keep their proportions in the rest, 1 % each at least, unless the new one is to have all;
    where no other has traffic, it gets all.
    """
    total = max(100 - percent, sum(map(bool, present.values()))) if percent < 100 else 0
    rest = scale(present, total)
    return {new: 100 - sum(rest.values()), **rest} if percent else rest


def deploy_model(
    platform: Platform,
    deploy: Deploy,
    *,
    model: str,
    exported: Path,
    labels: Mapping[str, str],
    encryption_key: str,
    run: str,
    check: Callable[[], None] = lambda: None,
) -> str:
    """Deploys a model that gives the golden answers of its export, and returns the endpoint's resource name.

    A run on this machine deploys nothing and returns "".

    Args:
        platform: The project and region of the pipeline.
        deploy: Endpoint, machines and traffic.
        model: Resource name of the registered model's version; "" where nothing was uploaded.
        exported: Directory of the export with its golden examples.
        labels: Labels of new endpoints.
        encryption_key: Resource name of the key of a new endpoint; "" for Google's own.
        run: Name of the run.
        check: Raises ModelError where the model can be the champion no more; asked before it gets traffic.

    Raises:
        ModelError: When the export has no golden examples, or of `check`.
        RunError: When the deployed model does not agree with them; the traffic is as it was.
        PlatformError: When the API refuses or is not reached.
    """
    machines = f"{deploy.min_replica_count} to {deploy.max_replica_count} {deploy.machine_type}"
    where = deploy.endpoint or f"a new endpoint {deploy.display_name!r}"
    if platform.location == LOCAL or not model:
        say(
            "deploy",
            f"a local run: the model is not deployed; on Vertex AI it would be, to {where}, on {machines}",
        )
        return ""
    task = _Deployment(
        platform, deploy, model, exported, labels_of(labels), encryption_key, run_mark(run), check
    )
    name = task.to_endpoint(deploy.endpoint) if deploy.endpoint else task.to_new_endpoint()
    fact("endpoint", name)
    return name


@dataclass(frozen=True)
class _Deployment:
    """The deployment of one model by one run; the fields are the arguments of `deploy_model`."""

    platform: Platform
    deploy: Deploy
    model: str
    exported: Path
    labels: Mapping[str, str]
    encryption_key: str
    mark: str
    check: Callable[[], None] = lambda: None

    @cached_property
    def id(self) -> str:
        """Id of the deployed model, on whichever endpoint."""
        return str(_FIRST_ID + int(self.mark, 16) % _IDS)

    def to_new_endpoint(self) -> str:
        """Makes an endpoint for the model alone and returns its name; one that does not agree leaves none."""
        name = self._make_endpoint(f"run-{self.mark}", self.deploy.display_name, self.encryption_key)
        try:
            self._deploy(name, self.deploy, {"0": 100})
            self._probe(name)
            self.check()
        except BaseException:
            self._remove(name)
            raise
        return name

    def to_endpoint(self, name: str) -> str:
        """Adds the model to an endpoint that is there, and returns its name."""
        endpoint = self._get(name)
        if self.id not in _ids(endpoint):
            self._rehearse(endpoint)
            try:
                self._deploy(name, self.deploy, {})
            except BaseException:
                self._undeploy(name, self.id)
                raise
        else:
            say("deploy", f"{self.model} was deployed to {name} by an earlier attempt of this run")
        before = self._shift(name)
        try:
            self._undeploy_idle(name, before)
        except PlatformError as error:  # the model serves, and is to become the champion
            say("deploy", f"warning: {error}; models without traffic stay, and cost machines")
        return name

    def _rehearse(self, endpoint: Any) -> None:
        """Probes the model on an endpoint that nobody else knows, and removes that."""
        key = endpoint.encryption_spec.kms_key_name
        name = self._make_endpoint(f"probe-{self.mark}", f"probe for {endpoint.display_name}"[:128], key)
        try:
            self._deploy(name, replace(self.deploy, min_replica_count=1, max_replica_count=1), {"0": 100})
            self._probe(name)
        finally:
            self._remove(name)

    def _shift(self, name: str) -> dict[str, int]:
        """Gives the model its traffic step by step, and returns that of before, which failures bring back."""
        endpoint = self._get(name)
        before, done = self._traffic_before(endpoint), _split(endpoint)
        start, wanted = done.get(self.id, 0), done
        try:
            if start:  # by an earlier attempt, which may not have come to ask
                self.check()
                self._probe(name)
            for percent in self.deploy.steps:
                if percent <= start:
                    continue
                self.check()
                wanted = share_traffic(before, self.id, percent)
                if _split(self._get(name)) != done:
                    raise RunError(f"{self.model} gets no more traffic")
                if wanted != done:
                    self._set_traffic(name, wanted)
                    done = wanted
                self._probe(name)
        except BaseException as error:
            left = self._back(name, before, (done, wanted), error)
            if isinstance(error, ShardlineError):
                raise type(error)(f"{error}; {left}") from error
            say("deploy", left)
            raise
        return before

    def _back(
        self, name: str, before: Mapping[str, int], ours: tuple[dict[str, int], ...], error: BaseException
    ) -> str:
        """Gives the traffic back and takes the model off, and says so; not if somebody else has shared it."""
        try:
            now = _split(self._get(name))
            if now in ours and now != before:
                self._set_traffic(name, before)
        except PlatformError as failed:
            raise PlatformError(
                f"{error}; and the traffic of before could not be given back ({failed}); do it with "
                f"gcloud ai endpoints update {name} --traffic-split={_written(before)}"
            ) from error
        if now in ours or self.id not in now:
            self._undeploy(name, self.id)
        if now in ours:
            return f"the traffic of {name} is without it again: {_in_words(before)}"
        return (
            f"somebody else has changed the traffic of {name} meanwhile, and it is left so: {_in_words(now)}"
        )

    def _probe(self, name: str) -> None:
        """Raises RunError when the model behind an endpoint does not give the golden answers."""
        found = probe(endpoint_server(name, model=self.id), self.exported, requests=0)
        if not found.agrees:
            raise RunError(
                f"{self.model} on {name} does not answer as it did when it was judged: {found}; compare the "
                "serving image's TensorFlow with the one in export.json"
            )
        say("deploy", f"{name} answers as the model did when it was judged: {found}")

    def _traffic_before(self, endpoint: Any) -> dict[str, int]:
        """Returns the traffic without the model; what a broken-off attempt gave it goes to the others.

        As long as nobody else has shared it since, it is what it was when the model was deployed.
        """
        split, there = _split(endpoint), _ids(endpoint)
        share = split.pop(self.id, 0)
        if not share:
            return split
        own = endpoint.deployed_models[there.index(self.id)]
        noted = re.findall(r"(\d+)=(\d+)", own.display_name) if own.display_name.startswith(_BEFORE) else ()
        known = scale({key: int(part) for key, part in noted if key in there}, 100)
        as_set = share_traffic(known, self.id, share)
        return known if not split or as_set == {**split, self.id: share} else scale(split, 100)

    def _undeploy_idle(self, name: str, before: Mapping[str, int]) -> None:
        """Takes models without traffic off, but for the last ones, those that had some until now first."""
        endpoint = self._get(name)
        idle = [
            one
            for one in _newest_first(endpoint.deployed_models)
            if one.id != self.id and not endpoint.traffic_split.get(one.id)
        ]
        idle.sort(key=lambda one: one.id not in before)
        for one in idle[self.deploy.keep :]:
            self._undeploy(name, one.id)
        if kept := [one.id for one in idle[: self.deploy.keep]]:
            say("deploy", f"kept without traffic, at the price of machines: {', '.join(kept)}")

    def _make_endpoint(self, endpoint_id: str, display_name: str, key: str) -> str:
        name = f"{self.platform.parent}/endpoints/{endpoint_id}"
        encryption = {"kms_key_name": key} if key else None
        content = {"display_name": display_name, "labels": dict(self.labels), "encryption_spec": encryption}
        request = {"parent": self.platform.parent, "endpoint": content, "endpoint_id": endpoint_id}
        self._make(f"make the endpoint {name}", self._endpoints.create_endpoint, request, lambda: True)
        return name

    def _deploy(self, name: str, deploy: Deploy, traffic: Mapping[str, int]) -> None:
        endpoint = self._get(name)
        if self.id in _ids(endpoint):
            return
        say("deploy", f"deploying {self.model} to {name}; the platform takes some minutes for machines")
        machine: dict[str, Any] = {"machine_type": deploy.machine_type}
        if deploy.accelerator_type:
            machine["accelerator_type"] = deploy.accelerator_type
            machine["accelerator_count"] = deploy.accelerator_count
        replicas = {
            "min_replica_count": deploy.min_replica_count,
            "max_replica_count": deploy.max_replica_count,
        }
        deployed = {
            "id": self.id,
            "model": self.model,
            "display_name": _before(_split(endpoint)),
            "service_account": deploy.service_account,
            "dedicated_resources": {"machine_spec": machine, **replicas},
        }
        request = {"endpoint": name, "deployed_model": deployed, "traffic_split": dict(traffic)}
        doing = f"deploy {self.model} to {name}"
        self._make(doing, self._endpoints.deploy_model, request, lambda: self.id in _ids(self._get(name)))

    def _make(
        self, doing: str, method: Callable[..., Any], request: Any, is_there: Callable[[], bool]
    ) -> None:
        """Makes something under an id of our choice, or waits for what an earlier call is making."""
        try:
            wait(doing, ask(doing, method, request), _DEPLOYMENT_S)
        except PlatformError as error:
            if kind_of(error.__cause__) is not Kind.CONFLICT:
                raise
            end = time.monotonic() + _DEPLOYMENT_S
            while not is_there():
                if time.monotonic() > end:
                    raise
                time.sleep(_POLL_S)

    def _set_traffic(self, name: str, split: Mapping[str, int]) -> None:
        doing = f"set the traffic of {name}"
        say("deploy", f"traffic of {name}: {_in_words(split)}")
        # Without an etag: repeated after a lost answer, the call would meet its own change.
        endpoint = {"name": name, "traffic_split": dict(split)}
        request = {"endpoint": endpoint, "update_mask": {"paths": ["traffic_split"]}}
        ask(doing, self._endpoints.update_endpoint, request)

    def _undeploy(self, name: str, deployed_id: str) -> None:
        """Takes a model without traffic off; one that cannot be is said, and fails nothing."""
        self._take(
            f"undeploy {deployed_id} from {name}",
            self._endpoints.undeploy_model,
            {"endpoint": name, "deployed_model_id": deployed_id},
            f"gcloud ai endpoints undeploy-model {name} --deployed-model-id={deployed_id}",
        )

    def _remove(self, name: str) -> None:
        """Removes an endpoint of this run with its model."""
        self._undeploy(name, self.id)
        request, command = {"name": name}, f"gcloud ai endpoints delete {name}"
        self._take(f"delete {name}", self._endpoints.delete_endpoint, request, command)

    def _take(self, doing: str, method: Callable[..., Any], request: Any, command: str) -> None:
        try:
            wait(doing, ask(doing, method, request), _DEPLOYMENT_S)
        except PlatformError as error:
            if kind_of(error.__cause__) is not Kind.MISSING:
                say("deploy", f"warning: {error}; it costs machines until it is gone: {command}")

    @property
    def _endpoints(self) -> Any:
        return self.platform.endpoints

    def _get(self, name: str) -> Any:
        return ask(f"read the endpoint {name}", self._endpoints.get_endpoint, {"name": name})


def _ids(endpoint: Any) -> list[str]:
    return [deployed.id for deployed in endpoint.deployed_models]


def _newest_first(models: Any) -> list[Any]:
    return sorted(
        models, key=lambda one: one.create_time.timestamp() if one.create_time else 0.0, reverse=True
    )


def _split(endpoint: Any) -> dict[str, int]:
    return {key: share for key, share in endpoint.traffic_split.items() if share}


def _written(split: Mapping[str, int]) -> str:
    return ",".join(f"{key}={share}" for key, share in sorted(split.items()))


def _before(split: Mapping[str, int]) -> str:
    """Returns the name of a deployed model, which alone can say what it meets; "" is that of its model."""
    name = f"{_BEFORE}{_written(split)}"
    return name if split and len(name) <= LONGEST_NAME else ""


def _in_words(split: Mapping[str, int]) -> str:
    return ", ".join(f"{key} {share} %" for key, share in sorted(split.items())) or "none"
