"""The hosts that a url names: those that no resolver can be asked for are refused at once."""

from functools import partial

import pytest

from quire import connect, connect_async
from quire.errors import BrokerUnavailable
from quire.queue.broker import Broker

URLS = [
    "redis://:hush@{}:6379/0",
    "rediss://{}/0",
    "redis+sentinel://:hush@{}/shop",
    "redis+sentinel://one:1,{}:2/shop",
]


@pytest.mark.parametrize("make", [connect, connect_async])
@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize(
    "host", ["redis..svc", ".svc", f"{'a' * 64}.svc", "é..svc", "\udcff", "a%00b"]
)
def test_a_host_that_no_resolver_can_be_asked_for_is_refused(make, url, host):
    """As where a variable between two dots was empty. The error would be none of Redis later."""
    with pytest.raises(ValueError, match="host") as caught:
        make(url.format(host))
    assert host not in str(caught.value) and "hush" not in str(caught.value)


@pytest.mark.parametrize("make", [connect, connect_async])
@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize(
    "host", ["redis.svc.", f"{'a' * 63}.svc", "my_redis", "[::1]", "10.0.0.1", "bücher.svc"]
)
def test_any_other_host_is_taken(make, url, host):
    make(url.format(host))


@pytest.mark.parametrize("make", [connect, connect_async])
@pytest.mark.parametrize("url", ["localhost:6379", "http://hush", "redis:/hush", ""])
def test_another_scheme_is_refused_with_all_that_there_are(make, url):
    with pytest.raises(
        ValueError, match=r"redis://, rediss://, unix://, redis\+sent.*, rediss\+"
    ) as e:
        make(url)
    assert "hush" not in str(e.value)


@pytest.mark.parametrize("as_a_script", [False, True])
def test_a_database_that_is_not_there_is_no_damage(real_server, as_a_script):
    """Neither a retry nor a look at the server's log helps: it is the url."""
    with connect(f"{real_server.url.rpartition('/')[0]}/9999") as connection:
        broker = Broker(connection)
        call = partial(broker.cancel, "a") if as_a_script else partial(broker.status, "a")
        with pytest.raises(BrokerUnavailable, match="the url names a database that Redis does not"):
            call()
