"""A run that resumes with other settings."""

import json

import numpy as np
import pytest
import tensorflow as tf

from shardline.trainer.base.errors import DivergedError, SettingsError
from shardline.trainer.models.saving import load_model
from tests.helpers import replicas
from tests.trainer.test_train import run as train


def run(dataset, out, **changes):
    return train(dataset, out, **{"model": "tests.helpers.models:synchronized", "epochs": 1, **changes})


def rates(out):
    """Returns the learning rates in the newest checkpoint; one that LossScaleOptimizer ignores is 0."""
    reader = tf.train.load_checkpoint(newest(out))
    names = [name for name in reader.get_variable_to_shape_map() if name.endswith("learning_rate")]
    return [pytest.approx(rate) for name in names if (rate := float(reader.get_tensor(name)))]


def newest(out):
    steps = max(int(path.stem.removeprefix("ckpt-")) for path in out.glob("checkpoints/*.index"))
    return str(out / "checkpoints" / f"ckpt-{steps}")


def settings_of(out):
    return json.loads((out / "settings.json").read_text())


def test_another_learning_rate_takes_effect_and_is_recorded(dataset, tmp_path, capsys):
    precision = "float16"
    run(dataset, tmp_path, learning_rate=0.01, precision=precision)
    assert settings_of(tmp_path)["changes"] == []
    run(dataset, tmp_path, learning_rate=0.002, precision=precision, epochs=2)

    assert rates(tmp_path) == [0.002]
    assert "learning_rate was 0.01, is 0.002 from step 7 on" in capsys.readouterr().out
    changes = {one["setting"]: one for one in settings_of(tmp_path)["changes"]}
    assert changes["learning_rate"] == {"step": 7, "setting": "learning_rate", "was": 0.01, "is": 0.002}

    run(dataset, tmp_path, learning_rate=0.002, precision=precision, epochs=3)
    assert [one["setting"] for one in settings_of(tmp_path)["changes"]] == [
        "epochs",
        "learning_rate",
        "epochs",
    ]


def test_a_learning_rate_that_a_callback_has_lowered_stays(dataset, tmp_path):
    lowered = {"callbacks": ("tests.helpers.models:Halving",), "learning_rate": 0.01}
    run(dataset, tmp_path, **lowered)
    run(dataset, tmp_path, **lowered, epochs=2)

    assert rates(tmp_path) == [0.005]  # saved before the end of the second epoch


def test_a_diverged_run_resumes_with_a_lower_learning_rate(dataset, tmp_path):
    model = {"model": "tests.helpers.models:plain_with_rate"}
    run(dataset, tmp_path, learning_rate=0.1, **model)
    with pytest.raises(DivergedError, match="lower the learning rate"):
        run(dataset, tmp_path, learning_rate=1e38, epochs=2, **model)
    logs = run(dataset, tmp_path, learning_rate=0.05, epochs=2, **model)

    assert np.isfinite(logs["loss"])
    changes = [one for one in settings_of(tmp_path)["changes"] if one["setting"] == "learning_rate"]
    assert [(one["was"], one["is"]) for one in changes] == [(0.1, 0.05)]


def test_a_change_that_comes_too_late_to_be_trained_is_reported(dataset, tmp_path, capsys):
    run(dataset, tmp_path, max_steps=4, learning_rate=0.01)
    run(dataset, tmp_path, max_steps=4, learning_rate=0.5)
    assert "warning: learning_rate was 0.01, is 0.5 from step 5 on: that trains nothing, as max_steps 4" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 3}, "seed was 0, is 3"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps was 1, is 2"),
    ],
)
def test_what_cannot_change_is_refused(dataset, tmp_path, changes, message):
    run(dataset, tmp_path, max_steps=3)
    with pytest.raises(SettingsError) as caught:
        run(dataset, tmp_path, **changes)
    assert message in str(caught.value)


def test_another_number_of_replicas_resumes_in_the_middle_of_an_accumulation(dataset, tmp_path):
    """Two replicas have summed two of three steps of 16 examples."""
    arguments = ["-m", "shardline.trainer.task", "--dataset", dataset, "--model-dir", tmp_path / "parts"]
    arguments += ["--model", "tests.helpers.models:plain", "--epochs", 1, "--gradient-accumulation-steps", 3]
    arguments += ["--per-replica-batch-size", 8, "--cpu-devices", 2, "--max-steps", 2]
    replicas.run([str(one) for one in arguments], 1)
    same = {"model": "tests.helpers.models:plain", "gradient_accumulation_steps": 3}
    run(dataset, tmp_path / "parts", **same)
    run(dataset, tmp_path / "whole", **same)

    parts, whole = (load_model(tmp_path / out / "model.keras").get_weights() for out in ("parts", "whole"))
    for one, other in zip(parts, whole, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
