"""The measurement of a gateway: what comes through a real one, and what its gate refuses."""

import pytest

from benchmarks.bench_gateway import gateway_process, measure_throughput
from benchmarks.bench_protocol import private_server
from benchmarks.bench_streams import check_arrivals
from quire.transport.local_redis import INSTALL_HINT, server_program

NAMES = ("a", "b")
ARRIVALS = {name: [(1.0, "0 1.5\n"), (1.1, "1 1.6\n2 1.6\n")] for name in NAMES}


def test_whole_streams_pass_in_pieces_of_any_length():
    check_arrivals(ARRIVALS, NAMES, 3)


@pytest.mark.parametrize(
    "arrivals",
    [
        {"a": ARRIVALS["a"]},
        ARRIVALS | {"b": ARRIVALS["b"][:1]},
        ARRIVALS | {"b": ARRIVALS["b"][::-1]},
        ARRIVALS | {"b": [*ARRIVALS["b"], (1.2, "2 1.6\n")]},
    ],
    ids=["a stream is missing", "its end", "order", "a token twice"],
)
def test_what_is_lost_moved_or_repeated_fails_the_measurement(arrivals):
    with pytest.raises(AssertionError):
        check_arrivals(arrivals, NAMES, 3)


@pytest.mark.skipif(server_program() is None, reason=f"needs a real Redis: {INSTALL_HINT}")
def test_streams_are_read_through_a_gateway_and_from_redis():
    with private_server() as connection:
        settings = connection.connection_pool.connection_kwargs
        url = f"redis://{settings['host']}:{settings['port']}/{settings['db']}"
        with gateway_process(url, max_open=4) as gateway:
            figures = measure_throughput(url, gateway, num_streams=4, num_tokens=5, rounds=1)
    assert all(isinstance(figure, float) and figure > 0 for figure in figures.values())
    assert gateway.peak_bytes > 1 << 20
