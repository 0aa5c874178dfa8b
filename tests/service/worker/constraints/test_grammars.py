"""What is made of schemas, patterns, texts and grammars: whatever tokens come, it holds."""

import builtins
import json
import re
import threading
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from quire.errors import InvalidRequest
from quire.version import install_hint
from quire.wire.constraints import Constraint
from service.worker.constraints import grammar_cache, grammars
from service.worker.constraints.grammar_cache import GrammarCache
from service.worker.constraints.grammars import CompiledGrammars, NoGrammars, load_grammars
from service.worker.constraints.matching import GrammarConstraint
from tests.service.walks import (
    EOS_ID,
    OTHER_EOS_ID,
    compiled,
    constraint,
    may_come,
    pair_tokenizer,
    text_of,
    vocab_size,
    walk,
)

ADDRESS = {
    "type": "object",
    "properties": {
        "street": {"type": "string", "maxLength": 12},
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
    },
    "required": ["street", "zip"],
    "additionalProperties": False,
}
PERSON = {
    "$defs": {"address": ADDRESS},
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "kind": {"enum": ["cat", "dog", None, 7]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "address": {"$ref": "#/$defs/address"},
        "born": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
    },
    "required": ["name", "age", "kind", "tags", "address", "born"],
    "additionalProperties": False,
}
PATTERNS = [r"[0-9]{3,7}", r"(ab|a|b){1,9}c", r"[^a-z]{2,5}", r"\d+(\.\d{1,2})?", r"^x.y$"]


@pytest.mark.parametrize("seed", range(25))
def test_whatever_tokens_come_a_schema_holds(seed: int):
    output, has_ended = walk(constraint("json_schema", PERSON), seed=seed, longest=2000)
    assert has_ended
    value = json.loads(text_of(output))
    jsonschema.validate(value, PERSON)
    assert list(value) == list(PERSON["properties"])
    # The control: the same with a part of it cut out is another text.
    with pytest.raises((ValueError, jsonschema.ValidationError)):
        jsonschema.validate(json.loads(text_of(output[:-2])), PERSON)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("seed", range(8))
def test_whatever_tokens_come_a_pattern_holds_from_end_to_end(pattern: str, seed: int):
    output, has_ended = walk(constraint("regex", pattern), seed=seed)
    if has_ended:
        assert re.fullmatch(pattern, text_of(output))


@given(texts=st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=5), seed=st.integers())
@settings(max_examples=60, deadline=None)
def test_of_any_texts_one_comes_word_for_word(texts: list[str], seed: int):
    output, has_ended = walk(constraint("choice", tuple(texts)), seed=seed)
    assert has_ended and text_of(output) in texts


def test_every_one_of_the_texts_can_come():
    rule = ("yes", "no", "not at all")
    outputs = (walk(constraint("choice", rule), seed=seed)[0] for seed in range(60))
    assert {text_of(output) for output in outputs} == set(rule)


def test_a_grammar_holds():
    rule = 'start: sum\nsum: number | "(" sum "+" sum ")"\nnumber: /[0-9]{1,3}/'
    ended = [
        output
        for n in range(60)
        for output, end in [walk(constraint("grammar", rule), seed=n)]
        if end
    ]
    assert len({len(output) for output in ended}) > 3
    for text in map(text_of, ended):
        shorter, before = text, ""
        while shorter != before:
            before, shorter = shorter, re.sub(r"\([0-9]{1,3}\+[0-9]{1,3}\)", "0", shorter)
        assert re.fullmatch(r"[0-9]{1,3}", shorter), text


@pytest.mark.parametrize("word", ["contains", "uniqueItems", "unevaluatedItems"])
def test_a_word_of_a_schema_that_cannot_be_kept_to_is_refused(word: str):
    with pytest.raises(InvalidRequest, match=word):
        constraint("json_schema", {"type": "array", word: {"type": "integer"}})
    # Nor does it help to tell the library that it need not be.
    easy = {"x-guidance": {"lenient": True, "coerce_one_of": True}}
    with pytest.raises(InvalidRequest, match=word):
        constraint("json_schema", easy | {"type": "array", word: {"type": "integer"}})


@pytest.mark.parametrize(
    ("key", "spelling"), [("a", "\\u0061"), ("ab", "a\\u0062"), ("\n", "\\u000a"), ("/", "\\/")]
)
def test_a_key_of_a_schema_has_one_spelling_so_that_none_comes_as_another(key: str, spelling: str):
    rule = {"type": "object", "properties": {key: {"type": "integer"}}}
    text = f'{{"{spelling}":"x"}}'
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(text), rule)
    assert not holds(rule, text)
    # The controls: as it is written, and another key.
    assert holds(rule, json.dumps({key: 1}, separators=(",", ":")))
    assert holds(rule, '{"other\\n":"x"}')


def holds(rule: dict[str, Any], text: str) -> bool:
    """Whether a text may come, from end to end."""
    tokens = pair_tokenizer().encode(text).ids
    asked = constraint("json_schema", rule)
    come = all(id_ in may_come(asked, tokens[:place]) for place, id_ in enumerate(tokens))
    return come and EOS_ID in may_come(asked, tokens)


