"""Schema of a source: its labels, the types of its columns, and values that do not fit them.

It may import `storage`, and nothing else of `preprocess`.
"""

from shardline.components.preprocess.schema.labels import (
    LARGEST_FLOAT,
    Fault,
    LabelSetting,
    are_classes,
    describe_label,
    encode_targets,
    find_labels,
    is_number,
    parse_labels,
    tally_label,
    unknown_column,
    unknown_label,
)
from shardline.components.preprocess.schema.schema import (
    MAX_MISSING,
    NO_VALUES,
    Schema,
    SchemaCheck,
    read_schema,
)

__all__ = [
    "LARGEST_FLOAT", "MAX_MISSING", "NO_VALUES", "Fault", "LabelSetting", "Schema", "SchemaCheck",
    "are_classes", "describe_label", "encode_targets", "find_labels", "is_number", "parse_labels",
    "read_schema", "tally_label", "unknown_column", "unknown_label",
]  # fmt: skip
