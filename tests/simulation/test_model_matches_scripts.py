"""The model of the model check and the real scripts are one: paths of the model, compared on Redis.

The paths are a shortest one to each answer of each script, and random ones. A failing walk names
its seed; QUIRE_WALK_SEED=17 walks that one alone, QUIRE_WALKS sets how many are taken.
"""

import os

import pytest

from quire.queue.scripts import load_source
from tests.quire.builders import leaked_keys
from tests.simulation.controls import CONTROLS
from tests.simulation.exploration import Search
from tests.simulation.lockstep import Divergence, Lockstep, walk
from tests.simulation.model_state import Call
from tests.simulation.modelcheck import OUTCOMES, SMALL_SCENARIOS
from tests.simulation.protocol_model import Scripts
from tests.simulation.real_shard import RealShard, fresh_queue
from tests.simulation.world import Scenario, scripts_of

NUM_WALKS = int(os.environ.get("QUIRE_WALKS", "12"))
NUM_STEPS = 120

#: Within so many walks a doctored model or script must be found out, if the paths have not done it.
NUM_CONTROL_WALKS = 30

#: States of each scenario among which the paths are looked for.
NUM_STATES = 1000

#: Everything may happen, as often as it likes.
_OFTEN = 1_000_000
_WILD = {
    "num_requests": 2,
    "num_tokens": 8,
    "num_releases": _OFTEN,
    "num_late_calls": _OFTEN,
    "num_rollbacks": _OFTEN,
    "num_requeues": _OFTEN,
    "num_expiries": _OFTEN,
    "may_cancel": True,
    "may_be_late": True,
    "may_be_poison": True,
    "may_fail": True,
    "may_schedule": True,
    "may_pause": True,
    "may_be_torn": True,
}
WILD_SCENARIOS = (
    Scenario("wild", **_WILD),
    Scenario("wild, one key", **_WILD, shares_a_key=True),
    Scenario("wild, one session", **_WILD, shares_a_session=True),
    Scenario("wild, a small queue", **_WILD, max_attempts=3),
)

#: What a server may lose of two requests, one after the other, and how they come back.
LOSSES = (
    *(Call("submit", 0), Call("restore", 0), Call("lose_rank", 0), Call("submit", 0)),
    *(Call("restore", 0), Call("lose_rank", 0), Call("restore", 0), Call("restore", 0)),
    *(Call("lose_ticket", 0, 0), Call("submit", 0), Call("lose_ticket", 0, 0)),
    *(Call("restore", 0), Call("misrank", 0), Call("peek")),
    *(Call("restore", 0), Call("lose_rank", 0), Call("balance"), Call("restore", 0)),
    Call("lose_ticket", 0, 0),
    *(Call("claim", 0, owner=1), Call("restore", 0), Call("submit", 0)),
    *(Call("stay_ranked", 0), Call("claim", 0, owner=3)),
    *(Call("lose_lease", 0), Call("restore", 0), Call("release", 0, epoch=1, owner=1)),
    *(Call("lose_rank", 0), Call("lose_ticket", 0, 0), Call("submit", 0)),
    *(Call("restore", 0), Call("claim", 0, owner=2)),
    *(Call("expire_lease", 0), Call("reap", 0), Call("lose_wait", 0), Call("restore", 0)),
    *(Call("lose_rank", 0), Call("restore", 0)),
    *(Call("submit", 1, flag=True), Call("restore", 1), Call("lose_delay", 1), Call("restore", 1)),
    *(Call("lose_wait", 1), Call("restore", 1), Call("forget", 1), Call("restore", 1)),
    Call("restore", 1),
)

