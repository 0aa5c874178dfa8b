import pytest
import yaml

from tests.ops.checkout import (
    PROMETHEUS,
    ROOT,
    RULE_TESTS,
    RULES,
    alerts,
    load_yaml,
    program,
    rules,
    run,
)

SEVERITIES = {"page", "ticket", "none"}
#: (alert, severity) of every alerting rule; one alert may have a rule per severity.
ALERTS = sorted((rule["alert"], rule["labels"]["severity"]) for rule in alerts())
#: Rules that Prometheus takes and that can mislead, such as two of one name and the same labels.
LINT = ("--lint=all", "--lint-fatal")
CASES = [
    (case["alertname"], expected["exp_labels"]["severity"] if expected else None)
    for path in RULE_TESTS
    for scenario in load_yaml(path)["tests"]
    for case in scenario.get("alert_rule_test", ())
    for expected in (case["exp_alerts"] or [None])
]


@pytest.mark.distribution
def test_prometheus_accepts_its_configuration():
    result = run(program("promtool"), "check", "config", PROMETHEUS / "prometheus.yml")

    assert result.returncode == 0, result.stderr
    assert f"{len(RULES)} rule files found" in result.stdout


@pytest.mark.distribution
def test_prometheus_accepts_the_rules():
    result = run(program("promtool"), "check", "rules", *LINT, *RULES)

    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.distribution
def test_two_rules_of_one_name_and_the_same_labels_are_noticed(tmp_path):
    path = PROMETHEUS / "rules" / "resources.yml"
    wrong = tmp_path / path.name
    wrong.write_text(
        path.read_text(encoding="utf-8").replace("seen_by: workers", "seen_by: exporter")
    )

    result = run(program("promtool"), "check", "rules", *LINT, wrong)

    assert result.returncode != 0
    assert "1 duplicate rule(s) found" in result.stdout + result.stderr


@pytest.mark.distribution
def test_every_alert_fires_and_keeps_silent_as_its_scenarios_say():
    result = run(program("promtool"), "test", "rules", *RULE_TESTS)

    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.distribution
def test_a_scenario_that_is_wrong_would_be_noticed(tmp_path):
    (tmp_path / "rules").symlink_to(PROMETHEUS / "rules")
    (tmp_path / "tests").mkdir()
    path = PROMETHEUS / "tests" / "workers.yml"
    text = path.read_text(encoding="utf-8")
    wrong = tmp_path / "tests" / path.name
    # One file of several: promtool takes seconds for all of them.
    wrong.write_text(text.replace("severity: page", "severity: ticket"), encoding="utf-8")

    result = run(program("promtool"), "test", "rules", wrong)

    assert result.returncode == 1
    assert 'severity="ticket"' in result.stdout + result.stderr


@pytest.mark.parametrize(("alert", "severity"), ALERTS)
def test_every_alert_is_seen_firing_in_a_scenario(alert, severity):
    assert (alert, severity) in CASES


@pytest.mark.parametrize("alert", sorted({alert for alert, _ in ALERTS} - {"Watchdog"}))
def test_every_alert_is_seen_silent_in_a_scenario(alert):
    assert (alert, None) in CASES


def without_their_rules(path, text):
    """What the scenarios of a file name, and the rules that the file loads do not have.

    An alert without its rule never fires, so a scenario in which it keeps silent shows nothing. A
    file that loads all rules has each of them evaluated for each minute of each scenario.
    """
    scenarios = yaml.safe_load(text)
    files = {(path.parent / name).resolve() for name in scenarios["rule_files"]}
    loaded = rules(sorted(files))
    tested = {
        case["alertname"] for one in scenarios["tests"] for case in one.get("alert_rule_test", ())
    }
    asked = [case["expr"] for one in scenarios["tests"] for case in one.get("promql_expr_test", ())]
    queries = " ".join(asked + [rule["expr"] for rule in loaded if rule.get("alert") in tested])
    used = {rule["record"] for rule in rules() if "record" in rule and rule["record"] in queries}
    return sorted((tested | used) - {rule.get("alert") or rule["record"] for rule in loaded})


@pytest.mark.parametrize("path", RULE_TESTS, ids=lambda path: path.stem)
def test_every_scenario_has_the_rules_of_its_alerts(path):
    assert without_their_rules(path, path.read_text(encoding="utf-8")) == []


def test_a_rule_that_is_not_loaded_is_noticed():
    path = PROMETHEUS / "tests" / "workers.yml"
    text = path.read_text(encoding="utf-8")
    recorded = without_their_rules(path, text.replace(", ../rules/queue.yml", ""))
    assert recorded == ["quire:queue:due_requests"]
    assert "Watchdog" in without_their_rules(path, text.replace("../rules/workers.yml, ", ""))


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_every_alert_says_what_it_is_about(rule):
    assert rule["labels"]["severity"] in SEVERITIES
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    assert all(text.strip() for text in rule["annotations"].values())


def test_every_recorded_series_is_used():
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    queries = " ".join(rule["expr"] for rule in alerts())
    queries += (ROOT / "ops/kubernetes/components/keda/scaled-object.yaml").read_text()

    assert {name for name in recorded if name not in queries} == set()
