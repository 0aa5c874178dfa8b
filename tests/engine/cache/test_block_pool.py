"""The pool's conservation law, its order of eviction, and its refusal of double frees."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.block_pool import BlockPool


def test_every_block_is_in_exactly_one_place():
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.remember([first], [b"first"])
    pool.free([first, second])
    assert (pool.num_blank, pool.num_cached, pool.num_owned) == (3, 1, 0)
    assert pool.violations() == []


def test_a_pool_hands_out_what_it_has_and_no_more():
    pool = BlockPool(4)
    pool.allocate(4)
    with pytest.raises(AssertionError):
        pool.allocate(1)


def test_blank_blocks_are_used_before_cached_content_is_evicted():
    pool = BlockPool(2)
    (kept,) = pool.allocate(1)
    pool.remember([kept], [b"content"])
    pool.free([kept])
    assert pool.allocate(1) != [kept]
    assert pool.lookup(b"content") == kept


def test_the_least_recently_used_content_is_evicted_first():
    pool = BlockPool(2)
    for content in (b"old", b"new"):
        (block_id,) = pool.allocate(1)
        pool.remember([block_id], [content])
    pool.free([0])
    pool.free([1])
    pool.touch([0])
    pool.free([0])
    pool.allocate(1)
    assert pool.lookup(b"new") is None
    assert pool.lookup(b"old") == 0


def test_the_tail_of_a_freed_sequence_is_evicted_before_its_head():
    pool = BlockPool(3)
    sequence = pool.allocate(3)
    pool.remember(sequence, [b"%d" % index for index in range(3)])
    pool.free(sequence)
    pool.allocate(1)
    assert [pool.lookup(b"%d" % index) for index in range(3)] == [0, 1, None]


def test_a_shared_block_stays_owned_until_its_last_reference_goes():
    pool = BlockPool(1)
    pool.allocate(1)
    pool.touch([0])
    pool.free([0])
    assert pool.num_owned == 1
    pool.free([0])
    assert pool.num_owned == 0


def test_freeing_a_block_twice_is_our_bug_and_is_caught():
    pool = BlockPool(1)
    pool.allocate(1)
    pool.free([0])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free([0])


def test_of_two_blocks_with_equal_content_the_first_is_remembered():
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.remember([first, second], [b"same", b"same"])
    assert pool.lookup(b"same") == first
    pool.free([second])
    assert (pool.num_blank, pool.num_cached) == (1, 0)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_laws_hold_after_any_sequence_of_operations(data):
    pool = BlockPool(data.draw(st.integers(1, 8), label="num_blocks"))
    owned: list[int] = []
    for _ in range(data.draw(st.integers(1, 40), label="operations")):
        match data.draw(st.sampled_from(["allocate", "free", "touch", "remember"])):
            case "allocate":
                owned += pool.allocate(data.draw(st.integers(0, pool.num_free)))
            case "free" if owned:
                pool.free([owned.pop(data.draw(st.integers(0, len(owned) - 1)))])
            case "remember" if owned:
                content = b"%d" % data.draw(st.integers(0, 5))
                pool.remember([data.draw(st.sampled_from(owned))], [content])
            case "touch":
                block_id = pool.lookup(b"%d" % data.draw(st.integers(0, 5)))
                if block_id is not None:
                    pool.touch([block_id])
                    owned.append(block_id)
        assert pool.violations() == []
        assert pool.num_owned == len(set(owned))
