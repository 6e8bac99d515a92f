"""Inspection of a finished dataset directory: its manifest, profile, card and verification.

It loads no TensorFlow and writes nothing.

It may import all of `preprocess` but the tasks at its top.
"""

from shardline.components.preprocess.inspect.profile import (
    Categories,
    Numbers,
    Profile,
    describe,
    draft,
    make_profile,
    render,
    render_card,
    render_manifest,
)
from shardline.components.preprocess.inspect.verification import verify

__all__ = [
    "Categories", "Numbers", "Profile", "describe", "draft", "make_profile", "render", "render_card",
    "render_manifest", "verify",
]  # fmt: skip
