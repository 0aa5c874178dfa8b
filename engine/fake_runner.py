"""A ModelRunner without torch, for tests and simulations. It has no model, but a KV cache.

Each slot stores the token, the position and the adapter that were written to it; of a token of a
picture, a number made of the picture and the token's place in it. The next token is a hash of the
row's slots, read through its block table. So a block that is allocated twice, lost in a swap or
cached under a wrong hash gives a wrong token, as with a real model.

It may also have a recurrent state: here everything that was written so far. It must be the same as
what the slots say, so a state that is lost, misplaced or that of another length is noticed.
"""

import hashlib
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from engine.batch import UNKNOWN_TOKEN, Batch, BatchRow, LaunchedStep, StepResult, Vector
from engine.cache.state_tags import StateTags
from engine.constraint import allows, why_no_token
from engine.logprobs import Logprobs
from engine.picture import Picture

#: The content of a slot: token id, position, and name of the adapter.
Slot = tuple[int, int, str | None]
#: The numbers of a vector.
FAKE_WIDTH = 8
#: The content of an unwritten slot.
EMPTY_SLOT: Slot = (-1, -1, None)


class FakeRunner:
    """Deterministic tokens from the content of the cache; faults by request id or by callback.

    Args:
        num_blocks, num_host_blocks, block_size: as in the engine's configuration.
        vocab_size: tokens are chosen from `0 .. vocab_size - 1` without the `never` ids.
        never: ids that are never produced, such as the end of sequence.
        num_state_slots, num_host_state_slots, num_state_snapshots: as in the engine's
            configuration.
        memory: the number of last tokens that determine the next one; 0 for all tokens. With a
            short memory, an output repeats itself, so that it can be guessed.
        before_run: called with each batch first; may raise, wait or record.
        runs_ahead: whether steps are in flight until `result` is called.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        num_state_slots: int = 0,
        num_host_state_slots: int = 0,
        num_state_snapshots: int = 0,
        vocab_size: int = 1000,
        never: Collection[int] = (0,),
        memory: int = 0,
        before_run: Callable[[Batch], None] | None = None,
        runs_ahead: bool = False,
    ) -> None:
        self._block_size = block_size
        self._vocabulary = [id_ for id_ in range(vocab_size) if id_ not in never]
        self._device = [[EMPTY_SLOT] * block_size for _ in range(num_blocks)]
        self._host = [[EMPTY_SLOT] * block_size for _ in range(num_host_blocks)]
        self._tags = StateTags(num_state_slots, num_state_snapshots)
        #: By buffer, and by slot of the host: what the state was made of.
        self._states: list[tuple[Slot, ...]] = [()] * self._tags.num_buffers
        self._host_states: list[tuple[Slot, ...]] = [()] * num_host_state_slots
        self._has_states = num_state_slots > 0
        self._memory = memory
        self._before_run = before_run
        self._runs_ahead = runs_ahead
        self.script = Script()

    def launch(self, batch: Batch, *, after: LaunchedStep | None = None) -> LaunchedStep:
        """Swap blocks, write the rows' tokens to their slots, and compute tokens from the slots.

        The tokens of a row with a draft go to `runs`. The token of another row goes to `decoded` if
        the row is one of the batch's decodes, or else to `token_ids`. A row that can have no token
        goes to `failures`. `after` is the step before, from which rows take their unknown token.
        """
        if self._before_run is not None:
            self._before_run(batch)
        self._swap(batch)
        rows = [with_known_token(row, after) for row in batch.rows]
        for row in rows:
            self._write(row)
        self._advance_states(rows, batch)
        self.script.raise_if_failing(batch)
        token_ids: dict[str, int] = {}
        failures: dict[str, str] = {}
        runs: dict[str, Sequence[int]] = {}
        for row in rows:
            if row.request_id in self.script.broken_request_ids:
                failures[row.request_id] = "no numbers"
            elif row.samples and row.pooling is None:
                run = self._run(row)
                if not run:
                    failures[row.request_id] = why_no_token(row.constraint)
                elif row.num_drafted:
                    runs[row.request_id] = run
                else:
                    token_ids[row.request_id] = run[0]
        decodes = dict.fromkeys(request.request_id for request in batch.decodes.requests)
        outcome = StepResult(
            decoded=[token_ids.get(request_id, UNKNOWN_TOKEN) for request_id in decodes],
            token_ids={id_: token for id_, token in token_ids.items() if id_ not in decodes},
            failures=failures,
            logprobs={
                row.request_id: [
                    fake_logprobs(token_id, row.sampling.logprobs)
                    for token_id in runs.get(row.request_id) or [token_ids[row.request_id]]
                ]
                for row in rows
                if row.sampling.logprobs is not None
                and (row.request_id in token_ids or row.request_id in runs)
            },
            runs=runs,
            vectors=self._vectors(rows),
            prompt_logprobs=self._prompt_logprobs(rows),
        )
        return FakeStep(outcome, self._runs_ahead, token_ids)

    def _run(self, row: BatchRow) -> Sequence[int]:
        """The row's next tokens: one, plus one for each accepted token of its draft."""
        token_ids = []
        for one in row.unrolled():
            token_id = self._sample(one)
            if token_id is None:
                break
            token_ids.append(token_id)
        return row.run_of(token_ids)

    def _write(self, row: BatchRow) -> None:
        for position, token_id in enumerate(row.token_ids, start=row.start):
            block_id = row.block_ids[position // self._block_size]
            content = fake_content(token_id, position, row.pictures)
            slot = (content, position, row.adapter)
            self._device[block_id][position % self._block_size] = slot

    def _swap(self, batch: Batch) -> None:
        for source, destination in batch.swap_out:
            self._host[destination] = list(self._device[source])
        for source, destination in batch.swap_in:
            self._device[destination] = list(self._host[source])
        for source, destination, num_tokens in batch.state_out:
            buffer = self._tags.buffer_after(source, num_tokens)
            self._host_states[destination] = self._states[buffer]
        for source, destination, num_tokens in batch.state_in:
            self._states[self._tags.put(destination, num_tokens)] = self._host_states[source]
        for copy in batch.state_restored:
            read, written = self._tags.restore(*copy)
            self._states[written] = self._states[read]

    def _advance_states(self, rows: Sequence[BatchRow], batch: Batch) -> None:
        """Write each row's new state, and take snapshots; rows may be computed again."""
        if not (self._has_states and rows):
            return
        slots, starts, ends = np.array([[row.state_slot, row.start, row.end] for row in rows]).T
        turn = self._tags.turn(slots, starts, ends)
        for row, read, written in zip(rows, turn.reads, turn.writes, strict=True):
            new = [
                (fake_content(token_id, position, row.pictures), position, row.adapter)
                for position, token_id in enumerate(row.token_ids, start=row.start)
            ]
            self._states[written] = (*self._states[read], *new)
        self._tags.commit(turn)
        for copy in batch.snapshots:
            read, written = self._tags.keep(*copy)
            self._states[written] = self._states[read]

    def _state_of(self, row: BatchRow) -> tuple[Slot, ...]:
        return self._states[self._tags.buffer_after(row.state_slot, row.end)]

    def _read(self, row: BatchRow) -> list[int]:
        """The tokens of the row's slots, read through its block table."""
        slots = [slot for block_id in row.block_ids for slot in self._device[block_id]][: row.end]
        written = [(position, adapter) for _, position, adapter in slots]
        expected = [(position, row.adapter) for position in range(row.end)]
        assert written == expected, f"{row.request_id} reads a corrupted cache"
        if self._has_states:
            assert self._state_of(row) == tuple(slots), f"{row.request_id} has a corrupted state"
        return [token_id for token_id, _, _ in slots]

    def _vectors(self, rows: Sequence[BatchRow]) -> dict[str, Vector]:
        return {
            row.request_id: fake_vector(self._read(row), dimensions=row.pooling.dimensions)
            for row in rows
            if row.samples and row.pooling is not None and row.sampling.prompt_logprobs is None
        }

    def _prompt_logprobs(self, rows: Sequence[BatchRow]) -> dict[str, Sequence[Logprobs]]:
        found: dict[str, Sequence[Logprobs]] = {}
        for row in rows:
            number = row.sampling.prompt_logprobs
            if number is not None and row.scored:
                slots, prompt = self._read(row), row.prompt_token_ids
                found[row.request_id] = [
                    fake_prompt_logprob(slots[:index], prompt[index], number)
                    for index in row.scored
                ]
        return found

    def _sample(self, row: BatchRow) -> int | None:
        """The row's next token; None if its constraint allows no token of the vocabulary."""
        forced = self.script.forced_token(row)
        if forced is not None:
            return forced
        tokens = self._read(row)[-self._memory :]
        vocabulary = self._allowed_tokens(row)
        if not vocabulary:
            return None
        return fake_next_token(tokens, row.sampling.seed, vocabulary, adapter=row.adapter)

    def _allowed_tokens(self, row: BatchRow) -> list[int]:
        if row.constraint is None:
            return self._vocabulary
        assert row.output_index == len(row.output_token_ids), "a step was launched too early"
        bits = row.constraint.allowed(row.output_token_ids)
        return [token_id for token_id in self._vocabulary if allows(bits, token_id)]


class FakeStep(NamedTuple):
    """A step that is already computed, but may report that it is in flight.

    `token_ids` are its tokens by request id, which the next step may need as input.
    """

    outcome: StepResult
    is_in_flight: bool
    token_ids: Mapping[str, int]

    def result(self) -> StepResult:
        return self.outcome


@dataclass(slots=True)
class Script:
    """What a test forces: tokens by output index, and requests whose rows raise or fail."""

    tokens: dict[str, dict[int, int]] = field(default_factory=dict)
    failing_request_ids: set[str] = field(default_factory=set)
    broken_request_ids: set[str] = field(default_factory=set)

    def forced_token(self, row: BatchRow) -> int | None:
        return self.tokens.get(row.request_id, {}).get(row.output_index)

    def raise_if_failing(self, batch: Batch) -> None:
        for row in batch.rows:
            if row.request_id in self.failing_request_ids:
                raise ValueError(f"scripted failure of {row.request_id}")


def with_known_token(row: BatchRow, before: LaunchedStep | None) -> BatchRow:
    """The row with its unknown token, if any, replaced by that of the step before."""
    if UNKNOWN_TOKEN not in row.token_ids:
        return row
    assert isinstance(before, FakeStep)
    assert list(row.token_ids) == [UNKNOWN_TOKEN]
    return row._replace(token_ids=(before.token_ids.get(row.request_id, 0),))


def fake_next_token(
    token_ids: Sequence[int], seed: int, vocabulary: Sequence[int], *, adapter: str | None = None
) -> int:
    """The token after `token_ids`: a pure function of these, the seed and the adapter."""
    known = array("q", [seed, *token_ids]).tobytes() + (adapter or "").encode()
    digest = hashlib.blake2b(known, digest_size=8).digest()
    return vocabulary[int.from_bytes(digest, "little") % len(vocabulary)]


def fake_content(token_id: int, position: int, pictures: Sequence[Picture]) -> int:
    """What the slot of a token stores: its id, or what stands for its part of a picture."""
    for picture in pictures:
        if picture.start <= position < picture.end:
            part = picture.digest + array("q", [position - picture.start, token_id]).tobytes()
            return int.from_bytes(hashlib.blake2b(part, digest_size=7).digest(), "little")
    return token_id


def fake_vector(token_ids: Sequence[int], *, dimensions: int | None = None) -> Vector:
    """The vector of a prompt: FAKE_WIDTH numbers, or fewer; a pure function of the prompt."""
    digest = hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=FAKE_WIDTH).digest()
    numbers = np.frombuffer(digest, dtype=np.uint8).astype(np.float32)
    return (numbers / np.float32(256))[:dimensions]


