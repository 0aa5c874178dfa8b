"""The objects that the overlays of ops/kubernetes render to, and what judges them."""

import functools
import json
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from tests.ops.checkout import ROOT, load_yaml, program

KUBERNETES = ROOT / "ops" / "kubernetes"
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
#: The version of Kubernetes whose schemas judge the objects.
VERSION = "1.34"
CUSTOM = load_yaml(Path(__file__).with_name("custom_resources.yml"))
#: What runs in every overlay; a trial has a Redis, too.
NAMES = ("quire-worker", "quire-exporter", "quire-gateway")
#: What runs in an overlay with these components.
OPTIONAL = {
    "batches": "quire-batcher",
    "webhooks": "quire-notifier",
    "console": "quire-console",
}
#: Of these one pod is enough.
SINGLE = {"quire-exporter", "quire-console"}
#: One parsed object of a cluster.
Object = dict[str, Any]


class Refused(Exception):
    """The API server would not accept an object."""


def components_of(overlay: str) -> set[str]:
    """The components that an overlay names."""
    parts = load_yaml(KUBERNETES / "overlays" / overlay / "kustomization.yaml")["components"]
    return {part.removeprefix("../../components/") for part in parts}


#: Each process of ours in each overlay.
OURS = [
    (overlay, name)
    for overlay in OVERLAYS
    for name in (*NAMES, *(OPTIONAL[one] for one in sorted(components_of(overlay) & {*OPTIONAL})))
]


@functools.cache
def _rendered(overlay: str) -> str:
    """What `kubectl apply -k` would send; rendered once in a test process."""
    kubectl = program("kubectl")
    done = subprocess.run(
        [kubectl, "kustomize", str(KUBERNETES / "overlays" / overlay)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@functools.cache
def objects(overlay: str) -> list[Object]:
    """The objects of an overlay. Shared: do not change them."""
    return list(yaml.load_all(_rendered(overlay), Loader=yaml.CSafeLoader))


def of_kind(overlay: str, kind: str) -> dict[str, Object]:
    """The objects of one kind by name."""
    return {each["metadata"]["name"]: each for each in objects(overlay) if each["kind"] == kind}


def workloads(overlay: str) -> dict[str, Object]:
    """Deployments and stateful sets by name."""
    return of_kind(overlay, "Deployment") | of_kind(overlay, "StatefulSet")


def pod_of(workload: Object) -> Object:
    return workload["spec"]["template"]["spec"]


def container_of(workload: Object) -> Object:
    (container,) = pod_of(workload)["containers"]
    return container


def variables(overlay: str, workload: Object) -> dict[str, str]:
    """The environment of a container, as Kubernetes sets it; a field of the pod is its path."""
    maps = of_kind(overlay, "ConfigMap")
    found: dict[str, str] = {}
    for source in container_of(workload).get("envFrom", ()):
        found |= maps[source["configMapRef"]["name"]]["data"]
    for each in container_of(workload).get("env", ()):
        found[each["name"]] = each.get("value") or each["valueFrom"]["fieldRef"]["fieldPath"]
    return found


def check(given: Object) -> None:
    """Refused if a field is missing, unknown, or has a value of a wrong type."""
    _check(json.dumps(given, sort_keys=True))


@functools.cache
def _check(text: str) -> None:
    """Once for equal objects: several overlays have them, and a schema takes long to load."""
    given = json.loads(text)
    name = f"{given['apiVersion']} {given['kind']}"
    try:
        if name in CUSTOM["kinds"]:
            _validator(name).validate(given)
        else:
            kubernetes_validate.validate(given, VERSION, strict=True)
    except (jsonschema.ValidationError, kubernetes_validate.ValidationError) as error:
        raise Refused(f"{name} {given['metadata'].get('name')}: {error}") from error
    except kubernetes_validate.SchemaNotFoundError as error:
        raise Refused(f"{name}: no schema") from error


@functools.cache
def _validator(name: str) -> jsonschema.Draft202012Validator:
    whole = {
        "type": "object",
        "additionalProperties": False,
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "properties": {
            "apiVersion": {},
            "kind": {},
            "metadata": {"$ref": "#/definitions/metadata"},
            "spec": {"type": "object", **CUSTOM["kinds"][name]},
        },
        "definitions": CUSTOM["definitions"],
    }
    jsonschema.Draft202012Validator.check_schema(whole)
    return jsonschema.Draft202012Validator(whole)
