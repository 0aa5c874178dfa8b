"""Compiles constraints to the tokens that may come next; the only user of llguidance.

Knows no requests. A constraint is compiled once, in the compiler thread, and only if a process of
its own could do so within bounds (see `service.probe`); it is cached for later requests that ask
for the same. Each generation gets a matcher of its own. All matchers of one
compilation share the states of its lexer, which are limited: a matcher that reaches the limit,
perhaps because others have used it up, gets a compilation of its own.
"""

import json
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from tokenizers import Tokenizer

from engine.constraint import Constraint as EngineConstraint
from engine.constraint import TokenBitmask
from quire.constraints import Constraint, Kind
from quire.errors import InvalidRequest
from service.deep_stack import on_deep_stack
from service.grammar_cache import GrammarCache

if TYPE_CHECKING:
    from llguidance import LLMatcher

    Matcher: TypeAlias = LLMatcher

#: What one constraint may cost, as the library counts. The first two bound what it counts of
#: compiling it, to some tenths of a second; `service.probe` bounds the rest. The
#: others bound each step, to some hundredths of a second for one that was made to be slow, and its
#: memory, to some megabytes. They count operations, not time, so a busy machine does not matter.
MAX_GRAMMAR_SIZE = 200_000
MAX_COMPILE_FUEL = 500_000
MAX_STEP_FUEL = 50_000
MAX_STEP_ITEMS = 5_000
MAX_ROW_ITEMS = 5_000
MAX_LEXER_STATES = 10_000
#: How many tokens a generation has to get with its own compilation before it may have another.
RENEWED_TOKENS = 16
#: White space between two parts of a JSON value: enough to indent with, but bounded, as some models
#: would otherwise generate it without end.
JSON_SPACE = r"[ \n\r\t]{1,32}"
#: What may follow a backslash in JSON. Not `u`, which would give a key several spellings: the
#: library compares keys by spelling, so a key of the schema, spelled in another way, could have any
#: value.
JSON_ESCAPES = 'nrbtf\\"'
#: The schema of `json_object`.
ANY_OBJECT = {"type": "object"}
#: The longest reason for refusing a constraint, in characters; the library quotes what it refuses.
MAX_REASON_LENGTH = 300
#: How to install the library.
GRAMMARS_EXTRA = "the extra `grammars`: pip install -c constraints.txt -e '.[grammars]'"


class Grammars(Protocol):
    """A worker's ability to constrain outputs."""

    def constraint(
        self, wanted: Constraint, output_token_ids: Sequence[int], /
    ) -> EngineConstraint:
        """A new constraint for a generation that goes on from the given output.

        Raises:
            InvalidRequest: it cannot be compiled, or not here; the field and the reason are named.
        """
        ...

    def is_ready(self, wanted: Constraint, /) -> bool:
        """Whether `constraint` answers at once: what is wanted is compiled, or nothing ever is."""
        ...


