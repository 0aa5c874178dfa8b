"""`quire limits`: quotas without a program."""

import json

import pytest

from quire.cli.exit_codes import EXIT_USAGE
from quire.errors import QueueFull
from quire.queue.control.defaults import QueueDefaults
from quire.queue.control.limits import QueueLimits
from quire.queue.rank.fairness import Fairness
from tests.quire.builders import make_request

pytestmark = [pytest.mark.real_redis, pytest.mark.timeout(60)]

HEADER = ["shard", "requests", "tokens", "waiting_tokens", "per_tenant", "per_minute", "fairness"]


def test_limits_are_set_kept_and_taken_away_one_by_one(quire, real_broker):
    code, _, _ = quire("limits", "--requests", "100", "--per-tenant", "2", "--of", "gold=5")
    assert code == 0
    assert real_broker.control().limits == QueueLimits(
        requests=100, per_tenant=2, tenants={"gold": 5}
    )

    quire("limits", "--tokens", "9000", "--requests", "0", "--of", "free=0")
    assert real_broker.control().limits == QueueLimits(
        tokens=9000, per_tenant=2, tenants={"gold": 5, "free": 0}
    )

    quire("limits", "--of", "gold=", "--of", "free=")
    assert real_broker.control().limits == QueueLimits(tokens=9000, per_tenant=2)


def test_what_is_used_stands_beside_what_may_be(quire, real_broker):
    real_broker.set_limits(QueueLimits(per_tenant=2, tenants={"gold": 5}))
    real_broker.submit(make_request(tenant="free", body={"prompt": [1, 2], "max_tokens": 8}))
    code, out, _ = quire("limits")
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
        [*HEADER, "timeout_s", "target_s", "max_tokens", "keep_prompts", "ends"],
        ["0", "-", "-", "10", "2", "-", "-", "-", "-", "-", "0", "10000"],
        [],
        ["shard", "tenant", "limit", "per_minute", "weight", "open"],
        ["0", "free", "2", "-", "1", "1"],
        ["0", "gold", "5", "-", "1", "0"],
    ]
    assert json.loads(quire("limits", "--json")[1]) == {
        "shard": 0,
        "limits": {
            "requests": None, "tokens": None, "per_tenant": 2, "tenants": {"gold": 5},
            "rate": None, "rates": {},
        },
        "fairness": {"by_tokens": False, "weights": {}},
        "backlog": {"tokens": 10, "tenants": {"free": 1}},
        "defaults": {
            "request_timeout_seconds": None, "target_latency_seconds": None, "max_tokens": None,
        },
        "ends": 10000,
        "keep_prompts": 0,
    }  # fmt: skip


def test_a_refused_tenant_is_told_its_name(quire, real_broker):
    quire("limits", "--per-tenant", "1")
    real_broker.submit(make_request(tenant="free"))
    with pytest.raises(QueueFull, match="the tenant free has as many open requests"):
        real_broker.submit(make_request(tenant="free"))


@pytest.mark.parametrize(
    "wrong",
    [
        ["--requests", "-1"],
        ["--tokens", "many"],
        ["--of", "gold"],
        ["--of", "a b=3"],
        ["--of", "gold\n=3"],
        ["--weight", "gold=0"],
        ["--weight", "gold=1001"],
        ["--fairness", "requests"],
        ["--tokens-per-minute", "-1"],
        ["--tokens-per-minute-of", "gold"],
    ],
)
def test_a_limit_that_cannot_be_is_wrong_usage(quire, real_broker, wrong):
    code, out, err = quire("limits", *wrong)
    assert (code, out) == (2, "") and "error: " in err
    assert (real_broker.control().limits, real_broker.control().fairness) == (
        QueueLimits(),
        Fairness(),
    )


