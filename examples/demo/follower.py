"""Follows all requests at once through one connection, and notes when each token came."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire import Broker, Completion, TokenChunk

#: How long one read waits for news; also how often the display moves when nothing comes.
BLOCK_SECONDS = 0.2


@dataclass(slots=True)
class Followed:
    """What the follower has of one request."""

    request_id: str
    prompt: str
    submitted: float
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    #: That of the claim under which the last tokens were published.
    epoch: int = 0
    first_token: float | None = None
    last_token: float = 0.0
    #: Seconds between tokens; a piece of several counts as that many equal gaps.
    gaps: list[float] = field(default_factory=list)
    #: The number of tokens and of characters when another claim first published; None if none did.
    resumed_at: tuple[int, int] | None = None
    completion: Completion | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class Follower:
    """Reads the output of many requests until all have ended."""

    def __init__(self, broker: Broker, requests: Sequence[Followed]) -> None:
        self._broker = broker
        self.requests = {request.request_id: request for request in requests}
        self._resumed: list[str] = []
        self._has_told = False

    @property
    def open_requests(self) -> list[Followed]:
        return [request for request in self.requests.values() if request.completion is None]

    @property
    def num_tokens(self) -> int:
        return sum(request.num_tokens for request in self.requests.values())

    def first_resumed(self) -> str | None:
        """The first request that goes on under another claim, and where; told once."""
        if self._has_told or not self._resumed:
            return None
        self._has_told = True
        return self._resumed[0]

    def follow(self, on_news: Callable[[], None]) -> None:
        """Read until every request has ended; `on_news` is called after each read."""
        while pending := self.open_requests:
            seen = {request.request_id: request.num_tokens for request in pending}
            news = self._broker.read_output(seen, block_seconds=BLOCK_SECONDS)
            now = time.monotonic()
            for request_id, output in news.items():
                request = self.requests[request_id]
                for item in output:
                    if isinstance(item, Completion):
                        request.completion = item
                    else:
                        self._note(request, item, now)
            on_news()

    def _note(self, request: Followed, chunk: TokenChunk, now: float) -> None:
        count = len(chunk.token_ids)
        if 0 < request.epoch < chunk.epoch:
            self._resumed.append(f"{request.prompt!r} from token {chunk.start} on")
            if request.resumed_at is None:
                request.resumed_at = (request.num_tokens, len(request.text))
        request.epoch = chunk.epoch
        if request.first_token is None:
            request.first_token = now
        else:
            request.gaps += [(now - request.last_token) / count] * count
        request.last_token = now
        request.token_ids += chunk.token_ids
        request.text += chunk.text
