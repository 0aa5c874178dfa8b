"""Loads the tokenizer of a GGUF file, with its chat template. Knows no prompts and no model.

transformers builds it from the file's metadata. How a text is split before its pieces are merged is
only named there. A split that transformers does not know would be replaced by a similar one, and
the model would get other tokens than in training, so such a file is refused.
"""

from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers

#: The names of splits that transformers' default for byte-level vocabularies is right for.
DEFAULT_SPLITS = frozenset({"gpt-2"})
#: The names of splits that put each digit apart before the default split.
DIGIT_SPLITS = frozenset({"smollm", "starcoder", "refact", "command-r"})


def load_gguf_tokenizer(file: Path) -> Any:
    """The library's tokenizer of a GGUF file.

    Raises:
        ValueError: the file names a kind of tokenizer or a split that is not known.
        Exception: transformers cannot build a tokenizer from the file's metadata.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        GGUF_PRE_TOKENIZER_SPLITS,
        convert_gguf_tokenizer,
        get_gguf_tokenizer,
    )

    architecture, described, options = get_gguf_tokenizer(str(file))
    split = described.get("pre_tokenizer_type")
    is_byte_level = described.get("tokenizer_type") == "gpt2"
    known = DEFAULT_SPLITS | DIGIT_SPLITS | GGUF_PRE_TOKENIZER_SPLITS.keys()
    if is_byte_level and split not in known:
        raise ValueError(
            f"its tokenizer.ggml.pre is {split!r}; known are {', '.join(sorted(known))}"
        )
    backend, _ = convert_gguf_tokenizer(architecture, described)
    tokenizer_class: Any = PreTrainedTokenizerFast
    loaded = tokenizer_class(tokenizer_object=backend, **options)
    if is_byte_level and split in DIGIT_SPLITS:
        loaded.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    return loaded