def test_an_object_is_any_object_and_nothing_else():
    rule = constraint("json_object", True)
    first = {text_of([token_id])[0] for token_id in may_come(rule, [])}
    assert first == {"{"}


@pytest.mark.parametrize("seed", range(10))
def test_an_end_may_come_exactly_where_the_output_may_end(seed: int):
    pattern = r"(ab){1,3}|x[0-9]*"
    rule = constraint("regex", pattern)
    output, _ = walk(rule, seed=seed, longest=12)
    fresh = constraint("regex", pattern)
    for length in range(len(output) + 1):
        found = may_come(fresh, output[:length])
        may_end = re.fullmatch(pattern, text_of(output[:length])) is not None
        assert (EOS_ID in found, OTHER_EOS_ID in found) == (may_end, may_end)


def test_what_is_complete_says_so_and_what_could_go_on_does_not():
    tokens = pair_tokenizer().encode("abc").ids
    assert constraint("regex", "abc").is_complete(tokens)
    assert not constraint("regex", "abcd?").is_complete(tokens)
    assert not constraint("regex", "abcd").is_complete(tokens)


def test_a_grammar_that_names_an_end_of_sequence_does_not_get_it():
    rule = constraint("grammar", 'start: "a" (<eos> | "b")')
    output = pair_tokenizer().encode("a").ids
    assert {text_of([token_id]) for token_id in may_come(rule, output)} == {"b"}


def test_white_space_does_not_run_on_for_ever():
    space = pair_tokenizer().encode(" ").ids
    output = pair_tokenizer().encode("{").ids
    rule = constraint("json_schema", PERSON)
    count = 0
    while space[0] in may_come(rule, output):
        output = [*output, *space]
        count += 1
    assert count == 32


# -- a function of the tokens ---------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_one_that_goes_on_from_tokens_says_what_one_says_that_saw_them_come(seed: int):
    rule = constraint("json_schema", PERSON)
    output, _ = walk(rule, seed=seed, longest=80)
    whole = constraint("json_schema", PERSON)
    for length in range(len(output)):
        later = constraint("json_schema", PERSON, output=output[:length])
        wanted = whole.allowed(output[:length]).tolist()
        assert later.allowed(output[:length]).tolist() == wanted
        # Asked again, and after it was asked something else, it says the same.
        whole.is_complete(output[:length])
        assert whole.allowed(output[:length]).tolist() == wanted


def test_generations_that_ask_the_same_do_not_move_one_another():
    first, second = (constraint("regex", "abc|xyz") for _ in range(2))
    first.is_complete(pair_tokenizer().encode("ab").ids)
    assert {text_of([id_])[0] for id_ in may_come(second, [])} == {"a", "x"}


def test_tokens_that_no_such_rule_lets_come_leave_nothing_and_a_reason():
    rule = constraint("regex", "[0-9]+", output=pair_tokenizer().encode("no").ids)
    assert may_come(rule, pair_tokenizer().encode("no").ids) == []
    # Nothing of the request is at fault.
    assert rule.failure == ("its output so far does not match its constraint on this worker", None)
    assert not rule.is_complete(pair_tokenizer().encode("no").ids)


# -- the worker's side ----------------------------------------------------------------------------


def test_what_is_asked_again_is_not_compiled_again_and_little_is_kept(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(grammar_cache, "MAX_ITEMS", 2)
    found = load_grammars(pair_tokenizer(), vocab_size=vocab_size(), eos_token_ids={EOS_ID})
    compiled_texts: list[str] = []
    compile_ = CompiledGrammars.compile
    monkeypatch.setattr(
        CompiledGrammars,
        "compile",
        lambda self, wanted, **how: (
            compiled_texts.append(wanted.value),
            compile_(self, wanted, **how),
        )[1],
    )
    for value in ("a", "b", "a", "c", "a", "b"):
        found.constraint(Constraint("regex", value, "body.regex"), [])
    assert compiled_texts == ["a", "b", "c", "b"]


def test_what_holds_much_memory_is_kept_less_long(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar_cache, "MAX_BYTES", 100)
    cache = GrammarCache[str]()
    for key, size in {"a": 40, "b": 40, "c": 40}.items():
        cache.put(key, key.upper())
        cache.set_size(key, size)
    assert [cache.get(key) for key in "abc"] == [None, "B", "C"]
    cache.put("d", "D")
    cache.set_size("d", 101)
    assert [key in cache for key in "bcd"] == [False, False, False]
    # What was dropped weighs nothing, also when it is told its size afterwards.
    cache.set_size("b", 100)
    cache.put("e", "E")
    cache.set_size("e", 100)
    assert cache.get("e") == "E"
    cache.drop("e")
    assert "e" not in cache


def test_a_schema_whose_properties_stand_in_another_order_is_another_one():
    one = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}}
    two = {"type": "object", "properties": {"b": {"const": 2}, "a": {"const": 1}}}
    both = [rule | {"required": ["a", "b"], "additionalProperties": False} for rule in (one, two)]
    outputs = [text_of(walk(constraint("json_schema", rule), seed=1)[0]) for rule in both]
    assert [list(json.loads(text)) for text in outputs] == [["a", "b"], ["b", "a"]]


