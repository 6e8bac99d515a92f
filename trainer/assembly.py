"""From settings to a model that is built, in the strategy's scope, and ready for its first step."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import keras

from shardline.trainer.data.pipeline import Feed
from shardline.trainer.distribute import strategy as strategies
from shardline.trainer.models.build import build, create_variables
from shardline.trainer.run import Run
from shardline.trainer.tuning.fine_tuning import FrozenLayers
from shardline.trainer.tuning.optimizer import tune_optimizer
from shardline.trainer.tuning.output_losses import weigh_output_losses
from shardline.trainer.warm_start import warm_start

_POLICIES = {"float32": "float32", "bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}


@dataclass(frozen=True)
class Assembly:
    """A model that is ready to train.

    Attributes:
        model: Compiled and built; its variables belong to the strategy.
        frozen: Its frozen layers, where they are to be trained later.
    """

    model: keras.Model
    frozen: FrozenLayers | None = None


def assemble(run: Run, feed: Feed, *, evaluate_only: bool = False) -> Assembly:
    """Builds the model of a run.

    Args:
        run: The run.
        feed: Data of the shapes that the model will take.
        evaluate_only: Whether weights will be restored and nothing is trained.

    Raises:
        ModelError: When the model function or what it returns cannot be used.
        SettingsError: When a setting does not fit the model.
    """
    settings = run.settings
    # One up: tf.data cannot compare a global seed of 0 with the tensor that seeds each epoch's shuffle.
    keras.utils.set_random_seed(settings.seed + 1)
    keras.config.set_dtype_policy(_POLICIES[settings.precision])
    with run.strategy.scope():
        model = build(
            settings.model,
            run.manifest.info(),
            settings.model_arguments,
            transformed=bool(settings.transform),
        )
        strategies.check_model(run.strategy, model)
        frozen = None
        if not evaluate_only:
            tune_optimizer(model, settings, run.replicas)
            frozen = FrozenLayers(model) if settings.unfreeze_at_epoch else None
        with frozen.thawed() if frozen else contextlib.nullcontext():
            create_variables(model, feed.element_spec)
        weigh_output_losses(model)
        if settings.initial_model and not evaluate_only:
            warm_start(model, settings.initial_model)
    return Assembly(model, frozen)
