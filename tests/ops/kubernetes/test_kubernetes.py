"""What `kubectl apply -k` would send to a cluster: valid, without needless rights, and agreeing."""

import copy
import re
from typing import Any

import pytest

from ops.kubernetes.generate import OUTPUT, rule_object
from quire.keys import GROUP, NUM_PRIORITIES, Keys
from service.gateway.settings import GatewaySettings
from tests.ops.checkout import PROMETHEUS, ROOT, load_yaml
from tests.ops.kubernetes.cluster import (
    KUBERNETES,
    OURS,
    OVERLAYS,
    SINGLE,
    Refused,
    check,
    components_of,
    container_of,
    objects,
    of_kind,
    pod_of,
    variables,
    workloads,
)
from tests.ops.promql import selectors
from tests.ops.test_register import FAMILIES, RECORDED, wrong_matchers

#: Where a container finds its secrets.
SECRETS = "/run/secrets/"
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
        assert set(budgets) == named - SINGLE
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
    # A console has no metrics.
    assert labelled == jobs | {"quire-console"}


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
