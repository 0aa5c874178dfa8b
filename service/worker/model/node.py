"""A machine of a model that vLLM divides among machines; the first one serves the requests."""

from typing import NoReturn

from service.shared.logs import take_over_libraries
from service.worker.model.served import vllm_limits
from service.worker.settings.config import Settings


def serves_no_requests(settings: Settings) -> bool:
    """Whether another machine is the first one."""
    return str(settings.vllm.get("node_rank", 0)) != "0"


def follow_first(settings: Settings) -> NoReturn:
    """Load this machine's part of the model, and compute for the first; see `follow`."""
    from engine.vllm.follower import follow

    take_over_libraries()
    follow(settings.model_source, vllm_limits(settings), given=settings.vllm)
