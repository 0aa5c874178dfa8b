"""The engine's errors. They know nothing of the wire protocol.

    EngineError
    ├── RequestRejected   one request can never be served; names the field; the engine continues
    ├── DuplicateRequest  the id of a request that is alive in the engine was added again
    ├── ModelRefused      the model folder cannot be served; says why in one sentence
    └── DeviceFailed      no later step can be trusted; the process must end, and others take over

Bugs of the engine are assertions, which are not in this tree.
"""


class EngineError(Exception):
    """Root of the tree above."""


class RequestRejected(EngineError):
    """A request that can never be served. It is refused at once; other requests are not affected.

    `field` names the invalid input ("prompt", "max_tokens", ...); `message` is one sentence for
    its author.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class DuplicateRequest(EngineError):
    """`request_id` is already alive in this engine."""


class ModelRefused(EngineError):
    """The model cannot be served by this engine."""


class DeviceFailed(EngineError):
    """The device reported an error that outlives the step; no further step can be trusted."""
