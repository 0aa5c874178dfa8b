"""Keeps objects that are never freed out of garbage collections, which would look at each of them.

Hundreds of thousands of objects, mostly of libraries, live as long as the process. Traversing them
takes longer than many steps, and blocks all threads.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing(module: str) -> Iterator[None]:
    """Import a module with large libraries in this context.

    Nothing is collected meanwhile, and collections while a model is loaded do not look at what was
    imported. Without effect if it has been imported before: garbage that was made since then must
    still be found.
    """
    if module in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


def keep_out_of_collections() -> None:
    """Exclude all objects that exist now from garbage collection; call it after a collection."""
    gc.freeze()