def fake_logprobs(token_id: int, num_top: int) -> Logprobs:
    """Log-probabilities that depend only on the token id; the next ids are the top tokens."""
    top = tuple((token_id + rank, -0.5 * rank) for rank in range(1, num_top + 1))
    return Logprobs(-0.25 * token_id, top)


def fake_prompt_logprob(before: Sequence[int], token_id: int, num_top: int) -> Logprobs:
    """The log-probabilities of a token of a prompt, made of it and all tokens before it."""
    digest = hashlib.blake2b(array("q", before).tobytes(), digest_size=2).digest()
    logprob, top = fake_logprobs(token_id, num_top)
    return Logprobs(logprob - int.from_bytes(digest, "little") / (1 << 16), top)


def fake_generation(
    prompt_token_ids: Sequence[int],
    *,
    num_tokens: int,
    seed: int = 0,
    vocab_size: int = 1000,
    never: Collection[int] = (0,),
    adapter: str | None = None,
    pictures: Sequence[Picture] = (),
) -> list[int]:
    """The output of a FakeRunner for a prompt without faults: the expected output in tests."""
    vocabulary = [id_ for id_ in range(vocab_size) if id_ not in never]
    token_ids = [
        fake_content(token_id, position, pictures)
        for position, token_id in enumerate(prompt_token_ids)
    ]
    for _ in range(num_tokens):
        token_ids.append(fake_next_token(token_ids, seed, vocabulary, adapter=adapter))
    return token_ids[len(prompt_token_ids) :]
