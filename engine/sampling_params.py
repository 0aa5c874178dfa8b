"""Parameters of sampling and stopping. Made from a request by `service.worker.incoming`.

Values are already validated; the assertions here catch bugs, not mistakes of a caller.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Immutable sampling and stopping parameters of one request, with their usual names.

    `temperature == 0` is greedy. `top_k == 0`, `top_p == 1` and `min_p == 0` each disable that
    truncation. `seed` is always set: a request without a seed gets one at submit, so that resuming
    repeats the same noise. An empty `allowed_token_ids` allows every token. `logit_bias` has pairs
    of a token id, each at most once, and the value that is added to its logit. `logprobs` is the
    number of top tokens whose log-probabilities are reported with each sampled token; None reports
    none. `prompt_logprobs` is the same for the tokens of the prompt, those from the index
    `prompt_logprobs_from` on; before the token with index 0 there is nothing that predicts it.
    `takes_argmax` is derived from the other fields: the token is the argmax of the raw logits. It
    is stored because every step reads it for every row.
    """

    max_tokens: int
    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    allowed_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_from: int = 1
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    takes_argmax: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert self.max_tokens >= 1
        assert 0 <= self.min_tokens <= self.max_tokens
        assert self.temperature >= 0.0
        assert self.top_k >= 0
        assert 0.0 < self.top_p <= 1.0
        assert 0.0 <= self.min_p <= 1.0
        assert self.repetition_penalty > 0.0
        assert len(dict(self.logit_bias)) == len(self.logit_bias)
        assert self.logprobs is None or self.logprobs >= 0
        assert self.prompt_logprobs is None or self.prompt_logprobs >= 0
        assert self.prompt_logprobs_from >= 1
        processes_logits = self.allowed_token_ids or self.logit_bias or self.min_tokens
        plain = not (processes_logits or self.has_penalties) and self.logprobs is None
        object.__setattr__(self, "takes_argmax", self.is_greedy and plain)

    def scored(self, start: int, end: int, *, num_prompt_tokens: int) -> range:
        """The indices of prompt tokens whose log-probabilities the tokens `start .. end - 1` give.

        Each token gives that of the token after it. Empty for a request without `prompt_logprobs`.
        """
        if self.prompt_logprobs is None:
            return range(0)
        first = max(start + 1, self.prompt_logprobs_from)
        return range(first, min(end + 1, num_prompt_tokens))

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is chosen, without noise."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether the sampler needs the tokens so far, because penalties depend on them."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )
