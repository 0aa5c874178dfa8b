"""For tests that load models into their own process."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def frozen_again() -> Iterator[None]:
    """Afterwards the models are free, and all other objects are left out of collections again.

    A loaded model is excluded from garbage collection, with all that exists; a shelf that drops one
    includes everything. Each collection would then look at the million objects of a test run, to
    the end of the process, and to load a model takes several collections.
    """
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()
