import re

import pytest

from service.exporter.register import exporter_families
from service.exporter.settings import ExporterSettings
from service.worker.settings.config import Settings
from tests.ops.checkout import COMPOSE_FILE, OPERATE, RUNBOOK, alerts, load_yaml, panels

TEXT = RUNBOOK.read_text(encoding="utf-8")
#: Both pages for operators, of which the runbook is one.
PAGES = TEXT + OPERATE.read_text(encoding="utf-8")
SECTIONS = {
    section.partition("\n")[0]: section.partition("\n")[2] for section in TEXT.split("\n## ")[1:]
}


def test_there_is_one_section_per_alert_and_no_other():
    assert set(SECTIONS) == {rule["alert"] for rule in alerts()}


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_the_link_of_an_alert_leads_to_its_section(rule):
    # GitHub's anchor of a heading of one word is the word in small letters.
    assert rule["annotations"]["runbook_url"] == f"docs/how-to/runbook.md#{rule['alert'].lower()}"


@pytest.mark.parametrize("alert", SECTIONS)
def test_every_section_says_meaning_check_and_do(alert):
    steps = re.findall(r"^- \*\*(\w+)\*\*: ", SECTIONS[alert], re.MULTILINE)

    assert steps == ["Meaning", "Check", "Do"]


@pytest.mark.parametrize("alert", SECTIONS)
def test_every_section_begins_with_the_severities_of_its_alert(alert):
    severities = {rule["labels"]["severity"] for rule in alerts() if rule["alert"] == alert}
    stated = re.match(r"\s*\*([a-z ]+)\.\*", SECTIONS[alert])

    assert stated is not None
    assert set(stated.group(1).split(" or ")) == severities


def test_the_alerts_that_see_nothing_without_the_exporter_are_named_where_it_is_missing():
    told = exporter_families().keys() - {"quire_exporter_up"}
    blind = {rule["alert"] for rule in alerts() if any(name in rule["expr"] for name in told)}
    (named,) = re.findall(r"the alerts ([\w\s,]+) are blind", SECTIONS["QueueUnseen"])

    assert set(re.split(r",\s+|\sand\s+", named)) == blind


def test_every_setting_it_names_exists():
    compose = COMPOSE_FILE.read_text(encoding="utf-8")
    named = set(re.findall(r"QUIRE_[A-Z_]+", PAGES))
    settings = {
        *(f"QUIRE_{name.upper()}" for name in Settings.model_fields),
        *(f"QUIRE_EXPORTER_{name.upper()}" for name in ExporterSettings.model_fields),
    }

    assert {name for name in named - settings if f"${{{name}:-" not in compose} == set()


def cannot_be_set(names: set[str], services: dict[str, dict]) -> set[str]:
    """Variables that do not reach a service that has to hear of them.

    Compose reads them in a value, or passes them on because they have none.
    """
    heard = {name: set(re.findall(r"\$\{(QUIRE_\w+)", repr(services[name]))) for name in services}
    for name, service in services.items():
        given = service.get("environment", {})
        heard[name] |= {variable for variable, value in given.items() if value is None}
    anywhere = set().union(*heard.values())
    both = heard["worker-cpu"] & heard["worker-gpu"]
    of_workers = {f"QUIRE_{name.upper()}" for name in Settings.model_fields}
    return {name for name in names if name not in (both if name in of_workers else anywhere)}


def test_every_setting_it_names_can_be_changed_in_the_stack():
    services = load_yaml(COMPOSE_FILE)["services"]
    named = set(re.findall(r"QUIRE_[A-Z_]+[A-Z]", PAGES))

    assert cannot_be_set(named, services) == set()
    assert cannot_be_set({"QUIRE_HTTP_PORT", "QUIRE_QUEUE"}, services) == {"QUIRE_HTTP_PORT"}


def test_every_panel_it_names_exists():
    # A panel is named in italics that begin with a capital letter.
    named = set(re.findall(r"(?<!\*)\*([A-Z][^*\n→]+)\*(?!\*)", PAGES))
    titles = {panel["title"] for panel in panels()}

    assert named and named <= titles
