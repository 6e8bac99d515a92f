"""MLflow's copy of a model store: an export as the model of a run, and the champion in the model registry.

MLflow's own flavor "tensorflow" loads the SavedModel: without Shardline, and without a pickle.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardline.components.model_store import EXPORT_FILE, SAVED_MODEL, Export, champions
from shardline.components.model_store.catalog import Version, open_store
from shardline.components.runs import tracked
from shardline.trainer.base import files, tracking
from shardline.trainer.base.errors import ModelError
from shardline.trainer.base.progress import report

#: Tags: the store of a registered model, the version that a registered one is, the export that a model is.
STORE_TAG, VERSION_TAG, EXPORT_TAG = "shardline.champion_uri", "shardline.version", "shardline.export"
_UPLOAD_S = 3600.0


def log_model(exported: Path, name: str) -> None:
    """Uploads an export as the model of a run, with signature, input example and requirements."""
    if run := tracking.open_run(name):
        run.call(lambda client: _upload(client, exported, run.id))
        run.close(seconds=_UPLOAD_S)


def mirror_champion(champion_uri: str) -> None:
    """Gives a store's champion the alias "champion" in MLflow's registry; what fails is only reported.

    MLflow moves an alias without compare-and-swap. So the catalog, which decides, is read again after each
    move until both agree: of concurrent publishers, the one that moves it last also reads last.
    """
    result = "MLflow's registry does not follow the champion, until its next change"

    def mirror(client: Any) -> None:
        nonlocal result
        name, moved = _registered_model(client, champion_uri), ""
        while (version := champions.require_current(champion_uri)).version != moved:
            number, moved = _registered_version(client, name, champion_uri, version), version.version
            client.set_registered_model_alias(name, "champion", number)
        result = f"{moved} is {name}@champion in MLflow's registry, its version {number}"

    tracked.sign_in()
    if registry := tracking.open_run(""):
        registry.call(mirror)
        registry.close(seconds=_UPLOAD_S)
        report("register", result)


def registered_name(location: str) -> str:
    """Returns the last part of a store's location, without "/", ":" and "..", which MLflow refuses."""
    return re.sub(r"[^\w.-]+", "-", location.rstrip("/").rpartition("/")[2]).strip(".-") or "model"


def _registered_model(client: Any, champion_uri: str) -> str:
    location = open_store(champion_uri).location("")
    location = location if location.startswith("gs://") else str(Path(location).resolve())
    name = registered_name(location)
    with contextlib.suppress(Exception):  # it is there; else the next line fails
        client.create_registered_model(name, {STORE_TAG: location})
    if (owner := client.get_registered_model(name).tags.get(STORE_TAG)) != location:
        raise ModelError(f"{name} is of {owner or 'others'}; rename it, or set {STORE_TAG}={location}")
    return name


def _registered_version(client: Any, name: str, champion_uri: str, version: Version) -> str:
    """Returns the number of a version in the registry, to which it is added where it is missing."""
    wanted = f"name = '{name}' and tags.`{VERSION_TAG}` = '{version.version}'"
    if not (found := client.search_model_versions(wanted)):
        export = champions.read_record(champion_uri, version, EXPORT_FILE, Export)
        if not (model := _find(client, export)):  # then in a run of its own
            run = tracking.open_run(version.version, environ={**os.environ, tracking.RUN_VARIABLE: ""})
            with champions.fetched(champion_uri, version) as exported:
                model = _upload(client, exported, run.id if run else "")
            client.set_terminated(model.source_run_id)
        keys = {"tags": {VERSION_TAG: version.version}, "model_id": model.model_id}
        source = f"models:/{model.model_id}"
        found = [client.create_model_version(name, source, model.source_run_id, **keys)]
    number = min(int(item.version) for item in found)  # a concurrent process may have added one, too
    for key in ("quality", "fingerprint", "verdict", "override"):
        client.set_model_version_tag(name, str(number), key, getattr(version, key))
    return str(number)


