"""A small model with random weights whose tokenizer and chat template are those of a family."""

import json
from pathlib import Path

import transformers
from tokenizers import AddedToken, Tokenizer

from tests.engine.model.builders import save_model
from tests.service.fake_model import BOS_ID, EOS_ID, VOCAB_SIZE, byte_tokenizer
from tests.tools.formats import ENDS, Format

TEMPLATE = (
    "{{%- for message in messages -%}}{{{{- message.content -}}}}{{%- endfor -%}}"
    "{{%- if tools -%}}{marks}{{%- for tool in tools -%}}{{{{- tool.function.name -}}}}"
    "{{%- endfor -%}}{{%- endif -%}}{{{{- 'assistant:' -}}}}"
)


def save_family(one: Format, folder: Path) -> dict[str, float]:
    """Save the model; returns the bias of its tokens, as a call has it."""
    tokenizer = Tokenizer.from_str(byte_tokenizer().to_str())
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in one.special])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in one.tokens])
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE + len(one.special) + len(one.tokens),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )
    save_model(config, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "chat_template": TEMPLATE.format(marks=one.family.template),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    bias = ENDS | dict(one.bias)
    ids = {text: tokenizer.encode(text, add_special_tokens=False).ids for text in bias}
    assert all(len(one) == 1 for one in ids.values()), "a bias is of one token"
    return {str(ids[text][0]): value for text, value in bias.items()}