def test_threads_may_ask_at_once():
    wanted = [("regex", f"[a-z]{{{n % 5 + 1}}}") for n in range(40)]
    results: dict[int, bool] = {}

    def ask(number: int) -> None:
        results[number] = walk(constraint(*wanted[number]), seed=number)[1]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(wanted))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(len(wanted)), True)


def test_a_worker_without_the_library_refuses_with_one_sentence(monkeypatch: pytest.MonkeyPatch):
    import_ = builtins.__import__

    def without(name: str, *others: Any) -> Any:
        if name == "llguidance":
            raise ModuleNotFoundError(name=name)
        return import_(name, *others)

    monkeypatch.setattr(builtins, "__import__", without)
    found = load_grammars(pair_tokenizer(), vocab_size=vocab_size(), eos_token_ids={EOS_ID})
    with pytest.raises(InvalidRequest) as refused:
        found.constraint(Constraint("regex", "a", "body.regex"), [])
    assert refused.value.field == "body.regex"
    assert refused.value.message == (
        "this worker has no grammars: the module llguidance is missing; it comes with "
        f"{install_hint('grammars')}"
    )


def test_a_tokenizer_whose_bytes_nobody_knows_is_a_reason_to_refuse_and_not_to_end():
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    found = load_grammars(words, vocab_size=2, eos_token_ids={1})
    assert isinstance(found, NoGrammars)
    assert "tokenizer" in found.reason and "\n" not in found.reason


def test_a_model_without_an_end_of_sequence_ends_where_its_output_is_complete():
    found = load_grammars(pair_tokenizer(), vocab_size=vocab_size(), eos_token_ids=())
    rule = found.constraint(Constraint("choice", ("ab", "abc"), "body.choice"), [])
    output = pair_tokenizer().encode("ab").ids
    assert {text_of([token_id]) for token_id in may_come(rule, output)} == {"c"}
    assert rule.is_complete(pair_tokenizer().encode("abc").ids)


@pytest.mark.parametrize("eos_token_ids", [set(), {299}])
def test_no_token_of_the_text_is_taken_for_an_end_that_the_tokenizer_does_not_know(eos_token_ids):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert alphabet[0] == "!"
    letters = Tokenizer(models.BPE(vocab={one: n for n, one in enumerate(alphabet)}, merges=[]))
    letters.decoder = decoders.ByteLevel()
    found = load_grammars(letters, vocab_size=300, eos_token_ids=eos_token_ids)
    rule = found.constraint(Constraint("regex", "a!?", "body.regex"), [])
    letter = letters.token_to_id("a")
    assert may_come(rule, [letter]) == [0, *eos_token_ids]
    assert rule.is_complete([letter, 0])


def test_states_that_others_have_used_up_are_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch):
    """Matchers of one compilation share the states of its lexer, and the limit on them."""
    for name in ("MAX_LEXER_STATES", "MAX_OWN_LEXER_STATES"):
        monkeypatch.setattr(grammars, name, 1200)
    wanted = Constraint("regex", ".*[a-m].{14}b", "body.regex")

    def walks(*, share: bool) -> list[tuple[list[int], bool]]:
        found = load_grammars(pair_tokenizer(), vocab_size=vocab_size(), eos_token_ids={EOS_ID})
        outputs = []
        for seed in range(12):
            rule = found.constraint(wanted, [])
            if not share:
                found._compiled = GrammarCache()
            outputs.append(walk(rule, seed=seed, longest=25))
        return outputs

    assert walks(share=True) == walks(share=False)
    # The control: where a matcher is not renewed, one that came late has nothing left.
    monkeypatch.setattr(GrammarConstraint, "_replace_matcher", lambda rule: False)
    with pytest.raises(AssertionError, match="too complex"):
        walks(share=True)


def test_where_there_is_no_new_compilation_the_generation_fails_and_nobody_else():
    """The engine asks between two steps, where whatever is raised ends it."""
    tight = LLParserLimits(max_lexer_states=300)
    grammar = LLMatcher.grammar_from_regex(".*[a-m].{14}b")

    def refuse() -> LLMatcher:
        raise RuntimeError("can't start new thread")

    matcher = LLMatcher(compiled()._tokenizer, grammar, limits=tight, log_level=0)
    rule = GrammarConstraint(
        matcher,
        field="regex",
        ends={EOS_ID: True},
        speller=compiled()._speller,
        renew=refuse,
    )
    with pytest.raises(AssertionError, match=r"is too complex to continue after \d+ tokens"):
        walk(rule, seed=1)
    assert rule.failure is not None and rule.failure.field == "regex"
    output = pair_tokenizer().encode("abc").ids
    assert not rule.is_complete(output * 100)
    assert may_come(rule, output * 100) == []
