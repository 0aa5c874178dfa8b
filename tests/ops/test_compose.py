import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.batcher.settings import BATCHER_PORT, BatcherSettings
from service.console.settings import CONSOLE_PORT, ConsoleSettings
from service.exporter.settings import EXPORTER_PORT, ExporterSettings
from service.gateway.server import CLOSE_SECONDS
from service.gateway.settings import GATEWAY_PORT, GatewaySettings
from service.notifier.endpoints import read_endpoints
from service.notifier.settings import NOTIFIER_PORT, NotifierSettings
from service.shared.model_table import read_models
from service.shared.settings.sources import ConfigurationError
from service.worker.settings.config import Settings
from service.worker.settings.several import settings_of_models
from tests.ops.checkout import COMPOSE_FILE, ROOT, load_yaml, program, run

DOCKERFILE = ROOT / "ops" / "Dockerfile"
COMPOSE: dict[str, Any] = load_yaml(COMPOSE_FILE)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
NATIVE_WORKERS = ["worker-cpu", "worker-gpu"]
VLLM_WORKERS = ["worker-vllm", "worker-vllm-cpu"]
WORKERS = [*NATIVE_WORKERS, *VLLM_WORKERS]
#: Services of our own image.
OURS = [*WORKERS, "exporter", "gateway", "batcher", "notifier", "console"]
#: Longer than a worker needs after its drain, to release requests and commit the last tokens.
AFTER_DRAIN_SECONDS = 30


def interpolated(text: str, given: Mapping[str, str] = {}) -> str:
    """`text` as compose reads it: `${NAME:-default}` is a given variable, or the default."""
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: given.get(found[1]) or found[2], text)


def seconds(duration: str) -> float:
    units = {"s": 1, "m": 60, "h": 3600}
    return sum(int(count) * units[unit] for count, unit in re.findall(r"(\d+)([smh])", duration))


def bind_sources(service: dict[str, Any]) -> list[Path]:
    mounts = [interpolated(mount).split(":")[0] for mount in service.get("volumes", [])]
    return [ROOT / source for source in mounts if source.startswith(".")]


def check_schema(path: Path) -> int:
    checker = program("check-jsonschema")
    return run(checker, "--builtin-schema", "vendor.compose-spec", path).returncode


def test_the_file_follows_the_compose_specification():
    assert check_schema(COMPOSE_FILE) == 0


def test_a_misspelt_key_would_be_noticed(tmp_path):
    wrong = tmp_path / "docker-compose.yml"
    text = COMPOSE_FILE.read_text(encoding="utf-8")
    wrong.write_text(text.replace("stop_grace_period:", "stop_grace_perod:"), encoding="utf-8")

    assert check_schema(wrong) == 1


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_runs_with_no_more_rights_than_it_needs(name):
    service = SERVICES[name]

    user, _, group = service["user"].partition(":")
    assert user.isdigit() and int(user) > 0 and group.isdigit()
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service and "cap_add" not in service


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_has_limits_and_comes_back(name):
    service = SERVICES[name]

    assert service["pids_limit"] > 0 and service["mem_limit"]
    assert service["restart"] == "unless-stopped" and service["init"] is True
    assert set(service["logging"]["options"]) == {"max-size", "max-file"}


@pytest.mark.parametrize("name", SERVICES)
def test_ports_are_published_on_loopback_only(name):
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[name].get("ports", []))


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_says_when_it_is_healthy(name):
    check = SERVICES[name]["healthcheck"]

    assert {"interval", "timeout", "retries", "start_period", "start_interval"} <= set(check)
    assert seconds(check["start_interval"]) < seconds(check["interval"])
    # A worker's test is the HEALTHCHECK of its image.
    assert ("test" in check) is (name not in WORKERS)


@pytest.mark.parametrize("name", SERVICES)
def test_images_are_pinned_to_a_version(name):
    image = SERVICES[name]["image"]

    version = r":v?\d+\.\d+\.\d+" if name not in OURS else ":(cpu|gpu|gpu-vllm|vllm-cpu)$"
    assert re.search(version, image)


