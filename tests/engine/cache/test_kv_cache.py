"""Block tables: on demand, shared by content, swapped bit for bit, and transactional throughout."""

import pytest

from engine.cache.kv_cache import BlockTable, KVCache
from tests.engine.builders import make_request


def make_cache(**overrides) -> KVCache:
    return KVCache(**({"num_blocks": 8, "block_size": 4, "num_host_blocks": 4} | overrides))


def computed(cache: KVCache, request, num_tokens: int) -> None:
    """Pretend that a step has just computed the request up to `num_tokens`."""
    assert cache.grow(request.request_id, num_tokens)
    request.num_computed_tokens = num_tokens
    cache.remember([(request, num_tokens)])


#: Two whole blocks, which can be shared.
PROMPT = list(range(1, 9))


def shared(cache: KVCache, name: str = "a", *, salt: str = "", **others):
    """Admit a request, and compute its prompt."""
    request = make_request(name, **({"prompt": PROMPT} | others))
    request.cache_salt = salt
    cache.admit(request)
    computed(cache, request, request.num_prompt_tokens)
    return request


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (4096, 256)]
)
def test_blocks_for_a_number_of_tokens(num_tokens, num_blocks):
    assert make_cache(block_size=16).blocks_for(num_tokens) == num_blocks


def test_admission_promises_blocks_and_allocates_none():
    cache = make_cache()
    cache.admit(make_request(prompt=10))
    assert (cache.pool.num_owned, cache.num_promised, cache.num_available) == (0, 3, 5)


def test_growth_takes_from_the_promise_first():
    cache = make_cache()
    request = make_request(prompt=10)
    cache.admit(request)
    assert cache.grow(request.request_id, 5)
    assert (cache.pool.num_owned, cache.num_promised) == (2, 1)


def test_a_failed_growth_changes_nothing():
    cache = make_cache(num_blocks=2)
    request = make_request(prompt=4)
    cache.admit(request)
    before = cache.pool.num_free, cache.num_promised
    assert not cache.grow(request.request_id, 12)
    assert (cache.pool.num_free, cache.num_promised) == before


def test_many_grow_by_a_block_each_or_none_of_them_does():
    cache = make_cache(num_blocks=5)
    requests = [make_request(name, prompt=4) for name in ("a", "b")]
    for request in requests:
        cache.admit(request)
        assert cache.grow(request.request_id, 4)
        request.num_computed_tokens = 4
        request.expect_token()
    for _ in "planned", "planned again":
        assert cache.grow_by_a_block(requests)
        assert [list(cache.block_ids(name)) for name in ("a", "b")] == [[0, 2], [1, 3]]
    for request in requests:
        for token_id in (1, 2, 3, 4):
            request.append_token(token_id)
            request.expect_token()
    assert cache.num_available == 1
    assert not cache.grow_by_a_block(requests)
    assert [list(cache.block_ids(name)) for name in ("a", "b")] == [[0, 2], [1, 3]]
    assert cache.violations({"a", "b"}) == []


def test_those_who_grow_together_take_what_was_promised_to_them():
    cache = make_cache(num_blocks=3)
    a, b = requests = [make_request(name, prompt=5) for name in ("a", "b")]
    cache.admit(a)
    assert cache.grow("a", 4)
    b.num_pending_tokens = 1
    cache._tables["b"] = BlockTable(device_block_ids=cache.pool.allocate(1))
    assert (cache.num_promised, cache.num_available) == (1, 0)
    assert not cache.grow_by_a_block(requests)
    assert cache.grow_by_a_block([a])
    assert (cache.num_promised, cache.pool.num_free) == (0, 0)
    assert cache.violations({"a", "b"}) == []


def test_a_promise_is_out_of_reach_for_the_others():
    cache = make_cache(num_blocks=3)
    cache.admit(make_request("a", prompt=8))
    greedy = make_request("b", prompt=4)
    cache.admit(greedy)
    assert cache.grow("b", 4)
    assert not cache.grow("b", 5)


def test_a_computed_prefix_is_shared_and_the_last_token_is_always_left_to_compute():
    cache = make_cache()
    shared(cache)
    assert cache.admit(make_request("b", prompt=PROMPT)) == 4
    assert cache.admit(make_request("c", prompt=[*PROMPT, 9])) == 8
    assert cache.pool.reference_count(cache.block_ids("a")[0]) == 3


def test_the_prefix_outlives_its_request_until_it_is_evicted():
    cache = make_cache(num_blocks=3)
    shared(cache)
    cache.free("a")
    assert cache.admit(make_request("b", prompt=[*PROMPT, 9])) == 8
    cache.free("b")
    shared(cache, "c", prompt=12)
    cache.free("c")
    assert cache.admit(make_request("d", prompt=[*PROMPT, 9])) == 0


def test_a_block_that_was_planned_but_not_computed_is_never_shared():
    cache = make_cache()
    cache.admit(make_request("a", prompt=PROMPT))
    cache.grow("a", 8)
    assert cache.admit(make_request("b", prompt=[*PROMPT, 9])) == 0


def test_different_adapters_never_share_and_the_same_one_does():
    cache = make_cache(num_blocks=64)
    names = (None, "a", "b")
    for name in names:
        assert shared(cache, f"first-{name}", adapter=name).num_cached_tokens == 0
    for name in names:
        assert cache.admit(make_request(f"second-{name}", prompt=[*PROMPT, 9], adapter=name)) == 8


