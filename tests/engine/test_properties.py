"""Whatever arrives, is aborted or preempted: each stream is the one its request alone gives."""

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import FinishReason, Priority
from tests.engine.builders import Machine, expected_tokens, make_config, make_request

configs = st.builds(
    make_config,
    num_blocks=st.integers(3, 24),
    num_host_blocks=st.sampled_from([0, 3, 40]),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.sampled_from([1, 3, 8, 32]),
    long_prefill_token_threshold=st.sampled_from([0, 2]),
    preemption_mode=st.sampled_from(["swap", "recompute", "auto"]),
    swap_min_tokens=st.just(6),
    watermark=st.sampled_from([0.0, 0.1, 0.3]),
    enable_prefix_caching=st.booleans(),
    policy=st.sampled_from(["fcfs", "sjf", "priority", "adaptive"]),
    aging_seconds=st.sampled_from([0.5, 5.0, 50.0]),
)


@st.composite
def arrivals(draw):
    """Steps before it arrives, prompt, max_tokens, priority, tokens published, steps to abort."""
    return (
        draw(st.integers(0, 4)),
        draw(st.integers(1, 20).map(lambda n: [7] * n) | st.integers(1, 20)),
        draw(st.integers(1, 20)),
        Priority(draw(st.integers(0, 3))),
        draw(st.integers(0, 5)),
        draw(st.none() | st.integers(0, 30)),
    )


@settings(max_examples=150, deadline=None)
@given(config=configs, plan=st.lists(arrivals(), min_size=1, max_size=10))
def test_every_stream_is_a_prefix_of_the_request_alone_and_whole_unless_aborted(config, plan):
    machine = Machine(config)
    requests, abort_at = {}, {}
    limit = config.max_request_tokens

    def step() -> None:
        machine.step()
        for name in [name for name, due in abort_at.items() if due <= machine.now]:
            del abort_at[name]
            machine.engine.abort(name)

    for index, (gap, prompt, max_tokens, priority, published, abort_after) in enumerate(plan):
        for _ in range(gap):
            step()
        name = f"r{index}"
        alone = make_request(name, prompt=prompt, max_tokens=max_tokens)
        if alone.num_prompt_tokens >= limit:
            continue
        whole = expected_tokens(alone)[: limit - alone.num_prompt_tokens]
        requests[name] = whole, whole[:published]
        machine.add(
            make_request(
                name,
                prompt=prompt,
                max_tokens=max_tokens,
                priority=priority,
                arrival=machine.now,
                output=whole[:published],
            )
        )
        if abort_after is not None:
            abort_at[name] = machine.now + abort_after
    while machine.engine.has_work():
        assert machine.now < 3000, "livelock"
        step()
    for name, (whole, published) in requests.items():
        stream = published + machine.tokens(name)
        if machine.finish_reason(name) is FinishReason.CANCELLED:
            assert stream == whole[: len(stream)]
        else:
            assert stream == whole
    assert machine.engine.violations() == []


@settings(max_examples=60, deadline=None)
@given(config=configs, prompts=st.lists(st.integers(1, 12), min_size=2, max_size=8))
def test_between_two_preemptions_of_one_request_it_gains_a_token(config, prompts):
    machine = Machine(config)
    for index, prompt in enumerate(prompts):
        if prompt < config.max_request_tokens:
            machine.add(make_request(f"r{index}", prompt=prompt, max_tokens=12))
    scheduler = machine.engine._scheduler
    length_at_preemption: dict[str, tuple[int, int]] = {}
    while machine.engine.has_work():
        assert machine.now < 3000, "livelock"
        machine.step()
        for name, request in scheduler.requests.items():
            count, length = length_at_preemption.get(name, (0, -1))
            if request.num_preemptions > count:
                assert request.num_preemptions == count + 1
                assert request.num_tokens > length
                length_at_preemption[name] = (request.num_preemptions, request.num_tokens)
