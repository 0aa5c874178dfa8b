"""What requests meet on their way through the workers: latency and throughput."""

from ops.grafana.panel import Panel, Row, Target
from ops.grafana.queries import (
    TOKENS_PER_SECOND,
    WORKERS,
    heat,
    mean,
    quantile,
    quantiles,
    rate,
)

LATENCY_ROW = Row(
    "Latency",
    [
        Panel(
            title="Time to the first token",
            description="From the claim to the commit of the claim's first token.",
            unit="s",
            targets=quantiles("quire_time_to_first_token_seconds"),
        ),
        Panel(
            title="Between two tokens",
            description="Time between two tokens of one request as they leave the engine.",
            unit="s",
            targets=quantiles("quire_inter_token_latency_seconds"),
        ),
        Panel(
            title="End to end",
            description="From entering the ingress stream to the commit of the terminal record.",
            unit="s",
            targets=quantiles("quire_request_e2e_seconds"),
        ),
        Panel(
            title="Where the time goes",
            description="Mean seconds a request spends in the queue, waiting in the engine, in "
            "prefill and in decode.",
            unit="s",
            targets=[
                Target(mean("quire_request_stream_wait_seconds", WORKERS), "in the queue"),
                Target(mean("quire_request_queue_seconds"), "in the engine"),
                Target(mean("quire_request_prefill_seconds"), "prefill"),
                Target(mean("quire_request_decode_seconds"), "decode"),
            ],
            is_stacked=True,
        ),
        Panel(
            title="Time to the first token, distribution",
            description="How many requests saw their first token after how long.",
            unit="s",
            targets=heat("quire_time_to_first_token_seconds"),
            kind="heatmap",
        ),
        Panel(
            title="Between two tokens, distribution",
            description="How many tokens followed the one before after how long.",
            unit="s",
            targets=heat("quire_inter_token_latency_seconds"),
            kind="heatmap",
        ),
    ],
)

THROUGHPUT_ROW = Row(
    "Throughput",
    [
        Panel(
            title="Tokens",
            description="Tokens per second: generated, prompt tokens computed or found in the "
            "prefix cache, and guesses by whether they came.",
            unit=TOKENS_PER_SECOND,
            targets=[
                Target(rate("quire_generation_tokens_total"), "generated"),
                Target(rate("quire_prompt_tokens_total", "source"), "prompt, {{source}}"),
                Target(rate("quire_draft_tokens_total", "outcome"), "guessed, {{outcome}}"),
            ],
        ),
        Panel(
            title="Ended claims",
            description="Claims that ended per second, by outcome.",
            unit="reqps",
            targets=[Target(rate("quire_requests_finished_total", "outcome"), "{{outcome}}")],
            is_stacked=True,
        ),
        Panel(
            title="Steps",
            description="Engine steps per second by what they computed.",
            unit="ops",
            targets=[Target(rate("quire_engine_steps_total", "phase"), "{{phase}}")],
            is_stacked=True,
        ),
        Panel(
            title="Step time, p95",
            description="Time the device takes for one step, by what it computes.",
            unit="s",
            targets=[Target(quantile(0.95, "quire_engine_step_seconds", "phase"), "{{phase}}")],
        ),
        Panel(
            title="Tokens per step",
            description="How full the batches are. A mean near 1 under load means that requests "
            "are not batched.",
            unit="short",
            targets=[
                Target(mean("quire_engine_step_tokens"), "mean"),
                Target(quantile(0.95, "quire_engine_step_tokens"), "p95"),
            ],
        ),
        Panel(
            title="Prompt length",
            description="Tokens of the prompts of finished requests.",
            unit="short",
            targets=heat("quire_request_prompt_tokens"),
            kind="heatmap",
            width=4,
        ),
        Panel(
            title="Output length",
            description="Tokens of the outputs of finished requests.",
            unit="short",
            targets=heat("quire_request_generation_tokens"),
            kind="heatmap",
            width=4,
        ),
    ],
)
