"""Regression test for the reference systems' wire bug, by its id."""

from quire.wire.protocol import GenerationRequest


def test_b01_a_request_crosses_a_process_with_its_times_on_the_wall_clock():
    request = GenerationRequest(
        kind="completions",
        body={"prompt": "12+34=", "max_tokens": 4},
        deadline_ms=1_900_000_000_000,
        created_ms=1_800_000_000_000,
    )
    assert GenerationRequest.decode(request.encode()) == request
