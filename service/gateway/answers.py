"""Reads the output logs of all choices of a call and merges them as tokens come. Knows no HTTP.

At most one read per choice is made ahead. The logs in Redis are the buffer: a slow caller costs the
gateway only the result of that read, and a caller that has gone costs it nothing.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, TypeVar

from quire.client.client_async import AsyncClient
from quire.client.following import MAX_READINGS, joined, raise_unless_completed
from quire.errors import OutputRewound, ProtocolError, ResultExpired, UnknownRequest
from quire.openai.answers import naming_prompt
from quire.transport.turns import Turn
from quire.wire.output import Completion, State, TokenChunk
from quire.wire.pooling import is_pooled
from service.gateway.cursors import Cursor
from service.gateway.http.lifecycle import draining
from service.gateway.idempotency import MAX_COMPLETE_LOGPROBS, CallRecord, kept_prompts
from service.gateway.refusals import Refused, too_large
from service.shared.http.tasks import end

_Item = TypeVar("_Item")

#: The index of a choice, and what one read of its log returned, never empty.
Update = tuple[int, Sequence[TokenChunk | Completion]]


class Answer:
    """The answer to one call, read from the cursors of its caller on.

    `cursors` has one for each choice; without them reading starts at the beginning. The code that
    iterates over `updates` advances them, and feeds `messages`, which has one for each choice if
    the answer has parts. If Redis has lost a part of what the caller was sent, the
    cursor is set back to the last token that is certain. When `closing` is set, the answer is
    broken off.
    """

    def __init__(
        self,
        client: AsyncClient,
        record: CallRecord,
        *,
        closing: asyncio.Event,
        cursors: Sequence[Cursor] | None = None,
    ) -> None:
        self.record = record
        self.cursors = list(cursors or [Cursor()] * record.num_choices)
        self.messages = [
            record.message_stream(choice)
            for choice in range(record.num_choices if record.has_parts else 0)
        ]
        #: The texts of the prompts that are kept with the call, once `updates` has begun.
        self.prompts: Sequence[str] = ()
        self._client = client
        self._closing = closing
        #: Held for what a read brought, until the caller has come to its end: a hundred choices may
        #: each begin with the same long prompt.
        self._gate = asyncio.Lock() if self._has_prompts else None

    async def updates(self, *, idle_seconds: float) -> AsyncGenerator[Update | None, None]:
        """The updates of all choices, each completion after its chunks.

        Yields None whenever nothing has come for `idle_seconds`.

        Raises:
            QuireError: a choice did not complete, or its log cannot be read.
            ResultExpired: a choice does not exist any more.
            Refused: the answer is broken off.
        """
        if self.record.prompt.is_kept:
            self.prompts = await self._kept_prompts()
        following = [self._follow(choice) for choice in range(self.record.num_choices)]
        async for item in merged(following, self._closing, idle_seconds=idle_seconds):
            yield item

    async def whole(self) -> list[Completion]:
        """The completion of every choice, with its text and tokens.

        Raises what `updates` raises, and Refused if the answer is too large to be sent complete,
        which happens to calls that were submitted for a stream.
        """
        for _ in range(MAX_READINGS - 1):
            # Redis has lost a part of the log. The caller has received nothing, so read it again.
            with contextlib.suppress(OutputRewound):
                return await self._read_complete()
        return await self._read_complete()

    def kept_of(self, choice: int) -> str:
        """The text of the prompt of a choice if it is kept, else empty."""
        each = self.record.num_choices // self.record.num_prompts
        return self.prompts[choice // each] if self.prompts else ""

    @property
    def _has_prompts(self) -> bool:
        """Whether the logs may have the tokens of the prompts."""
        use = self.record.prompt
        return use.has_logprobs or use.is_echoed or self.record.has_token_ids

    async def prompt_lengths(self) -> dict[int, int]:
        """The tokens of the prompts of choices whose logs have begun, and tell it."""
        found: dict[int, int] = {}
        for choice, member_id in enumerate(self.record.member_ids):
            if self.cursors[choice].num_tokens:
                async for updates in self._client.attach(member_id).follow_reads(explains=False):
                    first = next(iter(updates))
                    if isinstance(first, TokenChunk) and first.told_prompt:
                        found[choice] = first.num_prompt_tokens
                    break
        return found

    async def _kept_prompts(self) -> list[str]:
        kept = await self._client.kept(self.record.id)
        if kept is None:
            raise ResultExpired(self.record.id)
        prompts = kept_prompts(kept)
        if len(prompts) != self.record.num_prompts:
            raise ProtocolError(f"{self.record.id}: kept are other prompts than the call's")
        return prompts

    async def _read_vectors(self) -> list[Completion]:
        """The ends of all choices, whose logs have nothing else: there may be thousands."""
        closed = asyncio.ensure_future(self._closing.wait())
        reads = asyncio.gather(*map(self._end_of, range(self.record.num_choices)))
        try:
            waited: set[asyncio.Future[Any]] = {closed, reads}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not reads.done():
                raise draining()
            return reads.result()
        finally:
            await end(closed, reads)

    async def _end_of(self, choice: int) -> Completion:
        last: TokenChunk | Completion | None = None
        async for _, updates in self._follow(choice):
            last = updates[-1]
        assert isinstance(last, Completion), "the end is the last of a log"
        return last

    async def _read_complete(self) -> list[Completion]:
        if is_pooled(self.record.kind):
            return await self._read_vectors()
        self.cursors = [Cursor()] * self.record.num_choices
        num_logprobs = 0
        chunks: list[list[TokenChunk]] = [[] for _ in self.cursors]
        ends: dict[int, Completion] = {}
        async for item in self.updates(idle_seconds=float("inf")):
            assert item is not None, "there is no idle timeout"
            choice, updates = item
            for one in updates:
                if isinstance(one, Completion):
                    ends[choice] = one
                    continue
                chunks[choice].append(one)
                for tokens in (one.logprobs, one.prompt_tokens):
                    num_logprobs += sum(1 + len(token.top) for token in tokens)
                if not one.prompt_tokens:
                    num_logprobs += len(one.prompt_token_ids)
                if num_logprobs > MAX_COMPLETE_LOGPROBS:
                    raise Refused(too_large(MAX_COMPLETE_LOGPROBS))
        return [joined(ends[choice], own) for choice, own in enumerate(chunks)]

    async def _follow(self, choice: int) -> AsyncGenerator[Update, None]:
        cursor, is_fed = self.cursors[choice], False
        handle = self._client.attach(self.record.member_ids[choice])
        try:
            async for updates in handle.follow_reads(
                after=cursor.num_tokens,
                prefix_hash=cursor.prefix_hash,
                # The stream itself says why it waits. The log would get a line for each caller.
                explains=False,
                gate=self._gate,
            ):
                if self.messages and cursor.num_tokens and not is_fed:
                    # Only now is it certain that the log has what the caller has.
                    await self._feed_earlier(choice, cursor.num_tokens)
                is_fed = True
                *pieces, last = updates
                if isinstance(last, Completion) and last.state is not State.COMPLETED:
                    if pieces:
                        yield choice, pieces
                    raise_unless_completed(self._naming_prompt(choice, last))
                yield choice, updates
        except OutputRewound as rewound:
            self.cursors[choice] = Cursor(rewound.kept)
            raise
        except UnknownRequest as unknown:
            # The request existed when the call was submitted or found, so it has expired since.
            raise ResultExpired(unknown.request_id) from unknown

    async def _feed_earlier(self, choice: int, num_tokens: int) -> None:
        """Feed the text of the tokens that the caller has: reasoning or a call may be in it."""
        handle = self._client.attach(self.record.member_ids[choice])
        async for updates in handle.follow_reads(explains=False):
            for one in updates:
                if isinstance(one, Completion) or one.start >= num_tokens:
                    return
                later = one.after(num_tokens)
                end = len(one.text) - (len(later.text) if later is not None else 0)
                ends = one.text_ends[: num_tokens - one.start]
                self.messages[choice].delta(one.text[:end], ends)

    def _naming_prompt(self, choice: int, end: Completion) -> Completion:
        record = self.record
        return naming_prompt(
            end,
            choice,
            num_choices=record.num_choices,
            num_prompts=record.num_prompts,
            form=record.form,
            use=record.prompt,
        )


async def encode_parts(parts: Iterable[str]) -> bytes:
    """The parts of a body as UTF-8, joined. Yields to the event loop during long work."""
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
    idle_seconds: float,
) -> AsyncGenerator[_Item | None, None]:
    """The items of all sources as they come; None whenever nothing has come for `idle_seconds`.

    Awaits one item of each source at a time. Raises Refused once `closing` is set.
    """
    closed: asyncio.Future[Any] = asyncio.create_task(closing.wait())
    awaited: dict[asyncio.Future[_Item], AsyncGenerator[_Item, None]] = {
        asyncio.ensure_future(anext(source)): source for source in sources
    }
    timeout = None if idle_seconds == float("inf") else idle_seconds
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