@pytest.mark.parametrize("name", SERVICES)
def test_every_mounted_file_is_in_the_checkout(name):
    assert all(source.exists() for source in bind_sources(SERVICES[name]))


@pytest.mark.parametrize("name", [*WORKERS, "exporter", "batcher"])
def test_our_services_have_no_way_out_of_the_internal_network(name):
    assert COMPOSE["networks"]["backend"]["internal"] is True
    assert list(SERVICES[name]["networks"]) == ["backend"]
    assert "ports" not in SERVICES[name]


@pytest.fixture
def enter(monkeypatch, tmp_path):
    """Sets the environment of a service, with its secret in a file that this test can write."""

    def enter_service(name: str, **given: str) -> None:
        """`given` are the variables of whoever calls compose."""
        secret = tmp_path / "redis_password"
        secret.write_text("as in the file\n", encoding="utf-8")
        # Without a value a variable is passed on, if it is set.
        environment = {
            key: given[key] if text is None else interpolated(text, given)
            for key, text in SERVICES[name]["environment"].items()
            if text is not None or key in given
        }
        assert environment["QUIRE_REDIS_PASSWORD_FILE"] == "/run/secrets/redis_password"
        environment["QUIRE_REDIS_PASSWORD_FILE"] = str(secret)
        for key, text in environment.items():
            monkeypatch.setenv(key, text)
        monkeypatch.chdir(tmp_path)

    return enter_service


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_understands_its_environment_and_has_time_to_drain(name, enter):
    enter(name)

    settings = Settings.load([])

    assert settings.redis_password is not None
    assert settings.redis_password.get_secret_value() == "as in the file"
    # vLLM finds its device itself, and a worker with it refuses the setting.
    devices = {"worker-cpu": "cpu", "worker-gpu": "cuda"}
    assert settings.device == devices.get(name, "auto")
    assert settings.engine == ("vllm" if name in VLLM_WORKERS else "native")
    grace = seconds(SERVICES[name]["stop_grace_period"])
    assert grace >= settings.drain_seconds + AFTER_DRAIN_SECONDS


