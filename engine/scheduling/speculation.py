"""Speculative decoding: which requests get drafts, and how many drafted tokens were accepted.

Knows no ranks and no model. A rejected draft token costs one token of the step's budget and nothing
else. An accepted one is the token that would have been chosen anyway, so speculation never changes
an output.
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile

from engine.batch import Batch, BatchRow
from engine.cache.kv_cache import KVCache
from engine.config import EngineConfig
from engine.prompt_lookup import PromptLookup
from engine.request import Request
from engine.scheduling.decode_set import limit_of
from engine.scheduling.plan import Plan
from engine.stats import SchedulerStats


class Speculation:
    """Drafts for requests that decode, in steps so small that checking them costs little."""

    def __init__(self, config: EngineConfig, kv_cache: KVCache, stats: SchedulerStats) -> None:
        self._config = config
        self._kv_cache = kv_cache
        self._stats = stats

    def has_room_behind(self, batch: Batch) -> bool:
        """Whether the step after this one may have drafts: the decodes alone do not fill it up.

        Always so after a step with drafts. So no step is planned ahead of the results of one, when
        the lengths of its requests are not known yet.
        """
        most = min(self._config.max_speculative_step_tokens, self._config.max_num_batched_tokens)
        return self._config.num_speculative_tokens > 0 and len(batch.decodes) < most

    def drafts(
        self, requests: Sequence[Request], plan: Plan
    ) -> Iterator[tuple[Request, Sequence[int]]]:
        """Some of `requests`, each with a draft, for which it has been given blocks.

        The caller plans each one, which takes from the budget, before it asks for the next.
        """
        config = self._config
        if not config.num_speculative_tokens:
            return
        for request in requests:
            planned = config.max_num_batched_tokens - plan.budget
            room = min(plan.budget, config.max_speculative_step_tokens - planned)
            if room <= 0:
                break
            # The step yields one token more than are drafted.
            wanted = limit_of(request, config) - request.num_tokens - 1
            most = min(wanted, room, config.num_speculative_tokens)
            draft = draft_of(request, most=most, vocab_size=config.vocab_size) if most > 0 else ()
            end = request.num_tokens + len(draft)
            if draft and self._kv_cache.grow(request.request_id, end):
                yield request, draft

    def learn(self, request: Request, row: BatchRow, num_right: int) -> None:
        """Count how many of a row's drafted tokens were accepted."""
        self._stats.accepted_draft_tokens += num_right
        self._stats.rejected_draft_tokens += row.num_drafted - num_right
        if request.lookup is not None:
            request.lookup.learn(row.draft, num_right=num_right)


def draft_of(request: Request, *, most: int, vocab_size: int) -> Sequence[int]:
    """A draft for a request, at most `most` tokens and often none."""
    if request.lookup is None:
        request.lookup = PromptLookup()
    lookup = request.lookup
    lookup.extend(request.token_ids_between(lookup.num_known, request.num_tokens))
    guess: Sequence[int] = lookup.guess(most=most)
    if request.constraint is not None:
        told = request.constraint.draft(request.output_token_ids, guess)
        # A tokenizer may have tokens that the model has not: it would look one up behind the end of
        # its embedding.
        guess = list(takewhile(lambda token_id: token_id < vocab_size, told))
    return guess[:most]