#: A server forgets that the first of two turns is open, and is told. The claim consumes the ticket
#: of the turn that is parked again.
TURN_LOSSES = (
    *(Call("submit", 0), Call("submit", 1), Call("restore", 1), Call("lose_turn", 0)),
    *(Call("restore", 1), Call("restore", 0), Call("restore", 1), Call("claim", 0, owner=1)),
    *(Call("peek"), Call("claim", 1, owner=2), Call("submit", 1), Call("restore", 0)),
    *(Call("lose_turn", 0), Call("restore", 0), Call("restore", 1)),
    *(Call("commit", 0, epoch=1, owner=1, done="completed"), Call("restore", 0), Call("peek")),
    *(Call("claim", 1, owner=3), Call("lose_turn", 1), Call("restore", 1), Call("peek")),
)

#: A server loses the entries that rank two turns, and not their order: one runs, one is parked.
TURN_ENTRY_LOSSES = (
    *(Call("submit", 0), Call("submit", 1), Call("lose_turn", 1, flag=True), Call("restore", 1)),
    *(Call("claim", 0, owner=1), Call("lose_turn", 0, flag=True)),
    *(Call("lose_turn", 1, flag=True), Call("submit", 1), Call("peek")),
    *(Call("lose_turn", 1, flag=True), Call("commit", 0, epoch=1, owner=1, done="completed")),
    *(Call("peek"), Call("restore", 1), Call("peek"), Call("claim", 1, owner=2)),
    *(Call("lose_turn", 1, flag=True), Call("commit", 1, epoch=1, owner=2, done="completed")),
)

#: A torn file has the ends of two requests, but only the first one was told. Whoever finds such an
#: end, by a commit or by a claim, tells it if it was not.
TORN_ENDS = (
    *(Call("submit", 0), Call("submit", 1), Call("claim", 0, owner=1), Call("snapshot")),
    Call("commit", 0, epoch=1, owner=1, tokens=(0,), done="completed"),
    Call("tear", 0, entry=1, flag=True),
    Call("commit", 0, epoch=1, owner=1, tokens=(0,), done="completed"),
    *(Call("claim", 1, owner=2), Call("snapshot")),
    Call("commit", 1, epoch=1, owner=2, tokens=(0,), done="completed"),
    *(Call("tear", 1, flag=True), Call("expire_lease", 1), Call("reap", 1)),
    Call("claim", 1, owner=3),
)

#: The most that may wait in a small queue.
SMALL_BACKLOG = 1

pytestmark = [pytest.mark.real_redis]


@pytest.fixture(scope="module")
def paths():
    """For each answer of each script a shortest path to it, with its scenario."""
    found = {}
    for scenario in SMALL_SCENARIOS:
        search = Search(scenario, Scripts)
        assert search.run(max_states=NUM_STATES) is None
        for outcome, (number, step) in search.firsts.items():
            if outcome not in found:
                found[outcome] = scenario, search.way_to(number, step)
    return found


def lockstep_of(connection, make, scenario, kind=Scripts, sources=None) -> Lockstep:
    scripts = scripts_of(scenario, kind)
    scripts.max_backlog = SMALL_BACKLOG if "small queue" in scenario.name else 0
    real = RealShard(
        connection,
        make,
        num_requests=scenario.num_requests,
        keyed=scripts.keyed,
        in_session=scripts.in_session,
        max_attempts=scripts.max_attempts,
        max_backlog=scripts.max_backlog or None,
        sources=sources,
    )
    return Lockstep(real, scripts)


def take(connection, scenario, path, **doctored) -> set:
    """Takes one path on a queue of its own; returns the answers met. Divergence."""
    with fresh_queue(connection) as make:
        lockstep = lockstep_of(connection, make, scenario, **doctored)
        for step in path:
            for call in step.calls:
                lockstep.run(call)
        assert leaked_keys(connection, lockstep.real.broker) == []
    return lockstep.outcomes


