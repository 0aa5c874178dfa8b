"""A cache with a maximum number of items and bytes. Knows no grammar and no library."""

from collections import OrderedDict
from threading import Lock
from typing import Generic, TypeVar

_Item = TypeVar("_Item")

#: The most items; the least recently used ones are dropped.
MAX_ITEMS = 64
#: The most bytes of all items together, as far as their sizes are known.
MAX_BYTES = 1 << 28


class GrammarCache(Generic[_Item]):
    """Items by key; drops the least recently used one first. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._items: OrderedDict[str, _Item] = OrderedDict()
        self._sizes: dict[str, int] = {}

    def __contains__(self, key: str) -> bool:
        with self._lock:
            return key in self._items

    def get(self, key: str) -> _Item | None:
        """The item, which becomes the most recently used one; None if there is none."""
        with self._lock:
            if key in self._items:
                self._items.move_to_end(key)
            return self._items.get(key)

    def put(self, key: str, item: _Item) -> None:
        """Store an item. A new one has size 0 until `set_size` is called."""
        with self._lock:
            self._items[key] = item
            self._items.move_to_end(key)
            self._shrink()

    def set_size(self, key: str, num_bytes: int) -> None:
        """Set the size of an item in bytes. Items are dropped at once if the sum is too large."""
        with self._lock:
            if key in self._items:
                self._sizes[key] = num_bytes
                self._shrink()

    def drop(self, key: str) -> None:
        """Remove an item, if there is one with this key."""
        with self._lock:
            self._items.pop(key, None)
            self._sizes.pop(key, None)

    def _shrink(self) -> None:
        while len(self._items) > MAX_ITEMS or sum(self._sizes.values()) > MAX_BYTES:
            oldest, _ = self._items.popitem(last=False)
            self._sizes.pop(oldest, None)