def test_tenants_get_weights_and_rates_and_share_by_tokens(quire, real_broker):
    code, out, _ = quire(
        *("limits", "--fairness", "tokens", "--weight", "gold=3", "--weight", "free=1"),
        *("--tokens-per-minute", "6000", "--tokens-per-minute-of", "gold=0"),
    )
    assert code == 0
    assert real_broker.control().fairness == Fairness(
        by_tokens=True, weights={"gold": 3, "free": 1}
    )
    assert real_broker.control().limits == QueueLimits(rate=6000, rates={"gold": 0})
    assert [line.split() for line in out.splitlines()] == [
        [*HEADER, "timeout_s", "target_s", "max_tokens", "keep_prompts", "ends"],
        ["0", "-", "-", "0", "-", "6000", "tokens", "-", "-", "-", "0", "10000"],
        [],
        ["shard", "tenant", "limit", "per_minute", "weight", "open"],
        ["0", "free", "-", "6000", "1", "0"],
        ["0", "gold", "-", "-", "3", "0"],
    ]
    quire("limits", "--fairness", "none", "--weight", "gold=", "--weight", "free=")
    quire("limits", "--tokens-per-minute", "0", "--tokens-per-minute-of", "gold=")
    assert (real_broker.control().limits, real_broker.control().fairness) == (
        QueueLimits(),
        Fairness(),
    )


def test_a_default_timeout_is_set_shown_and_removed(quire, real_broker):
    code, out, _ = quire("limits", "--request-timeout", "90.5", "--target-latency", "2")
    assert code == 0
    found = [line.split()[-5:-3] for line in out.splitlines()[:2]]
    assert found == [["timeout_s", "target_s"], ["90.5", "2"]]
    quire("limits", "--target-latency", "0")
    assert real_broker.control().defaults == QueueDefaults(request_timeout_seconds=90.5)
    # Limits and the default stay when the other changes.
    quire("limits", "--requests", "7")
    assert real_broker.control().defaults == QueueDefaults(request_timeout_seconds=90.5)
    quire("limits", "--request-timeout", "0")
    assert (real_broker.control().defaults, real_broker.control().limits.requests) == (
        QueueDefaults(),
        7,
    )
    code, _, err = quire("limits", "--request-timeout", "0.0001")
    assert code != 0 and "request_timeout_seconds" in err


def test_the_longest_answer_of_requests_that_name_none_is_set_shown_and_removed(quire, real_broker):
    real_broker.set_defaults(QueueDefaults(request_timeout_seconds=5))
    code, out, _ = quire("limits", "--default-max-tokens", "4096")
    assert code == 0
    assert [line.split()[-3] for line in out.splitlines()[:2]] == ["max_tokens", "4096"]
    assert real_broker.control().defaults == QueueDefaults(
        request_timeout_seconds=5, max_tokens=4096
    )
    # The limits of a queue are other fields, although they have similar names.
    quire("limits", "--tokens", "9")
    assert real_broker.control().defaults.max_tokens == 4096
    quire("limits", "--default-max-tokens", "0")
    assert real_broker.control().defaults == QueueDefaults(request_timeout_seconds=5)
    code, _, err = quire("limits", "--default-max-tokens", str(1 << 40))
    assert code != 0 and "max_tokens must be from 1" in err


def test_how_many_ends_are_kept_is_set_and_shown(quire, real_broker):
    code, out, _ = quire("limits", "--ends", "500")
    assert code == 0
    assert [line.split()[-1] for line in out.splitlines()[:2]] == ["ends", "500"]
    quire("limits", "--requests", "7")
    assert real_broker.control().ends_kept == 500
    quire("limits", "--ends", "0")
    assert real_broker.control().ends_kept == 0
    code, _, err = quire("limits", "--ends", "99999999")
    assert code != 0 and "ends" in err


def test_how_long_a_kept_prompt_may_be_is_set_and_shown(quire, real_broker):
    code, out, _ = quire("limits", "--keep-prompts", "65536")
    assert code == 0
    assert [line.split()[-2] for line in out.splitlines()[:2]] == ["keep_prompts", "65536"]
    quire("limits", "--requests", "7")
    assert real_broker.control().prompts_kept == 65_536
    code, _, err = quire("limits", "--keep-prompts", "99999999")
    assert code != 0 and "keep_prompts" in err


@pytest.mark.parametrize("given", [("--keep-prompts", "-5"), ("--of", "gold=-5"), ("--ends", "x")])
def test_a_limit_that_is_no_number_is_refused_in_words_that_fit_each_flag(quire, given):
    code, _, told = quire("limits", *given)
    assert code == EXIT_USAGE
    number = given[1].removeprefix("gold=")
    assert f"argument {given[0]}: {number} is not a whole number from 0" in told
