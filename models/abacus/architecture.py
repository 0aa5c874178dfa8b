"""The shape of abacus, its byte tokenizer, and how both are written as a Hugging Face folder.

A token is a byte: ids 0 to 255 are the byte values themselves, so any UTF-8 text survives the
round trip, and three special tokens follow. Training needs no tokenizer library, only
`encode_document`.
"""

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from models.abacus.tasks import Example

#: Ids of the special tokens, after the 256 bytes.
BOS_ID, EOS_ID, PAD_ID = 256, 257, 258
BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"
VOCABULARY_SIZE = 259
#: Positions that the rotary embedding is configured for; training reaches about 270 of them.
MAX_POSITIONS = 1024
#: The data type of the stored weights. Training keeps float32 and rounds once, at the end.
STORED_DTYPE = torch.bfloat16

#: A chat is answered as if its last user message were the prompt; a missing "=" is supplied.
CHAT_TEMPLATE = (
    "{%- set message = (messages | selectattr('role', 'equalto', 'user') | list | last) -%}"
    "{%- set prompt = message['content'] | trim -%}"
    "{{- bos_token + prompt -}}"
    "{%- if add_generation_prompt and prompt[-1:] != '=' -%}{{- '=' -}}{%- endif -%}"
)


def configuration() -> LlamaConfig:
    """Describe the model: six layers, six query heads that share two key-value heads."""
    return LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        attention_bias=False,
        mlp_bias=False,
    )


def encode_document(example: Example) -> tuple[list[int], int]:
    """Encode prompt and answer between <bos> and <eos>.

    Returns the ids and the index of the answer's first token; the tokenizer gives the same ids.
    """
    prompt = [BOS_ID, *example.prompt.encode()]
    return [*prompt, *example.answer.encode(), EOS_ID], len(prompt)


def build_tokenizer() -> Tokenizer:
    """Build the byte tokenizer: a BPE without merges over the 256 printable stand-ins of bytes."""
    vocabulary = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    vocabulary |= {BOS: BOS_ID, EOS: EOS_ID, PAD: PAD_ID}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (BOS, EOS, PAD)])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def save_folder(model: LlamaForCausalLM, folder: Path) -> None:
    """Write model, tokenizer and their configuration into `folder`, weights as STORED_DTYPE.

    Leaves `model` rounded to STORED_DTYPE: what is in memory afterwards is what was stored.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model.to(STORED_DTYPE)
    model.generation_config = GenerationConfig(
        do_sample=False, bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID
    )
    model.save_pretrained(folder)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _byte_symbols() -> list[str]:
    """Name each byte by one printable character, as the ByteLevel pre-tokenizer does.

    Printable bytes of Latin-1 stand for themselves; the others take the code points from 256 on,
    in order (the scheme of GPT-2's byte-level BPE).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols, spare = [], 256
    for byte in range(256):
        if byte in printable:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(spare))
            spare += 1
    return symbols