class NoGrammars:
    """Refuses every constraint, for a reason."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def constraint(self, wanted: Constraint, _: Sequence[int], /) -> EngineConstraint:
        """See `Grammars`."""
        raise InvalidRequest(wanted.field, f"this worker has no grammars: {self.reason}")

    def is_ready(self, _: Constraint, /) -> bool:
        """See `Grammars`."""
        return True


class CompiledGrammars:
    """Compiles constraints for the tokens of one model. Safe for several threads at once.

    Args:
        vocab_size: of the model, which may have ids that no token stands for.

    Raises:
        Exception: the library cannot tell the bytes of this tokenizer's tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        import llguidance

        self._library = llguidance
        self._described = partial(_description, tokenizer, vocab_size, tuple(eos_token_ids))
        known = 1 + max(tokenizer.get_vocab().values())
        described, ends_known = tokenizer.to_str(), [id_ for id_ in eos_token_ids if id_ < known]
        if not ends_known:
            # The library would take an ordinary token for the end, which could then never come.
            described, ends_known = with_special_token(described, known), [known]
        self._tokenizer = llguidance.LLTokenizer(
            described, n_vocab=max(vocab_size, known + 1), eos_token=ends_known
        )
        self._limits = llguidance.LLParserLimits(
            max_grammar_size=MAX_GRAMMAR_SIZE,
            initial_lexer_fuel=MAX_COMPILE_FUEL,
            step_lexer_fuel=MAX_STEP_FUEL,
            step_max_items=MAX_STEP_ITEMS,
            max_items_in_row=MAX_ROW_ITEMS,
            max_lexer_states=MAX_LEXER_STATES,
            verbose_errors=False,
        )
        ends = {id_ for id_ in eos_token_ids if id_ < vocab_size}
        self._ends = {id_: id_ in ends for id_ in ends.union(self._tokenizer.eos_tokens)}
        self._compiled: GrammarCache[Matcher] = GrammarCache()

    def constraint(
        self, wanted: Constraint, output_token_ids: Sequence[int], /
    ) -> EngineConstraint:
        """See `Grammars`."""
        key = _key_of(wanted)
        matcher = self._compiled.get(key)
        if matcher is None:
            matcher = self.compile(wanted)
            self._compiled.put(key, matcher)
        constraint = GrammarConstraint(
            matcher.deep_copy(), ends=self._ends, renew=partial(self._compile_anew, wanted, key=key)
        )
        # What was published is replayed here, and not in the engine's thread.
        constraint.is_complete(output_token_ids)
        return constraint

    def is_ready(self, wanted: Constraint, /) -> bool:
        """See `Grammars`."""
        return _key_of(wanted) in self._compiled

    def weigh(self, wanted: Constraint, *, num_bytes: int) -> None:
        """Tell how much memory a compiled constraint holds; the cache keeps less if it is much."""
        self._compiled.weigh(_key_of(wanted), num_bytes)

    @property
    def described(self) -> dict[str, Any]:
        """What another process needs to compile for the same tokens, as JSON."""
        return self._described()

    def compile(self, wanted: Constraint) -> "Matcher":
        """A matcher that nobody advances, its first step computed: each copy of it has that.

        Raises:
            InvalidRequest: it cannot be compiled.
        """
        try:
            grammar = self._grammar(wanted.kind, wanted.value)
        except ValueError as error:
            raise InvalidRequest(wanted.field, shortened(str(error))) from error
        matcher = on_deep_stack(partial(self._started, grammar))
        reason = matcher.get_error()
        if reason.startswith("NoExtension"):
            reason = "no output can be so"
        if reason:
            raise InvalidRequest(wanted.field, shortened(reason))
        return matcher

    def _started(self, grammar: str) -> "Matcher":
        """A matcher with the answer of its first step, or with an error."""
        matcher = self._library.LLMatcher(
            self._tokenizer, grammar, limits=self._limits, log_level=0
        )
        if not matcher.is_error():
            matcher.compute_bitmask()
        return matcher

    def _compile_anew(self, wanted: Constraint, *, key: str) -> "Matcher":
        """A matcher that shares nothing; and the next who asks the same gets another one."""
        self._compiled.drop(key)
        return self.compile(wanted)

    def _grammar(self, kind: Kind, value: Any) -> str:
        """What the library compiles."""
        matcher = self._library.LLMatcher
        if kind in ("json_schema", "json_object"):
            schema = json.dumps(ANY_OBJECT if kind == "json_object" else value)
            # A schema may say otherwise to the library, and would then be kept to by half.
            return matcher.grammar_from_json_schema(
                schema,
                overrides={
                    "whitespace_pattern": JSON_SPACE,
                    "lenient": False,
                    "coerce_one_of": False,
                    "json_allowed_escapes": JSON_ESCAPES,
                    "json_allow_general_unicode_escapes": False,
                },
            )
        if kind == "regex":
            return matcher.grammar_from_regex(value)
        if kind == "choice":
            # A string of Lark is one of JSON.
            return matcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, value)))
        return matcher.grammar_from_lark(value)


