"""Tokenizers and chat templates shaped like those of well-known families, for tests of prompts.

Written for the tests: small vocabularies, and templates that do with a message what those do.
"""

# ruff: noqa: RUF001 - DeepSeek's bars are not those of the keyboard.

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
#: Splits what was thought before from what was said, as reasoning models do.
QWEN = """{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'user' and content.startswith('<tool_response>') %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content.split('<tool_response>')[-1] }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role == 'assistant' and '</think>' in content %}
        {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {{- '<|im_start|>' + message.role + '\\n<think>\\n' + thought }}
        {{- '\\n</think>\\n\\n' + content }}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>\\n' ~ (call | tojson) ~ '\\n</tool_call>' }}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}
"""
LLAMA_3 = (
    "{{- bos_token }}{% for message in messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    "+ message['content'] | trim + '<|eot_id|>' %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}"
    "{% elif message['role'] == 'system' %}{{ '[INST] ' ~ message.content ~ '[/INST]' }}"
    "{% else %}{{ raise_exception('Only user, system and assistant roles are supported!') }}"
    "{% endif %}{% endfor %}"
)
#: Writes its control tokens in pieces around the role.
PHI = (
    "{% for message in messages %}{% if message['role'] == 'system' and message.get('name') %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + message['name'] + '<|end|>' }}"
    "{% else %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
#: Its names of control tokens have bars of their own, and most of them are not special.
DEEPSEEK = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}"
    "{% endif %}"
    "{% set ns = namespace(system_prompt='') %}{%- for message in messages %}"
    "{%- if message['role'] == 'system' %}{% set ns.system_prompt = message['content'] %}"
    "{%- endif %}{%- endfor %}{{bos_token}}{{ns.system_prompt}}{%- for message in messages %}"
    "{%- if message['role'] == 'user' %}{{'<｜User｜>' + message['content']}}{%- endif %}"
    "{%- if message['role'] == 'assistant' %}{% set content = message['content'] %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}{%- endfor %}"
    "{% if add_generation_prompt %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A tokenizer and its template; `added` are its added tokens, True for special ones."""

    make: Callable[[dict[str, bool]], Tokenizer]
    template: str
    added: dict[str, bool]
    bos: str
    eos: str

    def tokenizer(self) -> Tokenizer:
        return self.make(self.added)

    @property
    def settings(self) -> dict[str, str]:
        return {"chat_template": self.template, "bos_token": self.bos, "eos_token": self.eos}


def byte_level(added: dict[str, bool]) -> Tokenizer:
    """Bytes and a few merges, as GPT-2 and most since have them."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("<", "|"), ("|", ">"), ("e", "n"), ("i", "m")]
    vocabulary = {text: n for n, text in enumerate([*symbols, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _with(added, tokenizer)


def byte_fallback(added: dict[str, bool]) -> Tokenizer:
    """Pieces with marked spaces, whose vocabulary has the control tokens too, and bytes.

    Its merges make a control token of the plain text `<s>`: those of some converted models do.
    """
    letters = "▁abcdefghijklmnopqrstuvwxyz<>[]/|_123."
    merges = [("<", "s"), ("<s", ">"), ("▁", "t"), ("t", "h"), ("th", "e"), ("▁", "▁")]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    pieces += ["".join(pair) for pair in merges if "".join(pair) not in pieces]
    vocabulary = {text: n for n, text in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return _with(added, tokenizer)


def marked_first(added: dict[str, bool]) -> Tokenizer:
    """The same pieces; only the first word of a text gets a mark it had not."""
    tokenizer = byte_fallback(added)
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def unigram(added: dict[str, bool]) -> Tokenizer:
    """Pieces with scores, the control tokens among them."""
    letters = "▁abcdefghijklmnopqrstuvwxyz<>[]/|_123."
    scored = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    scored += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    scored += [(one, -5.0) for one in letters] + [("▁the", -6.0), ("en", -8.0)]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return _with(added, tokenizer)


def flagged(make: Callable[[dict[str, bool]], Tokenizer], **flags: bool) -> Family:
    """The tokens of Phi, each with the same flags, over another tokenizer."""

    def tokenizer(added: dict[str, bool]) -> Tokenizer:
        made = make({})
        made.add_tokens([AddedToken(text, special=added[text], **flags) for text in added])
        return made

    return Family(tokenizer, PHI, FAMILIES["Phi"].added, "<|endoftext|>", "<|endoftext|>")


def _with(added: dict[str, bool], tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_tokens(
        [AddedToken(text, special=special, normalized=False) for text, special in added.items()]
    )
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in added if added[text]]
    )
    return tokenizer


_CHATML_TOKENS = {"<|endoftext|>": True, "<|im_start|>": True, "<|im_end|>": True}
_THINKING = dict.fromkeys(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"],
    False,
)
_PIECES = {"<unk>": True, "<s>": True, "</s>": True}

FAMILIES: dict[str, Family] = {
    "ChatML": Family(byte_level, CHATML, _CHATML_TOKENS, "<|im_start|>", "<|im_end|>"),
    "Qwen": Family(byte_level, QWEN, _CHATML_TOKENS | _THINKING, "<|endoftext|>", "<|im_end|>"),
    "Llama 3": Family(
        byte_level,
        LLAMA_3,
        dict.fromkeys(
            ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], True
        ),
        "<|begin_of_text|>",
        "<|eot_id|>",
    ),
    "Gemma": Family(
        marked_first,
        GEMMA,
        # What is no control token may stand in a message, as the model has seen it in texts.
        _PIECES | {"<start_of_turn>": True, "<end_of_turn>": True, "\n": False, "<table>": False},
        "<s>",
        "</s>",
    ),
    "Mistral": Family(
        byte_fallback, MISTRAL, _PIECES | {"[INST]": True, "[/INST]": True}, "<s>", "</s>"
    ),
    "Unigram": Family(unigram, MISTRAL, _PIECES, "<s>", "</s>"),
    "Phi": Family(
        byte_level,
        PHI,
        {"<|endoftext|>": True, "<|end|>": True}
        | dict.fromkeys(["<|system|>", "<|user|>", "<|assistant|>"], False),
        "<|endoftext|>",
        "<|endoftext|>",
    ),
    "DeepSeek": Family(
        byte_level,
        DEEPSEEK,
        {"<｜begin▁of▁sentence｜>": True, "<｜end▁of▁sentence｜>": True}
        | dict.fromkeys(["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"], False),
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
    ),
}
