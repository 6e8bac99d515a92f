"""One image: its header, its pixels, and the bytes that are stored for it.

It imports only `lazy` of `preprocess`; numpy and the decoders are loaded where pixels are needed.
"""

from shardline.components.preprocess.images.codec import Codec, Kind, check_file, encode_pixels
from shardline.components.preprocess.images.structure import UnreadableError, read_header

__all__ = ["Codec", "Kind", "UnreadableError", "check_file", "encode_pixels", "read_header"]
