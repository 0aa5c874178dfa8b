"""Guessed tokens are checked many at a time, and no output shows that there were guesses."""

import pytest

from engine.batch import UNKNOWN_TOKEN
from engine.request import FinishReason
from tests.engine.builders import (
    EOS,
    VOCAB_SIZE,
    Machine,
    Residues,
    expected_under,
    make_config,
    make_request,
)
from tests.engine.test_engine import TextOfIds

CYCLE = (11, 12, 13, 14)


def speculating(**overrides) -> Machine:
    return Machine(make_config(**({"num_speculative_tokens": 4} | overrides)))


def cyclic(machine: Machine, name: str = "r", **others):
    """A request whose output goes round, from its prompt on: whoever guesses so is right."""
    request = make_request(name, prompt=CYCLE * 2, **({"max_tokens": 21} | others))
    outputs = request.sampling.max_tokens
    machine.runner.script.tokens[name] = {
        index: CYCLE[index % len(CYCLE)] for index in range(outputs)
    }
    return request


def drafts(machine: Machine) -> list[int]:
    """How many tokens were guessed in each step."""
    return [sum(row.num_drafted for row in batch.drafted_rows) for batch in machine.batches]


def test_guesses_that_are_right_save_their_steps():
    machine = speculating()
    machine.add(cyclic(machine))
    machine.run()
    assert machine.tokens("r") == [CYCLE[index % 4] for index in range(21)]
    # The prompt brings a token; each step after it one more than were guessed.
    assert drafts(machine) == [0, 1, 2, 4, 4, 4]
    snapshot = machine.engine.snapshot()
    assert (snapshot.accepted_draft_tokens, snapshot.rejected_draft_tokens) == (15, 0)
    assert (snapshot.generated_tokens, snapshot.steps) == (21, 6)


def test_guesses_that_are_wrong_cost_no_token_and_leave_nothing_behind():
    machine = speculating()
    machine.add(make_request("r", prompt=(*CYCLE, 99), max_tokens=21))
    # The fourth token is never what followed the three before it when they came last.
    wanted = [100 + index if index % 4 == 3 else CYCLE[index % 4] for index in range(21)]
    machine.runner.script.tokens["r"] = dict(enumerate(wanted))
    machine.run()
    assert machine.tokens("r") == wanted
    snapshot = machine.engine.snapshot()
    assert (snapshot.accepted_draft_tokens, snapshot.rejected_draft_tokens) == (0, 4)
    assert (snapshot.steps, snapshot.num_owned_blocks) == (21, 0)


def test_a_guess_is_right_up_to_its_first_wrong_token():
    machine = speculating()
    request = cyclic(machine)
    machine.runner.script.tokens["r"][9] = 99
    machine.add(request)
    for _ in range(4):
        machine.step()
    # Of four guesses behind the sixth token three were right, and the next comes as what it is.
    assert drafts(machine) == [0, 1, 2, 4] and request.num_output_tokens == 10
    assert machine.engine.snapshot().rejected_draft_tokens == 1
    machine.run()
    assert machine.tokens("r") == [99 if index == 9 else CYCLE[index % 4] for index in range(21)]


def test_without_speculation_nothing_is_guessed():
    machine = Machine(make_config())
    machine.add(cyclic(machine))
    machine.run()
    assert set(drafts(machine)) == {0}


@pytest.mark.parametrize("most", range(1, 7))
def test_no_request_gets_more_tokens_than_it_asked_for(most):
    machine = speculating()
    machine.add(cyclic(machine, max_tokens=most))
    machine.run()
    assert len(machine.tokens("r")) == most
    # Nor is more guessed than it can get: each step brings one token more than were guessed.
    assert sum(drafts(machine)) + len(machine.batches) == most
    assert machine.finish_reason("r") is FinishReason.LENGTH


def test_no_request_grows_beyond_the_model_or_the_pool():
    for overrides in ({"max_model_len": 19}, {"num_blocks": 5}):
        machine = speculating(**overrides)
        machine.add(cyclic(machine))
        machine.run()
        room = machine.config.max_request_tokens - 2 * len(CYCLE)
        assert machine.tokens("r") == [CYCLE[index % 4] for index in range(room)]


