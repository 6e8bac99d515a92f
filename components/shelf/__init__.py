"""Shelf of a champion: the records of versions, and where they stand, on a disk or in a bucket."""