def test_a_salt_and_an_adapter_share_nothing_with_others_nor_with_the_pair_that_reads_the_same():
    cache = make_cache(num_blocks=64)
    shared(cache, adapter="b", salt="tenant")
    others = (
        ("", "b"),
        ("other", "b"),
        ("tenant", None),
        ("tenantb", None),
        ("", "tenantb"),
        ("tenan", "tb"),
        ("b", "tenant"),
    )
    for salt, adapter in others:
        stranger = make_request(f"{salt}-{adapter}", prompt=[*PROMPT, 9], adapter=adapter)
        stranger.cache_salt = salt
        assert cache.admit(stranger) == 0


def test_a_salt_that_reads_like_the_hash_of_a_prefix_shares_nothing_with_what_follows_it():
    """Salts are chosen by callers, and the hash of a prompt that is known is no secret either."""
    cache = make_cache()
    for token_id in range(1 << 17):
        first = make_request("a", prompt=[token_id, *range(1, 8)])
        try:
            salt = cache._hashes.of_blocks(first, 1)[0].decode()
        except UnicodeDecodeError:
            cache.free("a")
        else:
            break
    cache.admit(first)
    computed(cache, first, 8)
    stranger = make_request("b", prompt=[*first.prompt_token_ids[4:], 9])
    stranger.cache_salt = salt
    assert cache.admit(stranger) == 0


def test_switched_off_nothing_is_shared():
    cache = make_cache(enable_prefix_caching=False)
    shared(cache)
    assert cache.admit(make_request("b", prompt=[*PROMPT, 9])) == 0


def test_swap_moves_exactly_the_computed_blocks_and_back():
    cache = make_cache()
    request = make_request(prompt=10)
    cache.admit(request)
    computed(cache, request, 6)
    device_ids = list(cache.block_ids("r"))
    out = cache.swap_out(request)
    assert [copy.source for copy in out] == device_ids
    assert cache.is_swapped("r")
    assert (cache.pool.num_owned, cache.num_promised, cache.host_pool.num_owned) == (0, 0, 2)
    back = cache.swap_in(request)
    assert [copy.source for copy in back] == [copy.destination for copy in out]
    assert [copy.destination for copy in back] == list(cache.block_ids("r"))
    assert cache.num_promised == 1


def swapped_out(cache: KVCache):
    request = make_request(prompt=9)
    cache.admit(request)
    computed(cache, request, 8)
    cache.swap_out(request)
    return request


def test_b15_a_swapped_request_cannot_be_swapped_out_again():
    cache = make_cache()
    request = swapped_out(cache)
    with pytest.raises(AssertionError):
        cache.swap_out(request)


def test_b16_admitting_an_id_twice_is_refused():
    cache = make_cache()
    request = make_request()
    cache.admit(request)
    with pytest.raises(AssertionError):
        cache.admit(request)


def test_b19_a_swap_in_that_does_not_fit_loses_nothing():
    cache = make_cache(num_blocks=3)
    request = swapped_out(cache)
    other = make_request("other", prompt=8)
    cache.admit(other)
    cache.grow("other", 8)
    assert next(cache.lacking_blocks(request)) > 0
    assert cache.is_swapped("r")
    assert cache.host_pool.num_owned == 2
    cache.free("other")
    assert len(cache.swap_in(request)) == 2


def test_host_blocks_are_not_reused_before_the_step_has_read_them():
    cache = make_cache(num_host_blocks=1)
    first, second = make_request("a", prompt=4), make_request("b", prompt=4)
    for request in (first, second):
        cache.admit(request)
        computed(cache, request, 3)
    cache.swap_out(first)
    cache.swap_in(first)
    assert not cache.can_swap_out(second)
    cache.begin_step()
    assert cache.can_swap_out(second)


def test_a_swap_that_does_not_fit_the_host_pool_is_refused_beforehand():
    cache = make_cache(num_host_blocks=1)
    request = make_request(prompt=8)
    cache.admit(request)
    computed(cache, request, 8)
    assert not cache.can_swap_out(request)


@pytest.mark.parametrize("place", ["device", "host", "nowhere"])
def test_free_is_idempotent_and_legal_wherever_the_request_is(place):
    cache = make_cache()
    request = make_request(prompt=8)
    if place != "nowhere":
        cache.admit(request)
        computed(cache, request, 6)
    if place == "host":
        cache.swap_out(request)
    cache.free("r")
    cache.free("r")
    assert cache.pool.num_owned == cache.host_pool.num_owned == cache.num_promised == 0
    assert cache.violations(set()) == []


def test_what_is_lacking_can_be_imagined_with_others_gone_even_when_they_share_blocks():
    cache = make_cache(num_blocks=4)
    shared(cache)
    twin = make_request("b", prompt=[*PROMPT, 9])
    cache.admit(twin)
    computed(cache, twin, 9)
    waiting = make_request("c", prompt=[*PROMPT, *range(20, 28)])
    # Of four blocks two are shared with the newcomer, one is the twin's, one is free.
    assert list(cache.lacking_blocks(waiting, without=["b"])) == [1, 0]
    # With all owners gone the shared ones are free, and taken again.
    assert list(cache.lacking_blocks(waiting, without=["a", "b"])) == [1, 1, 0]


def test_a_leaked_table_breaks_a_law():
    cache = make_cache()
    cache.admit(make_request(prompt=8))
    assert cache.violations(set()) == ["1 finished requests hold blocks"]
