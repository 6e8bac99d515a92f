"""The champion: the model that is in use, where it is published, and how the one before comes back.

    CHAMPION/champion.json             which version is the champion; replaced atomically
    CHAMPION/versions/<version>/       an exported model with its evaluation, report and verdict
    CHAMPION/versions/<version>/version.json   written last: a version without it is not complete

A reader opens champion.json and then the version that it names, and never lists versions/. So a reader
sees the old champion or the new one, whatever happens to the publisher in between. This matters on a
Cloud Storage mount, where renaming a directory is not atomic and, by default, not even possible: nothing
here renames a directory, and the one small file that decides is renamed as a file.

One published version of a model, as version.json and champion.json record it.

The output directory of a validation: names of its parts, and what must be gone before it is redone.

OUT/saved_model/      the exported model
OUT/model.keras       the trained model that it was made of, with the settings.json of its training
OUT/model.tflite      the exported model for LiteRT, and model.onnx for ONNX; where they were asked for
OUT/export.json       what was exported; written when all of these are complete
OUT/evaluation.json   what was measured
OUT/report.html       both, for a person
OUT/model_card.html   what the model is for, takes, gives and is worth, for its users; model_card.md likewise
OUT/blessing.json     the verdict; written last: where it is missing, nothing was decided
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shardline.trainer import files
from shardline.trainer.errors import ModelError, RunError, SettingsError

VERSIONS = "versions"
VERSION_FILE = "version.json"

_NAME = re.compile(r"\w[\w-]*")


@dataclass(frozen=True)
class Version:
    """One published version.

    Attributes:
        version: Time of publication and a short digest, unique; versions sort by time.
        path: Of the version's directory, relative to the champion's.
        accuracy: On the test split, 0..1.
        fingerprint: Of the dataset that it was judged on.
        created: Time of publication, ISO 8601, UTC.
        previous: The version that it replaced as champion; "" where there was none.
    """

    version: str
    path: str
    accuracy: float
    fingerprint: str
    created: str
    previous: str = ""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.version) or self.path != f"{VERSIONS}/{self.version}":
            raise ValueError(f"{self.path!r} is not the path of a version {self.version!r}")


def read_record(path: Path, remedy: str) -> Version:
    """Reads a version's record.

    Args:
        path: Of version.json or champion.json.
        remedy: What to do when it cannot be read, for the message.

    Raises:
        ModelError: When it is missing or damaged.
    """
    try:
        return Version(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{path} is damaged: {error}; {remedy}") from None


def complete_versions(champion: Path) -> list[Version]:
    """Returns the complete versions in a champion's directory, oldest first.

    Raises:
        ModelError: When the record of one is damaged.
    """
    records = sorted((champion / VERSIONS).glob(f"*/{VERSION_FILE}"))
    return [read_record(path, f"repair it, or remove {path.parent}") for path in records]


SAVED_MODEL = "saved_model"
MODEL_FILE = "model.keras"
SETTINGS_FILE = "settings.json"
TFLITE_FILE = "model.tflite"
ONNX_FILE = "model.onnx"
EXPORT_FILE = "export.json"
EVALUATION_FILE = "evaluation.json"
REPORT_FILE = "report.html"
CARD_FILE = "model_card.html"
CARD_TEXT_FILE = "model_card.md"
BLESSING_FILE = "blessing.json"

# Model and settings are not among them: they may be those that are being validated.
_EARLIER = (
    BLESSING_FILE,
    REPORT_FILE,
    CARD_FILE,
    CARD_TEXT_FILE,
    EVALUATION_FILE,
    EXPORT_FILE,
    ONNX_FILE,
    TFLITE_FILE,
)


def clear(out: Path) -> None:
    """Makes `out` and takes an earlier validation out of it, the verdict first.

    A verdict must never stand beside a model that it was not reached on, however this process ends.

    Raises:
        SettingsError: When `out` is a file or cannot be written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in _EARLIER:
            (out / name).unlink(missing_ok=True)
        if (out / SAVED_MODEL).exists():
            shutil.rmtree(out / SAVED_MODEL)
    except OSError as error:
        raise SettingsError(
            f"cannot write to the output directory {out}: {error.strerror}; choose another one"
        ) from None


CHAMPION_FILE = "champion.json"

_REMEDY = "repair it, or remove it to start anew"


def champion_directory(uri: str) -> Path:
    """Returns the local path of a champion's URI: a directory here, or gs:// through the /gcs mount.

    Raises:
        SettingsError: When the bucket of a gs:// URI is not mounted; a directory made in its place would
            be lost with this machine.
    """
    path = files.local_path(uri)
    if path != Path(uri):
        bucket = Path(*path.parts[:3])
        if not bucket.is_dir():
            raise SettingsError(
                f"cannot reach {uri}: {bucket} is not mounted here; on Vertex grant the service account "
                "access to the bucket, elsewhere give a local directory"
            )
    return path


