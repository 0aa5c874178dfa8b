"""The files Grafana and Prometheus are started with must agree with each other and with compose."""

from pathlib import PurePosixPath

import pytest

from service.exporter.settings import EXPORTER_PORT, ExporterSettings
from service.worker.settings.serving import WORKER_PORT
from tests.ops.checkout import (
    COMPOSE_FILE,
    DASHBOARD,
    GRAFANA,
    PROMETHEUS,
    ROOT,
    load_dashboard,
    load_yaml,
)

SERVICES = load_yaml(COMPOSE_FILE)["services"]
SCRAPE = load_yaml(PROMETHEUS / "prometheus.yml")
(DATASOURCE,) = load_yaml(GRAFANA / "provisioning" / "datasources" / "prometheus.yml")[
    "datasources"
]
(PROVIDER,) = load_yaml(GRAFANA / "provisioning" / "dashboards" / "quire.yml")["providers"]


def mounts(service: str) -> dict[str, PurePosixPath]:
    """Path in the container -> path in the checkout, of everything mounted from the checkout."""
    entries = [entry.split(":") for entry in SERVICES[service]["volumes"]]
    return {parts[1]: PurePosixPath(parts[0]) for parts in entries if parts[0].startswith("./")}


def test_the_dashboard_opens_with_the_provisioned_data_source():
    (variable,) = [
        variable
        for variable in load_dashboard()["templating"]["list"]
        if variable["type"] == "datasource"
    ]

    assert variable["current"]["value"] == DATASOURCE["uid"]
    assert variable["query"] == DATASOURCE["type"]


def test_the_data_source_is_the_prometheus_of_the_stack():
    (port,) = SERVICES["prometheus"]["ports"]

    assert DATASOURCE["url"] == f"http://prometheus:{port.rpartition(':')[2]}"
    assert DATASOURCE["isDefault"] is True and DATASOURCE["editable"] is False


def test_the_data_source_knows_the_scrape_interval():
    assert DATASOURCE["jsonData"]["timeInterval"] == SCRAPE["global"]["scrape_interval"]


def test_grafana_reads_the_folder_the_dashboard_is_mounted_in():
    mounted = mounts("grafana")

    assert ROOT / mounted[PROVIDER["options"]["path"]] == DASHBOARD.parent
    assert ROOT / mounted["/etc/grafana/provisioning"] == GRAFANA / "provisioning"
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{PROVIDER['options']['path']}/{DASHBOARD.name}"


def test_a_dashboard_from_a_file_cannot_be_changed_in_the_browser():
    assert PROVIDER["allowUiUpdates"] is False and PROVIDER["disableDeletion"] is True


def test_prometheus_reads_the_rules_that_are_mounted():
    mounted = mounts("prometheus")
    (command,) = [
        argument.partition("=")[2]
        for argument in SERVICES["prometheus"]["command"]
        if argument.startswith("--config.file=")
    ]

    assert ROOT / mounted[command] == PROMETHEUS / "prometheus.yml"
    folder = PurePosixPath(command).parent / "rules"
    assert ROOT / mounted[str(folder)] == PROMETHEUS / "rules"
    assert SCRAPE["rule_files"] == ["rules/*.yml"]


def test_prometheus_finds_the_workers_by_their_alias_and_port():
    (job,) = [job for job in SCRAPE["scrape_configs"] if job["job_name"] == "quire-worker"]
    (discovery,) = job["dns_sd_configs"]

    for name in ("worker-cpu", "worker-gpu", "worker-vllm", "worker-vllm-cpu"):
        assert SERVICES[name]["networks"]["backend"]["aliases"] == discovery["names"]
        assert SERVICES[name]["environment"]["QUIRE_HTTP_PORT"] == str(discovery["port"])
    assert "backend" in SERVICES["prometheus"]["networks"]


def test_prometheus_finds_the_one_exporter_by_its_name_and_port():
    (job,) = [job for job in SCRAPE["scrape_configs"] if job["job_name"] == "quire-exporter"]
    (target,) = [target for group in job["static_configs"] for target in group["targets"]]

    host, _, port = target.partition(":")
    assert SERVICES[host]["command"] == ["python", "-m", "service.exporter"]
    assert SERVICES[host]["environment"]["QUIRE_EXPORTER_HTTP_PORT"] == port
    assert port in " ".join(SERVICES[host]["healthcheck"]["test"])
    assert "backend" in SERVICES[host]["networks"]
    exporters = [
        name for name in SERVICES if "service.exporter" in SERVICES[name].get("command", [])
    ]
    assert exporters == [host]


@pytest.mark.parametrize("process", ["gateway", "batcher", "notifier"])
def test_prometheus_finds_every_process_by_its_name_and_port(process):
    (job,) = [job for job in SCRAPE["scrape_configs"] if job["job_name"] == f"quire-{process}"]
    (discovery,) = job["dns_sd_configs"]

    (name,) = discovery["names"]
    port = f"QUIRE_{process.upper()}_HTTP_PORT"
    assert SERVICES[name]["command"] == ["python", "-m", f"service.{process}"]
    assert SERVICES[name]["environment"][port] == str(discovery["port"])
    assert f":{discovery['port']}/readyz" in " ".join(SERVICES[name]["healthcheck"]["test"])


def test_callers_reach_the_gateway():
    assert SERVICES["gateway"]["networks"] == ["backend", "edge"]


def test_the_stack_uses_the_ports_that_are_the_defaults_everywhere():
    image = (ROOT / "ops" / "Dockerfile").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "how-to" / "operate.md").read_text(encoding="utf-8")

    for name in ("worker-cpu", "worker-gpu", "worker-vllm", "worker-vllm-cpu"):
        assert SERVICES[name]["environment"]["QUIRE_HTTP_PORT"] == str(WORKER_PORT)
    assert SERVICES["exporter"]["environment"]["QUIRE_EXPORTER_HTTP_PORT"] == str(EXPORTER_PORT)
    assert f"QUIRE_HTTP_PORT={WORKER_PORT}\n" in image
    assert f"EXPOSE {WORKER_PORT}\n" in image
    assert f"http://127.0.0.1:{WORKER_PORT}/livez" in page
    assert f"port {EXPORTER_PORT}" in page


def test_a_scrape_outlasts_the_exporters_patience_with_redis():
    timeout = SCRAPE["global"]["scrape_timeout"]

    assert ExporterSettings().timeout_seconds < float(timeout.removesuffix("s"))
