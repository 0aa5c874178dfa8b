"""The units for systemd: systemd accepts them, and each process understands its variables."""

import re
import sys
from pathlib import Path

import pytest

from service.batcher.settings import BatcherSettings
from service.console.server import CLOSE_SECONDS as CONSOLE_CLOSE_SECONDS
from service.console.settings import ConsoleSettings
from service.exporter.settings import ExporterSettings
from service.gateway.server import CLOSE_SECONDS
from service.gateway.settings import GatewaySettings
from service.notifier.settings import NotifierSettings
from service.worker.process.worker import RELEASE_SECONDS
from service.worker.settings.config import Settings
from tests.ops.checkout import ROOT, program, run

UNITS = sorted((ROOT / "ops" / "systemd").iterdir())
PROCESSES = {
    "service": Settings,
    "service.exporter": ExporterSettings,
    "service.gateway": GatewaySettings,
    "service.batcher": BatcherSettings,
    "service.notifier": NotifierSettings,
    "service.console": ConsoleSettings,
}


def complaints(text: str, *, name: str, folder: Path) -> str:
    """What systemd says of a unit; its program is moved to one that this machine has."""
    unit = folder / name.replace("@", "@1")
    unit.write_text(text.replace("/opt/quire/.venv/bin/python", sys.executable))
    done = run(program("systemd-analyze"), "verify", "--man=no", unit)
    return "\n".join(line for line in done.stderr.splitlines() if unit.name in line)


def module_of(text: str) -> str:
    (module,) = re.findall(r"^ExecStart=\S+ -m (\S+)$", text, re.MULTILINE)
    return str(module)


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_accepts_a_unit_and_no_misspelt_one(path, tmp_path):
    text = path.read_text()
    assert complaints(text, name=path.name, folder=tmp_path) == ""

    wrong = text.replace("TimeoutStopSec", "TimeoutStopSecs")
    assert "TimeoutStopSecs" in complaints(wrong, name=path.name, folder=tmp_path)


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_every_variable_of_a_unit_is_a_setting(path):
    text = path.read_text()
    names = re.findall(r"(QUIRE_\w+)=", re.sub(r"^#.*$", "", text, flags=re.MULTILINE))

    assert "QUIRE_REDIS_PASSWORD_FILE" in names
    assert PROCESSES[module_of(text)].unknown_variables(dict.fromkeys(names, "1")) == []


def test_a_unit_waits_for_the_drain_of_its_process():
    waits = {
        module_of(path.read_text()): int(*re.findall(r"TimeoutStopSec=(\d+)", path.read_text()))
        for path in UNITS
    }

    assert set(waits) == set(PROCESSES)
    worker, gateway = Settings.model_fields, GatewaySettings.model_fields
    needed = worker["drain_seconds"].default + worker["flush_seconds"].default + RELEASE_SECONDS
    assert waits["service"] >= needed + 30
    drain = gateway["drain_seconds"].default + 2 * CLOSE_SECONDS
    assert waits["service.gateway"] >= drain
    assert waits["service.batcher"] > BatcherSettings.model_fields["drain_seconds"].default + 10
    post = NotifierSettings.model_fields["post_timeout_seconds"].default
    assert waits["service.notifier"] > post + 10
    assert waits["service.console"] > CONSOLE_CLOSE_SECONDS


def unwritable(units: dict[str, str]) -> list[str]:
    """Units that name a folder of files which systemd does not let them write."""
    named = re.compile(r"_FILES_FOLDER=%S/(\S+)$", re.MULTILINE)
    kept = re.compile(r"^StateDirectory=(\S+)$", re.MULTILINE)
    return [name for name, text in units.items() if named.findall(text) != kept.findall(text)]


def test_gateway_and_batcher_share_a_folder_that_both_may_write():
    units = {path.stem: path.read_text() for path in UNITS}
    shared = [name for name in units if "StateDirectory=quire/files\n" in units[name]]
    assert shared == ["quire-batcher", "quire-gateway"]
    assert unwritable(units) == []

    wrong = units["quire-batcher"].replace("StateDirectory=", "RuntimeDirectory=")
    assert unwritable({**units, "quire-batcher": wrong}) == ["quire-batcher"]


def test_a_unit_reads_its_file_again_if_its_process_does():
    reloaded = [path.stem for path in UNITS if "ExecReload=/bin/kill -HUP" in path.read_text()]
    assert reloaded == ["quire-console", "quire-gateway"]
