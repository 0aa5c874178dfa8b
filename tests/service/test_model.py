"""Loading the real model: what is left behind in the process that serves it."""

import gc

import pytest

from service.model import load_model
from tests.service.builders import make_settings


@pytest.fixture
def unfrozen():
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("unfrozen")
def test_what_was_loaded_is_never_looked_through_for_garbage_again():
    served = load_model(make_settings("redis://nowhere", "queue", num_blocks=16))
    assert served.tokenizer.encode_prompt("1+2=")
    assert gc.get_freeze_count() > 10 * len(gc.get_objects())
