"""Which part of an endpoint's traffic each of its models gets once another model is deployed."""

from __future__ import annotations

from collections.abc import Mapping

from shardline.trainer.errors import PlatformError
from shardline.trainer.progress import say

#: What the API calls the model that is being deployed, which has no id yet.
NEW_MODEL = "0"


def share_traffic(present: Mapping[str, int], percent: int) -> dict[str, int]:
    """Returns the traffic of each deployed model, in percent, with that of the new one under "0".

    The models that have traffic keep their proportions in what is left; percents are whole and add up to 100,
    the largest remainders being rounded up.

    Source: google.cloud.aiplatform_v1.types.DeployModelRequest.traffic_split, which replaces the endpoint's;
    where it is empty the endpoint's stays as it is.

    Args:
        present: Percents by the id of the deployed model.
        percent: Of the new model, 0..100.

    Returns:
        Percents above 0 by id; {} where nothing changes.
    """
    if percent == 0:
        return {}
    serving = {model: share for model, share in present.items() if share}
    if not serving or percent == 100:
        return {NEW_MODEL: 100}
    rest, total = 100 - percent, sum(serving.values())
    shares = {model: share * rest // total for model, share in serving.items()}
    by_remainder = sorted(serving, key=lambda model: (-(serving[model] * rest % total), model))
    for model in by_remainder[: rest - sum(shares.values())]:
        shares[model] += 1
    return {NEW_MODEL: percent, **{model: share for model, share in shares.items() if share}}


def read_traffic(endpoint: str) -> dict[str, int]:
    """Returns the traffic of each model that is deployed to an endpoint, in percent, also where it is 0.

    Args:
        endpoint: projects/P/locations/L/endpoints/ID.

    Raises:
        PlatformError: When the API refuses or is not reached.
    """
    from google.api_core.exceptions import GoogleAPIError
    from google.auth.exceptions import GoogleAuthError
    from google.cloud.aiplatform_v1.services.endpoint_service import EndpointServiceClient

    location = endpoint.split("/")[3]
    try:
        client = EndpointServiceClient(
            client_options={"api_endpoint": f"{location}-aiplatform.googleapis.com"}
        )
        found = client.get_endpoint(name=endpoint)
    except (GoogleAPIError, GoogleAuthError) as error:
        raise PlatformError(
            f"cannot read the traffic of {endpoint}: {error}; is it there, and has the run's service account "
            "roles/aiplatform.user?"
        ) from error
    return {model.id: found.traffic_split.get(model.id, 0) for model in found.deployed_models}


def plan_traffic(endpoint: str, model: str, percent: int) -> dict[str, str]:
    """Reads an endpoint's traffic and says how it will be shared with a new model.

    Args:
        endpoint: projects/P/locations/L/endpoints/ID.
        model: Resource name of the uploaded model; "" in a local run, where nothing has been uploaded.
        percent: Of the new model, 0..100.

    Returns:
        Percents by the id of the deployed model, as texts: KFP would make 10.0 of a number.

    Raises:
        PlatformError: When the API refuses or is not reached.
    """
    if not model:
        say("deploy", "nothing was uploaded: no traffic is shared out")
        return {}
    present = read_traffic(endpoint)
    shared = share_traffic(present, percent)
    if not shared:
        say("deploy", f"the new model gets no traffic of {endpoint}, which stays as it is")
        return {}
    parts = ", ".join(f"{share} % {_name(deployed)}" for deployed, share in shared.items())
    say("deploy", f"traffic of {endpoint}: {parts}")
    if idle := sorted(set(present) - set(shared)):
        say(
            "deploy",
            f"deployed without traffic, at the price of machines: {', '.join(idle)}; take them off with "
            "gcloud ai endpoints undeploy-model once nobody wants to go back to them",
        )
    return {deployed: str(share) for deployed, share in shared.items()}


def _name(deployed: str) -> str:
    return "the new model" if deployed == NEW_MODEL else f"deployed model {deployed}"
