"""Settings of a training run as one validated dataclass, and its output directories."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from shardline.trainer.base.deserialize import Count, Natural, Within, check_types
from shardline.trainer.base.errors import ModelError, SettingsError
from shardline.trainer.base.files import local_path, read_json
from shardline.trainer.base.plugins import KERAS_PREFIX

MODEL_FILE = "model.keras"
SETTINGS_FILE = "settings.json"
HISTORY_FILE = "history.csv"

#: Settings with paths, which may differ between machines; their contents are compared instead.
PATH_SETTINGS = ("dataset", "model_dir", "checkpoint_dir", "tensorboard_log_dir")

#: Value of class_weights: all classes count alike.
BALANCED = "balanced"
# The trainer seeds with seed + 1, and NumPy takes 32 bits.
_LARGEST_SEED = 2**32 - 2
#: From 0 on.
_Number = Annotated[float, Within(0)]


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Settings of one training run, the same on every replica; each annotation is its help text."""

    dataset: Annotated[str, "Dataset directory, a path or gs://."]
    model: Annotated[str, "Built-in model, keras:NAME, or your own pkg.module:function."]
    model_dir: Annotated[str, 'Directory of the model; "" for AIP_MODEL_DIR.'] = ""
    checkpoint_dir: Annotated[
        str, 'Directory of checkpoints; "" for AIP_CHECKPOINT_DIR, or model_dir/checkpoints.'
    ] = ""
    tensorboard_log_dir: Annotated[
        str, 'Directory of logs; "" for AIP_TENSORBOARD_LOG_DIR, or model_dir/logs.'
    ] = ""
    hparams: Annotated[Mapping[str, Any], "Arguments of the model function."] = field(default_factory=dict)
    initial_model: Annotated[str, "model.keras to start from, a directory with one, or a champion_uri."] = ""
    epochs: Annotated[int, "Epochs over the training split."] = 10
    max_steps: Annotated[Natural, "Steps after which training ends; 0 for no limit."] = 0
    max_time: Annotated[_Number, "Seconds after which training ends; 0 for no limit."] = 0.0
    per_replica_batch_size: Annotated[
        Natural, "Examples per replica and step; 0 for 16, or a worker's share of the split if that is less."
    ] = 16
    gradient_accumulation_steps: Annotated[Count, "Steps whose gradients are averaged into one update."] = 1
    learning_rate: Annotated[_Number, "Learning rate for the model function; 0 for its default."] = 0.0
    class_weights: Annotated[str | Mapping[str, Any], '"balanced", or weights by class name, an object.'] = ""
    augment: Annotated[str, 'pkg.module:function applied to each training example; "" for none.'] = ""
    transform: Annotated[str, "pkg.module:function from a batch (x, y) to the model's input."] = ""
    allow_unexportable: Annotated[bool, "Train a model even if it cannot be loaded or exported."] = False
    callbacks: Annotated[tuple[str, ...], "pkg.module:make that returns Keras callbacks."] = ()
    early_stopping: Annotated[str, 'Metric that must improve ("val_loss"); "" for none.'] = ""
    early_stopping_patience: Annotated[Natural, "Epochs without improvement before training stops."] = 3
    tuning_metric: Annotated[str, 'Metric reported to a tuning job after each epoch ("val_accuracy").'] = ""
    precision: Annotated[
        Literal["float32", "bfloat16", "float16"], "Type of the computation; weights stay float32."
    ] = "float32"
    jit_compile: Annotated[Literal["auto", "on", "off"], "XLA compilation; auto decides as `fit` does."] = (
        "auto"
    )
    seed: Annotated[int, Within(0, _LARGEST_SEED), "Seed of weights, dropout and shuffling."] = 0
    deterministic: Annotated[bool, "Use deterministic TensorFlow kernels."] = False
    strategy: Annotated[
        Literal["auto", "one_device", "mirrored", "multi_worker_mirrored", "parameter_server"],
        "tf.distribute strategy; auto chooses by cluster and devices.",
    ] = "auto"
    communication: Annotated[
        Literal["auto", "tcp", "ring", "nccl"],
        "Exchange of gradients: tcp (Shardline's ring of sockets, auto between CPUs), or TensorFlow's ring "
        "or nccl.",
    ] = "auto"
    cache: Annotated[
        Literal["auto", "memory", "off"], "Cache of decoded examples; auto uses memory if there is room."
    ] = "auto"
    steps_per_execution: Annotated[Natural, "Steps between readings of metrics; 0 for about a second."] = 0
    checkpoint_steps: Annotated[Natural, "Steps between checkpoints within an epoch; 0 for none."] = 0
    checkpoint_minutes: Annotated[_Number, "Minutes between checkpoints within an epoch; 0 for none."] = 10.0
    keep_checkpoints: Annotated[Count, "Number of newest checkpoints to keep."] = 3
    allow_new_data: Annotated[bool, "Resume even if the dataset has changed."] = False
    evaluator: Annotated[bool, "Expect an evaluator; the chief waits for its last result."] = False
    startup_timeout: Annotated[_Number, "Seconds for all replicas to start."] = 600.0
    peer_timeout: Annotated[float, Within(1), "Seconds of silence after which a replica is lost."] = 60.0
    grace_period: Annotated[_Number, "Seconds from SIGTERM to the end of the process."] = 25.0
    stall_timeout: Annotated[_Number, "Seconds without progress after which a replica ends; 0 for never."] = (
        1800.0
    )
    cpu_devices: Annotated[Natural, "Logical devices to divide the CPU into; 0 for one."] = 0

    def __post_init__(self) -> None:
        check_types(self)
        # `fit`, which has no dataset setting, takes 0 as Keras does.
        if self.epochs < (least := int(bool(self.dataset))):
            raise SettingsError(f"epochs must be at least {least}, got {self.epochs}")
        if isinstance(self.class_weights, str) and self.class_weights not in ("", BALANCED):
            raise SettingsError(
                f'class_weights must be "{BALANCED}" or an object of weights by class name such as '
                f'{{"No": 1, "Yes": 4}}, no text, got {self.class_weights[:80]!r}'
            )
        if not self.model:
            raise SettingsError("model is empty; name a built-in model or pkg.module:function")
        if self.transform and self.class_weights:
            raise SettingsError(
                "transform and class_weights exclude each other: return the weights from transform"
            )

    @property
    def model_arguments(self) -> dict[str, Any]:
        """Keyword arguments of the model function."""
        rate = {"learning_rate": float(self.learning_rate)} if self.learning_rate else {}
        return {**rate, **self.hparams}


