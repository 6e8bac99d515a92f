"""Which keys have occurred, in 16 to 32 bytes each, where a set would take a hundred."""

from __future__ import annotations

from array import array


class Seen:
    """A set of 64-bit hashes: two of a million different keys are confused once in 30 million runs."""

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 << 16))
        self._free = len(self._slots) // 2

    def add(self, value: int) -> bool:
        """Adds a hash and returns whether it is new."""
        value = value or 1  # 0 is an empty slot
        slots = self._slots
        slot = value % len(slots)
        while found := slots[slot]:
            if found == value:
                return False
            slot = (slot + 1) % len(slots)
        slots[slot] = value
        self._free -= 1
        if not self._free:
            self._grow()
        return True

    def _grow(self) -> None:
        old, self._slots = self._slots, array("Q", bytes(16 * len(self._slots)))
        self._free = len(self._slots) // 2
        for value in filter(None, old):
            self.add(value)
