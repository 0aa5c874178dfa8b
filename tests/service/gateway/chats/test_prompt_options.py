"""Options of a body that change which prompt a worker computes, and what it shares."""

from tests.service.builders import Queue, StepGate, WorkerThread, expected_tokens
from tests.service.fake_model import BOS_ID, byte_tokenizer

PROMPT = list(range(1, 200))


def test_only_the_end_of_a_long_prompt_is_kept_after_a_takeover_too(queue: Queue) -> None:
    request_id = queue.submit(PROMPT, kind="completions", max_tokens=40, truncate_prompt_tokens=30)
    gate = StepGate(steps=0)
    with WorkerThread(queue.settings(drain_seconds=0.0), before_run=gate) as one:
        gate.step_until(lambda: queue.published(request_id) >= 4)
        one.worker.stop()
        gate.step_until(lambda: one.has_ended)
    with WorkerThread(queue.settings()):
        output = queue.result(request_id)
    assert output.token_ids == expected_tokens(PROMPT[-30:], max_tokens=40)
    assert output.completion.usage.prompt_tokens == 30


def test_a_text_is_cut_by_its_tokens(queue: Queue) -> None:
    request_id = queue.submit("abcdef", kind="completions", truncate_prompt_tokens=3)
    kept = byte_tokenizer().encode("def", add_special_tokens=False).ids
    with WorkerThread(queue.settings()):
        assert queue.result(request_id).token_ids == expected_tokens(kept, max_tokens=8)
    assert BOS_ID not in kept


def test_the_beginning_is_kept_if_the_other_side_is_cut(queue: Queue) -> None:
    sides = {"right": PROMPT[:30], "left": PROMPT[-30:]}
    with WorkerThread(queue.settings()):
        for side, kept in sides.items():
            cut = {"truncate_prompt_tokens": 30, "truncation_side": side}
            request_id = queue.submit(PROMPT, kind="completions", **cut)
            assert queue.result(request_id).token_ids == expected_tokens(kept, max_tokens=8)


def test_requests_share_cached_prefixes_only_with_the_same_salt(queue: Queue) -> None:
    cached = []
    with WorkerThread(queue.settings()):
        for salt in ("a", "b", "a", None, "b", None):
            request_id = queue.submit(PROMPT, kind="completions", cache_salt=salt)
            cached.append(queue.result(request_id).completion.usage.cached_tokens > 0)
    assert cached == [False, False, True, False, True, True]
