"""A whole worker on a real Redis: what callers get, and what bad callers get."""

from tests.service.builders import Queue, WorkerThread, expected_tokens, text_of


def test_a_request_is_answered_with_its_tokens_text_and_one_completion(queue: Queue):
    request_id = queue.submit((10, 20, 30), max_tokens=12, metadata={"row": 7})
    with WorkerThread(queue.settings()):
        output = queue.result(request_id)
    assert output.token_ids == expected_tokens((10, 20, 30), max_tokens=12)
    assert output.text == text_of(output.token_ids)
    assert output.completion.finish_reason == "length"
    assert output.completion.usage.prompt_tokens == 3
    assert output.completion.metadata == {"row": 7}
    assert output.completion.model == "fake"
    queue.assert_at_rest()
