"""The deployment of a model: its settings, and how traffic is shared."""

from dataclasses import fields
from pathlib import Path

import pytest

from shardline.components.register.deployment import Deployment, share_traffic
from shardline.components.register.settings import Deploy
from shardline.components.vertex.client import Platform
from shardline.pipelines import settings
from shardline.trainer.base import progress
from shardline.trainer.base.errors import SettingsError

ENDPOINT = "projects/my-project/locations/europe-west4/endpoints/9"
BASE = 'image = "i:1"\n[train]\nreplica_count = 1\nmachine_type = "n1-standard-8"\n'
UPLOAD = '[model_upload]\ndisplay_name = "digits"\nserving_image_uri = "s:1"\n'
DEPLOY = f'[deploy]\nendpoint = "{ENDPOINT}"\nmachine_type = "n1-standard-2"\n'


def load(directory: Path, text: str) -> settings.Settings:
    (directory / "s.toml").write_text(BASE + text)
    return settings.load(directory / "s.toml")


def test_the_tables_are_read(tmp_path: Path) -> None:
    loaded = load(tmp_path, UPLOAD + DEPLOY + "traffic_percent = 10\nmax_replica_count = 3\n")

    assert loaded.deploy == Deploy(
        endpoint=ENDPOINT, machine_type="n1-standard-2", traffic_percent=10, max_replica_count=3
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (DEPLOY, r"deploy needs a model in the Model Registry; add a table \[model_upload\]"),
        (UPLOAD + '[deploy]\nendpoint = "e"\n', "deploy.machine_type is missing"),
        (UPLOAD + '[deploy]\nmachine_type = "m"\n', "deploy.endpoint is missing"),
        (UPLOAD + DEPLOY.replace("endpoints", "models"), "deploy.endpoint must be projects/P/.*, got"),
        (UPLOAD + DEPLOY + "keep = -1\n", "keep must be 0 or more, got -1"),
        (UPLOAD + DEPLOY + "traffic_percent = 101\n", "traffic_percent must be from 0 to 100, got 101"),
        (
            UPLOAD + DEPLOY + "min_replica_count = 0\n",
            "1 <= min_replica_count <= max_replica_count, got 0 and 1",
        ),
        (UPLOAD + DEPLOY + 'accelerator_type = "NVIDIA_L4"\n', "go together, got 'NVIDIA_L4' and 0"),
        (UPLOAD + DEPLOY + "service_account = 'a\"b'\n", "deploy.service_account holds '\"'"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load(tmp_path, text)


@pytest.mark.parametrize(
    ("present", "percent", "shared"),
    [
        ({"7": 100}, 10, {"new": 10, "7": 90}),
        ({"7": 100}, 100, {"new": 100}),
        # The first model of an endpoint gets all traffic.
        ({}, 10, {"new": 100}),
        ({"7": 60, "8": 40}, 50, {"new": 50, "7": 30, "8": 20}),
        # 22.5 and 7.5.
        ({"7": 75, "8": 25}, 70, {"new": 70, "7": 22, "8": 8}),
        # What is rounded to nothing is left out.
        ({"6": 1, "7": 99}, 90, {"new": 90, "7": 10}),
    ],
)
def test_traffic_is_shared(present: dict[str, int], percent: int, shared: dict[str, int]) -> None:
    assert share_traffic(present, "new", percent) == shared


def test_shares_add_up_to_100() -> None:
    for percent in range(1, 101):
        for present in ({"1": 33, "2": 33, "3": 34}, {"1": 1, "2": 1, "3": 98}, {"1": 50, "2": 50}):
            shared = share_traffic(present, "new", percent)
            assert (sum(shared.values()), shared["new"]) == (100, percent)
            assert all(share > 0 for share in shared.values())


@pytest.mark.parametrize("model", ["", f"{ENDPOINT.replace('endpoints', 'models')}@1"])
def test_nothing_is_deployed_here_or_where_nothing_was_uploaded(model: str, tmp_path: Path) -> None:
    deploy = Deploy(endpoint=ENDPOINT, machine_type="n1-standard-2", max_replica_count=2)
    platform = Platform("p", "local" if model else "europe-west4")
    seen: list[progress.Event] = []
    with progress.sink(seen.append):
        name = Deployment(
            platform=platform, settings=deploy, model=model, exported=tmp_path, run="r"
        ).deploy()

    assert name == ""
    assert [event.text for event in seen] == [
        "a local run: the model is not deployed; on Vertex AI it would be, "
        f"to {ENDPOINT}, on 1 to 2 n1-standard-2"
    ]


def test_the_example_shows_every_key() -> None:
    """Uncommented, it is loaded by a test of the compiler."""
    example = (Path(__file__).resolve().parents[2] / "settings" / "vertex.toml.example").read_text()
    text = example[example.index("# [deploy]") :]

    assert not {item.name for item in fields(Deploy) if item.name not in text}
