"""Requests whose prompts begin with what earlier ones have left in the prefix cache."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from engine.model.run.model_runner import ModelRunner
from tests.engine.model.builders import Generated, generate, make_request


def generate_behind_prefixes(
    runner: ModelRunner,
    expected: Mapping[str, tuple[Sequence[int], Sequence[int]]],
    *,
    num_known: int = 5,
    **overrides,
) -> Generated:
    """Rests of outputs, by name, each behind a prompt that another request has left in the cache.

    `expected` has each prompt and its output. The first requests have the prompts; the second ones
    have the prompts and `num_known` tokens of their outputs. There must be hits.
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
    assert found.snapshot.cached_prompt_tokens > 0, "no prefix was found"
    return replace(found, tokens={name: found.tokens[name] for name in expected})