def walk_once(connection, seed, **doctored) -> set:
    """Takes one random path on a queue of its own; returns the answers met. Divergence."""
    scenario = WILD_SCENARIOS[seed % len(WILD_SCENARIOS)]
    with fresh_queue(connection) as make:
        lockstep = lockstep_of(connection, make, scenario, **doctored)
        walk(lockstep, scenario, seed=seed, num_steps=NUM_STEPS)
        assert leaked_keys(connection, lockstep.real.broker) == []
    return lockstep.outcomes


def test_every_answer_of_the_model_is_an_answer_of_the_scripts(real_connection, paths):
    met = set()
    for scenario, path in paths.values():
        met |= take(real_connection, scenario, path)
    # To be told of a holder is a step inside the broker's submit.
    assert met | {("submit", "held")} >= OUTCOMES


def test_every_random_path_of_the_model_is_a_path_of_the_scripts(real_connection):
    chosen = os.environ.get("QUIRE_WALK_SEED")
    met = set()
    for seed in [int(chosen)] if chosen else range(NUM_WALKS):
        try:
            met |= walk_once(real_connection, seed)
        except Divergence as divergence:
            pytest.fail(f"QUIRE_WALK_SEED={seed}: {divergence}")
    print(f"{len(met)} kinds of answers met")


def test_a_full_queue_is_full_on_both_sides(real_connection):
    with fresh_queue(real_connection) as make:
        lockstep = lockstep_of(real_connection, make, WILD_SCENARIOS[-1])
        lockstep.run(Call("submit", 0))
        assert lockstep.run(Call("submit", 1)) == ("full", 1, "requests")


def lose(connection, losses=LOSSES, *, shares_a_session=False, **doctored) -> list:
    """Loses what there is, and puts it back; returns what the calls of RESTORE replied."""
    scenario = Scenario("losses", num_requests=2, shares_a_session=shares_a_session)
    with fresh_queue(connection) as make:
        lockstep = lockstep_of(connection, make, scenario, **doctored)
        replies = [(call.name, lockstep.run(call)) for call in losses]
    return [reply for name, reply in replies if name == "restore"]


def test_what_a_server_loses_comes_back_on_both_sides(real_connection):
    assert lose(real_connection) == [
        *("", "", "entry", "", "", "", "entry", "", "lease", "", "wait", "entry"),
        *("", "delay", "wait", "record", ""),
    ]


def test_the_turns_that_a_server_loses_come_back_on_both_sides(real_connection):
    assert lose(real_connection, TURN_LOSSES, shares_a_session=True) == [
        *("", "entry", "entry", "", "", "entry", "", "", "entry"),
    ]


def test_the_entries_of_turns_that_a_server_loses_come_back_on_both_sides(real_connection):
    assert lose(real_connection, TURN_ENTRY_LOSSES, shares_a_session=True) == ["entry", "entry"]


def test_the_ends_of_a_torn_file_are_told_once_on_both_sides(real_connection):
    assert lose(real_connection, TORN_ENDS) == []


def is_found_out(connection, paths, *, by=(), **doctored) -> bool:
    """`by`: the scripts whose answers most likely tell, so that the paths to these come first."""
    nearest = [way for (script, _), way in paths.items() if script in by]
    try:
        for scenario, path in nearest:
            take(connection, scenario, path, **doctored)
        lose(connection, **doctored)
        for losses in (TURN_LOSSES, TURN_ENTRY_LOSSES):
            lose(connection, losses, shares_a_session=True, **doctored)
        lose(connection, TORN_ENDS, **doctored)
        for scenario, path in paths.values():
            take(connection, scenario, path, **doctored)
        for seed in range(NUM_CONTROL_WALKS):
            walk_once(connection, seed, **doctored)
    except Divergence:
        return True
    return False


DOCTORED_MODELS = {
    control.kind.__name__: control.kind for control in CONTROLS if control.kind is not Scripts
}


@pytest.mark.parametrize("name", DOCTORED_MODELS)
def test_a_doctored_model_is_found_out(real_connection, paths, name):
    kind = DOCTORED_MODELS[name]
    assert is_found_out(real_connection, paths, by=vars(kind), kind=kind)


