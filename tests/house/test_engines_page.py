"""docs/reference/engines.md names every setting of an engine."""

import re

from service.shared.settings.reading import ProcessSettings
from service.worker.settings.engine import EngineSettings
from tests.house.test_house import ROOT

TEXT = (ROOT / "docs" / "reference" / "engines.md").read_text()
SETTINGS = EngineSettings.model_fields.keys() - ProcessSettings.model_fields.keys()


def unnamed(settings: set[str], text: str) -> set[str]:
    """The settings that the text does not name."""
    return settings - set(re.findall(r"`([a-z_]+)`", text))


def test_every_setting_of_an_engine_is_on_its_page():
    assert unnamed(set(SETTINGS), TEXT) == set()


def test_a_setting_that_is_missing_is_noticed():
    assert unnamed({"model_path", "new_setting"}, TEXT) == {"new_setting"}
