"""Writes docs/reference/openai-fields.md: `python -m ops.pages.fields_page`."""

import json
import sys

from quire.openai.prompts import ANSWERED
from quire.wire.body_fields import KNOWN_FIELDS, UNSUPPORTED, UNSUPPORTED_IN_RESPONSES

#: The kinds of calls with fields of their own, as the tables name them.
CALLS = {"chat.completions": "chats", "completions": "completions"}

#: The fields that are taken, by the kind of the call.
KNOWN = {kind: KNOWN_FIELDS[kind] | ANSWERED.get(kind, frozenset()) for kind in CALLS}

#: The fields that are refused, by the name of the call.
REFUSED = {
    **{call: UNSUPPORTED[kind] for kind, call in CALLS.items()},
    "responses": UNSUPPORTED_IN_RESPONSES,
    "embeddings": UNSUPPORTED["embeddings"],
    "scores": UNSUPPORTED["scores"],
}

#: What each field means that is taken and is no sampling parameter.
TAKEN = {
    "adapter": "the name of an adapter of the model",
    "add_generation_prompt": "`false`: the prompt ends with the messages, without the beginning of "
    "an answer",
    "cache_salt": "only requests of the tenant with the same text share cached prefixes with this",
    "chat_template_kwargs": "variables of the model's chat template; see "
    "[tool calls](../how-to/tools.md)",
    "continue_final_message": "the answer goes on with the last message, which is the assistant's",
    "documents": "maps of texts for the chat template, which must read `documents`",
    "echo": "`true`: the text begins with the prompt, and `logprobs` with those of its tokens; "
    "`max_tokens` may then be 0",
    "guided_choice": "as `choice`",
    "guided_grammar": "as `grammar`, in the syntax of Lark",
    "guided_json": "as `json_schema`; also as JSON text",
    "guided_regex": "as `regex`",
    "include_reasoning": "`false` leaves the [reasoning](../how-to/reasoning.md) out",
    "max_completion_tokens": "as `max_tokens`",
    "metadata": "up to 16 texts; a key has at most 64 characters, a value 512. Kept with the call, "
    "and shown in its whole answer, also in batch files",
    "model": "the model, or `<model>:<adapter>`",
    "n": "how many answers each prompt gets",
    "parallel_tool_calls": "see [tool calls](../how-to/tools.md)",
    "prompt_cache_key": "ignored",
    "reasoning_effort": "a variable of the chat template, which must read it",
    "response_format": "`text`, `json_object` or `json_schema`",
    "return_token_ids": "`true`: choices and events have `token_ids`, those of the output, and "
    "`prompt_token_ids`; in batch files, too",
    "safety_identifier": "ignored",
    "service_tier": "`flex` is priority `low`, `priority` is `high`; in batch files ignored",
    "store": "`true` or `false`, and changes nothing: each answer is kept for `retention_seconds`",
    "stream": "the answer comes as events; not in batch files",
    "stream_options": "`include_usage`, and with it `continuous_usage_stats`",
    "structured_outputs": "one of `json` (as `json_schema`), `json_object`, `regex`, `choice` and "
    "`grammar`",
    "tool_choice": "see [tool calls](../how-to/tools.md)",
    "tools": "see [tool calls](../how-to/tools.md)",
    "top_logprobs": "how many alternatives each log-probability has",
    "truncate_prompt_tokens": "only so many tokens of the end of the prompt are kept",
    "truncation_side": "`right`: of its beginning; `left` is the default",
    "user": "ignored",
}


def render_markdown() -> str:
    """docs/reference/openai-fields.md, whole."""
    lines = [
        "# Fields of a call",
        "",
        "Generated from the code by `python -m ops.pages.fields_page`; do not edit.",
        "",
        "A body of [the gateway](gateway.md), or of a line of a [batch file](../how-to/batch.md),",
        "has the fields of OpenAI's API, many of vLLM's, and all",
        "[sampling parameters](sampling-parameters.md). OpenAI's client sends the others as",
        "`extra_body`. A field that is `null` counts as left out. An unknown field is refused.",
        "Other pages have the fields that [responses](../how-to/responses.md#fields) and",
        "[vectors](vectors.md) take.",
        "",
        "## Taken, besides the sampling parameters",
        "",
        "| field | of | meaning |",
        "|---|---|---|",
    ]
    taken = sorted({name for known in KNOWN.values() for name in known})
    lines += [f"| `{name}` | {_calls_with(name)} | {TAKEN[name]} |" for name in taken]
    lines += [
        "",
        "## Refused, unless the value changes nothing",
        "",
        "| field | of | values that are ignored | any other value |",
        "|---|---|---|---|",
    ]
    taken_by = {call: KNOWN[kind] for kind, call in CALLS.items()}
    for name in sorted({name for fields in REFUSED.values() for name in fields}):
        rows: dict[tuple[str, str], list[str]] = {}
        for call, fields in REFUSED.items():
            field = fields.get(name)
            if field is not None and name not in taken_by.get(call, ()):
                values = ", ".join(f"`{json.dumps(value)}`" for value in field.harmless)
                rows.setdefault((values, field.reason), []).append(call)
        for (values, reason), calls in rows.items():
            lines.append(f"| `{name}` | {', '.join(calls)} | {values} | {reason} |")
    return "\n".join(lines) + "\n"


def _calls_with(name: str) -> str:
    return ", ".join(call for kind, call in CALLS.items() if name in KNOWN[kind])


if __name__ == "__main__":
    sys.stdout.write(render_markdown())
