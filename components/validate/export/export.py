"""Export: writes a Keras model as a SavedModel with signatures, and checks that their predictions agree."""

from __future__ import annotations

import base64
import itertools
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from shardline.components import model_store
from shardline.components.model_store import Export
from shardline.components.validate.export import clean_process, signatures
from shardline.components.validate.export.formats import check_formats, convert_export
from shardline.components.validate.export.signatures import max_difference, name_outputs, read_deviations
from shardline.trainer.base import code, files
from shardline.trainer.base.errors import DatasetError
from shardline.trainer.base.progress import report
from shardline.trainer.base.settings import MODEL_FILE, SETTINGS_FILE
from shardline.trainer.data import transforms
from shardline.trainer.data.examples import Inputs, Prepare, parse_batch
from shardline.trainer.keras_compat.tensorflow_internals import short_error
from shardline.trainer.manifest import CLASS, Manifest
from shardline.trainer.models import Heads, read_heads, to_predictions

if TYPE_CHECKING:
    from shardline.components.validate.gate import TrainingKeys

#: Number of examples on which an export is compared with its model.
SAMPLES = 256

#: Examples in the golden set, and bytes of them and their outputs; JSON has up to six times as many.
GOLDEN, GOLDEN_BYTES = 16, 8 << 20

# Examples that the model has not seen come first.
_SAMPLED_SPLITS = ("test", "validation", "train")

_PACKAGES = ("shardline", "tensorflow", "keras", "numpy")

# Like `git rev-parse HEAD`, with "-dirty" where files differ from it.
_DESCRIBE = ("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def export_model(
    model: keras.Model,
    manifest: Manifest,
    out: Path,
    *,
    model_file: Path | None = None,
    samples: Sequence[bytes] = (),
    settings: Mapping[str, Any] | None = None,
    formats: Sequence[str] = (),
    heads: Heads | None = None,
    training_keys: TrainingKeys | None = None,
) -> tuple[Export, Any]:
    """Writes `out`/saved_model, a copy of the model file and, when both are complete, `out`/export.json.

    The SavedModel, which is loaded without Shardline, has the signatures `signatures.DEFAULT`, TENSOR of
    images, and EXAMPLE, with the outputs `signatures.OUTPUTS`.

    Args:
        model: Takes the inputs of the manifest's examples, and returns a number per class (one number for two
            classes) or per number; with several labels a dict of these, or a list.
        manifest: That of the training's dataset.
        out: Output directory, from which an earlier validation is removed.
        model_file: The model.keras that the model was loaded from, with its input transform next to it.
        samples: Serialized tf.train.Example on which export and model are compared, and for the golden set.
        settings: Settings of the training, for export.json.
        formats: Formats into which `serving_tensor` is converted as well.
        heads: What the model's outputs are, by name for several labels; None infers it from model and loss.
        training_keys: Keys of the examples that the model was trained on.

    Returns the content of export.json, and the result of `tf.saved_model.load`. Raises ModelError when the
    model does not fit the dataset or cannot be served, before anything is written, or when it cannot be
    converted; DatasetError when a sample cannot be decoded; SettingsError when `out` cannot be written to, or
    the packages of a format are not installed.
    """
    check_formats(formats, manifest)
    prepared = transforms.load(model_file) if model_file else None
    prepare = prepared.prepare if prepared else None
    heads = read_heads(model, manifest.info(), heads, prepare=prepare)
    functions = signatures.make_signatures(model, manifest, heads, prepare)
    model_store.clear(out)
    saved_model = out / model_store.SAVED_MODEL
    _write(saved_model, functions, (model, prepared))
    if model_file is not None:
        _copy_model(model_file, out)
    loaded = tf.saved_model.load(str(saved_model))
    export = replace(_describe(model, manifest, heads, loaded, saved_model), settings=dict(settings or {}))
    if formats:
        answer, parts = functions[signatures.TENSOR], [model, prepared]
        converted = {name: convert_export(name, out, answer, parts, manifest) for name in formats}
        export = replace(export, formats=converted)
    if training_keys:
        training_keys.write(out)
        export = replace(export, training_data=training_keys.data)
    if samples:
        report("validate", f"comparing the export with the model on {len(samples):,} examples")
        export = replace(
            export,
            compared_examples=len(samples),
            max_difference=measure_difference(model, heads, manifest, loaded, samples, prepare),
            golden=make_golden_set(manifest, loaded, samples),
        )
    export.write(out)
    return export, loaded


def _write(path: Path, functions: Mapping[str, Any], parts: Sequence[Any]) -> None:
    """Writes a SavedModel with signatures, their variables, and the vocabularies' tables in the parts."""
    # TensorFlow would trace a function that is an attribute again, as those of Keras' ExportArchive.
    concrete = {name: function.get_concrete_function() for name, function in functions.items()}
    module, table = tf.Module(), tf.saved_model.experimental.TrackableResource
    module.used = list({id(each): each for one in concrete.values() for each in one.variables}.values())
    views = [tf.train.TrackableView(part) for part in parts if part is not None]
    module.tables = [each for view in views for each in view.descendants() if isinstance(each, table)]
    tf.saved_model.save(module, str(path), concrete)


def take_samples(
    manifest: Manifest, directory: Path, count: int = SAMPLES, splits: Sequence[str] = _SAMPLED_SPLITS
) -> tuple[bytes, ...]:
    """Returns the first serialized tf.train.Example of the splits, in their order, at most `count`.

    Raises DatasetError when a shard cannot be read.
    """
    present = [manifest.splits[name] for name in splits if name in manifest.splits]
    paths = [str(directory / shard.file) for split in present for shard in split.shards]
    records = tf.data.TFRecordDataset(paths)
    try:
        return tuple(records.take(count).as_numpy_iterator())
    except (tf.errors.DataLossError, tf.errors.NotFoundError) as error:
        raise DatasetError(
            f"a shard in {directory} is damaged: {short_error(error)}; preprocess the data again"
        ) from None


