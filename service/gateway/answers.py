"""Reads the output logs of all choices of a call, merged as tokens come; knows no HTTP.

At most one read per choice is made ahead: the logs in Redis are the buffer, so a caller that reads
slowly costs no more here than what that brought, and one that never comes back nothing at all.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, TypeVar

from quire.client.async_client import AsyncClient
from quire.client.following import MAX_READINGS, joined, raise_unless_completed
from quire.client.turns import Turn
from quire.errors import OutputRewound, ResultExpired, UnknownRequest
from quire.openai.answers import naming_prompt
from quire.wire.output import Completion, State, TokenChunk
from service.gateway.cursors import Place
from service.gateway.http.lifecycle import draining
from service.gateway.http.tasks import end
from service.gateway.idempotency import MAX_WHOLE_LOGPROBS, Asked
from service.gateway.refusals import Refused, too_large

_Item = TypeVar("_Item")

#: A choice, and what one read of its log returned, never empty.
News = tuple[int, Sequence[TokenChunk | Completion]]


class Answer:
    """The answer to one call, read from a caller's places in it.

    Whoever iterates over `news` moves `places` on. When Redis has lost a part of what the caller
    was sent, they are set back to what is certain. `closing` breaks the answer off.
    """

    def __init__(
        self,
        client: AsyncClient,
        asked: Asked,
        *,
        closing: asyncio.Event,
        places: Sequence[Place] | None = None,
    ) -> None:
        self.asked = asked
        self.places = list(places or [Place()] * asked.num_choices)
        self._client = client
        self._closing = closing

    async def news(self, *, silence_seconds: float) -> AsyncGenerator[News | None, None]:
        """The news of all choices, each completion after its chunks; None after every silence.

        Raises the error of a choice that did not complete or cannot be read, ResultExpired for one
        that is not there any more; Refused when the answer is broken off.
        """
        following = [self._follow(choice) for choice in range(self.asked.num_choices)]
        async for item in merged(following, self._closing, silence_seconds=silence_seconds):
            yield item

    async def whole(self) -> list[Completion]:
        """The completion of every choice, with its text and tokens.

        Raises what `news` does; Refused for one that was asked for as a stream, and is too large.
        """
        for _ in range(MAX_READINGS - 1):
            # What Redis has lost of it nobody was told yet.
            with contextlib.suppress(OutputRewound):
                return await self._read_whole()
        return await self._read_whole()

    async def _read_whole(self) -> list[Completion]:
        self.places = [Place()] * self.asked.num_choices
        num_logprobs = 0
        chunks: list[list[TokenChunk]] = [[] for _ in self.places]
        ends: dict[int, Completion] = {}
        async for item in self.news(silence_seconds=float("inf")):
            assert item is not None, "no silence is so long"
            choice, news = item
            for one in news:
                if isinstance(one, Completion):
                    ends[choice] = one
                    continue
                chunks[choice].append(one)
                num_logprobs += sum(1 + len(token.top) for token in one.logprobs)
                if num_logprobs > MAX_WHOLE_LOGPROBS:
                    raise Refused(too_large(MAX_WHOLE_LOGPROBS))
        return [joined(ends[choice], own) for choice, own in enumerate(chunks)]

    async def _follow(self, choice: int) -> AsyncGenerator[News, None]:
        place = self.places[choice]
        handle = self._client.attach(self.asked.member_ids[choice])
        try:
            async for news in handle.follow_reads(
                after=place.num_tokens,
                prefix_hash=place.prefix_hash,
                # A caller is told in its stream; the log would have a line for each of them.
                explains=False,
            ):
                *pieces, last = news
                if isinstance(last, Completion) and last.state is not State.COMPLETED:
                    if pieces:
                        yield choice, pieces
                    raise_unless_completed(self._naming_prompt(choice, last))
                yield choice, news
        except OutputRewound as rewound:
            self.places[choice] = Place(rewound.kept)
            raise
        except UnknownRequest as unknown:
            # It was submitted, or found, before anybody asked for its answer.
            raise ResultExpired(unknown.request_id) from unknown

    def _naming_prompt(self, choice: int, end: Completion) -> Completion:
        asked = self.asked
        return naming_prompt(
            end, choice, num_choices=asked.num_choices, num_prompts=asked.num_prompts
        )


async def in_turns(parts: Iterable[str]) -> bytes:
    """All parts of a body, made one by one, with turns for other tasks of the loop in between."""
    made: list[bytes] = []
    async with Turn() as turn:
        for part in parts:
            made.append(part.encode())
            if turn.is_over:
                await turn.next()
    return b"".join(made)


async def merged(
    sources: Sequence[AsyncGenerator[_Item, None]],
    closing: asyncio.Event,
    *,
    silence_seconds: float,
) -> AsyncGenerator[_Item | None, None]:
    """The items of all sources as they come; None whenever none comes for `silence_seconds`.

    One item of each source is awaited at a time. Refused once `closing` is set.
    """
    closed: asyncio.Future[Any] = asyncio.create_task(closing.wait())
    awaited: dict[asyncio.Future[_Item], AsyncGenerator[_Item, None]] = {
        asyncio.ensure_future(anext(source)): source for source in sources
    }
    timeout = None if silence_seconds == float("inf") else silence_seconds
    try:
        while awaited:
            waited: set[asyncio.Future[Any]] = {closed, *awaited}
            done, _ = await asyncio.wait(
                waited, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if closed in done:
                raise draining()
            if not done:
                yield None
            for task in [task for task in awaited if task in done]:
                source = awaited.pop(task)
                try:
                    item = await task
                except StopAsyncIteration:
                    continue
                yield item
                awaited[asyncio.ensure_future(anext(source))] = source
    finally:
        await end(closed, *awaited)
        for source in sources:
            await source.aclose()