def test_an_end_in_the_middle_of_a_run_is_the_end():
    machine = speculating()
    request = make_request("r", prompt=(*CYCLE, EOS, *CYCLE), max_tokens=21)
    machine.runner.script.tokens["r"] = dict(enumerate((EOS, *CYCLE, EOS, *CYCLE, EOS)))
    machine.add(request)
    assert machine.run().tokens("r") == [EOS]
    ignoring = make_request("r", prompt=(*CYCLE, EOS, *CYCLE), max_tokens=11, ignore_eos=True)
    machine = speculating()
    machine.runner.script.tokens["r"] = dict(enumerate((EOS, *CYCLE, EOS, *CYCLE, EOS)))
    machine.add(ignoring)
    assert machine.run().tokens("r") == [EOS, *CYCLE, EOS, *CYCLE, EOS]
    stopping = cyclic(machine := speculating(), stop_token_ids=(14,), min_tokens=9)
    machine.add(stopping)
    assert machine.run().tokens("r") == [*CYCLE, *CYCLE, *CYCLE]
    assert machine.finish_reason("r") is FinishReason.STOP


def told(machine: Machine) -> list[tuple]:
    """All that came out of a machine, piece by piece."""
    return [(output.request_id, *output[1:]) for output in machine.outputs]


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"text": True},
        {"text": True, "stop_token_ids": (14,), "min_tokens": 9},
        {"logprobs": 2, "stop_token_ids": (12,), "min_tokens": 14},
    ],
    ids=["tokens", "text", "text that stops", "log-probabilities"],
)
def test_what_comes_out_is_piece_by_piece_what_comes_without_guesses(asked):
    """A log may end behind any token, and is gone on with as if its text were all that it made."""
    machines = Machine(make_config()), speculating()
    for machine in machines:
        others = dict(asked)
        if others.pop("text", False):
            others["text"] = TextOfIds()
        machine.add(cyclic(machine, **others))
        machine.run()
    assert told(machines[0]) == told(machines[1])
    assert any(drafts(machines[1]))


def test_a_step_that_is_large_already_has_no_room_for_guesses():
    machine = speculating(max_speculative_step_tokens=5)
    machine.add(*(cyclic(machine, name) for name in "abc"))
    machine.run()
    assert all(
        batch.num_tokens <= 5 or not batch.drafted_rows for batch in machine.batches
    ) and any(drafts(machine))


@pytest.mark.parametrize("limit", ["max_num_batched_tokens", "max_speculative_step_tokens"])
def test_a_step_is_filled_with_guesses_up_to_its_limit_and_not_beyond(limit):
    machine = speculating(**{limit: 9})
    machine.add(*(cyclic(machine, name) for name in "ab"))
    machine.run()
    sizes = [batch.num_tokens for batch in machine.batches if batch.drafted_rows]
    assert max(sizes) == 9


def test_a_constraint_may_say_more_than_there_is_room_for():
    class Talkative(Residues):
        def draft(self, output_token_ids, guess):
            return [1] * 30

    machine = speculating()
    machine.add(make_request("c", max_tokens=9, constraint=Talkative()))
    machine.run()
    assert max(drafts(machine)) == 4


def test_a_token_that_the_model_has_not_is_not_fed_to_it_however_sure_a_constraint_is():
    class Foreign(Residues):
        def draft(self, output_token_ids, guess):
            return [*self.may_come(output_token_ids)[:1], VOCAB_SIZE, 1]

    machine = speculating()
    machine.add(make_request("c", max_tokens=9, constraint=Foreign()))
    machine.run()
    assert set(drafts(machine)) == {0, 1}
    assert machine.tokens("c") == expected_under(Foreign(), make_request("c", max_tokens=9))


def test_a_step_with_room_for_guesses_is_never_launched_ahead():
    machine = Machine(make_config(num_speculative_tokens=4), runs_ahead=True)
    machine.add(cyclic(machine))
    machine.run()
    assert machine.tokens("r") == [CYCLE[index % 4] for index in range(21)]
    assert drafts(machine) == [0, 1, 2, 4, 4, 4]


