"""Requests whose prompts begin with what earlier ones have left in the prefix cache."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

from engine.model.run.model_runner import ModelRunner
from tests.engine.model.builders import Generated, generate, make_request

#: Enough snapshots that none of a few requests has to give way.
ENOUGH_SNAPSHOTS = 32


def generate_behind_prefixes(
    runner: ModelRunner,
    expected: Mapping[str, tuple[Sequence[int], Sequence[int]]],
    *,
    num_known: int = 5,
    keeps_all: bool = True,
    **overrides,
) -> Generated:
    """Rests of outputs, by name, each behind a prompt that another request has left in the cache.

    `expected` has each prompt and its output. The first requests have the prompts; the second ones
    have the prompts and `num_known` tokens of their outputs. With `keeps_all`, the cache has room
    for what all of them leave, and each begins exactly behind what `cached_tokens` says; otherwise
    one of them must have a hit.
    """
    most = max(len(tokens) for _, tokens in expected.values())
    first = [
        make_request(f"first {name}", prompt, max_tokens=most)
        for name, (prompt, _) in expected.items()
    ]
    second = [
        make_request(name, [*prompt, *tokens[:num_known]], max_tokens=most - num_known)
        for name, (prompt, tokens) in expected.items()
    ]
    found = generate(runner, first, second, **overrides)
    hits = {request.request_id: request.num_cached_tokens for request in second}
    if keeps_all:
        wanted = {
            name: cached_tokens(runner, prompt, tokens[:num_known], found.tokens[f"first {name}"])
            for name, (prompt, tokens) in expected.items()
        }
        assert hits == wanted, "a prompt did not begin behind its cached prefix"
    assert sum(hits.values()) > 0, "no prefix was found"
    return replace(found, tokens={name: found.tokens[name] for name in expected})


def cached_tokens(
    runner: ModelRunner, prompt: Sequence[int], known: Sequence[int], tokens: Sequence[int]
) -> int:
    """How much of a prompt and `known` tokens is found behind that prompt and its `tokens`.

    All whole blocks with equal tokens, but for the last token, which must be computed. With
    recurrent states, those up to the last boundary of the first prompt behind which an equal one
    could begin: there its snapshot was taken.
    """
    equal = takewhile(lambda pair: pair[0] == pair[1], zip(known, tokens, strict=False))
    most = min(len(prompt) + len(list(equal)), len(prompt) + len(known) - 1)
    if runner.kv_pool.states is not None:
        most = len(prompt) - 1
    return most - most % runner.config_facts.block_size
