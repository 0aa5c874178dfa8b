"""The file of endpoints: read whole, or refused without telling a secret."""

import pytest

from service.notifier.endpoints import read_endpoints
from service.notifier.events import EVENTS
from service.shared.settings.sources import ConfigurationError
from tests.service.notifier.conftest import SECRET

ENTRY = f"""
[[endpoints]]
tenant = "acme"
url = "https://hooks.acme.example/quire"
secrets = ["{SECRET}"]
"""


def read(tmp_path, text):
    path = tmp_path / "endpoints.toml"
    path.write_text(text)
    return read_endpoints(path, allows_http=False)


def test_each_tenant_has_its_endpoint(tmp_path):
    second = ENTRY.replace("acme", "other") + 'events = ["request.failed"]\n'
    found = read(tmp_path, ENTRY + second)
    assert found["acme"].events == frozenset(EVENTS)
    assert found["other"].events == {"request.failed"}
    assert "whsec" not in repr(found) and "Webhook" not in repr(found)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ENTRY + ENTRY, "two endpoints"),
        (ENTRY.replace("https", "http"), "must begin with https.*set allows_http"),
        (ENTRY.replace(SECRET, "whsec_c2hvcnQ="), "a secret of acme"),
        (ENTRY.replace(SECRET, "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3"), "a secret of acme"),
        (ENTRY.replace(SECRET, "whsec_?"), "a secret of acme"),
        (ENTRY + "colour = 1\n", "endpoints.0.colour"),
        (ENTRY + 'events = ["request.begun"]\n', "endpoints.0.events"),
        (ENTRY.replace("acme", "a b", 1), "endpoints.0.tenant"),
        (ENTRY.replace("[[", "[", 1), "not TOML"),
        ("", "endpoints"),
    ],
)
def test_a_wrong_file_is_refused_without_a_secret(tmp_path, text, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        read(tmp_path, text)
    assert SECRET not in str(caught.value)


def test_a_missing_file_is_refused_with_what_names_another_one(tmp_path):
    how = "No such file .*set --endpoints-file or QUIRE_NOTIFIER_ENDPOINTS_FILE"
    with pytest.raises(ConfigurationError, match=how):
        read_endpoints(tmp_path / "none.toml", allows_http=False)
