"""What `kubectl apply -k` would send to a cluster: valid, without needless rights, and agreeing."""

import copy
import re
from pathlib import Path
from typing import Any

import certifi
import pytest

from ops.kubernetes.generate import OUTPUT, rule_object
from quire.keys import GROUP, NUM_PRIORITIES, Keys
from service.batcher.settings import BATCHER_PORT, BatcherSettings, load_batcher_settings
from service.exporter.settings import EXPORTER_PORT, ExporterSettings, load_exporter_settings
from service.gateway.http.server import CLOSE_SECONDS
from service.gateway.settings import GATEWAY_PORT, GatewaySettings, load_gateway_settings
from service.notifier.settings import NOTIFIER_PORT, NotifierSettings, load_notifier_settings
from service.process.worker import RELEASE_SECONDS
from service.settings.config import WORKER_PORT, Settings, load_settings
from tests.ops.checkout import PROMETHEUS, ROOT, load_yaml
from tests.ops.kubernetes.cluster import (
    KUBERNETES,
    OVERLAYS,
    Refused,
    check,
    container_of,
    objects,
    of_kind,
    pod_of,
    variables,
    workloads,
)
from tests.ops.promql import selectors
from tests.ops.test_register import FAMILIES, RECORDED, wrong_matchers

#: What runs in every overlay; a trial has a Redis, too.
NAMES = ("quire-worker", "quire-exporter", "quire-gateway")
#: What runs in an overlay with these components.
OPTIONAL = {"batches": "quire-batcher", "webhooks": "quire-notifier"}
SECRETS = "/run/secrets/"


def components_of(overlay: str) -> set[str]:
    parts = load_yaml(KUBERNETES / "overlays" / overlay / "kustomization.yaml")["components"]
    return {part.removeprefix("../../components/") for part in parts}


OURS = [
    (overlay, name)
    for overlay in OVERLAYS
    for name in (*NAMES, *(OPTIONAL[one] for one in sorted(components_of(overlay) & {*OPTIONAL})))
]
#: The settings of each process, and its port.
PROCESSES = {
    "quire-worker": (Settings, WORKER_PORT),
    "quire-exporter": (ExporterSettings, EXPORTER_PORT),
    "quire-gateway": (GatewaySettings, GATEWAY_PORT),
    "quire-batcher": (BatcherSettings, BATCHER_PORT),
    "quire-notifier": (NotifierSettings, NOTIFIER_PORT),
}
WORKLOADS = [*OURS, *((one, "redis") for one in OVERLAYS if "redis" in components_of(one))]


# -- valid -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes_accepts_every_object_of_an_overlay(overlay):
    assert len(objects(overlay)) > 10
    for each in objects(overlay):
        check(each)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Deployment", ("spec", "template", "spec", "terminationGracePeriodSecond"), 90),
        ("Deployment", ("spec", "progressDeadlineSeconds"), "soon"),
        ("NetworkPolicy", ("spec", "egres"), []),
        ("ScaledObject", ("spec", "minReplicas"), 0),
        ("ScaledObject", ("spec", "triggers", 0, "metadata", "treshold"), "1"),
        ("ScaledObject", ("spec", "triggers", 0, "metadata", "threshold"), 20000),
        ("PodMonitor", ("spec", "podMetricsEndpoints", 0, "scrape_timeout"), "4s"),
        ("PrometheusRule", ("spec", "groups", 0, "rules", 0, "severity"), "page"),
        ("HTTPRoute", ("spec", "rules", 0, "timeouts", "read"), "0s"),
    ],
)
def test_a_wrong_field_is_refused(kind, path, value):
    sound = next(iter(of_kind("production", kind).values()))
    check(sound)
    wrong = copy.deepcopy(sound)
    place: Any = wrong
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(Refused):
        check(wrong)


def test_every_part_is_used_by_an_overlay():
    used = set().union(*map(components_of, OVERLAYS))
    assert used == {path.name for path in (KUBERNETES / "components").iterdir()}
    for overlay in OVERLAYS:
        assert set(workloads(overlay)) == {name for one, name in WORKLOADS if one == overlay}


def test_the_rules_are_those_that_prometheus_reads_itself():
    assert OUTPUT.read_text(encoding="utf-8") == rule_object()
    rules = of_kind("production", "PrometheusRule")["quire"]["spec"]["groups"]
    files = sorted((PROMETHEUS / "rules").glob("*.yml"))
    assert rules == [group for path in files for group in load_yaml(path)["groups"]]


