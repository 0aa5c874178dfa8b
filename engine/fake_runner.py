"""A ModelRunner without torch, for tests and simulations. Knows no model, but it has a KV cache.

Each slot remembers which token was written at which position, and with which adapter. The next
token is a hash of what the row's slots hold when they are read back through the block table, so a
block handed out twice, lost in a swap or cached under the wrong content shows as a wrong token, as
it would with a real model.
"""

import hashlib
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.batch import UNKNOWN_TOKEN, Batch, BatchRow, LaunchedStep, StepResult
from engine.constraint import allows, why_no_token
from engine.logprobs import Logprobs

#: What a slot holds: token id, position, and name of the adapter.
Slot = tuple[int, int, str | None]
#: Content of a slot nobody has written.
EMPTY_SLOT: Slot = (-1, -1, None)


class FakeRunner:
    """Deterministic tokens from the fake cache's content; faults by request id or by callback.

    Args:
        num_blocks, num_host_blocks, block_size: as the engine's configuration says.
        vocab_size: tokens are drawn from `0 .. vocab_size - 1` without the `never` ids.
        never: ids that are never produced, such as the end of sequence.
        memory: how many of the last tokens decide about the next one; 0 for all of them. With a
            short one an output repeats itself, and can be guessed.
        before_run: called with each batch first; may raise, wait or record.
        runs_ahead: steps are in flight until their results are asked for.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
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
        self._memory = memory
        self._before_run = before_run
        self._runs_ahead = runs_ahead
        self.script = Script()

    def launch(self, batch: Batch, *, after: LaunchedStep | None = None) -> LaunchedStep:
        """Swap, write the rows' tokens into their slots, and hash what can be read back."""
        if self._before_run is not None:
            self._before_run(batch)
        for source, destination in batch.swap_out:
            self._host[destination] = list(self._device[source])
        for source, destination in batch.swap_in:
            self._device[destination] = list(self._host[source])
        rows = [with_known_token(row, after) for row in batch.rows]
        for row in rows:
            self._write(row)
        self.script.fail_if_told(batch)
        token_ids: dict[str, int] = {}
        failures: dict[str, str] = {}
        runs: dict[str, Sequence[int]] = {}
        for row in rows:
            if row.request_id in self.script.broken_request_ids:
                failures[row.request_id] = "no numbers"
            elif row.samples:
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
        )
        return FakeStep(outcome, self._runs_ahead, token_ids)

    def _run(self, row: BatchRow) -> Sequence[int]:
        """The row's next tokens: one, and as many more as its draft is right about."""
        token_ids = []
        for place in row.unrolled():
            token_id = self._sample(place)
            if token_id is None:
                break
            token_ids.append(token_id)
        return row.run_of(token_ids)

    def _write(self, row: BatchRow) -> None:
        for position, token_id in enumerate(row.token_ids, start=row.start):
            block_id = row.block_ids[position // self._block_size]
            slot = (token_id, position, row.adapter)
            self._device[block_id][position % self._block_size] = slot

    def _sample(self, row: BatchRow) -> int | None:
        """The row's next token, or None where its constraint allows none of ours."""
        slots = [slot for block_id in row.block_ids for slot in self._device[block_id]][: row.end]
        forced = self.script.forced_token(row)
        if forced is not None:
            return forced
        tokens = [token_id for token_id, _, _ in slots[-self._memory :]]
        written = [(position, adapter) for _, position, adapter in slots]
        expected = [(position, row.adapter) for position in range(row.end)]
        assert written == expected, f"{row.request_id} reads a corrupted cache"
        vocabulary = self._may_come(row)
        if not vocabulary:
            return None
        return fake_next_token(tokens, row.sampling.seed, vocabulary, adapter=row.adapter)

    def _may_come(self, row: BatchRow) -> list[int]:
        if row.constraint is None:
            return self._vocabulary
        assert row.output_index == len(row.output_token_ids), "a step was launched too early"
        bits = row.constraint.allowed(row.output_token_ids)
        return [token_id for token_id in self._vocabulary if allows(bits, token_id)]


class FakeStep(NamedTuple):
    """A step that was computed while it was launched, and perhaps makes as if it were not.

    `token_ids` are those that the step behind it may have to be fed, by request id.
    """

    outcome: StepResult
    is_in_flight: bool
    token_ids: Mapping[str, int]

    def result(self) -> StepResult:
        return self.outcome


@dataclass(slots=True)
class Script:
    """What a test wants to happen: forced tokens by output index, rows that raise or fail."""

    tokens: dict[str, dict[int, int]] = field(default_factory=dict)
    failing_request_ids: set[str] = field(default_factory=set)
    broken_request_ids: set[str] = field(default_factory=set)

    def forced_token(self, row: BatchRow) -> int | None:
        return self.tokens.get(row.request_id, {}).get(row.output_index)

    def fail_if_told(self, batch: Batch) -> None:
        for row in batch.rows:
            if row.request_id in self.failing_request_ids:
                raise ValueError(f"scripted failure of {row.request_id}")


def with_known_token(row: BatchRow, before: LaunchedStep | None) -> BatchRow:
    """The row as the device computes it: an unknown token is what the step before has yielded."""
    if UNKNOWN_TOKEN not in row.token_ids:
        return row
    assert isinstance(before, FakeStep)
    assert list(row.token_ids) == [UNKNOWN_TOKEN]
    return row._replace(token_ids=(before.token_ids.get(row.request_id, 0),))


def fake_next_token(
    token_ids: Sequence[int], seed: int, vocabulary: Sequence[int], *, adapter: str | None = None
) -> int:
    """The token that follows `token_ids`: a pure function of all of them, seed and adapter."""
    known = array("q", [seed, *token_ids]).tobytes() + (adapter or "").encode()
    digest = hashlib.blake2b(known, digest_size=8).digest()
    return vocabulary[int.from_bytes(digest, "little") % len(vocabulary)]


def fake_logprobs(token_id: int, num_top: int) -> Logprobs:
    """What is said of a token: a function of its id, and as if the next ids were the likeliest."""
    top = tuple((token_id + place, -0.5 * place) for place in range(1, num_top + 1))
    return Logprobs(-0.25 * token_id, top)


def fake_generation(
    prompt_token_ids: Sequence[int],
    *,
    num_tokens: int,
    seed: int = 0,
    vocab_size: int = 1000,
    never: Collection[int] = (0,),
    adapter: str | None = None,
) -> list[int]:
    """What a FakeRunner generates for a prompt when nothing goes wrong: the oracle of its tests."""
    vocabulary = [id_ for id_ in range(vocab_size) if id_ not in never]
    token_ids = list(prompt_token_ids)
    for _ in range(num_tokens):
        token_ids.append(fake_next_token(token_ids, seed, vocabulary, adapter=adapter))
    return token_ids[len(prompt_token_ids) :]
