"""Compiles constraints to the tokens that may come next; the only user of llguidance.

Knows no requests. A constraint is compiled once, in the compiler thread, and only if a process of
its own could do so within bounds (see `service.constraints.probe`); it is cached for later requests
that ask for the same. Each generation gets a matcher of its own. All matchers of one compilation
share the states of its lexer, which are limited: a matcher that reaches the limit, perhaps because
others have used it up, gets a compilation of its own.
"""

import json
from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from tokenizers import Tokenizer

from engine.constraint import Constraint as EngineConstraint
from quire.errors import InvalidRequest
from quire.wire.constraints import Constraint, Kind
from service.constraints.compile_reasons import reason_of
from service.constraints.deep_stack import on_deep_stack
from service.constraints.grammar_cache import GrammarCache
from service.constraints.matching import GrammarConstraint, shortened
from service.constraints.schemas import SchemaRefused, reworked
from service.constraints.spelling import Speller, without_forced_text

if TYPE_CHECKING:
    from llguidance import LLMatcher

    Matcher: TypeAlias = LLMatcher

#: What one constraint may cost, as the library counts. The first two bound what it counts of
#: compiling it, to some tenths of a second; `service.constraints.probe` bounds the rest. The
#: others bound each step, to some hundredths of a second for one that was made to be slow, and its
#: memory, to some megabytes. They count operations, not time, so a busy machine does not matter.
MAX_GRAMMAR_SIZE = 200_000
MAX_COMPILE_FUEL = 500_000
MAX_STEP_FUEL = 50_000
MAX_STEP_ITEMS = 5_000
MAX_ROW_ITEMS = 5_000
MAX_LEXER_STATES = 10_000
#: White space between two parts of a JSON value: enough to indent with, but bounded, as some models
#: would otherwise generate it without end.
JSON_SPACE = r"[ \n\r\t]{1,32}"
#: What may follow a backslash in JSON. Not `u`, which would give a key several spellings: the
#: library compares keys by spelling, so a key of the schema, spelled in another way, could have any
#: value.
JSON_ESCAPES = 'nrbtf\\"'
#: The schema of `json_object`.
ANY_OBJECT = {"type": "object"}
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
        ends = {id_ for id_ in eos_token_ids if id_ < vocab_size}
        self._ends = {id_: id_ in ends for id_ in ends.union(self._tokenizer.eos_tokens)}
        self._speller = Speller(self._tokenizer, ends=self._ends)
        self._compiled: GrammarCache[Matcher] = GrammarCache()

    def constraint(
        self, wanted: Constraint, output_token_ids: Sequence[int], /, *, is_slow: bool = False
    ) -> EngineConstraint:
        """See `Grammars`. One that is slow to compile is compiled for this generation alone."""
        key = _key_of(wanted)
        matcher = None if is_slow else self._compiled.get(key)
        if matcher is None:
            matcher = self.compile(wanted)
            if not is_slow:
                self._compiled.put(key, matcher)
        constraint = GrammarConstraint(
            matcher.deep_copy(),
            field=wanted.field.removeprefix("body."),
            ends=self._ends,
            speller=self._speller,
            # It would be compiled in the engine's thread, between two steps of all requests.
            renew=None if is_slow else partial(self._compile_anew, wanted, key=key),
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
        except SchemaRefused as error:
            raise InvalidRequest(wanted.field, shortened(str(error))) from error
        # A text has a state for each of its bytes, however harmless it is.
        num_bytes = len(grammar) if wanted.kind == "choice" else 0
        matcher = on_deep_stack(
            partial(self._started, grammar, max_lexer_states=MAX_LEXER_STATES + num_bytes)
        )
        said = matcher.get_error()
        if said:
            raise InvalidRequest(wanted.field, reason_of(wanted.kind, said))
        return matcher

    def _started(self, grammar: str, *, max_lexer_states: int) -> "Matcher":
        """A matcher with the answer of its first step, or with an error."""
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
            self._tokenizer, without_forced_text(grammar), limits=limits, log_level=0
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
            schema = json.dumps(ANY_OBJECT if kind == "json_object" else reworked(value))
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
            value = "start: " + " | ".join(map(json.dumps, value))
        return json.dumps({"grammars": [{"lark_grammar": value}]})


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
