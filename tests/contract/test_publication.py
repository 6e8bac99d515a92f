"""A blessed model is prepared for the upload, and becomes the champion, even if a task fails in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kfp import dsl

from shardline.components.model_store.champions import current, versions
from shardline.components.model_store.store import DiskStore
from shardline.components.register.component import register, serving_model
from tests.contract.fake.services import PROJECT_NUMBER
from tests.contract.fake.vertex import LOCATION
from tests.helpers.exports import judge_again, write_export

PARENT = f"projects/{PROJECT_NUMBER}/locations/{LOCATION}/models/7"


class Publication:
    """The tasks of one run after its model was blessed, in the pipeline's order; a failed one is repeated."""

    def __init__(self, directory: Path, run: str = "retrain-1") -> None:
        self.champion = directory / "champion"
        self._exported = dsl.Model(uri=str(directory / run))
        if not Path(self._exported.path).exists():
            write_export(Path(self._exported.path), weights=run.encode())
            judge_again(Path(self._exported.path), self.champion)
        self._serving = dsl.Artifact(uri=str(directory / "serving" / run))
        self._run, self.uploads = run, 0

    def do(self) -> None:
        """Does all tasks that are still to be done, as an attempt that knows nothing of the one before."""
        common: dict[str, Any] = {"quality": "accuracy 0.9700"}
        of_run: dict[str, Any] = {"gate": {"champion_uri": str(self.champion)}, "job_name": self._run}
        serving_model(exported=self._exported, serving=self._serving, image_uri="s:1", **common, **of_run)
        self.uploads += 1  # Google's own, which has a test of its own
        register(exported=self._exported, **common, **of_run)


@pytest.mark.parametrize("where", ["put", "after put", "replace", "after replace"])
def test_one_champion_whatever_failed_before(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publication = Publication(tmp_path)
    step = where.removeprefix("after ")
    method = getattr(DiskStore, step)

    def failing(*arguments: Any) -> Any:
        monkeypatch.setattr(DiskStore, step, method)
        if where != step:
            method(*arguments)
        raise SystemExit(1)

    monkeypatch.setattr(DiskStore, step, failing)
    with pytest.raises(SystemExit):
        publication.do()
    publication.do()
    publication.do()  # its answer was lost on the way to the platform

    assert versions(publication.champion) == [current(publication.champion)]
    # A copy without a record stays: its publisher may be at work.
    left = 2 if where == "after put" else 1
    assert len(list((publication.champion / "versions").iterdir())) == left


def test_the_next_run_publishes_its_own(tmp_path: Path) -> None:
    first = Publication(tmp_path, "retrain-1")
    first.do()
    second = Publication(tmp_path, "retrain-2")
    second.do()
    first.do()  # an old attempt that comes late replaces nothing

    found = current(second.champion)
    assert found is not None
    assert (found.run, len(versions(second.champion))) == ("retrain-2", 2)


def test_the_loser_is_not_uploaded(tmp_path: Path) -> None:
    late, fast = (Publication(tmp_path, name) for name in ("retrain-1", "retrain-2"))
    fast.do()
    with pytest.raises(SystemExit) as ended:
        late.do()

    assert ended.value.code == 2
    assert late.uploads == 0
    assert [item.run for item in versions(fast.champion)] == ["retrain-2"]
