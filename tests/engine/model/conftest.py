"""Model folders and runners, built once for the whole room."""

from pathlib import Path

import pytest
import torch
from transformers.utils import logging

from engine.model.run.model_runner import ModelRunner
from tests.engine.model.builders import CONFIGS, Oracle, make_runner, save_model


@pytest.fixture(autouse=True, scope="session")
def _quiet_and_single_threaded():
    """Tiny matrices: a second thread would only wait, and twice as long on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    """How many threads compute a step: alone, in halves, and in thirds, which seldom come out."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """The folder of a tiny model by the name of its config in `builders`."""
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            folders[name] = save_model(CONFIGS[name], tmp_path_factory.mktemp(name))
        return folders[name]

    return folder


@pytest.fixture(scope="session")
def runner_of(model_folder):
    """A runner over a tiny model, shared by all tests that leave nothing behind but its pool."""
    runners: dict[tuple[str, str], ModelRunner] = {}

    def runner(name: str, model_path: str = "auto") -> ModelRunner:
        key = (name, model_path)
        if key not in runners:
            runners[key] = make_runner(model_folder(name), model_path=model_path)
        return runners[key]

    return runner


@pytest.fixture(scope="session")
def oracle(model_folder):
    """What transformers itself generates with the tiny Llama."""
    return Oracle(model_folder("llama"))
