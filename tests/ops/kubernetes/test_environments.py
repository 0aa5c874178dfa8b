"""What each container is told: settings, files, time to end, and what its probes ask."""

import tomllib
from pathlib import Path

import certifi
import pytest

from service.batcher.settings import BATCHER_PORT, BatcherSettings
from service.console.server import CLOSE_SECONDS as CONSOLE_CLOSE_SECONDS
from service.console.settings import CONSOLE_PORT, ConsoleSettings
from service.exporter.settings import EXPORTER_PORT, ExporterSettings
from service.gateway.server import CLOSE_SECONDS
from service.gateway.settings import GATEWAY_PORT, GatewaySettings
from service.notifier.settings import NOTIFIER_PORT, NotifierSettings
from service.worker.process.worker import RELEASE_SECONDS
from service.worker.settings.config import Settings
from service.worker.settings.serving import WORKER_PORT
from tests.ops.kubernetes.cluster import (
    KUBERNETES,
    OURS,
    OVERLAYS,
    container_of,
    of_kind,
    pod_of,
    variables,
    workloads,
)

#: Where a container finds its secrets.
SECRETS = "/run/secrets/"
#: Where a container finds the table of several models, and what that is here.
TABLE = "/etc/quire/"
TABLE_FOLDER = KUBERNETES / "components" / "several-models"
#: The settings of each process, and its port.
PROCESSES = {
    "quire-worker": (Settings, WORKER_PORT),
    "quire-exporter": (ExporterSettings, EXPORTER_PORT),
    "quire-gateway": (GatewaySettings, GATEWAY_PORT),
    "quire-batcher": (BatcherSettings, BATCHER_PORT),
    "quire-notifier": (NotifierSettings, NOTIFIER_PORT),
    "quire-console": (ConsoleSettings, CONSOLE_PORT),
}