class GrammarConstraint:
    """One generation's matcher, brought to where its output is by every question.

    Args:
        ends: which of the tokens that the matcher or the model takes for an end of sequence are
            one; whether one may come is said here.
        renew: makes a matcher that shares nothing; None if this one has to do.
    """

    def __init__(
        self, matcher: "Matcher", *, ends: dict[int, bool], renew: Callable[[], "Matcher"] | None
    ) -> None:
        self._matcher = matcher
        self._ends = ends
        self._renew = renew
        self._num_consumed = 0
        self._renewable_from = 0

    def allowed(self, output_token_ids: Sequence[int]) -> TokenBitmask:
        """See `engine.constraint.Constraint`."""
        self._consume(output_token_ids)
        found = self._matcher.compute_bitmask()
        if self._is_renewed():
            self._consume(output_token_ids)
            found = self._matcher.compute_bitmask()
        bits = np.frombuffer(found, dtype=np.uint8).copy()
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
        return bits

    def is_complete(self, output_token_ids: Sequence[int]) -> bool:
        """See `engine.constraint.Constraint`."""
        self._consume(output_token_ids)
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def draft(self, output_token_ids: Sequence[int], guess: Sequence[int]) -> Sequence[int]:
        """See `engine.constraint.Constraint`."""
        self._consume(output_token_ids)
        if self._matcher.is_error():
            return ()
        if forced := self._matcher.compute_ff_tokens():
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
        ahead = GrammarConstraint(self._matcher.deep_copy(), ends=self._ends, renew=None)
        ahead._num_consumed = self._num_consumed
        return ahead

    @property
    def failure(self) -> str | None:
        """See `engine.constraint.Constraint`."""
        reason = self._matcher.get_error()
        return f"its constraint cannot go on: {shortened(reason)}" if reason else None

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
        if "lexer" not in self._matcher.get_error() or self._num_consumed < self._renewable_from:
            return False
        if self._renew is None:
            return False
        self._renewable_from = self._num_consumed + RENEWED_TOKENS
        try:
            self._matcher, self._num_consumed = self._renew(), 0
        except Exception:  # noqa: BLE001 - it costs this generation, and not the engine that asks.
            return False
        return True


def load_grammars(
    tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Collection[int]
) -> CompiledGrammars | NoGrammars:
    """What can be done here: nothing without the library, or with a tokenizer it cannot read."""
    try:
        return CompiledGrammars(tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
    except ModuleNotFoundError as error:
        return NoGrammars(f"the module {error.name} is missing; it comes with {GRAMMARS_EXTRA}")
    except Exception as error:  # noqa: BLE001 - the model serves, whatever a library thinks of it.
        return NoGrammars(shortened(f"its tokenizer cannot be read: {error}"))


def _description(
    tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]
) -> dict[str, Any]:
    sizes = {"vocab_size": vocab_size, "eos_token_ids": list(eos_token_ids)}
    return {"tokenizer": tokenizer.to_str(), **sizes}


def _key_of(wanted: Constraint) -> str:
    return f"{wanted.kind} {json.dumps(wanted.value)}"


def with_special_token(described: str, token_id: int) -> str:
    """A tokenizer, as JSON, with one token more, which is no text and which no model has."""
    fields = json.loads(described)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    token = {"id": token_id, "content": f"<end {token_id}>", "special": True, **flags}
    fields["added_tokens"].append(token)
    return json.dumps(fields)


def shortened(reason: str) -> str:
    """A reason of the library in one line."""
    line = " ".join(reason.replace("<non-verbose/>", "").split())
    return line if len(line) <= MAX_REASON_LENGTH else f"{line[: MAX_REASON_LENGTH - 1]}…"