def measure_difference(
    model: keras.Model,
    heads: Heads,
    manifest: Manifest,
    loaded: Any,
    samples: Sequence[bytes],
    prepare: Prepare | None = None,
) -> float:
    """Returns the largest difference of a probability or number between an export and its model.

    It covers all signatures, outputs and samples; numbers are in standard deviations; at least 1 where only
    one of two values is finite. Raises DatasetError when a sample cannot be decoded.
    """
    labels, deviations = manifest.labels, read_deviations(manifest)
    names = name_outputs(labels)

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def trained(examples: tf.Tensor) -> tuple[Inputs, dict[str, tf.Tensor]]:
        inputs, _ = parse_batch(examples, manifest.inputs, labels)
        outputs = model(prepare(inputs) if prepare else inputs, training=False)
        return inputs, to_predictions(model, outputs, heads, labels)

    largest = 0.0
    try:
        for start in range(0, len(samples), 64):
            examples = tf.constant(samples[start : start + 64])
            inputs, answers = trained(examples)
            expected = {label: values.numpy() for label, values in answers.items()}
            for name, request in signatures.make_requests(manifest, examples, inputs).items():
                answer = loaded.signatures[name](**request)
                for label, wanted in expected.items():
                    exported = answer[names[label][0]].numpy().reshape(wanted.shape)
                    largest = max(largest, max_difference(wanted, exported, deviations.get(label, ())))
    except tf.errors.InvalidArgumentError as error:
        raise DatasetError(
            f"one of the first {len(samples):,} examples cannot be served: {short_error(error)}; "
            "preprocess the data again"
        ) from None
    return largest


def make_golden_set(manifest: Manifest, loaded: Any, samples: Sequence[bytes]) -> dict[str, Any]:
    """Returns requests with their predictions, in the form of TensorFlow Serving's REST interface.

    They verify that a deployment serves this model. They are the first samples, fewer where these are large.
    """
    outputs = 4 * sum(len(label.outputs) for label in manifest.labels)
    sizes = itertools.accumulate(len(sample) + outputs for sample in samples[:GOLDEN])
    examples = tf.constant(samples[: sum(size <= GOLDEN_BYTES for size in sizes)] or [min(samples, key=len)])
    inputs, _ = parse_batch(examples, manifest.inputs, manifest.labels)
    request = signatures.make_requests(manifest, examples, inputs)[signatures.DEFAULT]
    answer = loaded.signatures[signatures.DEFAULT](**request)
    output_names = [name for names in name_outputs(manifest.labels).values() for name in names]
    if "image" in manifest.inputs:
        images = request[signatures.IMAGES].numpy()
        instances: list[Any] = [{"b64": base64.b64encode(image).decode("ascii")} for image in images]
    else:
        instances = clean_process.to_rows(request)
    return {
        "signature_name": signatures.DEFAULT,
        "instances": instances,
        "predictions": clean_process.to_rows({name: answer[name] for name in output_names}),
    }


def read_revision() -> str | None:
    """Returns the git revision of the working directory, or the image's own; None where neither is known.

    That of an image is not the revision of code that came with the pipeline.
    """
    try:
        described = subprocess.run(_DESCRIBE, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        # There is no git in the image: its Dockerfile sets the revision that it was built from.
        return None if code.VARIABLE in os.environ else os.environ.get("SHARDLINE_REVISION") or None
    return described.stdout.strip()


def _describe(model: keras.Model, manifest: Manifest, heads: Heads, loaded: Any, saved_model: Path) -> Export:
    output_names = [name for names in name_outputs(manifest.labels).values() for name in names]
    return Export(
        fingerprint=manifest.fingerprint,
        labels=manifest.labels,
        deviations=read_deviations(manifest),
        inputs={
            name: {**asdict(manifest.inputs[name]), "argument": argument}
            for name, argument in signatures.argument_names(manifest.inputs).items()
        },
        signatures={
            name: {
                "inputs": _describe_tensors(inputs := signature.structured_input_signature[1], inputs),
                "outputs": _describe_tensors(signature.structured_outputs, output_names),
            }
            for name, signature in loaded.signatures.items()
        },
        softmax_added=any(heads[label.name] == "logits" for label in manifest.labels if label.kind == CLASS),
        parameters=model.count_params(),
        bytes=sum(path.stat().st_size for path in saved_model.rglob("*") if path.is_file()),
        versions={
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in _PACKAGES},
            **code.versions(code.unpacked_files()),
        },
        git_revision=read_revision(),
    )


def _describe_tensors(specs: Mapping[str, tf.TensorSpec], names: Iterable[str]) -> dict[str, Any]:
    return {name: {"dtype": specs[name].dtype.name, "shape": specs[name].shape.as_list()} for name in names}


def _copy_model(model_file: Path, out: Path) -> None:
    source = model_file.parent
    # The settings name the module of the model function.
    for name, copied in ((model_file.name, MODEL_FILE), (SETTINGS_FILE,) * 2):
        original, copy = source / name, out / copied
        if original.is_file() and not (copy.exists() and original.samefile(copy)):
            with files.replacing(copy) as temporary:
                shutil.copyfile(original, temporary)
    prepared, target = source / transforms.DIRECTORY, out / transforms.DIRECTORY
    if source.resolve() == out.resolve():
        return
    if target.exists():
        shutil.rmtree(target)
    if prepared.is_dir():
        shutil.copytree(prepared, target, copy_function=shutil.copyfile)
