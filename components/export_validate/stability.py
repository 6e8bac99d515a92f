"""Stability: whether a model says the same of an example however it is asked (metamorphic checks)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from shardline.components.export_validate.served import Predictions

_EXAMPLES = 32
_JPEG_QUALITY = 90
_SHIFT = 1

Serve = Callable[[tf.Tensor], Predictions]


def batch_difference(serve: Serve, requests: tf.Tensor) -> float:
    """Returns the largest difference that batch size and order make to a probability, on 32 examples.

    Examples with an output that is not finite are left out.

    Args:
        serve: Answers some requests.
        requests: At least one, [n].
    """
    some = requests[:_EXAMPLES]
    together = serve(some).probabilities
    turned = serve(some[::-1]).probabilities[::-1]
    alone = np.concatenate([serve(some[place : place + 1]).probabilities for place in range(len(together))])
    differences = np.abs(np.stack([turned, alone]) - together)
    finite = differences[np.isfinite(differences)]
    return float(finite.max()) if finite.size else 0.0


def flips(serve: Serve, images: tf.Tensor) -> dict[str, float]:
    """Returns on which share of 32 images a change that a person hardly sees changes the predicted class.

    Args:
        serve: Answers some encoded images.
        images: At least one, a string tensor of shape [n].

    Returns:
        jpeg_flips for encoding as a JPEG of quality 90, shift_flips for a shift by one pixel.
    """
    some = images[:_EXAMPLES]
    predicted = serve(some).labels
    changes: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {"jpeg_flips": _as_jpeg, "shift_flips": _shifted}
    return {
        name: float((serve(tf.stack([change(image) for image in some])).labels != predicted).mean())
        for name, change in changes.items()
    }


def _as_jpeg(image: tf.Tensor) -> tf.Tensor:
    return tf.io.encode_jpeg(_decode(image), quality=_JPEG_QUALITY)


def _shifted(image: tf.Tensor) -> tf.Tensor:
    pixels: npt.NDArray[Any] = _decode(image).numpy()
    edges = ((_SHIFT, 0), (_SHIFT, 0), (0, 0))
    return tf.io.encode_png(np.pad(pixels, edges, mode="edge")[:-_SHIFT, :-_SHIFT])


def _decode(image: tf.Tensor) -> tf.Tensor:
    return tf.io.decode_image(image, expand_animations=False)
