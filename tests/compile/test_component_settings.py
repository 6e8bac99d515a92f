"""Settings of our components in a pipeline of one's own, which `shardline check` reads (SL613)."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from kfp import compiler, dsl

from shardline.components import Cluster, CustomJobSettings, WorkerPool, with_image
from shardline.pipelines.check import Pipeline, check_pipeline

PLAIN = with_image("image:1")
ON_TWO = with_image(
    "image:1",
    CustomJobSettings(cluster=Cluster.of(WorkerPool(machine_type="n1-standard-4", replica_count=2))),
)


def findings(
    ours: Any,
    path: Path,
    *,
    given: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    **inputs: Any,
) -> list[str]:
    @dsl.pipeline(name="own")
    def own(epochs: int = 2, rules: list[str] = ["accuracy >= 0.5"], model: str = "") -> None:  # noqa: B006
        dataset = ours.preprocess(**{"source": "digits", **(data or {})}).outputs["dataset"]
        training = {"model_function": model, "epochs": epochs, **inputs}
        trained = ours.train(dataset=dataset, **training).outputs["model"]
        ours.export_validate(dataset=dataset, model=trained, rules=rules)

    compiler.Compiler().compile(own, str(path / "own.yaml"))
    spec = yaml.safe_load((path / "own.yaml").read_text())
    return [f"{one.where}: {one.why}" for one in check_pipeline(Pipeline(spec, given)) if one.code == "SL613"]


@pytest.mark.parametrize("ours", [PLAIN, ON_TWO], ids=["task", "job"])
def test_a_wrong_setting_is_found_before_a_run(ours: Any, tmp_path: Path) -> None:
    wrong = {"options": {"early_stoping": "loss"}}
    assert findings(ours, tmp_path, **wrong)[0].startswith(
        "task train: unknown key options.early_stoping; did you mean options.early_stopping?"
    )
    assert "task train: epochs must be at least 1, got 0" in findings(ours, tmp_path, given={"epochs": "0"})
    assert "mnist_cnnn" in findings(ours, tmp_path, model_function="mnist_cnnn")[0]
    message = "task preprocess: unknown key options.encodng; did you mean options.encoding?"
    assert findings(ours, tmp_path, data={"options": {"encodng": "png"}}) == [message]
    assert "accuracy >> 1" in findings(ours, tmp_path, given={"rules": '["accuracy >> 1"]'})[0]


def test_what_a_run_must_pass_or_a_task_puts_out_is_not_yet_wrong(tmp_path: Path) -> None:
    right = {"options": {"checkpoint_steps": 5}, "hparams": {"units": [8, 4.5]}}
    assert findings(ON_TWO, tmp_path, data={"options": {"shards": 4}}, **right) == []
