"""`quire plan`: the numbers that it gives back are those that were measured."""

import json

import pytest

from quire.cli.exit_codes import EXIT_OK, EXIT_USAGE
from quire.cli.fleet.plan import Load, Speed, money, plan_for, size

#: Ten words.
FEW = 13
SPEED = Speed(output_tokens=1000.0)


@pytest.mark.parametrize(("output_tokens", "measured"), [(64, 5_000), (400, 9_500)])
def test_an_ended_request_takes_what_was_measured(output_tokens, measured):
    load = Load(1.0, 0, output_tokens, kept_seconds=1000.0)
    assert plan_for(load, SPEED).ended_bytes / 1000 == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize(("words", "measured"), [(10, 1_400), (500, 4_100)])
def test_a_waiting_request_takes_what_was_measured(words, measured):
    load = Load(0.0, 1.3 * words, 1, kept_seconds=0.0, waiting=1000)
    assert plan_for(load, SPEED).waiting_bytes / 1000 == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize(("words", "measured"), [(10, 361), (500, 3_219)])
def test_a_prompt_that_the_queue_keeps_takes_what_was_measured(words, measured):
    def ended_bytes(keep_prompts: int) -> int:
        load = Load(1.0, 1.3 * words, 64, kept_seconds=1000.0, keep_prompts=keep_prompts)
        return plan_for(load, SPEED).ended_bytes

    kept = (ended_bytes(4096) - ended_bytes(0)) / 1000
    assert kept == pytest.approx(measured, rel=0.01)
    # A request that is longer than what the queue keeps is not kept.
    assert ended_bytes(300) == ended_bytes(0)


def test_workers_have_room_and_one_to_spare():
    # 10 requests of 700 tokens need 7 workers of 1,000 tokens per second, used to 70 %.
    assert plan_for(Load(10.0, FEW, 700, 0.0), SPEED).workers == 11
    # A prompt takes as long as the output.
    both = Speed(output_tokens=1000.0, prompt_tokens=10_000.0)
    assert plan_for(Load(10.0, 7_000, 700, 0.0), both).busy_workers == pytest.approx(14.0)


def test_one_server_of_redis_has_a_limit():
    few, many = (plan_for(Load(rate, FEW, 1, 0.0), SPEED) for rate in (1_000.0, 5_000.0))
    assert (few.redis_servers, many.redis_servers) == (1, 4)
    assert few.redis_cores == pytest.approx(0.35)


def test_the_price_of_a_million_tokens_is_that_of_all_workers_over_the_tokens_of_an_hour():
    # 3.6 million tokens an hour from 3 workers, of which one could compute them all.
    price = plan_for(Load(10.0, FEW, 100, 0.0), SPEED, worker_price=0.6).price
    assert price is not None
    assert price.per_hour == pytest.approx(1.8)
    assert (price.per_million, price.busy_per_million) == pytest.approx((0.5, 0.6 / 3.6))
    nothing = plan_for(Load(0.0, FEW, 100, 0.0), SPEED, worker_price=0.6).price
    assert nothing is not None and (nothing.per_hour, nothing.per_million) == (0.6, None)
    assert plan_for(Load(10.0, FEW, 100, 0.0), SPEED).price is None


def test_the_command_tells_money_only_where_it_knows_a_price(quire):
    assert "money" not in quire("plan")[1]
    assert json.loads(quire("plan", "--json")[1])["price"] is None
    shown = quire("plan", "--rate", "10", "--output-tokens", "100", "--worker-price", "0.6")[1]
    assert "money per hour" in shown and "if all workers were busy" in shown
    assert "per million" not in quire("plan", "--rate", "0", "--worker-price", "1")[1]


@pytest.mark.parametrize(("amount", "text"), [(0.05571, "0.0557"), (1.2, "1.2"), (1254.4, "1,254")])
def test_amounts_are_as_long_as_a_decision_needs(amount, text):
    assert money(amount) == text


def test_the_command_prints_a_table_or_json(quire):
    flags = ("--rate", "10", "--prompt-tokens", "500", "--output-tokens", "200")
    code, out, _ = quire("plan", *flags, "--worker-speed", "2000", "--json")
    assert (code, json.loads(out)["workers"]) == (EXIT_OK, 3)
    code, out, _ = quire("plan", *flags, "--worker-speed", "2000")
    assert code == EXIT_OK and "36000 are kept" in out
    code, out, _ = quire("plan", *flags, "--keep-prompts", "65536", "--json")
    assert json.loads(out)["ended_bytes"] > 36_000 * (4_140 + 4.49 * 500)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--rate", "-1"), "argument --rate: -1 is not a number from 0 to 1e+12"),
        (("--rate", "many"), "argument --rate: many is not a number from 0"),
        (("--worker-price", "inf"), "argument --worker-price: inf is not a number"),
        (("--keep-prompts", "-5"), "argument --keep-prompts: -5 is not a whole number from 0"),
        (("--worker-speed", "0"), "--worker-speed: must be more than 0"),
    ],
)
def test_a_number_that_makes_no_plan_is_refused_by_its_flag(quire, flags, complaint):
    code, _, told = quire("plan", *flags)
    assert code == EXIT_USAGE and complaint in told


def test_a_rate_is_not_cut_to_the_seconds_of_a_year(quire):
    plan = json.loads(quire("plan", "--rate", "1e9", "--kept", "1", "--json")[1])
    assert plan["ended_requests"] == 10**9


def test_the_command_has_a_default_for_each_number_and_an_example_that_runs(quire):
    assert "workers" in quire("plan")[1]
    code, shown, _ = quire("plan", "--help")
    example = shown.partition("for instance: quire ")[2].split()
    assert code == EXIT_OK and example[0] == "plan"
    assert "workers" in quire(*example)[1]


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(999, "999 B"), (1_500_000_000, "1.5 GB"), (2 * 10**15, "2e+03 TB")]
)
def test_sizes_have_units(num_bytes, text):
    assert size(num_bytes) == text
