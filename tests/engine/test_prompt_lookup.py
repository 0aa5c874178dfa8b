"""What followed the last tokens when they came before is the guess; how it went says how long."""

from engine.prompt_lookup import MAX_HISTORY, PromptLookup


def trusted(num_tokens: int) -> PromptLookup:
    """A lookup whose guesses were right so far, so that it makes long ones."""
    lookup = PromptLookup()
    lookup.guess(history := [1, 2, 3, 9, 1, 2, 3], most=1)
    while len(guess := lookup.guess(history, most=num_tokens)) < num_tokens:
        lookup.learn(guess, num_right=len(guess))
    return lookup


def test_the_tokens_that_followed_before_are_guessed():
    history = [5, 6, 7, 8, 9, 10, 4, 5, 6, 7]
    assert trusted(3).guess([0] * 7 + history, most=3) == [8, 9, 10]


def test_what_came_last_counts():
    history = [5, 6, 7, 1, 5, 6, 7, 2, 5, 6, 7]
    assert PromptLookup().guess(history, most=1) == [2]


def test_two_tokens_in_the_same_order_are_not_enough():
    assert PromptLookup().guess([4, 6, 7, 8, 5, 6, 7], most=1) == []


def test_nothing_is_guessed_where_nothing_came_before():
    for history in ([], [1], [1, 2, 3], [1, 2, 3, 4]):
        assert PromptLookup().guess(history, most=4) == []


def test_a_period_shorter_than_the_guess_goes_round():
    assert trusted(5).guess([0] * 7 + [1, 2, 1, 2, 1], most=5) == [2, 1, 2, 1, 2]


def test_a_history_that_grows_is_looked_up_to_its_end():
    lookup, history = PromptLookup(), [1, 2, 3, 4]
    assert lookup.guess(history, most=1) == []
    history += [1, 2, 3]
    assert lookup.guess(history, most=1) == [4]


def test_guesses_grow_while_they_are_right_and_shrink_to_what_was():
    lookup, history = PromptLookup(), [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
    lengths = []
    for num_wrong in (0, 0, 0, 2, 0):
        guess = lookup.guess(history, most=6)
        lengths.append(len(guess))
        lookup.learn(guess, num_right=len(guess) - num_wrong)
    assert lengths == [1, 2, 4, 6, 4]


def test_a_guess_that_was_all_wrong_is_followed_by_a_short_one():
    lookup = trusted(4)
    history = [0] * 7 + [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
    lookup.learn(lookup.guess(history, most=4), num_right=0)
    assert len(lookup.guess(history, most=4)) == 1


def test_drafts_of_somebody_else_teach_it_nothing():
    lookup, history = PromptLookup(), [1, 2, 3, 4, 5, 6, 1, 2, 3]
    lookup.guess(history, most=4)
    lookup.learn([77, 78], num_right=2)
    assert len(lookup.guess(history, most=4)) == 1


def test_what_lies_too_far_back_is_not_looked_up():
    filler = list(range(10, 10 + MAX_HISTORY))
    assert PromptLookup().guess([1, 2, 3, 4, *filler, 1, 2, 3], most=1) == []
    assert PromptLookup().guess([1, 2, 3, 4, *filler[:-10], 1, 2, 3], most=1) == [4]
