"""Lists in flags and variables: what an empty text means."""

import pytest

from service.console.settings import ConsoleSettings
from service.exporter.settings import ExporterSettings
from service.gateway.settings import GatewaySettings
from service.notifier.settings import NotifierSettings
from service.shared.settings.sources import ConfigurationError
from service.worker.settings.config import Settings


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (ConsoleSettings, "allowed_hosts"),
        (ConsoleSettings, "trusted_proxies"),
        (GatewaySettings, "allowed_origins"),
        (NotifierSettings, "allowed_networks"),
    ],
)
def test_who_is_let_in_may_be_nobody(kind, name):
    flag = f"--{name.replace('_', '-')}"
    assert getattr(kind.load([flag, ""]), name) == ()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (ConsoleSettings, "queues"),
        (ExporterSettings, "queues"),
        (Settings, "served_shards"),
        (Settings, "class_shares"),
    ],
)
def test_what_is_served_or_shared_is_not_left_out_by_an_empty_text(kind, name):
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(ConfigurationError, match=rf"^{name}"):
        kind.load([flag, ""])