@pytest.fixture
def models(tmp_path):
    """A file of two models, as it is in the folder that compose mounts."""
    path = tmp_path / "models.toml"
    entry = '[models.{0}]\nqueue = "{0}"\nsource = "/models/{0}"\n'
    path.write_text(entry.format("small") + entry.format("large"), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", NATIVE_WORKERS)
def test_a_worker_serves_the_model_of_the_image_or_one_model_or_a_file_of_models(
    name, enter, models, monkeypatch
):
    enter(name)
    (settings,) = settings_of_models(Settings.load([]))
    assert settings.model is None and settings.model_source.endswith("models/abacus")

    enter(name, QUIRE_MODELS_FILE=models)
    made = settings_of_models(Settings.load([]))
    assert [(one.queue, one.model) for one in made] == [
        ("small", "/models/small"), ("large", "/models/large"),
    ]  # fmt: skip

    monkeypatch.delenv("QUIRE_MODELS_FILE")
    enter(name, QUIRE_MODEL="/models/one", QUIRE_ADAPTERS="/models/adapters")
    (settings,) = settings_of_models(Settings.load([]))
    assert (settings.model, settings.adapters) == ("/models/one", Path("/models/adapters"))
    enter(name, QUIRE_MODELS_FILE=models)
    with pytest.raises(ConfigurationError, match="adapters, model: cannot be combined"):
        Settings.load([])


def test_gateway_and_batcher_read_the_file_of_models_that_workers_read(enter, models):
    for name, load in (("gateway", GatewaySettings.load), ("batcher", BatcherSettings.load)):
        enter(name, QUIRE_GATEWAY_MODELS_FILE=models)
        table = read_models(load([]).models_file)
        assert table is not None
        assert [route.name for route in table.routes] == ["small", "large"]
        mounts = SERVICES[name]["volumes"]
        assert set(SERVICES["worker-cpu"]["volumes"]) <= set(mounts)


@pytest.mark.parametrize("name", WORKERS)
def test_every_setting_of_a_worker_can_be_set_from_outside(name):
    """Compose itself decides where the worker listens and where its password is."""
    fixed = {"config_file", "redis_password", "worker_name", "burst"}
    passed_on = {key.removeprefix("QUIRE_").lower() for key in SERVICES[name]["environment"]}
    fixed |= {"device"} if name in VLLM_WORKERS else set()
    assert set(Settings.model_fields) - passed_on == fixed


@pytest.fixture
def in_container(enter, monkeypatch):
    """Loads the settings that a process of the image has in its service; it finds Redis there."""

    def load(name, kind, *, port):
        for key, text in re.findall(r"(QUIRE_\w+)=(\S+)", DOCKERFILE.read_text(encoding="utf-8")):
            monkeypatch.setenv(key, text)
        enter(name)
        settings = kind.load([])
        assert settings.connection_url == "redis://:as%20in%20the%20file@redis:6379/0"
        assert (settings.http_host, settings.http_port) == ("0.0.0.0", port)
        assert SERVICES[name]["image"] == SERVICES["worker-cpu"]["image"]
        return settings

    return load


def test_the_exporter_understands_its_environment_and_the_images(in_container, monkeypatch):
    settings = in_container("exporter", ExporterSettings, port=EXPORTER_PORT)
    assert settings.queues == ("default",)
    monkeypatch.setenv("QUIRE_EXPORTER_QUEUES", "default,bulk")
    assert ExporterSettings.load([]).queues == ("default", "bulk")
    assert SERVICES["exporter"]["build"] == SERVICES["worker-cpu"]["build"]


def test_the_gateway_understands_its_environment_and_has_time_to_drain(in_container):
    settings = in_container("gateway", GatewaySettings, port=GATEWAY_PORT)
    grace = seconds(SERVICES["gateway"]["stop_grace_period"])
    assert grace >= settings.drain_seconds + 2 * CLOSE_SECONDS


def test_the_batcher_understands_its_environment_and_shares_the_gateways_files(in_container):
    settings = in_container("batcher", BatcherSettings, port=BATCHER_PORT)
    assert seconds(SERVICES["batcher"]["stop_grace_period"]) > settings.drain_seconds
    gateway = SERVICES["gateway"]
    assert gateway["volumes"] == SERVICES["batcher"]["volumes"]
    assert "files:/files" in gateway["volumes"]
    folder = gateway["environment"]["QUIRE_GATEWAY_FILES_FOLDER"]
    assert str(settings.files_folder) == folder == "/files"


def test_the_notifier_understands_its_environment_and_reads_the_file_of_endpoints(in_container):
    settings = in_container("notifier", NotifierSettings, port=NOTIFIER_PORT)
    service = SERVICES["notifier"]
    assert seconds(service["stop_grace_period"]) > settings.post_timeout_seconds
    (mount,) = service["volumes"]
    assert mount.endswith(f":{settings.endpoints_file.parent}:ro")
    (folder,) = bind_sources(service)
    assert read_endpoints(folder / settings.endpoints_file.name, allows_http=False) == {}


def test_the_console_understands_its_environment_and_only_reads(in_container):
    settings = in_container("console", ConsoleSettings, port=CONSOLE_PORT)
    assert (settings.queues, settings.role) == (("default",), "observer")


def test_a_profile_chooses_the_engine_and_the_rest_of_a_service_comes_with_each():
    assert {name: SERVICES[name].get("profiles") for name in SERVICES} == {
        "redis": None,
        "worker-cpu": ["cpu"],
        "worker-gpu": ["gpu"],
        "worker-vllm": ["vllm"],
        "worker-vllm-cpu": ["vllm-cpu"],
        "exporter": None,
        "gateway": None,
        "batcher": ["batcher"],
        "notifier": ["notifier"],
        "console": None,
        "prometheus": None,
        "grafana": None,
    }
    for name in ("worker-gpu", "worker-vllm"):
        (device,) = SERVICES[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}


@pytest.mark.parametrize("name", VLLM_WORKERS)
def test_code_that_vllm_compiles_can_be_run_from_its_cache(name):
    caches = [mount for mount in SERVICES[name]["tmpfs"] if "exec" in mount.split(",")]

    (folder,) = [mount.partition(":")[0] for mount in caches]
    text = DOCKERFILE.read_text(encoding="utf-8")
    for variable in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert re.search(rf"{variable}={folder}(/\w+)? ", text)


EXAMPLE = (ROOT / ".env.example").read_text(encoding="utf-8")


def offered(text: str) -> dict[str, str]:
    """The variables of the example with their values; each line is off."""
    return dict(re.findall(r"^# (\w+)=(.*)$", text, flags=re.MULTILINE))


def read_by_compose() -> dict[str, str | None]:
    """What a person can set, with the default of the file if it has one."""
    text = COMPOSE_FILE.read_text(encoding="utf-8")
    passed_on = {
        name: None
        for service in SERVICES.values()
        for name, value in service.get("environment", {}).items()
        if value is None
    }
    own = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", text))
    del own["VERSION"]  # `make up` sets it.
    return passed_on | own


def test_the_example_of_an_environment_names_what_can_be_set_and_sets_nothing():
    assert [line for line in EXAMPLE.splitlines() if line and not line.startswith("# ")] == []
    read = read_by_compose()
    assert offered(EXAMPLE).keys() == read.keys()
    # A variable that is missing, or that nothing reads, is noticed.
    assert offered(EXAMPLE.replace("# QUIRE_MODEL=", "# QUIRE_MODLE=")).keys() != read.keys()


def test_the_values_of_the_example_are_the_defaults(enter):
    values = {name: value for name, value in offered(EXAMPLE).items() if value}
    wrong = {
        name: value
        for name, value in read_by_compose().items()
        if value is not None and value != offered(EXAMPLE)[name]
    }
    assert wrong == {}
    kinds = {"worker-cpu": Settings, "exporter": ExporterSettings, "gateway": GatewaySettings}
    kinds |= {"console": ConsoleSettings, "notifier": NotifierSettings}
    for name, kind in kinds.items():
        enter(name)
        untouched = kind.load([])
        enter(name, **values)
        assert kind.load([]) == untouched


class Overriding(yaml.SafeLoader):
    """Reads a file over another one: `!reset` takes a key away."""


Overriding.add_constructor("!reset", lambda _loader, _node: None)


def test_the_file_for_images_pulls_each_image_of_ours_and_builds_none():
    text = (ROOT / "ops" / "compose.images.yml").read_text(encoding="utf-8")
    over = yaml.load(text, Loader=Overriding)["services"]
    assert over.keys() == {name for name in SERVICES if "build" in SERVICES[name]} == set(OURS)
    for name, service in over.items():
        assert service.keys() == {"image", "build", "pull_policy"}
        assert (service["build"], service["pull_policy"]) == (None, "always")
        # The same name and tag, but nothing is pulled without the name of a registry.
        asked = re.sub(
            r"\$\{QUIRE_IMAGE:\?[^}]+\}", "${QUIRE_IMAGE:-quire-worker}", service["image"]
        )
        assert asked == SERVICES[name]["image"] != service["image"]
    assert text.count("build: !reset null") == len(OURS)


def test_secrets_are_made_once_and_readable_by_the_containers(tmp_path):
    script = tmp_path / "make-secrets.sh"
    script.write_bytes((ROOT / "ops" / "make-secrets.sh").read_bytes())

    assert run("sh", script).returncode == 0
    made = {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()}
    assert run("sh", script).returncode == 0

    folder = tmp_path / "secrets"
    assert {path.name: path.read_text() for path in folder.iterdir()} == made
    assert {Path(secret["file"]).name for secret in COMPOSE["secrets"].values()} == set(made)
    assert all(re.fullmatch("[0-9a-f]{48}", text) for text in made.values())
    assert len(set(made.values())) == len(made)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o444}
