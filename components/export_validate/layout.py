"""The output directory of a validation: names of its parts, and what must be gone before it is redone.

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

import shutil
from pathlib import Path

from shardline.trainer.errors import SettingsError

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
