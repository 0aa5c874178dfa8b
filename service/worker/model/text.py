"""Encodes prompts and chats to token ids, and makes the text stream of each generation.

Knows no requests. Chats are rendered by the model's own template. Without a template they are
refused, because a guessed one would give wrong prompts. Only the template writes control tokens of
a chat; everything in a message is text. In a plain prompt, the text of a control token becomes the
control token.
"""

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2.meta import find_undeclared_variables
from tokenizers import Tokenizer

from engine.errors import ModelRefused
from engine.logprobs import Logprobs
from engine.output.detokenizer import Detokenizer, StreamDecoder
from engine.sampling_params import SamplingParams
from quire.errors import InvalidRequest
from quire.openai.tools.formats import REASONING_FORMATS
from quire.wire.logprobs import TokenLogprob, TopLogprob
from service.worker.constraints.strict_calls import CallMarks, call_marks, mark_ids
from service.worker.model.chat_template import (
    JOIN,
    NONE_TEST,
    PROBE_TEXT,
    SHORT_IDS,
    in_parts,
    is_none,
    joined,
    own_text,
    reads_only_parts,
    rewritten,
    with_no_text,
    with_plain_contents,
    with_short_ids,
)
from service.worker.model.control_tokens import ChatPrompt, ControlTokens
from service.worker.model.encoding import encoded
from service.worker.model.gguf_tokenizer import load_gguf_tokenizer
from service.worker.model.special_tokens import (
    all_but,
    marks_of_calls,
    marks_of_reasoning,
    special_tokens,
)
from service.worker.model.token_bytes import bytes_of

#: Decoded before a token to get the token's own text: many tokens decode differently at the
#: beginning of a text.
BEFORE = "a"
#: The longest reason for refusing a tokenizer, in characters: some libraries write pages.
MAX_REASON_LENGTH = 300

#: How much of the end of a prompt is searched for the opening mark of reasoning, in characters.
MAX_OPENING_LENGTH = 256

#: A comment before a template's source. The library caches templates by source, so a unique comment
#: gives each ModelTokenizer its own compiled template. The plus sign keeps a line end after it.
OWN_TEMPLATE = "{{# text of messages stays text: {owner} +#}}"

Messages = Sequence[dict[str, Any]]

#: Before a model is served, our token ids of these chats are compared with the library's.
PROBES: Sequence[Messages] = (
    [{"role": "user", "content": PROBE_TEXT}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROBE_TEXT}],
    [
        {"role": "user", "content": PROBE_TEXT},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Good-bye."},
    ],
)

#: The variable of a template with the functions that the answer may call.
TOOLS = "tools"
NOTHING: Mapping[str, Any] = MappingProxyType({})
#: Names that the library's renderer reads itself; no caller may set them.
_SETTINGS = frozenset({"messages", "add_generation_prompt", "continue_final_message"})
#: What callers may send for the template, if it reads a variable of that name.
_GIVEN = {
    TOOLS: "tools",
    "documents": "documents",
    "reasoning_effort": "effort of reasoning",
}

#: When the chat that is being rendered was created, in milliseconds since 1970.
_CREATED_MS: ContextVar[int] = ContextVar("created_ms")

#: Renders messages to text with marks for the template's own control tokens; see `control_tokens`.
#: Further arguments are variables of the template.
RenderChat = Callable[..., str]


