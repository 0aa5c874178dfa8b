"""Compiles constraints with llguidance, which then gives the tokens that may come next.

Knows no requests. A constraint is compiled once, in the compiler thread, and only after a separate
process could compile it within bounds (see `probe`). The result is cached for
later requests with the same constraint. Each generation gets a matcher of its own. All matchers of
one compilation share the states of its lexer, and their number is limited. A matcher that reaches
the limit, perhaps because other matchers have used up the states, gets a new compilation.
"""

import json
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from tokenizers import Tokenizer

from engine.constraint import Constraint as EngineConstraint
from engine.constraint import Failure
from quire.errors import InvalidRequest
from quire.version import install_hint
from quire.wire.constraints import Constraint
from service.worker.constraints.compile_reasons import reason_of
from service.worker.constraints.deep_stack import on_deep_stack
from service.worker.constraints.grammar_cache import GrammarCache
from service.worker.constraints.matching import GrammarConstraint, shortened
from service.worker.constraints.rehearsal import failure_of
from service.worker.constraints.schemas.checks import SchemaRefused
from service.worker.constraints.schemas.rewriting import enforceable
from service.worker.constraints.spelling import Speller, without_forcing

if TYPE_CHECKING:
    from llguidance import LLMatcher

    Matcher: TypeAlias = LLMatcher

