"""What followed the last tokens when they came before is the guess; how it went says how long."""

from collections.abc import Sequence
from copy import deepcopy
from itertools import pairwise

from engine.prompt_lookup import MAX_HISTORY, PromptLookup

#: What a lookup has seen whose guesses were right so far.
TAUGHT = [1, 2, 3, 9, 1, 2, 3]


def guess(lookup: PromptLookup, history: Sequence[int], *, most: int) -> list[int]:
    """What may follow a history that begins with what the lookup knows."""
    lookup.extend(history[lookup.num_known :])
    return lookup.guess(most=most)


def trusted(num_tokens: int) -> PromptLookup:
    """A lookup that was taught, so that it makes long guesses."""
    lookup = PromptLookup()
    while len(found := guess(lookup, TAUGHT, most=num_tokens)) < num_tokens:
        lookup.learn(found, num_right=len(found))
    return lookup


def test_the_tokens_that_followed_before_are_guessed():
    history = [*TAUGHT, 5, 6, 7, 8, 9, 10, 4, 5, 6, 7]
    assert guess(trusted(3), history, most=3) == [8, 9, 10]


def test_what_came_last_counts():
    history = [5, 6, 7, 1, 5, 6, 7, 2, 5, 6, 7]
    assert guess(PromptLookup(), history, most=1) == [2]


def test_two_tokens_in_the_same_order_are_not_enough():
    assert guess(PromptLookup(), [4, 6, 7, 8, 5, 6, 7], most=1) == []


def test_nothing_is_guessed_where_nothing_came_before():
    for history in ([], [1], [1, 2, 3], [1, 2, 3, 4]):
        assert guess(PromptLookup(), history, most=4) == []


def test_a_period_shorter_than_the_guess_goes_round():
    assert guess(trusted(5), [*TAUGHT, 1, 2, 1, 2, 1], most=5) == [2, 1, 2, 1, 2]


def test_a_history_that_grows_is_looked_up_to_its_end():
    lookup, history = PromptLookup(), [1, 2, 3, 4]
    assert guess(lookup, history, most=1) == []
    history += [1, 2, 3]
    assert guess(lookup, history, most=1) == [4]


def test_guesses_grow_while_they_are_right_and_shrink_to_what_was():
    lookup, history = PromptLookup(), [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
    lengths = []
    for num_wrong in (0, 0, 0, 2, 0):
        found = guess(lookup, history, most=6)
        lengths.append(len(found))
        lookup.learn(found, num_right=len(found) - num_wrong)
    assert lengths == [1, 2, 4, 6, 4]


def lengths_of_guesses(lookup: PromptLookup, *, tokens: int, right_from: int = 1000) -> list[int]:
    """How long the guess is at each token of an output in which the same could come all the time.

    Nothing of a guess comes before token `right_from`, and from there on all of it.
    """
    history, lengths = [*TAUGHT, *[5] * 20], []
    for place in range(tokens):
        found = guess(lookup, history, most=4)
        lengths.append(len(found))
        lookup.learn(found, num_right=len(found) if place >= right_from else 0)
        history.append(5)
    return lengths


def test_guesses_of_which_nothing_comes_are_short_and_ever_rarer():
    lengths = lengths_of_guesses(trusted(4), tokens=400)
    made = [place for place, length in enumerate(lengths) if length]
    assert lengths[0] == 4 and set(lengths[1:]) == {0, 1}
    assert [after - before for before, after in pairwise(made)][:7] == [2, 4, 8, 16, 32, 64, 64]


def test_after_one_that_comes_they_are_no_longer_rare():
    lengths = lengths_of_guesses(trusted(4), tokens=80, right_from=31)
    # The silence ends at the 62nd.
    assert lengths[31:62] == [0] * 31
    assert lengths[62:66] == [1, 2, 4, 4]


def test_drafts_of_somebody_else_teach_it_nothing():
    lookup, history = PromptLookup(), [1, 2, 3, 4, 5, 6, 1, 2, 3]
    guess(lookup, history, most=4)
    lookup.learn([77, 78], num_right=2)
    assert len(guess(lookup, history, most=4)) == 1


def test_what_lies_too_far_back_is_not_looked_up():
    filler = list(range(10, 10 + MAX_HISTORY))
    assert guess(PromptLookup(), [1, 2, 3, 4, *filler, 1, 2, 3], most=1) == []
    assert guess(PromptLookup(), [1, 2, 3, 4, *filler[:-10], 1, 2, 3], most=1) == [4]


def test_of_a_long_output_no_more_is_kept_than_is_looked_up():
    lookup, tokens = PromptLookup(), [7, 8, 9, 1]
    for token in range(100, 100 + 3 * MAX_HISTORY):
        tokens.append(token)
        guess(lookup, tokens, most=4)
    assert len(lookup._ends) <= 2 * MAX_HISTORY + 1
    assert guess(deepcopy(lookup), [*tokens, 7, 8, 9], most=4) == []
    assert guess(lookup, [*tokens, *tokens[-9:-6]], most=4) == [tokens[-6]]
