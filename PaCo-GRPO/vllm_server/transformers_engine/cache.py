"""A cache of a limited number of bytes."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any


class ByteCache:
    """The most recently used values, ``limit`` bytes together; the newest one is kept whatever its size."""

    def __init__(self, limit: int):
        self._left = limit
        self._entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()  # the most recently used last

    def get(self, key: Hashable) -> Any | None:
        """The value, which then counts as used; None if it is not here."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def put(self, key: Hashable, value: Any, size: int) -> None:
        """Adds a value of ``size`` bytes under a new key; those used longest ago make room."""
        self._entries[key] = value, size
        self._left -= size
        while self._left < 0 and len(self._entries) > 1:
            self._left += self._entries.popitem(last=False)[1][1]