#: Limits of one constraint, in the library's own units. The first two bound what the library counts
#: of a compilation, to some tenths of a second; `probe` bounds the rest. The
#: others bound each step, to some hundredths of a second for a constraint that was designed to be
#: slow, and its memory. They count operations and not time, so they do not depend on how busy the
#: machine is. A step may do as much as a compilation, so what compiles can also continue.
MAX_GRAMMAR_SIZE = 200_000
MAX_COMPILE_FUEL = 500_000
MAX_STEP_FUEL = 500_000
MAX_STEP_ITEMS = 5_000
MAX_ROW_ITEMS = 5_000
#: The states that the generations of one compilation share, of 0.1 to 2 kB each. A text of bounded
#: length needs some seven for each character that is generated, and one for each that is replayed.
MAX_LEXER_STATES = 10_000
#: The states of a generation with a compilation of its own.
MAX_OWN_LEXER_STATES = 50_000
#: White space between two parts of a JSON value. Enough for indentation, but bounded, because some
#: models would otherwise generate white space without end.
JSON_SPACE = r"[ \n\r\t]{1,32}"
#: The characters that may follow a backslash in JSON. Without `u`, because it would allow several
#: spellings of a key. The library compares keys by their spelling, so a key of the schema in
#: another spelling could have any value.
JSON_ESCAPES = 'nrbtf\\"'
#: The library's options for a schema, whatever white space the output may have.
_JSON_OPTIONS: Final[Any] = {
    "lenient": False,
    "coerce_one_of": False,
    "json_allowed_escapes": JSON_ESCAPES,
    "json_allow_general_unicode_escapes": False,
}
_ANY_SPACE: Final[Any] = {"whitespace_pattern": JSON_SPACE}
#: As `json.dumps` writes, with or without its spaces.
_COMPACT: Final[Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
#: The schema of `json_object`.
ANY_OBJECT = {"type": "object"}


class Grammars(Protocol):
    """Makes the constraints of a worker's generations."""

    def constraint(
        self, wanted: Constraint, output_token_ids: Sequence[int], /
    ) -> EngineConstraint:
        """A new constraint for a generation that continues after the given output.

        Raises:
            InvalidRequest: the constraint cannot be compiled, or this worker compiles none. The
                error names the field and the reason.
        """
        ...

    def is_ready(self, wanted: Constraint, /) -> bool:
        """Whether `constraint` returns or raises at once, without a compilation."""
        ...


class NoGrammars:
    """Refuses every constraint with the same reason."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def constraint(self, wanted: Constraint, _: Sequence[int], /) -> EngineConstraint:
        """See `Grammars`."""
        raise InvalidRequest(wanted.field, f"this worker has no grammars: {self.reason}")

    def is_ready(self, _: Constraint, /) -> bool:
        """See `Grammars`."""
        return True


class CompiledGrammars:
    """Compiles constraints for the tokens of one model. Thread-safe.

    Args:
        vocab_size: that of the model. It may be larger than the tokenizer's vocabulary.

    Raises:
        Exception: the library cannot read the bytes of this tokenizer's tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        import llguidance

        self._library = llguidance
        self._describe = partial(_description, tokenizer, vocab_size, tuple(eos_token_ids))
        known = 1 + max(tokenizer.get_vocab().values())
        described, ends_known = tokenizer.to_str(), [id_ for id_ in eos_token_ids if id_ < known]
        if not ends_known:
            # Otherwise the library would treat an ordinary token as the end of sequence, and that
            # token could never come.
            described, ends_known = with_special_token(described, known), [known]
        self._tokenizer = llguidance.LLTokenizer(
            described, n_vocab=max(vocab_size, known + 1), eos_token=ends_known
        )
        ends = {id_ for id_ in eos_token_ids if id_ < vocab_size}
        self._ends = {id_: id_ in ends for id_ in ends.union(self._tokenizer.eos_tokens)}
        self._speller = Speller(self._tokenizer, ends=self._ends)
        self._compiled: GrammarCache[Matcher] = GrammarCache()

    def constraint(
        self, wanted: Constraint, output_token_ids: Sequence[int], /, *, is_slow: bool = False
    ) -> EngineConstraint:
        """See `Grammars`. If `is_slow`, the compilation is for this generation alone."""
        key = key_of(wanted)
        matcher = None if is_slow else self._compiled.get(key)
        if matcher is None:
            matcher = self.compile(wanted, is_shared=not is_slow)
            if not is_slow:
                self._compiled.put(key, matcher)
        # A renewal compiles in the engine's thread while all running requests wait.
        renew = None if is_slow else partial(self._compile_anew, wanted, key=key)
        constraint = self._started(matcher, wanted, renew=renew)
        # Replays the published output here, so that the engine's thread does not have to.
        constraint.is_complete(output_token_ids)
        return constraint

    def is_ready(self, wanted: Constraint, /) -> bool:
        """See `Grammars`."""
        return key_of(wanted) in self._compiled

    def set_size(self, wanted: Constraint, *, num_bytes: int) -> None:
        """Set how much memory a compiled constraint holds, for the limit of the cache."""
        self._compiled.set_size(key_of(wanted), num_bytes)

    def rehearse(self, wanted: Constraint, matcher: "Matcher") -> Failure | None:
        """Why a constraint cannot continue in the middle of an output; None if nothing is found.

        `matcher` is what `compile` returned for it.
        """
        closing = self._speller.begins_with(b'"]}')
        return failure_of(partial(self._started, matcher, wanted), closing=closing, ends=self._ends)

    @property
    def described(self) -> dict[str, Any]:
        """The arguments with which another process can compile for the same tokens, as JSON."""
        return self._describe()

    def compile(self, wanted: Constraint, *, is_shared: bool = True) -> "Matcher":
        """A matcher to copy and never to advance. Its first step is computed, so copies have it.

        If `is_shared`, several generations use its states, and otherwise one.

        Raises:
            InvalidRequest: the constraint cannot be compiled.
        """
        try:
            grammar = self._grammar(wanted)
        except SchemaRefused as error:
            raise InvalidRequest(wanted.field, shortened(str(error))) from error
        # The lexer has one state for each byte of the texts, so long texts need a higher limit.
        num_bytes = len(grammar) if wanted.kind == "choice" else 0
        num_states = MAX_LEXER_STATES if is_shared else MAX_OWN_LEXER_STATES
        matcher = on_deep_stack(
            partial(self._matcher, grammar, max_lexer_states=num_states + num_bytes)
        )
        error_text = matcher.get_error()
        if error_text:
            raise InvalidRequest(wanted.field, reason_of(wanted.kind, error_text))
        return matcher

    def _started(
        self,
        matcher: "Matcher",
        wanted: Constraint,
        *,
        renew: Callable[[], "Matcher"] | None = None,
    ) -> GrammarConstraint:
        return GrammarConstraint(
            matcher.deep_copy(),
            field=wanted.field.removeprefix("body."),
            ends=self._ends,
            speller=self._speller,
            renew=renew,
        )

    def _matcher(self, grammar: str, *, max_lexer_states: int) -> "Matcher":
        """A matcher whose first step is computed, or that has an error."""
        limits = self._library.LLParserLimits(
            max_grammar_size=MAX_GRAMMAR_SIZE,
            initial_lexer_fuel=MAX_COMPILE_FUEL,
            step_lexer_fuel=MAX_STEP_FUEL,
            step_max_items=MAX_STEP_ITEMS,
            max_items_in_row=MAX_ROW_ITEMS,
            max_lexer_states=max_lexer_states,
            verbose_errors=False,
        )
        matcher = self._library.LLMatcher(
            self._tokenizer, without_forcing(grammar), limits=limits, log_level=0
        )
        if not matcher.is_error():
            matcher.compute_bitmask()
        return matcher

    def _compile_anew(self, wanted: Constraint, *, key: str) -> "Matcher":
        """A matcher that shares no states. The next request for this constraint recompiles it."""
        self._compiled.drop(key)
        return self.compile(wanted, is_shared=False)

    def _grammar(self, wanted: Constraint) -> str:
        """The grammar of a constraint, in the library's form. SchemaRefused."""
        kind, value, matcher = wanted.kind, wanted.value, self._library.LLMatcher
        if kind in ("json_schema", "json_object"):
            schema = json.dumps(ANY_OBJECT if kind == "json_object" else enforceable(value))
            # The overrides also win over options in the schema itself (`x-guidance`), with which
            # the library would enforce only a part of it.
            return matcher.grammar_from_json_schema(
                schema,
                overrides=json_options(is_compact=wanted.is_compact),
            )
        if kind == "regex":
            return matcher.grammar_from_regex(value)
        if kind == "choice":
            # Lark and JSON write strings in the same way.
            value = "start: " + " | ".join(map(json.dumps, value))
        return json.dumps({"grammars": [{"lark_grammar": value}]})


def json_options(*, is_compact: bool) -> Any:
    """The library's options for a schema."""
    return {**_JSON_OPTIONS, **(_COMPACT if is_compact else _ANY_SPACE)}


def load_grammars(
    tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Collection[int]
) -> CompiledGrammars | NoGrammars:
    """A compiler of constraints; NoGrammars without the library or with an unreadable tokenizer."""
    try:
        return CompiledGrammars(tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
    except ModuleNotFoundError as error:
        hint = install_hint("grammars")
        return NoGrammars(f"the module {error.name} is missing; it comes with {hint}")
    except Exception as error:  # noqa: BLE001 - the model can still serve other requests.
        return NoGrammars(shortened(f"the library cannot read the model's tokenizer: {error}"))


def _description(
    tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]
) -> dict[str, Any]:
    sizes = {"vocab_size": vocab_size, "eos_token_ids": list(eos_token_ids)}
    return {"tokenizer": tokenizer.to_str(), **sizes}


def key_of(wanted: Constraint) -> str:
    """What tells compilations apart."""
    return f"{wanted.kind} {wanted.is_compact} {json.dumps(wanted.value)}"


def with_special_token(described: str, token_id: int) -> str:
    """A tokenizer's JSON with one more special token, which stands for no text."""
    fields = json.loads(described)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    token = {"id": token_id, "content": f"<end {token_id}>", "special": True, **flags}
    fields["added_tokens"].append(token)
    return json.dumps(fields)
