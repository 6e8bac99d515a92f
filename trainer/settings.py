"""Settings of a training run: one frozen, checked value, and the directories that follow from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from shardline.trainer.errors import SettingsError
from shardline.trainer.files import local_path

STRATEGIES = (
    "auto",
    "one_device",
    "mirrored",
    "central_storage",
    "multi_worker_mirrored",
    "parameter_server",
    "tpu",
)
COMMUNICATIONS = ("auto", "tcp", "ring", "nccl")

#: The settings that take one of some words.
CHOICES = {
    "strategy": STRATEGIES,
    "communication": COMMUNICATIONS,
    "gradient_compression": ("none", "bfloat16", "float16"),
    "shard_policy": ("auto", "file", "data", "off"),
    "cache": ("auto", "memory", "off"),
    "precision": ("float32", "bfloat16", "float16"),
}
_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    tuple: "a list of texts",
}
_AT_LEAST_ONE = ("epochs", "per_replica_batch_size", "gradient_accumulation_steps", "keep_checkpoints")


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Settings of one training run; the same on every replica.

    Attributes:
        dataset: Dataset directory, a path or gs://.
        model: Built-in model name, keras:NAME, or the user's own `pkg.module:function`.
        model_dir: Where the chief writes the model; "" means AIP_MODEL_DIR.
        checkpoint_dir: Where checkpoints are kept; "" means AIP_CHECKPOINT_DIR, else `model_dir`/checkpoints.
        tensorboard_log_dir: Where logs go; "" means AIP_TENSORBOARD_LOG_DIR, else `model_dir`/logs.
        hparams: Keyword arguments of the model function.
        initial_model: model.keras whose weights a new run starts with, or a directory that holds one, also
            a champion's.
        epochs: Passes over the training split.
        max_steps: Steps after which training ends, whatever the epochs; 0 for no such limit.
        max_time: Seconds after which training ends, whatever the epochs; 0 for no such limit.
        per_replica_batch_size: Examples per replica and step.
        gradient_accumulation_steps: Steps whose gradients are averaged into one update.
        learning_rate: Learning rate for the model function; 0 keeps the model's own default.
        scale_learning_rate: Whether to multiply the learning rate by the number of replicas.
        warmup_steps: Updates over which the learning rate rises linearly to its full value.
        unfreeze_at_epoch: Epoch, from 1, at whose start frozen layers become trainable; 0 for never.
        fine_tuning_learning_rate: Learning rate from then on; 0 keeps it.
        label_smoothing: Label smoothing for the model function, in 0..1; 0 is not passed on.
        class_weights: Weights in the loss: "balanced", a JSON object of class names and weights, or "".
        augment: `pkg.module:function` applied to each training example; "" for none.
        transform: `pkg.module:function` that makes of a batch (x, y) what the model takes; "" for none.
        callbacks: `pkg.module:make` of further Keras callbacks.
        early_stopping: Metric that must improve ("val_loss"); "" trains to the end.
        early_stopping_patience: Epochs without improvement after which training stops.
        tuning_metric: Metric reported to a hyperparameter tuning job after each validation ("val_accuracy");
            "" reports none.
        precision: Type of the computation: float32, bfloat16 or float16; weights stay float32.
        jit_compile: Whether XLA compiles the step.
        seed: Seed of weights, dropout and shuffling.
        deterministic: Whether TensorFlow has to choose deterministic kernels.
        strategy: Strategy of tf.distribute; auto chooses by cluster and devices.
        communication: How workers exchange gradients: tcp, a ring of sockets, which auto takes between
            CPUs; or TensorFlow's own ring or nccl.
        gradient_compression: Type in which gradients travel: none (float32, exact), bfloat16 or float16.
        averaging_steps: Steps that each worker takes by itself until weights are averaged (local SGD, another
            algorithm); 0 exchanges the gradients of every step.
        shard_policy: How data reaches the workers: file, whole shards to each; data, each keeps its share of
            all records; auto, file where shards can be dealt out evenly; off, without a common order.
        cache: Whether each worker keeps its decoded examples in memory: memory, off, or auto for where there
            is room and more than one epoch.
        steps_per_execution: Steps between two looks at the metrics; 0 adapts it to about a second.
        checkpoint_steps: Steps between checkpoints within an epoch; 0 for none.
        checkpoint_minutes: Minutes between checkpoints within an epoch; 0 for none.
        keep_checkpoints: Newest checkpoints that are kept.
        allow_new_data: Whether to resume although the dataset is no longer the checkpoint's.
        evaluator: Whether an evaluator task runs beside, for whose last result the chief waits.
        evaluator_timeout: Seconds for which the chief waits for that result.
        startup_timeout: Seconds for all replicas to come up.
        grace_period: Seconds from SIGTERM until the process must have ended.
        cpu_devices: Logical devices into which this machine's CPU is divided; 0 leaves it whole.
        histograms: Epochs between TensorBoard histograms of the weights; 0 for none.
        profile_steps: First and last step of TensorBoard's profile, "10,20"; "" for none.
    """

    dataset: str
    model: str
    model_dir: str = ""
    checkpoint_dir: str = ""
    tensorboard_log_dir: str = ""
    hparams: Mapping[str, Any] = field(default_factory=dict)
    initial_model: str = ""
    epochs: int = 10
    max_steps: int = 0
    max_time: float = 0.0
    per_replica_batch_size: int = 16
    gradient_accumulation_steps: int = 1
    learning_rate: float = 0.0
    scale_learning_rate: bool = False
    warmup_steps: int = 0
    unfreeze_at_epoch: int = 0
    fine_tuning_learning_rate: float = 0.0
    label_smoothing: float = 0.0
    class_weights: str = ""
    augment: str = ""
    transform: str = ""
    callbacks: tuple[str, ...] = ()
    early_stopping: str = ""
    early_stopping_patience: int = 3
    tuning_metric: str = ""
    precision: str = "float32"
    jit_compile: bool = False
    seed: int = 0
    deterministic: bool = False
    strategy: str = "auto"
    communication: str = "auto"
    gradient_compression: str = "none"
    averaging_steps: int = 0
    shard_policy: str = "auto"
    cache: str = "auto"
    steps_per_execution: int = 0
    checkpoint_steps: int = 0
    checkpoint_minutes: float = 10.0
    keep_checkpoints: int = 3
    allow_new_data: bool = False
    evaluator: bool = False
    evaluator_timeout: float = 600.0
    startup_timeout: float = 600.0
    grace_period: float = 25.0
    cpu_devices: int = 0
    histograms: int = 0
    profile_steps: str = ""

    def __post_init__(self) -> None:
        for field_ in fields(self):
            self._check_type_and_range(field_.name, field_.default)
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise SettingsError(f"unknown {name} {getattr(self, name)!r}; there are {', '.join(choices)}")
        if not self.model:
            raise SettingsError("model is empty; give a built-in name or pkg.module:function")
        if self.label_smoothing >= 1:
            raise SettingsError(f"label_smoothing must be below 1, got {self.label_smoothing}")
        if self.fine_tuning_learning_rate and not self.unfreeze_at_epoch:
            raise SettingsError("fine_tuning_learning_rate needs unfreeze_at_epoch, the epoch it starts with")
        if self.unfreeze_at_epoch > self.epochs:
            raise SettingsError(
                f"unfreeze_at_epoch {self.unfreeze_at_epoch} never comes: the run has {self.epochs} epochs"
            )
        if self.averaging_steps and self.gradient_accumulation_steps > 1:
            raise SettingsError(
                "averaging_steps and gradient_accumulation_steps exclude each other; give one of them"
            )
        if self.transform and self.class_weights:
            raise SettingsError(
                "transform and class_weights exclude each other: return the weights from transform"
            )
        _ = self.profiled_steps

    def _check_type_and_range(self, name: str, default: Any) -> None:
        value, kind = getattr(self, name), type(default)
        right = (int, float) if kind is float else (kind,)
        if kind in _KINDS and type(value) not in right:
            raise SettingsError(f"{name} must be {_KINDS[kind]}, got {value!r}")
        least = int(name in _AT_LEAST_ONE)
        if kind in (int, float) and not least <= value < math.inf:
            rule = f"must be at least {least}" if least else "must not be negative"
            raise SettingsError(f"{name} {rule}, got {value}")

    @property
    def model_arguments(self) -> dict[str, Any]:
        """Keyword arguments of the model function."""
        chosen = {name: getattr(self, name) for name in ("learning_rate", "label_smoothing")}
        return {**{name: value for name, value in chosen.items() if value}, **self.hparams}

    @property
    def profiled_steps(self) -> tuple[int, int] | None:
        """First and last profiled step, from 1."""
        if not self.profile_steps:
            return None
        try:
            first, last = (int(text) for text in self.profile_steps.split(","))
        except ValueError:
            first, last = 0, 0
        if not 1 <= first <= last:
            raise SettingsError(
                f"profile_steps takes a first and a last step such as 10,20, got {self.profile_steps!r}"
            )
        return first, last


@dataclass(frozen=True)
class OutputDirs:
    """Directories of a run as this machine sees them: of the model, of checkpoints, of TensorBoard's logs."""

    model: Path
    checkpoints: Path
    logs: Path


def output_dirs(settings: TrainSettings, environ: Mapping[str, str]) -> OutputDirs:
    """Decides where the run writes: flags first, then AIP_*, then a default; the model directory has none."""
    model = settings.model_dir or environ.get("AIP_MODEL_DIR", "")
    if not model:
        raise SettingsError(
            "no place for the model: give --model-dir, or set AIP_MODEL_DIR as Vertex AI does"
        )
    base = local_path(model)
    checkpoints = settings.checkpoint_dir or environ.get("AIP_CHECKPOINT_DIR", "")
    logs = settings.tensorboard_log_dir or environ.get("AIP_TENSORBOARD_LOG_DIR", "")
    return OutputDirs(
        model=base,
        checkpoints=local_path(checkpoints) if checkpoints else base / "checkpoints",
        logs=local_path(logs) if logs else base / "logs",
    )
