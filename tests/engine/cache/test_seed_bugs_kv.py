"""Regression tests for the bugs of the reference systems' KV managers, by their ids."""

import pytest

from engine.cache.kv_cache import KVCache
from tests.engine.builders import make_request


def swapped_out(cache: KVCache, request_id: str = "r", *, num_tokens: int = 8):
    request = make_request(request_id, prompt=num_tokens + 1)
    cache.admit(request)
    cache.grow(request_id, num_tokens)
    request.num_computed_tokens = num_tokens
    cache.swap_out(request)
    return request


def test_b13_freeing_a_swapped_request_gives_nothing_back_twice():
    cache = KVCache(num_blocks=8, block_size=4, num_host_blocks=8)
    swapped_out(cache)
    cache.free("r")
    cache.free("r")
    assert (cache.pool.num_free, cache.host_pool.num_free) == (8, 8)
    assert cache.violations(set()) == []


def test_b14_free_and_owned_add_up_after_every_swap():
    cache = KVCache(num_blocks=8, block_size=4, num_host_blocks=8)
    request = swapped_out(cache)
    assert cache.pool.num_free + cache.pool.num_owned == 8
    cache.swap_in(request)
    cache.end_of_step()
    cache.free("r")
    assert (cache.pool.num_owned, cache.host_pool.num_owned) == (0, 0)


def test_b15_a_swapped_request_cannot_be_swapped_out_again():
    cache = KVCache(num_blocks=8, block_size=4, num_host_blocks=8)
    request = swapped_out(cache)
    with pytest.raises(AssertionError):
        cache.swap_out(request)


def test_b16_admitting_an_id_twice_is_refused():
    cache = KVCache(num_blocks=8, block_size=4)
    request = make_request()
    cache.admit(request)
    with pytest.raises(AssertionError):
        cache.admit(request)


def test_b19_a_swap_in_that_does_not_fit_loses_nothing():
    cache = KVCache(num_blocks=3, block_size=4, num_host_blocks=4)
    request = swapped_out(cache)
    other = make_request("other", prompt=8)
    cache.admit(other)
    cache.grow("other", 8)
    assert next(cache.lacking_blocks(request)) > 0
    assert cache.is_swapped("r")
    assert cache.host_pool.num_owned == 2
    cache.free("other")
    assert len(cache.swap_in(request)) == 2