def test_steps_that_decodes_fill_are_launched_ahead_until_there_is_room_for_guesses():
    config = make_config(num_speculative_tokens=4, max_speculative_step_tokens=3)
    machine = Machine(config, runs_ahead=True)
    lengths = {"a": 5, "b": 5, "c": 11, "d": 11}
    machine.add(*(cyclic(machine, name, max_tokens=most) for name, most in lengths.items()))
    machine.run()
    for name, length in lengths.items():
        assert machine.tokens(name) == [CYCLE[index % 4] for index in range(length)]
    assert [
        (UNKNOWN_TOKEN in batch.decodes.token_ids, len(batch.decodes), num_drafted)
        for batch, num_drafted in zip(machine.batches, drafts(machine), strict=True)
    ] == [
        (False, 0, 0),  # The prompts.
        (False, 4, 0),
        (True, 4, 0),
        (True, 4, 0),
        (True, 4, 0),  # The short ones end.
        (True, 2, 0),
        (False, 1, 1),  # One has a guess to check.
        (False, 1, 1),
        (False, 1, 1),
        (False, 1, 0),
    ]


def test_a_step_that_checks_guesses_is_one_of_decodes():
    machine = speculating()
    machine.add(cyclic(machine))
    kinds = []
    while machine.engine.has_work():
        machine.step()
        kinds.append(machine.engine.snapshot().last_step.kind)
    assert kinds == ["prefill"] + ["decode"] * 5


def test_blocks_behind_a_wrong_guess_are_given_back_at_once():
    machine = speculating(block_size=1)
    machine.add(request := cyclic(machine))
    machine.runner.script.tokens["r"][8] = 99
    while request.num_output_tokens < 9:
        machine.step()
    assert drafts(machine)[-1] == 4 and machine.engine.snapshot().num_owned_blocks == 17


def test_guesses_take_no_block_from_anybody():
    machine = speculating(num_blocks=6, max_num_seqs=2)
    a, b = cyclic(machine, "a", max_tokens=4), cyclic(machine, "b", max_tokens=4)
    machine.add(a, b)
    machine.run()
    assert machine.engine.snapshot().preemptions_recompute == 0 and any(drafts(machine))


def test_a_guess_keeps_to_the_constraint_and_the_output_is_what_it_was():
    rule = Residues()
    machine = Machine(make_config(num_speculative_tokens=4))
    # What comes under the rule alone is put into the prompt, so that it is found there.
    plain = make_request("c", prompt=[1], max_tokens=12, constraint=Residues())
    whole = expected_under(rule, plain)
    prompt = [1, *whole, 500, 1, *whole[:2]]
    request = make_request("c", prompt=prompt, max_tokens=12, constraint=Residues())
    machine.runner.script.tokens["c"] = dict(enumerate(whole))
    guesses = []
    machine.runner._before_run = lambda batch: guesses.extend(
        (list(row.output_token_ids), row.draft) for row in batch.drafted_rows
    )
    machine.add(request)
    machine.run()
    assert machine.tokens("c") == whole
    assert any(len(draft) > 1 for _, draft in guesses)
    for output, draft in guesses:
        for count, token_id in enumerate(draft):
            assert token_id in rule.may_come([*output, *draft[:count]])


def test_a_row_that_fails_with_a_draft_fails_alone():
    machine = speculating()
    machine.add(cyclic(machine, "good"), cyclic(machine, "bad"))
    for _ in range(2):
        machine.step()
    machine.runner.script.failing_request_ids.add("bad")
    machine.run()
    assert machine.batches[-1].num_rows and machine.finish_reason("bad") is FinishReason.ERROR
    assert machine.tokens("good") == [CYCLE[index % 4] for index in range(21)]


def test_one_that_is_given_up_while_it_is_checked_says_nothing_more():
    machine = speculating()
    machine.add(cyclic(machine))
    machine.step()
    machine.runner._before_run = lambda batch: machine.engine.abort("r")
    machine.step()
    assert [output.finish_reason for output in machine.outputs] == [None, FinishReason.CANCELLED]
    assert machine.engine.snapshot().num_owned_blocks == 0


def test_what_a_run_has_filled_is_found_by_the_next_who_asks_the_same():
    machine = speculating()
    machine.add(cyclic(machine))
    machine.run()
    again = make_request("s", prompt=[*CYCLE * 2, *machine.tokens("r")], max_tokens=1)
    machine.add(again)
    machine.run()
    # All blocks but those that the last run, which ended the request, has filled.
    assert again.num_cached_tokens >= 20
