"""The data: 333 penguins of the Palmer Archipelago (Horst, Hill and Gorman, 2020; CC0)."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterator
from pathlib import Path

from shardline import Example, Feature

TABLE = Path(__file__).with_name("penguins.csv")


class Source:
    """Rows of a table: text and number columns, and the species to be predicted."""

    class_names = ("Adelie", "Chinstrap", "Gentoo")
    features = (
        Feature("island", "string"),
        Feature("sex", "string"),
        Feature("bill_length_mm", "float32"),
        Feature("bill_depth_mm", "float32"),
        Feature("flipper_length_mm", "float32"),
        Feature("body_mass_g", "float32"),
    )

    def __iter__(self) -> Iterator[Example]:
        """Yields every example once, each with a key that stays the same when the data grows."""
        with TABLE.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                # From the content: a row keeps its split when rows are moved.
                key = hashlib.sha256(",".join(row.values()).encode()).hexdigest()[:16]
                values = {
                    column.name: row[column.name] if column.dtype == "string" else float(row[column.name])
                    for column in self.features
                }
                label = self.class_names.index(row["species"])
                yield Example(key=key, label=label, features=values)

    def fingerprint(self) -> str:
        """Returns another text when the data is another: scheduled runs train on changed data only."""
        return hashlib.sha256(TABLE.read_bytes()).hexdigest()
