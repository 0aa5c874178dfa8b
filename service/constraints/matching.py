"""One generation's matcher of the library, brought to where its output is by every question.

Knows no request and compiles nothing.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import structlog

from engine.constraint import Failure, TokenBitmask
from service.constraints.spelling import Speller

if TYPE_CHECKING:
    from llguidance import LLMatcher

    Matcher: TypeAlias = LLMatcher

#: How many tokens a generation has to get with its own compilation before it may have another.
RENEWED_TOKENS = 16
#: The longest reason of the library that is passed on, in characters; it quotes what it refuses.
MAX_REASON_LENGTH = 300
#: What the library says of a token that it does not accept; all its other errors in the middle of
#: an output are limits.
NOT_ACCEPTED = "doesn't satisfy the grammar"
#: What all its errors have in them that may be due to states which others have used up.
LEXER_LIMIT = "lexer"

_log = structlog.get_logger("service.constraints.matching")


class GrammarConstraint:
    """One generation's matcher, brought to where its output is by every question.

    Args:
        field: of the request that asked for it.
        ends: which of the tokens that the matcher or the model takes for an end of sequence are
            one; whether one may come is said here.
        speller: spells the text that the matcher forces.
        renew: makes a matcher that shares nothing; None if this one has to do.
    """

    def __init__(
        self,
        matcher: "Matcher",
        *,
        field: str,
        ends: dict[int, bool],
        speller: Speller,
        renew: Callable[[], "Matcher"] | None,
    ) -> None:
        self.field = field
        self._matcher = matcher
        self._ends = ends
        self._speller = speller
        self._renew = renew
        self._num_consumed = 0
        self._renewable_from = 0

    def allowed(self, output_token_ids: Sequence[int]) -> TokenBitmask:
        """See `engine.constraint.Constraint`."""
        self._consume(output_token_ids)
        bits = self._found()
        if self._is_renewed():
            self._consume(output_token_ids)
            bits = self._found()
        return bits

    def _found(self) -> TokenBitmask:
        """The tokens that may come next, by the matcher as it is."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8).copy()
        if self._matcher.is_error():
            bits[:] = 0
            return bits
        may_end = self._matcher.is_accepting()
        for token_id, is_end in self._ends.items():
            bit = np.uint8(1 << token_id % 8)
            if may_end and is_end:
                bits[token_id // 8] |= bit
            else:
                bits[token_id // 8] &= ~bit
        if not may_end:
            ahead = self._speller.keep_to_spelling(bits, self._matcher)
            if LEXER_LIMIT in ahead.get_error():
                # Others may have used up the states, so another compilation may see further.
                self._matcher = ahead
        return bits

    def is_complete(self, output_token_ids: Sequence[int]) -> bool:
        """See `engine.constraint.Constraint`."""
        self._consume(output_token_ids)
        if self._matcher.is_error():
            return False
        if not output_token_ids:
            # The library notices an end only behind a token.
            return self._may_only_end()
        return self._matcher.is_stopped()

    def _may_only_end(self) -> bool:
        if not self._matcher.is_accepting():
            return False
        bits = np.frombuffer(self._matcher.deep_copy().compute_bitmask(), dtype=np.uint8).copy()
        for token_id in self._ends:
            bits[token_id // 8] &= ~np.uint8(1 << token_id % 8)
        return not bits.any()

    def draft(self, output_token_ids: Sequence[int], guess: Sequence[int]) -> Sequence[int]:
        """See `engine.constraint.Constraint`."""
        self._consume(output_token_ids)
        if self._matcher.is_error():
            return ()
        if forced := self._speller.draft(self._matcher):
            return forced
        # Behind an end there is nothing to guess.
        guess = list(takewhile(lambda token_id: token_id not in self._ends, guess))
        return guess[: self._matcher.validate_tokens(guess)]

    def assuming(
        self, output_token_ids: Sequence[int], draft: Sequence[int]
    ) -> "GrammarConstraint":
        """See `engine.constraint.Constraint`."""
        del draft  # The question will bring it.
        self._consume(output_token_ids)
        ahead = GrammarConstraint(
            self._matcher.deep_copy(),
            field=self.field,
            ends=self._ends,
            speller=self._speller,
            renew=None,
        )
        ahead._num_consumed = self._num_consumed
        return ahead

    @property
    def failure(self) -> Failure | None:
        """See `engine.constraint.Constraint`."""
        reason = self._matcher.get_error()
        if not reason:
            return None
        _log.info("a constraint cannot go on", field=self.field, reason=shortened(reason))
        if NOT_ACCEPTED in reason:
            # As where the worker before had another version of the library.
            return Failure("its output so far does not keep to its constraint here")
        return Failure(f"is too complex to go on after {self._num_consumed} tokens", self.field)

    def _consume(self, output_token_ids: Sequence[int]) -> None:
        assert len(output_token_ids) >= self._num_consumed, "an output has become shorter"
        new = list(output_token_ids[self._num_consumed :])
        self._num_consumed = len(output_token_ids)
        if new:
            # What it does not accept makes it an error, for ever.
            self._matcher.consume_tokens(new)
            if self._is_renewed():
                self._consume(output_token_ids)

    def _is_renewed(self) -> bool:
        """Whether the matcher had come upon a limit of its lexer, and another one has its place.

        One that has seen nothing but these tokens fails where there is no other way.
        """
        if LEXER_LIMIT not in self._matcher.get_error() or self._renew is None:
            return False
        if self._num_consumed < self._renewable_from:
            return False
        self._renewable_from = self._num_consumed + RENEWED_TOKENS
        try:
            self._matcher, self._num_consumed = self._renew(), 0
        except Exception:  # noqa: BLE001 - it costs this generation, and not the engine that asks.
            return False
        return True


def shortened(reason: str) -> str:
    """A reason of the library in one line."""
    line = " ".join(reason.replace("<non-verbose/>", "").split())
    return line if len(line) <= MAX_REASON_LENGTH else f"{line[: MAX_REASON_LENGTH - 1]}…"