def enter(overlay: str, name: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Sets the environment of a container, with its secrets in files that this test can write."""
    monkeypatch.chdir(folder)
    (folder / "redis_password").write_text("as in the file\n", encoding="utf-8")
    # Any authority: the settings check that the file holds certificates.
    (folder / "redis_ca.pem").write_bytes(Path(certifi.where()).read_bytes())
    for key, text in variables(overlay, workloads(overlay)[name]).items():
        here = text.replace(SECRETS, f"{folder}/").replace(TABLE, f"{TABLE_FOLDER}/")
        monkeypatch.setenv(key, here)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_worker_understands_its_environment_and_has_time_to_drain(overlay, monkeypatch, tmp_path):
    worker = workloads(overlay)["quire-worker"]
    enter(overlay, "quire-worker", monkeypatch, tmp_path)

    settings = Settings.load([])

    assert settings.redis_password is not None
    assert (settings.http_host, settings.http_port) == ("0.0.0.0", WORKER_PORT)
    assert settings.worker == "metadata.name"
    # After the drain: the release of the rest, the last commits, and the ends of threads.
    needed = settings.drain_seconds + RELEASE_SECONDS + settings.flush_seconds
    assert pod_of(worker)["terminationGracePeriodSeconds"] >= needed + 30
    assert "replicas" not in worker["spec"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_exporter_and_gateway_understand_their_environment(overlay, monkeypatch, tmp_path):
    enter(overlay, "quire-exporter", monkeypatch, tmp_path)
    exporter = ExporterSettings.load([])
    enter(overlay, "quire-gateway", monkeypatch, tmp_path)
    gateway = GatewaySettings.load([])

    assert (exporter.http_host, exporter.http_port) == ("0.0.0.0", EXPORTER_PORT)
    assert (gateway.http_host, gateway.http_port) == ("0.0.0.0", GATEWAY_PORT)
    assert gateway.keys_file is not None
    pod, container = (of(workloads(overlay)["quire-gateway"]) for of in (pod_of, container_of))
    sleeps = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    needed = sleeps + gateway.drain_seconds + 2 * CLOSE_SECONDS
    assert pod["terminationGracePeriodSeconds"] >= needed


def test_with_several_models_everybody_has_the_queues_of_one_table(monkeypatch, tmp_path):
    overlay, name = "cpu-models", "models.toml"
    found = workloads(overlay)
    table = of_kind(overlay, "ConfigMap")
    for process in ("quire-worker", "quire-gateway"):
        volumes = {volume["name"]: volume for volume in pod_of(found[process])["volumes"]}
        mounts = {
            one["mountPath"]: one["name"] for one in container_of(found[process])["volumeMounts"]
        }
        told = table[volumes[mounts[TABLE.rstrip("/")]]["configMap"]["name"]]["data"]
        assert told == {name: (TABLE_FOLDER / name).read_text(encoding="utf-8")}
    queues = {one["queue"] for one in tomllib.loads(told[name])["models"].values()}
    enter(overlay, "quire-worker", monkeypatch, tmp_path)
    worker = Settings.load([])
    enter(overlay, "quire-gateway", monkeypatch, tmp_path)
    gateway = GatewaySettings.load([])
    enter(overlay, "quire-exporter", monkeypatch, tmp_path)
    exporter = ExporterSettings.load([])

    assert worker.models_file == gateway.models_file == TABLE_FOLDER / name
    assert worker.model is None and set(exporter.queues) == queues and len(queues) == 2
    (shown,) = [one["data"] for key, one in table.items() if key.startswith("quire-queues")]
    assert shown["QUIRE_CONSOLE_QUEUES"] == shown["QUIRE_EXPORTER_QUEUES"]


@pytest.mark.parametrize("overlay", ["production", "production-cpu"])
def test_batcher_and_notifier_understand_their_environment(overlay, monkeypatch, tmp_path):
    enter(overlay, "quire-batcher", monkeypatch, tmp_path)
    batcher = BatcherSettings.load([])
    enter(overlay, "quire-notifier", monkeypatch, tmp_path)
    notifier = NotifierSettings.load([])

    assert (batcher.http_host, batcher.http_port) == ("0.0.0.0", BATCHER_PORT)
    assert (notifier.http_host, notifier.http_port) == ("0.0.0.0", NOTIFIER_PORT)
    found = workloads(overlay)
    needed = {"quire-batcher": batcher.drain_seconds}
    needed["quire-notifier"] = notifier.post_timeout_seconds
    for name, seconds in needed.items():
        assert pod_of(found[name])["terminationGracePeriodSeconds"] >= seconds + 30
    mounts = [
        {mount["mountPath"]: mount["name"] for mount in container_of(found[name])["volumeMounts"]}
        for name in ("quire-batcher", "quire-gateway")
    ]
    folder = str(batcher.files_folder)
    assert mounts[0][folder] == mounts[1][folder] == "files"
    gateway = variables(overlay, found["quire-gateway"])
    assert gateway["QUIRE_GATEWAY_FILES_FOLDER"] == folder
    claims = [
        volume["persistentVolumeClaim"]["claimName"]
        for name in ("quire-batcher", "quire-gateway")
        for volume in pod_of(found[name])["volumes"]
        if volume["name"] == "files"
    ]
    assert claims == ["quire-files"] * 2 and set(claims) <= set(
        of_kind(overlay, "PersistentVolumeClaim")
    )
    # Each has the user of its role.
    for name in ("batcher", "notifier"):
        url = variables(overlay, found[f"quire-{name}"])["QUIRE_REDIS_URL"]
        assert url.startswith(f"rediss://{name}@")


@pytest.mark.parametrize("overlay", ["production", "production-cpu"])
def test_a_console_only_reads_and_has_users_and_one_pod(overlay, monkeypatch, tmp_path):
    console = workloads(overlay)["quire-console"]
    enter(overlay, "quire-console", monkeypatch, tmp_path)

    settings = ConsoleSettings.load([])

    assert (settings.http_host, settings.http_port) == ("0.0.0.0", CONSOLE_PORT)
    assert settings.role == "observer" and settings.redis_url.startswith("rediss://observer@")
    assert settings.allowed_hosts and settings.trusted_proxies != ("127.0.0.1",)
    # A second pod would refuse the forms of the first one.
    assert console["spec"]["replicas"] == 1
    assert pod_of(console)["terminationGracePeriodSeconds"] > CONSOLE_CLOSE_SECONDS
    volumes = {volume["name"]: volume for volume in pod_of(console)["volumes"]}
    mounts = {one["mountPath"]: one for one in container_of(console)["volumeMounts"]}
    mount = mounts[str(settings.users_file.parent)]
    assert mount["readOnly"] is True
    assert volumes[mount["name"]]["secret"] == {"secretName": "quire-console", "defaultMode": 0o440}
    # The Service and the policy choose its pods, and no policy lets it out but to Redis and DNS.
    labels = console["spec"]["template"]["metadata"]["labels"]
    service = of_kind(overlay, "Service")["quire-console"]["spec"]
    assert service["selector"].items() <= labels.items()
    assert {port["targetPort"] for port in service["ports"]} == {"http"}
    policies = of_kind(overlay, "NetworkPolicy")
    (into,) = [one for name, one in policies.items() if name == "from-proxy-to-console"]
    assert into["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    (chosen,) = policies["to-redis"]["spec"]["podSelector"]["matchExpressions"]
    assert labels[chosen["key"]] in chosen["values"]


@pytest.mark.parametrize(("overlay", "name"), OURS)
def test_every_variable_is_a_setting_and_kubernetes_adds_none(overlay, name):
    process, _ = PROCESSES[name]
    given = {k: v for k, v in variables(overlay, workloads(overlay)[name]).items() if "QUIRE" in k}

    assert given and process.unknown_variables(given) == []
    # Of the Service quire-gateway, links would set QUIRE_GATEWAY_PORT and others.
    assert pod_of(workloads(overlay)[name])["enableServiceLinks"] is False


def test_a_variable_that_is_no_setting_would_be_noticed():
    assert Settings.unknown_variables({"QUIRE_DRAIN_SECOND": "3"}) != []
    assert GatewaySettings.unknown_variables({"QUIRE_GATEWAY_PORT": "tcp://10.0.0.1:80"}) != []


@pytest.mark.parametrize(("overlay", "name"), OURS)
def test_probes_ask_what_the_process_answers(overlay, name):
    container = container_of(workloads(overlay)[name])
    _, port = PROCESSES[name]

    assert container["ports"] == [{"name": "http", "containerPort": port}]
    asked = {
        kind: container[kind]["httpGet"]
        for kind in ("startupProbe", "readinessProbe", "livenessProbe")
    }
    assert {one["port"] for one in asked.values()} == {"http"}
    paths = {kind: one["path"] for kind, one in asked.items()}
    # An outage of Redis must not restart anything, so only readiness may depend on it.
    assert paths["startupProbe"] == paths["livenessProbe"] == "/livez"
    assert paths["readinessProbe"] == ("/livez" if name == "quire-exporter" else "/readyz")
