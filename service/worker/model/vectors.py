"""What a model makes that makes vectors: embeddings, or the scores of a classification head.

Encodes the text or the pair of texts of a request, with the model's prompts and within its length.
Knows no engine and no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenizers import Encoding, Tokenizer

from engine.request import Pooling
from quire.errors import InvalidRequest
from quire.wire.pooling import TO_MODEL_LENGTH, PooledKind, PoolingParams
from service.worker.model.text import ModelTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedVectors:
    """The vectors of one model.

    Args:
        kind: the requests that it serves.
        width: the numbers of a vector. Scores have one for each label.
        prompts: texts that are put before an input, by name.
        default_prompt: the one for inputs that name none; empty for none.
        lowers: whether the model was trained with texts in lower case.
        labels: of scores, in their order; empty for embeddings.
    """

    kind: PooledKind
    width: int
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    lowers: bool = False
    labels: tuple[str, ...] = ()

    def encode(
        self,
        given: str | list[int],
        params: PoolingParams,
        *,
        tokenizer: ModelTokenizer,
        max_tokens: int,
    ) -> tuple[list[int], Pooling]:
        """The token ids of an input, and what is computed of them.

        Token ids are taken as they are. A text gets the prompt and the special tokens of the model.
        One that is too long is cut before the last special tokens if the request says so; without
        that, the engine refuses it.

        Raises:
            InvalidRequest: the model has no such prompt, or fewer dimensions.
        """
        if (params.dimensions or 1) > self.width:
            message = f"this model's vectors have {self.width} numbers"
            raise InvalidRequest("body.dimensions", message)
        most = params.truncate_prompt_tokens
        most = max_tokens if most == TO_MODEL_LENGTH else most
        if not isinstance(given, str):
            return given[:most], Pooling(params.dimensions, None, params.use_activation)
        text, pair = self._prompt(params.prompt_name) + given, params.pair
        if self.lowers:
            text, pair = text.lower(), pair and pair.lower()
        encoding = encoded_within(tokenizer.backend, text, pair, most=most)
        second = encoding.type_ids.index(1) if 1 in encoding.type_ids else None
        return list(encoding.ids), Pooling(params.dimensions, second, params.use_activation)

    def _prompt(self, name: str | None) -> str:
        if name is None:
            return self.default_prompt
        if name not in self.prompts:
            known = ", ".join(map(repr, self.prompts)) or "none"
            message = f"this model has no prompt {name!r}; it has {known}"
            raise InvalidRequest("body.prompt_name", message)
        return self.prompts[name]


def encoded_within(
    tokenizer: Tokenizer, text: str, pair: str | None, *, most: int | None
) -> Encoding:
    """The text, or both texts, with special tokens; with at most `most` tokens, if that is given.

    Of a pair that is too long, the longer text is cut first.
    """
    # Not `encode`, which holds the interpreter's lock; and without offsets, which take longest.
    (whole,) = tokenizer.encode_batch_fast([text if pair is None else (text, pair)])
    if most is None or len(whole.ids) <= most:
        return whole
    texts = [text] if pair is None else [text, pair]
    parts = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    room = most - tokenizer.num_special_tokens_to_add(pair is not None)
    if room < len(parts):
        message = f"leaves no room for the text: {most - room} tokens are special ones"
        raise InvalidRequest("body.truncate_prompt_tokens", message)
    for part, length in zip(
        parts, _lengths_within([len(one.ids) for one in parts], room), strict=True
    ):
        part.truncate(length)
    return tokenizer.post_process(parts[0], parts[1] if len(parts) > 1 else None)


def _lengths_within(lengths: list[int], room: int) -> list[int]:
    """The lengths of one or two parts that fit into `room`, as the library shares it out."""
    if len(lengths) == 1:
        return [min(lengths[0], room)]
    shorter = min(*lengths, room // 2)
    first, second = lengths
    if first <= second:
        return [shorter, min(second, room - shorter)]
    return [min(first, room - shorter), shorter]