@pytest.mark.parametrize(
    ("script", "text", "doctored"),
    [
        ("commit", "fields.epoch == epoch and fields.owner == owner", "fields.epoch == epoch"),
        ("commit", "item.start > published", "false"),
        ("claim", "record.state == 'running' and record.owner == owner", "false"),
        ("release", "tonumber(record.attempts) - 1", "tonumber(record.attempts)"),
        ("reap", "attempts >= MAX_ATTEMPTS", "attempts > MAX_ATTEMPTS"),
        ("reap", "int(tonumber(record.epoch) + 1)", "int(tonumber(record.epoch))"),
        ("reap", "tonumber(record.losses or '0') + 1", "1"),
        ("reap", " and tonumber(record.losses or '0') < SUSPICIOUS", ""),
        ("reap", "is_kept and rank or rank_anew", "rank_anew"),
        ("claim", "losses >= SUSPICIOUS", "false"),
        ("fail", "redis.call('HSET', keys.record, 'released', owner)", ""),
        ("cancel", "redis.call('ZREM', DELAY, id)", ""),
        ("cancel", "agree(keys, record)\n  redis.call('HDEL', LOG_POSITIONS, id)", ""),
        (
            "reap",
            "local function enter(keys, id, state)\n  redis.call('HDEL', LOG_POSITIONS, id)",
            "local function enter(keys, id, state)",
        ),
        ("extend", "positions[number] == ARGV[at] and ", ""),
        ("requeue", "redis.call('XDEL', DEAD, letter_id)", ""),
        ("submit", "forget(keys, id)\n\n", "\n"),
        ("submit", "  find_again(keys, id, found)\n", ""),
        ("restore", "if is_missing then", "if false then"),
        ("restore", "if surplus_of(record.priority) < 0 then", "if false then"),
        ("restore", "tonumber(before) ~= tonumber(rank_of_record(id, record))", "false"),
        ("cancel", "if from == 'queued' and to ~= 'queued' then", "if false then"),
        ("claim", "  unrank(id)\n  return { reason", "  return { reason"),
        ("claim", "take_surplus(record.priority, MAX_TICKETS)\n", ""),
        ("balance", "used + take_surplus(priority, most)", "used"),
        (
            "release",
            "tonumber(record.attempts) - 1, true, now",
            "tonumber(record.attempts) - 1, false, now",
        ),
        ("restore", "if not redis.call('ZSCORE', DELAY, id) then", "if false then"),
        ("restore", "if not redis.call('ZSCORE', LEASE, id) then", "if false then"),
        (
            "reap",
            "    add_ticket(id, record.priority)\n  end\n  return 'queued'",
            "  end\n  return 'queued'",
        ),
        ("commit", "    leave_session(id, keys)\n", ""),
        ("commit", "turn_of(id) or turn_in(keys.record)", "turn_of(id)"),
        ("submit", "    if is_parked(id, turn) then\n", "    if false then\n"),
        (
            "claim",
            "if is_parked(id, turn) then\n  return refuse",
            "if false then return refuse",
        ),
        ("restore", "  if is_parked(id, turn_of(id)) then\n    unrank(id)", "  if false then"),
        ("restore", "join_again(id, record) and 'entry' or nil", "nil"),
        ("requeue", "join_session(keys, id, record, record.number)", ""),
        ("commit", "if not is_told(id, record, newest.finished_ms) then", "if true then"),
        ("claim", "if not is_told(id, record, newest.finished_ms) then", "if false then"),
        ("cancel", "  tell(id, record, state, done)\n  return settle", "  return settle"),
    ],
)
def test_a_doctored_script_is_found_out(real_connection, paths, script, text, doctored):
    source = load_source(script)
    assert text in source
    sources = {script: source.replace(text, doctored)}
    assert is_found_out(real_connection, paths, by=[script], sources=sources)
