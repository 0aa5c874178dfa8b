"""Latency and throughput of the workers."""

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
            description="Time between two tokens of one request, when they leave the engine.",
            unit="s",
            targets=quantiles("quire_inter_token_latency_seconds"),
        ),
        Panel(
            title="End to end",
            description="From the entry in the ingress stream to the commit of the end.",
            unit="s",
            targets=quantiles("quire_request_e2e_seconds"),
        ),
        Panel(
            title="Time per phase",
            description="Mean seconds of a request in the queue, waiting in the engine, in prefill "
            "and in decode.",
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
            description="Number of requests by the time to their first token.",
            unit="s",
            targets=heat("quire_time_to_first_token_seconds"),
            kind="heatmap",
        ),
        Panel(
            title="Between two tokens, distribution",
            description="Number of tokens by the time since the previous token.",
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
            description="Tokens per second: generated; prompt tokens, computed or found in the "
            "prefix cache; and guessed tokens, accepted or rejected.",
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
            title="Target latency",
            description="Requests with a target latency that ended per second: within it, or not.",
            unit="reqps",
            targets=[Target(rate("quire_requests_targeted_total", "latency"), "{{latency}}")],
            is_stacked=True,
        ),
        Panel(
            title="Steps",
            description="Engine steps per second, by phase.",
            unit="ops",
            targets=[Target(rate("quire_engine_steps_total", "phase"), "{{phase}}")],
            is_stacked=True,
        ),
        Panel(
            title="Step time, p95",
            description="Time of one step on the device, by phase.",
            unit="s",
            targets=[Target(quantile(0.95, "quire_engine_step_seconds", "phase"), "{{phase}}")],
        ),
        Panel(
            title="Tokens by class",
            description="Tokens published per second, by the class of their request.",
            unit=TOKENS_PER_SECOND,
            targets=[Target(rate("quire_published_tokens_total", "priority"), "{{priority}}")],
            is_stacked=True,
        ),
        Panel(
            title="Tokens by tenant",
            description="Tokens published per second for the ten tenants with the most.",
            unit=TOKENS_PER_SECOND,
            targets=[
                Target(f"topk(10, {rate('quire_tenant_tokens_total', 'tenant')})", "{{tenant}}"),
            ],
        ),
        Panel(
            title="Tokens per step",
            description="Tokens in one batch. A mean near 1 under load means that requests are not "
            "batched.",
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