def test_redis_and_the_dashboard_are_the_files_of_the_checkout():
    (settings,) = [m for name, m in of_kind("cpu", "ConfigMap").items() if "redis-config" in name]
    for name in ("redis.conf", "start.sh"):
        assert settings["data"][name] == (ROOT / "ops" / "redis" / name).read_text()
    (board,) = [m for n, m in of_kind("production", "ConfigMap").items() if "dashboard" in n]
    assert board["data"]["quire.json"] == (
        ROOT / "ops" / "grafana" / "dashboards" / "quire.json"
    ).read_text(encoding="utf-8")


# -- rights ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("overlay", "name"), WORKLOADS)
def test_a_pod_has_no_more_rights_than_it_needs(overlay, name):
    pod, container = pod_of(workloads(overlay)[name]), container_of(workloads(overlay)[name])

    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & set(pod)
    kinds = {kind for volume in pod["volumes"] for kind in volume if kind != "name"}
    assert kinds <= {"secret", "configMap", "emptyDir", "persistentVolumeClaim"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_namespace_refuses_pods_with_more_rights(overlay):
    labels = of_kind(overlay, "Namespace")["quire"]["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    assert {
        each["metadata"].get("namespace")
        for each in objects(overlay)
        if each["kind"] != "Namespace"
    } == {"quire"}


@pytest.mark.parametrize(("overlay", "name"), WORKLOADS)
def test_secrets_are_files_and_no_variable_has_one(overlay, name):
    container = container_of(workloads(overlay)[name])

    assert all("secretRef" not in source for source in container.get("envFrom", ()))
    assert all("secretKeyRef" not in each.get("valueFrom", {}) for each in container.get("env", ()))
    volumes = {volume["name"]: volume for volume in pod_of(workloads(overlay)[name])["volumes"]}
    (mount,) = [one for one in container["volumeMounts"] if one["mountPath"] == "/run/secrets"]
    secret = volumes[mount["name"]]["secret"]
    assert mount["readOnly"] is True and secret["secretName"] == "quire-redis"
    assert (
        secret["defaultMode"] == 0o440
        and "fsGroup" in pod_of(workloads(overlay)[name])["securityContext"]
    )
    files = {SECRETS + item["path"] for item in secret["items"]}
    named = " ".join(variables(overlay, workloads(overlay)[name]).values())
    assert set(re.findall(r"/run/secrets/[\w.]+", named)) <= files


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_the_named_ways_into_and_out_of_a_pod_are_open(overlay):
    policies = of_kind(overlay, "NetworkPolicy")

    assert policies["deny-all"]["spec"] == {
        "podSelector": {},
        "policyTypes": ["Ingress", "Egress"],
    }
    ports = {
        (name, port["port"])
        for name, policy in policies.items()
        for rule in policy["spec"].get("egress", ())
        for port in rule["ports"]
    }
    endpoints = {("to-endpoints", 443)} if "webhooks" in components_of(overlay) else set()
    assert ports == {("allow-dns", 53), ("to-redis", 6379)} | endpoints
    for policy in policies.values():
        for rule in (*policy["spec"].get("ingress", ()), *policy["spec"].get("egress", ())):
            assert rule["ports"] and (rule.get("from") or rule.get("to"))


# -- agreeing --------------------------------------------------------------------------------------


def enter(overlay: str, name: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Sets the environment of a container, with its secrets in files that this test can write."""
    monkeypatch.chdir(folder)
    (folder / "redis_password").write_text("as in the file\n", encoding="utf-8")
    # Any authority: the settings check that the file holds certificates.
    (folder / "redis_ca.pem").write_bytes(Path(certifi.where()).read_bytes())
    for key, text in variables(overlay, workloads(overlay)[name]).items():
        monkeypatch.setenv(key, text.replace(SECRETS, f"{folder}/"))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_worker_understands_its_environment_and_has_time_to_drain(overlay, monkeypatch, tmp_path):
    worker = workloads(overlay)["quire-worker"]
    enter(overlay, "quire-worker", monkeypatch, tmp_path)

    settings = load_settings([])

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
    exporter = load_exporter_settings([])
    enter(overlay, "quire-gateway", monkeypatch, tmp_path)
    gateway = load_gateway_settings([])

    assert (exporter.http_host, exporter.http_port) == ("0.0.0.0", EXPORTER_PORT)
    assert (gateway.http_host, gateway.http_port) == ("0.0.0.0", GATEWAY_PORT)
    assert gateway.keys_file is not None
    pod, container = (of(workloads(overlay)["quire-gateway"]) for of in (pod_of, container_of))
    sleeps = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    needed = sleeps + gateway.drain_seconds + 2 * CLOSE_SECONDS
    assert pod["terminationGracePeriodSeconds"] >= needed


@pytest.mark.parametrize("overlay", ["production", "production-cpu"])
def test_batcher_and_notifier_understand_their_environment(overlay, monkeypatch, tmp_path):
    enter(overlay, "quire-batcher", monkeypatch, tmp_path)
    batcher = load_batcher_settings([])
    enter(overlay, "quire-notifier", monkeypatch, tmp_path)
    notifier = load_notifier_settings([])

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


def test_only_workers_run_the_large_image():
    for overlay, name in OURS:
        tag = container_of(workloads(overlay)[name])["image"].removeprefix("quire-worker:")
        components = components_of(overlay)
        wanted = "gpu-vllm" if "vllm" in components else "gpu" if "gpu" in components else "cpu"
        assert tag == (wanted if name == "quire-worker" else "cpu")
        limits = container_of(workloads(overlay)[name])["resources"]["limits"]
        assert ("nvidia.com/gpu" in limits) is (name == "quire-worker" and wanted != "cpu")


def test_disruptions_take_one_pod_at_a_time():
    for overlay in OVERLAYS:
        budgets = of_kind(overlay, "PodDisruptionBudget")
        named = {name for one, name in OURS if one == overlay}
        assert set(budgets) == named - {"quire-exporter"}
        for name, budget in budgets.items():
            assert budget["spec"]["maxUnavailable"] == 1
            pods = workloads(overlay)[name]["spec"]["template"]["metadata"]["labels"]
            assert budget["spec"]["selector"]["matchLabels"].items() <= pods.items()


def test_the_operator_scrapes_as_prometheus_does_in_compose():
    own = load_yaml(PROMETHEUS / "prometheus.yml")
    times = (own["global"]["scrape_interval"], own["global"]["scrape_timeout"])
    jobs = {job["job_name"] for job in own["scrape_configs"]} - {"prometheus"}
    pods = of_kind("production", "PodMonitor")["quire"]["spec"]
    gateways = of_kind("production", "ServiceMonitor")["quire-gateway"]["spec"]

    for endpoint in (*pods["podMetricsEndpoints"], *gateways["endpoints"]):
        assert (endpoint["interval"], endpoint["scrapeTimeout"]) == times
    (chosen,) = pods["selector"]["matchExpressions"]
    assert pods["jobLabel"] == gateways["jobLabel"] == chosen["key"]
    named = {*chosen["values"], gateways["selector"]["matchLabels"][gateways["jobLabel"]]}
    assert named == jobs
    labelled = {
        workload["spec"]["template"]["metadata"]["labels"][chosen["key"]]
        for workload in workloads("production").values()
    }
    assert labelled == jobs


def queries() -> dict[str, str]:
    triggers = of_kind("production", "ScaledObject")["quire-worker"]["spec"]["triggers"]
    return {one["name"]: one["metadata"]["query"] for one in triggers}


def test_scalers_ask_for_metrics_that_there_are():
    assert set(queries()) == {"backlog-tokens", "oldest-wait", "due-requests"}
    for query in queries().values():
        for selector in selectors(query):
            assert selector.name in {*RECORDED, *FAMILIES}
            if selector.name in FAMILIES:
                assert wrong_matchers(selector, FAMILIES[selector.name]) == []


def test_scalers_watch_the_streams_and_the_queue_of_the_workers():
    spec = of_kind("cpu-keda", "ScaledObject")["quire-worker"]["spec"]
    queue = variables("cpu-keda", workloads("cpu-keda")["quire-worker"])["QUIRE_QUEUE"]

    watched = [trigger["metadata"]["stream"] for trigger in spec["triggers"]]
    assert watched == [Keys(queue, 0).ingress(level) for level in range(NUM_PRIORITIES)]
    assert {trigger["metadata"]["consumerGroup"] for trigger in spec["triggers"]} == {GROUP}
    assert all(f'queue="{queue}"' in query for query in queries().values())


@pytest.mark.parametrize("overlay", ["cpu-keda", "production", "production-cpu"])
def test_workers_are_scaled_to_none_and_back(overlay):
    scaled = of_kind(overlay, "ScaledObject")["quire-worker"]["spec"]

    assert scaled["scaleTargetRef"]["name"] in workloads(overlay)
    assert scaled["minReplicaCount"] == 0 < scaled["maxReplicaCount"]


def test_no_proxy_collects_the_events_of_a_stream_or_gives_it_up():
    notes = of_kind("production-cpu", "Ingress")["quire-gateway"]["metadata"]["annotations"]
    prefix = "nginx.ingress.kubernetes.io/proxy"
    assert notes[f"{prefix}-buffering"] == "off" == notes[f"{prefix}-next-upstream"]
    assert int(notes[f"{prefix}-read-timeout"]) >= 3600
    largest = int(notes[f"{prefix}-body-size"].removesuffix("m")) << 20
    assert largest > GatewaySettings.model_fields["max_body_bytes"].default
    (rule,) = of_kind("production", "HTTPRoute")["quire-gateway"]["spec"]["rules"]
    assert set(rule["timeouts"].values()) == {"0s"}
