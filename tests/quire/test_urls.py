"""The hosts that a url names: those that no resolver can be asked for are refused at once."""

import pytest

from quire import connect, connect_async

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
