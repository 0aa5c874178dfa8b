"""The CUDA path on a device; every test here is skipped, with the reason, where there is none."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _device():
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
