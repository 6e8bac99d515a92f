"""Storage: files on a disk or in a bucket, listed, read, written once and replaced if unchanged.

`Storage` is a directory or a prefix of a bucket; the other functions find and read the files of a source.
It may import `vertex`, for the client, but no component.
"""

from shardline.components.storage.source_files import (
    as_source_error,
    copies,
    files_below,
    match_files,
    open_read,
    read_object,
    resolve,
    size_and_version,
)
from shardline.components.storage.storage import File, Storage, TextFile, ordered_map

__all__ = [
    "File",
    "Storage",
    "TextFile",
    "as_source_error",
    "copies",
    "files_below",
    "match_files",
    "open_read",
    "ordered_map",
    "read_object",
    "resolve",
    "size_and_version",
]
