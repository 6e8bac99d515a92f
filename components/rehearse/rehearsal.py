"""Rehearsal on a few examples: one step of training, the saved model, its export, and the gate.

Errors that would occur after the cluster has been paid for occur here, with the same message.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardline.components.changes import record_dataset
from shardline.components.model_store.champions import champion_directory, check_champion
from shardline.components.train import read_training
from shardline.components.validate import Gate
from shardline.trainer import manifest as manifests
from shardline.trainer.base import crash, files, progress
from shardline.trainer.base.deserialize import read_options
from shardline.trainer.base.errors import RunError, SettingsError
from shardline.trainer.base.files import local_path
from shardline.trainer.base.settings import MODEL_FILE, TrainSettings
from shardline.trainer.manifest import Manifest, Split

_TOPIC = "rehearse"
#: Examples of each split that are used, at most.
_MAX_EXAMPLES = 32
#: Directories of the job below a run's own.
_JOBS, _CHECKPOINTS = "jobs", "checkpoints"
_INDEX = "ckpt-*.index"


def rehearse_run(
    dataset: Any,
    job: Any,
    *,
    readers: int,
    parameter_servers: int,
    job_directory: str,
    continue_run: str,
    job_name: str,
    history_uri: str,
    fingerprint: str,
    **settings: Any,
) -> str:
    """Rehearses a run; arguments and result are those of `component.rehearse`.

    Raises:
        ShardlineError: As training, export and gate would, or when an output cannot be written to.
    """
    base = job_directory or training_job_directory(job.uri, job_name)
    checked = read_training(settings, "train_options")
    manifest = manifests.load_whole(Path(dataset.path))
    if history_uri:  # before the checks: a refused run leaves the dataset for the next one
        record_dataset(history_uri, fingerprint, dataset.uri)
    directory = champion_directory(base)
    advice = "give the run's service account access to it, or another base_output_directory"
    with crash.output_errors(f"write to {base}", advice):
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".rehearsal-"):
            pass
    if continue_run:
        _copy_checkpoints(continue_run, base, job_name, checked)
    rehearse(
        Path(dataset.path),
        checked,
        read_options(Gate, settings, "gate_options"),
        readers=readers,
        parameter_servers=parameter_servers,
        manifest=manifest,
    )
    return base


def training_job_directory(job_uri: str, job_name: str) -> str:
    """Returns the directory of a run's training job: jobs/RUN, next to the directory of the run's artifacts.

    An artifact is in ROOT/PROJECT NUMBER/RUN/TASK/NAME on the platform, in ROOT/RUN/TASK/NAME elsewhere.
    """
    if job_name.startswith("{{$"):  # the component was called as a function, outside a pipeline
        return job_uri
    root, separator, _ = job_uri.partition(f"/{job_name}/")
    if not job_name or not separator:
        raise RunError(f"the artifact {job_uri} is in no directory of the run {job_name!r}")
    return f"{re.sub(r'/[0-9]+$', '', root)}/{_JOBS}/{job_name}"


def _copy_checkpoints(run: str, base: str, job_name: str, training: TrainSettings) -> None:
    """Copies the checkpoints of another run to the directory of this run's job, unless that has some."""
    if training.checkpoint_dir:
        raise SettingsError("continue_run and checkpoint_dir exclude each other; leave one of them out")
    if "/" not in run and job_name not in base:
        raise SettingsError(
            f"{base} is the same for all runs; give the directory of the checkpoints of {run}"
        )
    directory = local_path(run if "/" in run else base.replace(job_name, run))
    candidates = directory, directory / _CHECKPOINTS
    source = next((path for path in candidates if any(path.glob(_INDEX))), None)
    if source is None:
        raise SettingsError(
            f"there are no checkpoints of the run {run} in {directory}; leave out continue_run"
        )
    own = local_path(base) / _CHECKPOINTS
    if not any(own.glob(_INDEX)):
        own.mkdir(exist_ok=True)
        # The index, which completes a checkpoint, is copied last; run.json names the run of the checkpoints.
        paths = [*source.glob("ckpt-*"), *source.glob("run.json")]
        for path in sorted(paths, key=lambda path: path.match(_INDEX)):
            with files.replacing(own / path.name) as temporary:
                shutil.copyfile(path, temporary)
    progress.report(_TOPIC, f"the training continues from the checkpoints in {source}")