class ModelTokenizer:
    """The tokenizer of one model. The intake thread and the engine thread may use it at once.

    `call_marks` says how the model writes calls; None if a constraint cannot enforce them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        render_chat: RenderChat | None = None,
        control: ControlTokens | None = None,
        variables: Collection[str] = (),
        no_chat: str = "this model has no chat template",
        call_marks: CallMarks | None = None,
    ) -> None:
        self.call_marks = call_marks
        self._tokenizer = tokenizer
        self._render_chat = render_chat
        if render_chat is not None and control is None:
            control = ControlTokens(tokenizer)
        self._control = control
        self._variables = variables
        self._no_chat = no_chat
        self._before = tokenizer.encode(BEFORE, add_special_tokens=False).ids
        self._texts: dict[int, tuple[str, bytes]] = {}
        special = special_tokens(tokenizer)
        self._left_out = all_but(special, marks_of_reasoning(special))
        self._left_out_of_calls = all_but(
            special, marks_of_reasoning(special) | marks_of_calls(special)
        )

    @classmethod
    def load(cls, source: str) -> "ModelTokenizer":
        """The tokenizer of a folder, name or GGUF file, with its chat template if it has one.

        Raises:
            ModelRefused: files are missing or damaged, or the tokenizer is not a fast one.
        """
        # Imported here, because it takes a second and also imports torch.
        from transformers import AutoTokenizer

        try:
            if source.lower().endswith(".gguf"):
                loaded = load_gguf_tokenizer(Path(source))
            else:
                loaded = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
            backend = loaded.backend_tokenizer
            # Truncation and padding in the file are for training; prompts must not be changed.
            backend.no_truncation()
            backend.no_padding()
        except Exception as error:
            reason = _short(error)
            raise ModelRefused(f"the tokenizer of {source} cannot be loaded: {reason}") from error
        if not loaded.chat_template:
            return cls(backend)
        try:
            return cls(backend, **_chat_of(loaded))
        except Exception as error:  # noqa: BLE001 - templates are programs and may raise anything.
            return cls(
                backend, no_chat=f"this model's chat template is not usable: {_short(error)}"
            )

    @property
    def why_no_chat(self) -> str | None:
        """Why chats are refused; None if they are not."""
        return self._no_chat if self._render_chat is None else None

    @property
    def backend(self) -> Tokenizer:
        """The library's tokenizer; callers must not change it."""
        return self._tokenizer

    def encode_prompt(self, prompt: str) -> list[int]:
        """Ids of a plain prompt, with the special tokens that the tokenizer itself adds."""
        return encoded(self._tokenizer, prompt)

    def encode_chat(
        self,
        messages: Messages,
        *,
        created_ms: int,
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] = NOTHING,
        settings: Mapping[str, Any] = NOTHING,
    ) -> ChatPrompt:
        """Ids of a chat as the model's template renders it, up to the beginning of the answer.

        `tools` are functions in OpenAI's form. `arguments` are variables of the template; those
        that it does not read are ignored. `settings` say how it renders; see
        `quire.wire.chat_messages.template_settings_of`.

        The `opening` of the result is a mark of reasoning with which the prompt ends, if it does. A
        content of null is null where the template tests for it, and else an empty text; the library
        leaves it out.

        Only the template's own text can become a control token; all strings of the messages are
        data. If no message contains the text of a control token, the ids are those of the
        transformers library. The time is linear in the length of the messages.

        A template that writes the date gets the date of `created_ms` (milliseconds since 1970) in
        UTC. So a worker that takes the chat over on another day, or in another time zone, computes
        the same prompt.

        Raises:
            InvalidRequest: the model has no template, its template does not read what must be in
                the prompt, or it refuses these messages.
        """
        if self._render_chat is None or self._control is None:
            raise InvalidRequest("body.messages", f"{self._no_chat}: use prompts (/v1/completions)")
        wanted = {**settings, TOOLS: list(tools)} if tools else dict(settings)
        for name, what in _GIVEN.items():
            if name in wanted and name not in self._variables:
                message = f"this model's chat template knows no {what}"
                raise InvalidRequest(f"body.{name}", message)
        created = _CREATED_MS.set(created_ms)
        try:
            plain = with_plain_contents(messages)
            given = {name: value for name, value in arguments.items() if name in self._variables}
            variables = {**given, **wanted}
            text = self._render_chat(plain, **variables)
            end = self._control.unmarked(text[-MAX_OPENING_LENGTH:])
            prompt = self._control.encode(text)._replace(opening=_opening_at(end))
            is_changed = prompt.is_changed or text != self._text_before(plain, text, variables)
            return prompt._replace(is_changed=is_changed)
        except Exception as error:
            # A template is a program of the model's author and may raise anything.
            reason = self._control.unmarked(str(error))
            message = f"the model's chat template refuses the messages: {reason}"
            raise InvalidRequest("body.messages", message) from error
        finally:
            _CREATED_MS.reset(created)

    def _text_before(
        self, messages: Messages, text: str, variables: Mapping[str, Any]
    ) -> str | None:
        """The `text` of a chat as earlier versions rendered it: they gave templates no null.

        None if the template refuses it so.
        """
        assert self._render_chat is not None
        if all(message["content"] is not None for message in messages):
            return text
        before = [{**message, "content": message["content"] or ""} for message in messages]
        try:
            return self._render_chat(before, **variables)
        except Exception:  # noqa: BLE001 - a template is a program and may raise anything.
            return None

    def text_stream(
        self,
        sampling: SamplingParams,
        *,
        prompt: Sequence[int],
        opening: str = "",
        keeps_marks: bool = False,
        keeps_calls: bool = False,
    ) -> Detokenizer:
        """A new text stream for one generation after `prompt`.

        The text begins with the `opening`. If it `keeps_marks`, marks of reasoning have text even
        if they are special tokens that are left out; if it `keeps_calls`, those of calls, too.
        """
        left_out = None
        if keeps_marks and sampling.skip_special_tokens:
            left_out = self._left_out_of_calls if keeps_calls else self._left_out
        decoder = StreamDecoder(
            self._tokenizer,
            skip_special_tokens=sampling.skip_special_tokens,
            prompt=prompt,
            left_out=left_out,
        )
        return Detokenizer(
            decoder,
            stop=sampling.stop,
            include_stop_str_in_output=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
            opening=opening,
        )

    def with_texts(self, token_id: int, logprobs: Logprobs) -> TokenLogprob:
        """The engine's log-probabilities of a token in the form of the wire, with texts."""
        top = tuple(TopLogprob(id_, logprob, *self._told(id_)) for id_, logprob in logprobs.top)
        text, raw = self._told(token_id)
        return TokenLogprob(token_id, logprobs.logprob, text, top, raw)

    def text_of(self, token_id: int) -> str:
        """The text of a token after other text; for a special token, its name.

        Bytes of an incomplete character become U+FFFD. An id without a token has no text ("").
        """
        return self._told(token_id)[0]

    def _told(self, token_id: int) -> tuple[str, bytes]:
        if token_id not in self._texts:
            text = self._added_by(token_id)  # Two threads at once store the same value.
            self._texts[token_id] = text, bytes_of(self._tokenizer, token_id, text)
        return self._texts[token_id]

    def _added_by(self, token_id: int) -> str:
        before = self._decode(self._before)
        both = self._decode([*self._before, token_id])
        return both[len(before) :] if both.startswith(before) else self._decode([token_id])

    def _decode(self, token_ids: Sequence[int]) -> str:
        try:
            return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))
        except Exception:  # noqa: BLE001 - the library raises a bare Exception.
            return ""


