"""Turns prompts and chats into token ids, and gives each generation its stream of text.

Knows no requests. Chats are rendered by the model's own template; without one they are refused, and
nothing is guessed.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from tokenizers import Tokenizer

from engine.detokenizer import Detokenizer, StreamDecoder
from engine.errors import ModelRefused
from engine.logprobs import Logprobs
from engine.sampling_params import SamplingParams
from quire.errors import InvalidRequest
from quire.logprobs import TokenLogprob, TopLogprob

#: Text before a token whose own text is wanted: many tokens decode differently at the beginning.
BEFORE = "a"
#: The longest reason for refusing a tokenizer, in characters; some libraries write pages.
MAX_REASON_LENGTH = 300

Messages = Sequence[dict[str, Any]]

#: When the chat that is being rendered was created, in milliseconds since 1970.
_CREATED_MS: ContextVar[int] = ContextVar("created_ms")


class ModelTokenizer:
    """The tokenizer of one model. Safe for the intake thread and the engine thread at once."""

    def __init__(
        self, tokenizer: Tokenizer, *, render_chat: Callable[[Messages], str] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._render_chat = render_chat
        self._before = tokenizer.encode(BEFORE, add_special_tokens=False).ids
        self._texts: dict[int, str] = {}

    @classmethod
    def load(cls, source: str) -> "ModelTokenizer":
        """The tokenizer of a model folder or name, with its chat template if it has one.

        Raises:
            ModelRefused: its files are missing, damaged, or not for a fast tokenizer.
        """
        # The import takes a second and brings torch along.
        from transformers import AutoTokenizer

        try:
            loaded = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
            backend = loaded.backend_tokenizer
            # Truncation and padding in the file were meant for training: prompts are taken whole.
            backend.no_truncation()
            backend.no_padding()
            _keep_the_time(loaded.chat_template)
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON_LENGTH]
            raise ModelRefused(f"the tokenizer of {source} cannot be loaded: {reason}") from error

        def render(messages: Messages) -> str:
            return str(
                loaded.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=True
                )
            )

        return cls(backend, render_chat=render if loaded.chat_template else None)

    @property
    def backend(self) -> Tokenizer:
        """The tokenizer of the library, to be read and not to be changed."""
        return self._tokenizer

    def encode_prompt(self, prompt: str) -> list[int]:
        """Ids of a plain prompt, with the special tokens the tokenizer adds itself."""
        return list(self._tokenizer.encode(prompt).ids)

    def encode_chat(self, messages: Messages, *, created_ms: int) -> list[int]:
        """Ids of a chat as the model's template renders it, ready for the answer.

        A template that writes the date gets that of `created_ms`, in UTC, so that a worker that
        takes the chat over on another day, or in another time zone, computes the same prompt.

        Raises:
            InvalidRequest: the model has no template, or its template refuses these messages.
        """
        if self._render_chat is None:
            raise InvalidRequest("kind", "this model has no chat template")
        created = _CREATED_MS.set(created_ms)
        try:
            text = self._render_chat([_with_plain_content(message) for message in messages])
        except Exception as error:
            # A template is a program of the model's author and raises whatever it likes.
            message = f"the model's chat template refuses the messages: {error}"
            raise InvalidRequest("body.messages", message) from error
        finally:
            _CREATED_MS.reset(created)
        # The template has written the special tokens already.
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def text_stream(self, sampling: SamplingParams, *, prompt: Sequence[int]) -> Detokenizer:
        """A fresh stream of text for one generation that follows `prompt`."""
        decoder = StreamDecoder(
            self._tokenizer, skip_special_tokens=sampling.skip_special_tokens, prompt=prompt
        )
        return Detokenizer(
            decoder,
            stop=sampling.stop,
            include_stop_str_in_output=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
        )

    def with_texts(self, token_id: int, logprobs: Logprobs) -> TokenLogprob:
        """The engine's log-probabilities of a token as they go on the wire, with texts."""
        top = tuple(TopLogprob(id_, logprob, self.text_of(id_)) for id_, logprob in logprobs.top)
        return TokenLogprob(token_id, logprobs.logprob, self.text_of(token_id), top)

    def text_of(self, token_id: int) -> str:
        """The text of a token after other text; for a special token, its name.

        Bytes that are no whole character become U+FFFD; an id without a token has no text.
        """
        text = self._texts.get(token_id)
        if text is None:
            # Two threads may do this at once; they store the same value.
            text = self._texts[token_id] = self._added_by(token_id)
        return text

    def _added_by(self, token_id: int) -> str:
        before = self._decode(self._before)
        both = self._decode([*self._before, token_id])
        return both[len(before) :] if both.startswith(before) else self._decode([token_id])

    def _decode(self, token_ids: Sequence[int]) -> str:
        try:
            return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))
        except Exception:  # noqa: BLE001 - the library raises a bare Exception.
            return ""


def _keep_the_time(chat_template: str | dict[str, str] | None) -> None:
    """Make `strftime_now` in templates return the time of the chat in place of the current one.

    The library caches compiled templates, and offers no other way to replace the function.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    named = chat_template if isinstance(chat_template, dict) else {"default": chat_template or ""}
    for template in named.values():
        if "strftime_now" in template:
            _compile_jinja_template(template).globals["strftime_now"] = _strftime_of_chat


def _strftime_of_chat(form: str) -> str:
    return datetime.fromtimestamp(_CREATED_MS.get() / 1000, UTC).strftime(form)


def _with_plain_content(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its text parts joined: most templates know only plain strings."""
    content = message["content"]
    if isinstance(content, str):
        return message
    return {**message, "content": "".join(part["text"] for part in content)}