def current(champion: Path) -> Version | None:
    """Returns the present champion, or None where nothing has been published yet.

    Raises:
        ModelError: When champion.json is damaged or names a version that is not there.
    """
    path = champion / CHAMPION_FILE
    if not path.exists():
        return None
    found = read_record(path, _REMEDY)
    if not (champion / found.path / VERSION_FILE).is_file():
        raise ModelError(f"{path} names {found.path!r}, which is no complete version; {_REMEDY}")
    return found


def publish(exported: Path, champion: Path, *, accuracy: float) -> Version:
    """Makes an exported model the champion; the previous version is kept.

    The version is copied under a name of its own, file by file, each forced to disk; version.json
    completes it, and replacing champion.json is the commit point. After a crash or an error before that
    point the previous champion is untouched, and publishing again makes a new version.

    Args:
        exported: Output directory of a validation that ended with a blessing.
        champion: Directory of the champion, made if it is not there.
        accuracy: On the test split, 0..1.

    Raises:
        ModelError: When `exported` is not a complete validation, its model is not blessed, or the
            present champion is damaged.
        SettingsError: When `champion` cannot be written to.
        RunError: When writing fails on the way.
    """
    fingerprint = _check_blessed(exported)
    _make_directory(champion / VERSIONS)
    created = datetime.now(UTC)
    name = f"{created:%Y%m%dT%H%M%S}-{_digest(exported, created)[:8]}"
    path = f"{VERSIONS}/{name}"
    _copy(exported, champion / path)
    # Only now: another publisher may have been faster.
    replaced = current(champion)
    published = Version(
        version=name,
        path=path,
        accuracy=accuracy,
        fingerprint=fingerprint,
        created=created.isoformat(timespec="seconds"),
        previous=replaced.version if replaced else "",
    )
    _write(champion / path / VERSION_FILE, published)
    _write(champion / CHAMPION_FILE, published)
    return published


def rollback(champion: Path, version: str = "") -> Version:
    """Makes an earlier version the champion again; none is removed, and nothing is copied.

    Args:
        champion: Directory of the champion.
        version: The version to go to; "" for the one that the present champion replaced.

    Raises:
        ModelError: When there is no champion or no such version, or a record is damaged.
        RunError: When writing fails; the champion is unchanged then.
    """
    present = current(champion)
    if present is None:
        raise ModelError(f"nothing has been published in {champion}; give the directory of a champion")
    wanted = version or present.previous
    if not wanted:
        raise ModelError(
            f"{present.version} replaced no version; name the one to go to, 'shardline champion show "
            f"{champion}' lists them"
        )
    if wanted == present.version:
        raise ModelError(f"{wanted} is the champion already; name another version")
    known = {item.version: item for item in complete_versions(champion)}
    if wanted not in known:
        raise ModelError(f"no version {wanted} in {champion}; there are {', '.join(known)}")
    _write(champion / CHAMPION_FILE, known[wanted])
    return known[wanted]


def _check_blessed(exported: Path) -> str:
    """Returns the fingerprint of the dataset that an exported model was judged on."""
    blessing = read_part(exported, BLESSING_FILE)
    if blessing.get("blessed") is not True:
        raise ModelError(
            f"the model in {exported} is not blessed ({blessing.get('reason')}); it is not published"
        )
    return str(read_part(exported, EXPORT_FILE).get("fingerprint"))


def read_part(exported: Path, name: str) -> dict[str, Any]:
    """Reads one of the JSON files of a validation.

    Raises:
        ModelError: When it is missing, damaged or no JSON object.
    """
    try:
        content = json.loads((exported / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        content = None
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {exported / name}: {error}; validate the model again") from None
    if not isinstance(content, dict):
        raise ModelError(f"no {name} in {exported}: validation did not finish; validate the model again")
    return content


def _write(path: Path, record: Version) -> None:
    try:
        files.write_json(path, asdict(record))
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}; the champion is unchanged") from error


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(
            f"cannot write to {path}: {error.strerror}; choose another champion_uri"
        ) from None


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in sorted(directory.rglob("*")) if path.is_file())


def _digest(exported: Path, created: datetime) -> str:
    """Returns a digest of the content and the instant: two publications never share it."""
    digest = hashlib.sha256(created.isoformat(timespec="microseconds").encode())
    for path in _files(exported):
        digest.update(str(path.relative_to(exported)).encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _copy(source: Path, target: Path) -> None:
    """Copies all files of a directory into a new one; a failed copy is removed."""
    try:
        target.mkdir()
        for path in _files(source):
            _copy_file(path, target / path.relative_to(source))
    except OSError as error:
        shutil.rmtree(target, ignore_errors=True)
        raise RunError(f"cannot copy to {target}: {error.strerror}; the champion is unchanged") from error


def _copy_file(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as reader, target.open("wb") as writer:
        shutil.copyfileobj(reader, writer)
        writer.flush()
        os.fsync(writer.fileno())