def _short(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON_LENGTH]


def _chat_of(loaded: Any) -> dict[str, Any]:
    """The arguments of ModelTokenizer for chats, from the library's tokenizer and its template.

    Raises:
        ValueError: the template's control tokens are not recognized. A chat would then be another
            prompt than the model was trained with.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    source = loaded.get_chat_template()
    own_source = OWN_TEMPLATE.format(owner=secrets.token_hex(16)) + source
    # Changes the cached compiled template: the library has no other way to replace the function.
    _compile_jinja_template(source).globals["strftime_now"] = _strftime_of_chat
    # Only this ModelTokenizer uses this compiled template, so it can be changed.
    compiled = _compile_jinja_template(own_source)
    environment = compiled.environment
    named = [text for text in loaded.special_tokens_map.values() if isinstance(text, str)]
    template_text = "\0".join([own_text(environment, source), *named])
    has_short_ids = SHORT_IDS in template_text
    control = ControlTokens(loaded.backend_tokenizer, template_text=template_text)
    own = environment.from_string(rewritten(environment, own_source, control.marked))
    compiled.root_render_func, compiled.blocks = with_no_text(own.root_render_func), own.blocks
    environment.tests = environment.tests | {NONE_TEST: is_none}
    compiled.globals |= {JOIN: joined(control.marked), "strftime_now": _strftime_of_chat}
    special = {
        name: control.marked(text) if isinstance(text, str) else text
        for name, text in loaded.special_tokens_map.items()
    }

    takes_parts = False

    def render(messages: Messages, **settings: Any) -> str:
        given = [in_parts(message) for message in messages] if takes_parts else list(messages)
        as_usual = {"tokenize": False, "add_generation_prompt": True}
        return str(loaded.apply_chat_template(given, **as_usual | settings))

    takes_parts = reads_only_parts(render)

    def render_marked(messages: Messages, **settings: Any) -> str:
        if has_short_ids:
            messages = [with_short_ids(message) for message in messages]
        return render(messages, **settings, chat_template=own_source, **special)

    _must_agree(render, render_marked, loaded.backend_tokenizer, control)
    variables = find_undeclared_variables(environment.parse(source)) - _SETTINGS
    return {
        "render_chat": render_marked,
        "control": control,
        "variables": variables,
        "call_marks": call_marks(own_text(environment, source), mark_ids(loaded.backend_tokenizer)),
    }


def _must_agree(
    render: RenderChat, render_marked: RenderChat, tokenizer: Tokenizer, control: ControlTokens
) -> None:
    """ValueError unless PROBES get the same ids from the library and with marks."""
    created = _CREATED_MS.set(0)
    try:
        for probe in PROBES:
            try:
                text = render(probe)
            except Exception:  # noqa: BLE001, S112 - the template refuses such a chat.
                continue
            expected = tokenizer.encode(text, add_special_tokens=False).ids
            if control.encode(render_marked(probe)).token_ids != expected:
                raise ValueError("it writes control tokens in pieces that are not recognized")
    finally:
        _CREATED_MS.reset(created)


def _opening_at(end: str) -> str:
    """The opening mark of reasoning at the end of a prompt; empty if there is none."""
    end = end.rstrip()
    return next((one.begin for one in REASONING_FORMATS if end.endswith(one.begin)), "")


def _strftime_of_chat(form: str) -> str:
    return datetime.fromtimestamp(_CREATED_MS.get() / 1000, UTC).strftime(form)
