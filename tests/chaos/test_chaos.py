"""A few schedules of chaos, small enough for every run of the tests, and all controls."""

from collections.abc import Iterator, Mapping

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from engine.model.decoder.native_decoder import NativeDecoder
from quire.transport.local_redis import URL_VARIABLE, LocalRedis
from quire.wire.adapters import adapter_of
from service.worker.settings.config import EMBEDDED_MODEL
from tests.chaos import hybrid
from tests.chaos.adapters import NAMES, SCALE, lay_out
from tests.chaos.append_only import cut, read_command
from tests.chaos.audit import log_violations
from tests.chaos.company import CONTROL, INTACT, SCHEDULE, Company, Play, Report
from tests.chaos.controls import LIVE
from tests.chaos.orders import (
    ORDER_PLANTS,
    SOUND_ENDS,
    SOUND_TURNS,
    told_violations,
    turn_violations,
)
from tests.chaos.plants import MAX_ATTEMPTS, PLANTS, sound_log
from tests.chaos.schedules import CONSTRAINTS, FAULTS, draw_plan, is_real, recorded
from tests.chaos.sinks.laws import (
    CANCELLED,
    SINK_PLANTS,
    SOUND_HOOKS,
    SOUND_RESULTS,
    SOUND_TOLD,
    SOUND_WANTED,
    Result,
    hook_violations,
    result_violations,
    told_once,
)
from tests.chaos.sinks.schedules import draw_batch
from tests.engine.model.adapted import merged
from tests.engine.model.builders import make_runner

#: Between them every fault there is.
SMOKE_SEEDS = (90, 661, 690)
#: One of them in which Redis forgets a submit that it has answered.
FORGETFUL_SEED = 690
#: One with the embedded model: workers are killed and stopped, and Redis loses its tail twice.
REAL_SEED = 3009
#: One with a batch over HTTP: gateways, batchers and notifiers are killed, stopped and drained.
BATCH_SEED = 613
#: Plays at once.
JOBS = 4
#: Whichever test is the first waits for all plays.
FIRST_TEST_SECONDS = 400


@pytest.fixture(scope="module")
def own_redis() -> Iterator[None]:
    """There is a Redis to start, and none is named: such a server is not ours to kill."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(URL_VARIABLE, raising=False)
        with LocalRedis.start() as server:
            if not server.is_real:
                pytest.skip("chaos kills its Redis: there is no redis-server to start")
        yield


@pytest.fixture(scope="module")
def abacus() -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """The embedded model as transformers runs it, in the precision of the plays."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    return tokenizer, AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32)


@pytest.fixture(scope="module")
def reports(own_redis: None) -> Mapping[Play, Report]:
    """All plays of this file, played at once: they mostly wait."""
    plays = [Play(SCHEDULE, str(seed)) for seed in (REAL_SEED, BATCH_SEED, *SMOKE_SEEDS)]
    plays += [Play(kind, name) for name in LIVE for kind in (CONTROL, INTACT)]
    with Company(JOBS) as company:
        return {report.play: report for report in company.perform(plays)}


@pytest.mark.real_redis
@pytest.mark.processes
@pytest.mark.timeout(FIRST_TEST_SECONDS)
@pytest.mark.parametrize("seed", [*SMOKE_SEEDS, REAL_SEED, BATCH_SEED])
def test_whatever_goes_wrong_every_log_is_that_of_the_uninterrupted_run(reports, seed):
    report = reports[Play(SCHEDULE, str(seed))]
    assert report.sentences == ()
    assert report.figures["tokens"] > 0


@pytest.mark.real_redis
@pytest.mark.processes
@pytest.mark.timeout(FIRST_TEST_SECONDS)
def test_a_request_that_redis_forgot_is_submitted_again_and_served(reports):
    figures = reports[Play(SCHEDULE, str(FORGETFUL_SEED))].figures
    assert figures["resubmits"] > 0
    assert figures["ended_completed"] == figures["requests"]


@pytest.mark.real_redis
@pytest.mark.processes
@pytest.mark.timeout(FIRST_TEST_SECONDS)
@pytest.mark.parametrize("name", LIVE)
def test_a_system_that_breaks_a_law_is_caught_by_that_law(reports, name):
    assert reports[Play(CONTROL, name)].sentences == ()


@pytest.mark.real_redis
@pytest.mark.processes
@pytest.mark.timeout(FIRST_TEST_SECONDS)
@pytest.mark.parametrize("name", LIVE)
def test_the_scene_of_a_broken_law_is_silent_when_the_law_is_kept(reports, name):
    assert reports[Play(INTACT, name)].sentences == ()


