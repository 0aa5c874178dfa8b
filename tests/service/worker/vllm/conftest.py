"""`VLLM_USE_V2_MODEL_RUNNER=1` runs the tests here with vLLM's second runner."""

import os

from tests.service.worker.vllm.second_runner import use_second_runner

if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    use_second_runner()