def rehearse(
    dataset: Path,
    training: TrainSettings,
    gate: Gate,
    *,
    readers: int = 1,
    parameter_servers: int = 0,
    manifest: Manifest | None = None,
) -> None:
    """Trains for one step on a few examples, and exports and judges the model, in a temporary directory.

    Checkpoints are neither read nor written; the champion is measured on the same examples. `readers` is the
    number of replicas that will train, 0 if not known. `manifest` is that of a dataset already checked to be
    complete. Raises ShardlineError as training, export and gate would.
    """
    from shardline.trainer import task
    from shardline.trainer.keras_compat import tensorflow_internals

    tensorflow_internals.import_tensorflow()  # quietly
    from shardline.components.validate import validation
    from shardline.components.validate.evaluate import Examples
    from shardline.trainer.cluster import ClusterConfig
    from shardline.trainer.distribute import choose_strategy
    from shardline.trainer.train import check_splits

    started = time.monotonic()
    manifest = manifest or manifests.load_whole(dataset)
    gate.for_dataset(manifest)
    if gate.champion_uri:
        check_champion(gate.champion_uri)
    settings = replace(training, dataset=str(dataset))
    check_splits(settings, manifest, max(1, readers), evaluator=settings.evaluator)
    if readers:
        hosts, servers = ("replica",) * readers, ("server",) * parameter_servers
        cluster = ClusterConfig(hosts=hosts if readers > 1 or servers else (), ps_hosts=servers)
        # Whether there are GPUs for NCCL is checked by the replicas.
        checked = settings if settings.communication != "nccl" else replace(settings, communication="auto")
        choose_strategy(checked, cluster)
    progress.report(_TOPIC, f"one step of {training.model}, its export and its verdict on a few examples")
    with tempfile.TemporaryDirectory(prefix="shardline-rehearsal-") as scratch:
        few, model = Path(scratch, "dataset"), Path(scratch, "model")
        sample = write_sample(dataset, manifest, few)
        with progress.sink(lambda event: None):  # the reports are about a temporary model
            task.run_replica(
                _one_step(settings, few, model, sample), {}
            )  # alone, whatever has started this process
            validation.try_gate(model / MODEL_FILE, Examples(few, sample), gate, training.model)
    seconds = time.monotonic() - started
    progress.report(_TOPIC, f"trains, saves, loads, exports, can be judged: {seconds:.0f} s")


def write_sample(dataset: Path, manifest: Manifest, out: Path) -> Manifest:
    """Writes the first examples of each split of a dataset as a dataset of one shard a split."""
    import google_crc32c
    import tensorflow as tf

    from shardline.components.preprocess.schema import tally_label
    from shardline.components.preprocess.tfrecord import decode
    from shardline.components.validate.export.export import take_samples

    out.mkdir()
    splits = {}
    for name in manifest.splits:
        examples = take_samples(manifest, dataset, _MAX_EXAMPLES, [name])
        columns, _ = decode(examples)
        path = out / f"{name}-00000-of-00001.tfrecord"
        with tf.io.TFRecordWriter(str(path)) as writer:
            for example in examples:
                writer.write(example)
        data = path.read_bytes()
        checksum = f"{google_crc32c.value(data):08x}"
        shard = manifests.Shard(path.name, len(examples), len(data), checksum)
        tallies = {
            label.name: tally_label(label, columns[label.name].to_pylist()) for label in manifest.labels
        }
        splits[name] = Split((shard,), tallies)
    sample = replace(manifest, splits=splits, keys=None)
    manifests.save(sample, out)
    return sample


def _one_step(settings: TrainSettings, dataset: Path, model: Path, sample: Manifest) -> TrainSettings:
    records = sample.splits["train"].records
    return replace(
        settings,
        dataset=str(dataset),
        model_dir=str(model),
        checkpoint_dir="",
        tensorboard_log_dir="",
        max_steps=1,
        per_replica_batch_size=max(1, min(settings.per_replica_batch_size, records)),
        strategy="auto",
        communication="auto",
        cpu_devices=0,
        evaluator=False,
        jit_compile="off",
        checkpoint_steps=0,
        checkpoint_minutes=0.0,
        cache="off",
    )
