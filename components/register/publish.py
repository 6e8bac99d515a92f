"""Registration of a blessed model: as the champion, and on an endpoint, whose traffic it shares."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardline.components import champions
from shardline.components.vertex.client import Platform, ask
from shardline.trainer.progress import fact, say

#: Name of the model that is being deployed in the API; it has no id yet.
NEW_MODEL = "0"


def register_model(exported: Path, accuracy: float, champion_uri: str, run: str = "") -> None:
    """Makes an exported, blessed model the champion; champion_uri "" publishes nothing.

    Repeated in the same `run`, it publishes once.

    Raises:
        ModelError: When `exported` is incomplete or not blessed, the present champion is damaged, or is no
            longer the one that the model was judged against.
        SettingsError, PlatformError: When the champion's place cannot be reached or written to.
        RunError: When copying fails.
    """
    if not champion_uri:
        say("register", "champion_uri is empty: the blessed model is not published")
        return
    published = champions.publish(exported, champion_uri, accuracy=accuracy, run=run)
    now = champions.require_current(champion_uri).version
    if now != published.version:
        how = f"was the champion, {now} is so since"
    elif published.commit.replaced:
        how = f"is the champion, replacing {published.commit.replaced}"
    else:
        how = "is the champion"
    say("register", f"version {published.version} {how}")
    fact("champion", champions.where(champion_uri, published.version))


def share_traffic(present: Mapping[str, int], percent: int) -> dict[str, int]:
    """Returns the traffic of each deployed model, in percent by id, with that of the new one under "0".

    The models that have traffic keep their proportions in the rest; percents are whole and add up to 100,
    the largest remainders being rounded up. A new model without traffic changes nothing: {}.

    Source: google.cloud.aiplatform_v1.types.DeployModelRequest.traffic_split, which replaces the endpoint's;
    where it is empty the endpoint's stays as it is.
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


def plan_traffic(endpoint: str, model: str, percent: int) -> dict[str, str]:
    """Reads an endpoint's traffic and plans how it is shared with a new model.

    Args:
        endpoint: projects/P/locations/L/endpoints/ID.
        model: Resource name of the uploaded model; "" in a local run, where nothing has been uploaded.
        percent: Share of the new model, 0..100.

    Returns:
        Percents by the id of the deployed model, as texts: KFP would make 10.0 of a number.
    """
    if not model:
        say("deploy", "nothing was uploaded: no traffic is assigned")
        return {}
    method = Platform.of(endpoint).endpoints.get_endpoint
    found = ask(f"read the traffic of {endpoint}", method, {"name": endpoint})
    present = {deployed.id: found.traffic_split.get(deployed.id, 0) for deployed in found.deployed_models}
    shared = share_traffic(present, percent)
    if not shared:
        say("deploy", f"the new model gets no traffic of {endpoint}, which stays as it is")
        return {}
    parts = ", ".join(
        f"{share} % {'the new model' if model_id == NEW_MODEL else f'deployed model {model_id}'}"
        for model_id, share in shared.items()
    )
    say("deploy", f"traffic of {endpoint}: {parts}")
    if idle := sorted(set(present) - set(shared)):
        say(
            "deploy",
            f"deployed without traffic, at the price of machines: {', '.join(idle)}; take them off with "
            "gcloud ai endpoints undeploy-model once they are no longer needed for a rollback",
        )
    return {deployed: str(share) for deployed, share in shared.items()}