def _find(client: Any, export: Export, run_id: str = "") -> Any:
    """Returns the model, of any run or of one, that an export is; None if none has been uploaded."""
    experiments = [item.experiment_id for item in client.search_experiments()]
    found = client.search_logged_models(experiments, f"tags.`{EXPORT_TAG}` = '{_digest(export)}'")
    ready = (model for model in found if model.status == "READY" and run_id in ("", model.source_run_id))
    return next(ready, None)


def _upload(client: Any, exported: Path, run_id: str) -> Any:
    import mlflow
    from mlflow.entities import LoggedModelOutput

    export = Export.read(exported)
    if earlier := _find(client, export, run_id):
        return earlier
    experiment = client.get_run(run_id).info.experiment_id
    model = client.create_logged_model(experiment, "model", run_id, {EXPORT_TAG: _digest(export)})
    client.log_model_artifacts(model.model_id, str(exported / SAVED_MODEL), SAVED_MODEL)
    with tempfile.TemporaryDirectory(prefix="mlflow-") as directory:
        for name, text in model_files(export, mlflow.__version__).items():
            files.write_text(Path(directory, name), text)
        client.log_model_artifacts(model.model_id, directory)
    client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=0)])
    return client.finalize_logged_model(model.model_id, "READY")


def _digest(export: Export) -> str:
    return hashlib.sha256(json.dumps(asdict(export), sort_keys=True).encode()).hexdigest()[:32]


def model_files(export: Export, mlflow_version: str) -> dict[str, str]:
    """Returns the files, by name, that make a model of MLflow of the directory of a SavedModel.

    Encoded images are bytes, which MLflow has in columns only; all else are tensors, texts of dtype object.
    It calls a SavedModel with signatures tf1-estimator: https://mlflow.org/docs/latest/ml/model/#storage-format
    """
    golden, versions = export.golden or {}, {"mlflow": mlflow_version, **export.versions}
    rows, key = golden.get("instances", []), golden.get("signature_name", "serving_default")
    sides = {"inputs": {}, "outputs": {}, **export.signatures.get(key, {})}
    tensors = {side: [_tensor(*item) for item in specs.items()] for side, specs in sides.items()}
    example: Any = {name: [row[name] for row in rows if name in row] for name in sides["inputs"]}
    info = {"artifact_path": "input_example.json", "type": "ndarray"}
    if "image" in export.inputs:
        tensors["inputs"] = [{"type": "binary", "name": "images"}]
        example = {"columns": ["images"], "data": [[row["b64"]] for row in rows]}
        info |= {"type": "dataframe", "pandas_orient": "split"}
    saved = {"saved_model_dir": SAVED_MODEL, "meta_graph_tags": ["serve"], "model_type": "tf1-estimator"}
    python = {"python_version": versions.get("python"), "env": {"virtualenv": "python_env.yaml"}}
    loader = {"loader_module": "mlflow.tensorflow", **python}
    model = {
        "flavors": {"tensorflow": {**saved, "signature_def_key": key}, "python_function": loader},
        "signature": {side: json.dumps(item) for side, item in tensors.items()} if sides["inputs"] else None,
        "saved_input_example_info": info if rows else None,
        **{"model_size_bytes": export.bytes, "mlflow_version": mlflow_version},
    }
    environment = {"python": versions.get("python"), "dependencies": ["-r requirements.txt"]}
    contents = {"MLmodel": model, "python_env.yaml": environment, "input_example.json": example}
    needed = [f"{name}=={versions[name]}\n" for name in ("mlflow", "tensorflow", "keras") if name in versions]
    # MLflow reads YAML, which contains JSON.
    return {"requirements.txt": "".join(needed)} | {name: json.dumps(item) for name, item in contents.items()}


def _tensor(name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    dtype, shape = spec["dtype"].replace("string", "object"), [size or -1 for size in spec["shape"]]
    return {"type": "tensor", "name": name, "tensor-spec": {"dtype": dtype, "shape": shape}}
