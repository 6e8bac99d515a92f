"""A SavedModel, used as a client would use it: through its serving signature."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from shardline.components.export_validate.signatures import DEFAULT, EXAMPLE, OUTPUTS
from shardline.trainer.errors import ModelError


@dataclass(frozen=True)
class Predictions:
    """What a model says of some images.

    Attributes:
        probabilities: float32 [n, classes].
        labels: int64 [n].
    """

    probabilities: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]


class ServedModel:
    """A SavedModel behind the signature that Shardline exports."""

    def __init__(self, path: Path, classes: int) -> None:
        """Loads the model.

        Args:
            path: Directory of the SavedModel.
            classes: Number of probabilities per image that are expected.

        Raises:
            ModelError: When there is no SavedModel, or it has another signature.
        """
        self._path = path
        try:
            # The signature alone does not keep the variables alive, the loaded object does.
            self._loaded = tf.saved_model.load(str(path))
        except (OSError, ValueError, tf.errors.OpError) as error:
            raise ModelError(f"cannot load the exported model {path}: {error}; export it again") from None
        self._serve = self._loaded.signatures.get(DEFAULT)
        if self._serve is None:
            raise ModelError(f"the SavedModel {path} has no signature {DEFAULT!r}; export it again")
        outputs = self._serve.structured_outputs
        if missing := [name for name in OUTPUTS if name not in outputs]:
            raise ModelError(
                f"the signature {DEFAULT!r} of {path} has no output {', '.join(missing)}; export it again"
            )
        if (found := outputs["probabilities"].shape[-1]) not in (None, classes):
            raise ModelError(
                f"the exported model {path} tells {found} classes apart, the dataset has {classes}; "
                "evaluate it on the data that it was made for"
            )

    def predict(self, images: tf.Tensor) -> Predictions:
        """Predicts a batch.

        Args:
            images: Encoded images, a string tensor of shape [n].

        Raises:
            tf.errors.InvalidArgumentError: When one of them cannot be decoded.
        """
        outputs = self._serve(images=images)
        return Predictions(outputs["probabilities"].numpy(), outputs["label"].numpy())

    def predict_examples(self, serialized: tf.Tensor) -> Predictions:
        """Predicts a batch of examples as a dataset holds them: of images or of tables.

        Args:
            serialized: tf.train.Example, a string tensor of shape [n].

        Raises:
            ModelError: When the model was exported without that signature.
            tf.errors.InvalidArgumentError: When one of them lacks a column or cannot be decoded.
        """
        serve = self._loaded.signatures.get(EXAMPLE)
        if serve is None:
            raise ModelError(f"the SavedModel {self._path} has no signature {EXAMPLE!r}; export it again")
        outputs = serve(examples=serialized)
        return Predictions(outputs["probabilities"].numpy(), outputs["label"].numpy())