def flag_name(setting: str) -> str:
    """Returns the command-line flag of a setting ("--per-replica-batch-size")."""
    return "--" + {"callbacks": "callback"}.get(setting, setting).replace("_", "-")


@dataclass(frozen=True)
class OutputDirs:
    """Local directories of a run: model, checkpoints and TensorBoard logs."""

    model: Path
    checkpoints: Path
    logs: Path

    def make(self) -> None:
        """Creates those that TensorFlow writes to, whose writers give no clear error."""
        for directory in (self.model, self.logs):
            directory.mkdir(parents=True, exist_ok=True)


def plugin_references(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the import strings in the settings of a training run, by setting."""
    model, callbacks = settings.get("model"), settings.get("callbacks")
    named = {
        "model": "" if str(model).startswith(KERAS_PREFIX) else model,
        "augment": settings.get("augment"),
        "transform": settings.get("transform"),
    }
    if isinstance(callbacks, list | tuple):
        named |= {f"callbacks[{index}]": callback for index, callback in enumerate(callbacks)}
    return {name: value for name, value in named.items() if isinstance(value, str) and ":" in value}


def output_dirs(settings: TrainSettings, environ: Mapping[str, str]) -> OutputDirs:
    """Returns the output directories: from flags, else AIP_*, else defaults; the model's has no default."""
    model = settings.model_dir or environ.get("AIP_MODEL_DIR", "")
    if not model:
        raise SettingsError(
            "no directory for the model: pass --model-dir, or set AIP_MODEL_DIR as Vertex AI does"
        )
    base = local_path(model)
    checkpoints = settings.checkpoint_dir or environ.get("AIP_CHECKPOINT_DIR", "")
    logs = settings.tensorboard_log_dir or environ.get("AIP_TENSORBOARD_LOG_DIR", "")
    return OutputDirs(
        model=base,
        checkpoints=local_path(checkpoints) if checkpoints else base / "checkpoints",
        logs=local_path(logs) if logs else base / "logs",
    )


def initial_model_file(uri: str) -> Path:
    """Returns the model file of the setting `initial_model`, in a model store that of the champion.

    Raises ModelError where champion.json is damaged.
    """
    path = local_path(uri)
    if not path.is_dir():
        return path
    champion = path / "champion.json"
    if not champion.is_file():
        return path / MODEL_FILE
    version = Path(read_entry(champion, "path", "register a model again"))
    if version.is_absolute() or ".." in version.parts:
        raise ModelError(f"{champion} names a version outside its directory: {version}")
    return path / version / MODEL_FILE


def read_entry(file: Path, name: str, advice: str) -> str:
    """Returns a text in a JSON file; ModelError, with advice, where there is none."""
    value = read_json(file, ModelError).get(name)
    if not isinstance(value, str):
        raise ModelError(f"{file} has no text {name!r}, it has {value!r}; {advice}")
    return value