@pytest.mark.real_redis
@pytest.mark.processes
@pytest.mark.timeout(FIRST_TEST_SECONDS)
def test_the_run_nobody_interrupts_is_what_transformers_generates(own_redis, abacus, tmp_path):
    tokenizer, alone = abacus
    lay_out(tmp_path, model=EMBEDDED_MODEL)
    models = {name: merged(EMBEDDED_MODEL, tmp_path / name, SCALE)._model for name in NAMES}
    greedy = [item for item in recorded() if item.request.body["temperature"] == 0.0]
    assert len(greedy) >= 3
    used = set()
    for item in greedy:
        asked = adapter_of(item.request.body, model=EMBEDDED_MODEL.name)
        model = models[asked.name] if asked else alone
        used.add(asked and asked.name)
        prompt = tokenizer(item.request.body["prompt"]).input_ids
        # Greedy: each token is the likeliest after all tokens before it.
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *item.tokens]])).logits[0]
        assert tuple(logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist()) == item.tokens
    assert len(used) > 1


def test_one_of_the_small_schedules_has_the_embedded_model():
    assert [seed for seed in (*SMOKE_SEEDS, REAL_SEED) if is_real(seed)] == [REAL_SEED]


def test_a_seed_always_draws_the_same_plan():
    assert draw_plan(7) == draw_plan(7)


def test_the_small_schedules_hold_every_fault():
    drawn = {fault.kind for seed in SMOKE_SEEDS for fault in draw_plan(seed).faults}
    assert drawn == {*FAULTS, "trim"}


def test_the_small_schedules_hold_every_kind_of_constraint():
    bodies = [wanted.request.body for seed in SMOKE_SEEDS for wanted in draw_plan(seed).wanted]
    kinds = {kind for kind, _ in CONSTRAINTS}
    assert {kind for kind in kinds for body in bodies if kind in body} == kinds


def test_the_small_schedules_hold_every_adapter_in_both_words():
    bodies = [wanted.request.body for seed in SMOKE_SEEDS for wanted in draw_plan(seed).wanted]
    named = {body.get("adapter") or body.get("model") for body in bodies}
    assert named == {None, *NAMES, *(f"fake:{name}" for name in NAMES)}


def test_the_audit_accepts_a_sound_log():
    expected, log = sound_log()
    assert list(log_violations(expected, log, max_attempts=MAX_ATTEMPTS)) == []


@pytest.mark.parametrize("name", PLANTS)
def test_the_audit_names_every_planted_damage(name):
    assert PLANTS[name].is_found


def test_the_audit_accepts_turns_in_order_and_ends_told_once():
    assert list(turn_violations(SOUND_TURNS)) == []
    assert list(told_violations(SOUND_ENDS, dict(SOUND_ENDS))) == []


@pytest.mark.parametrize("name", ORDER_PLANTS)
def test_the_audit_names_what_is_out_of_order(name):
    assert ORDER_PLANTS[name].is_found


def test_the_small_schedules_hold_turns_of_a_session():
    turns = [wanted.request.session_id for seed in SMOKE_SEEDS for wanted in draw_plan(seed).wanted]
    assert turns.count("talk") >= 2


def test_a_schedule_of_batches_is_always_the_same_and_has_every_kind_of_victim():
    assert draw_batch(BATCH_SEED) == draw_batch(BATCH_SEED)
    drawn = {fault.kind for fault in draw_batch(BATCH_SEED).faults}
    assert {"kill_gateway", "kill_batcher", "pause_batcher", "kill_notifier"} <= drawn


def test_the_audit_accepts_the_results_and_webhooks_of_a_sound_batch():
    assert list(result_violations(SOUND_WANTED, SOUND_RESULTS)) == []
    assert list(told_once(SOUND_TOLD, SOUND_TOLD)) == []
    assert list(hook_violations(SOUND_TOLD, SOUND_HOOKS)) == []
    cut = Result("row-1", CANCELLED, is_error=True)
    results = (cut, *SOUND_RESULTS[1:])
    assert list(result_violations(SOUND_WANTED, results, was_cancelled=True)) == []


@pytest.mark.parametrize("name", SINK_PLANTS)
def test_the_audit_names_what_is_wrong_with_a_batch_or_a_webhook(name):
    assert SINK_PLANTS[name].is_found


def test_a_log_is_cut_at_the_end_of_a_whole_transaction(tmp_path):
    one, two = _command(b"SET", b"a", b"1"), _command(b"SET", b"b", b"2")
    transaction = _command(b"MULTI") + one + two + _command(b"EXEC")
    whole = one + transaction
    for size in range(len(whole) + 1):
        log = tmp_path / "log"
        log.write_bytes(whole)
        cut(log, size)
        assert log.read_bytes() in (b"", one, whole)
        assert len(log.read_bytes()) <= size


def test_a_command_that_is_cut_off_is_not_read():
    command = _command(b"SET", b"a", b"1")
    assert read_command(command, 0) == (b"SET", len(command))
    assert all(read_command(command[:size], 0) is None for size in range(len(command)))


def _command(*words: bytes) -> bytes:
    parts = b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)
    return b"*%d\r\n%s" % (len(words), parts)


def test_plays_with_the_hybrid_model_are_plays_of_the_compiled_form(tmp_path):
    folder, adapters = hybrid.save(tmp_path), tmp_path / "adapters"
    lay_out(adapters, model=folder)
    runner = make_runner(folder, adapters={name: adapters / name for name in NAMES})
    assert isinstance(runner.model, NativeDecoder)
