"""The constraint of one generation: a matcher of the library that follows the output.

Knows no request and compiles nothing.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import structlog

from engine.constraint import Failure, TokenBitmask
from service.worker.constraints.spelling import Speller

if TYPE_CHECKING:
    from llguidance import LLMatcher

    Matcher: TypeAlias = LLMatcher

#: How many tokens a matcher consumes before it computes a step. The library counts the work of the
#: lexer from one computed step to the next.
REPLAYED_TOKENS = 64
#: How many tokens a generation must get with one renewed compilation before the next renewal.
RENEWED_TOKENS = 16
#: The longest reason of the library that is passed on, in characters. The library quotes the part
#: that it refuses, which may be long.
MAX_REASON_LENGTH = 300
#: Part of the library's error for a token that it does not accept. All its other errors in the
#: middle of an output are limits.
NOT_ACCEPTED = "doesn't satisfy the grammar"
#: Part of all errors that may be caused by other matchers, which have used up the shared states.
LEXER_LIMIT = "lexer"

_log = structlog.get_logger("service.worker.constraints.matching")


class GrammarConstraint:
    """The constraint of one generation. Each call first advances the matcher to the given output.

    Args:
        field: the field of the request that has the constraint.
        ends: the tokens that the matcher or the model treats as an end of sequence, and for each of
            them whether it is one. This class decides whether they may come, not the matcher.
        speller: chooses the tokens of text that the matcher forces.
        renew: makes a matcher that shares no states; None if there is no renewal.
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
        self._num_computed = 0
        self._renewable_from = 0

    def allowed(self, output_token_ids: Sequence[int]) -> TokenBitmask:
        """See `engine.constraint.Constraint`."""
        self._consume(output_token_ids)
        bits = self._bitmask()
        if self._replace_matcher():
            self._consume(output_token_ids)
            bits = self._bitmask()
        return bits

    def _bitmask(self) -> TokenBitmask:
        """The tokens that may come next, by the current state of the matcher."""
        self._num_computed = self._num_consumed
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
                # Other matchers may have used up the states. Keeping the matcher with this error
                # lets a new compilation replace it.
                self._matcher = ahead
        return bits

    def is_complete(self, output_token_ids: Sequence[int]) -> bool:
        """See `engine.constraint.Constraint`."""
        self._consume(output_token_ids)
        if self._matcher.is_error():
            return False
        if not output_token_ids:
            # The library reports an end only after a token.
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
        # Nothing follows an end of sequence.
        guess = list(takewhile(lambda token_id: token_id not in self._ends, guess))
        return guess[: self._matcher.validate_tokens(guess)]

    def assuming(
        self, output_token_ids: Sequence[int], draft: Sequence[int]
    ) -> "GrammarConstraint":
        """See `engine.constraint.Constraint`."""
        del draft  # The next call passes an output that includes it.
        self._consume(output_token_ids)
        ahead = GrammarConstraint(
            self._matcher.deep_copy(),
            field=self.field,
            ends=self._ends,
            speller=self._speller,
            renew=None,
        )
        ahead._num_consumed, ahead._num_computed = self._num_consumed, self._num_computed
        return ahead

    @property
    def failure(self) -> Failure | None:
        """See `engine.constraint.Constraint`."""
        reason = self._matcher.get_error()
        if not reason:
            return None
        _log.info("a constraint cannot continue", field=self.field, reason=shortened(reason))
        if NOT_ACCEPTED in reason:
            # For example, the earlier worker had another version of the library.
            return Failure("its output so far does not match its constraint on this worker")
        return Failure(f"is too complex to continue after {self._num_consumed} tokens", self.field)

    def _consume(self, output_token_ids: Sequence[int]) -> None:
        assert len(output_token_ids) >= self._num_consumed, "an output became shorter"
        while self._num_consumed < len(output_token_ids):
            if self._num_consumed >= self._num_computed + REPLAYED_TOKENS:
                self._matcher.compute_bitmask()
                self._num_computed = self._num_consumed
            new = output_token_ids[self._num_consumed : self._num_computed + REPLAYED_TOKENS]
            self._num_consumed += len(new)
            # After a token that it does not accept, the matcher stays in an error.
            self._matcher.consume_tokens(list(new))
            self._replace_matcher()

    def _replace_matcher(self) -> bool:
        """Replace a matcher that has reached a limit of its lexer; returns whether it was replaced.

        The new matcher has its own states, which only this generation uses. So it reaches the limit
        only if this output itself needs too many.
        """
        if LEXER_LIMIT not in self._matcher.get_error() or self._renew is None:
            return False
        if self._num_consumed < self._renewable_from:
            return False
        self._renewable_from = self._num_consumed + RENEWED_TOKENS
        try:
            self._matcher, self._num_consumed, self._num_computed = self._renew(), 0, 0
        except Exception:  # noqa: BLE001 - only this generation fails, and the engine goes on.
            return False
        return True


def shortened(reason: str) -> str:
    """A reason of the library in one line of at most MAX_REASON_LENGTH characters."""
    line = " ".join(reason.replace("<non-verbose/>", "").split())
    return line if len(line) <= MAX_REASON_LENGTH else f"{line[: MAX_REASON_LENGTH - 1]}…"
