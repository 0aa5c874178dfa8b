"""What a console remembers of a queue, and how that becomes plots."""

import re

import pytest

from quire.wire.output import ErrorInfo, State
from service.console.plots import HEIGHT, LEFT, RIGHT, WIDTH, plots_of
from service.console.reading.history import History, LastHour, Sample
from service.console.reading.queue import QueueReading
from tests.console import stage
from tests.quire.builders import claim_next, make_item, make_request


@pytest.fixture
def history(fake):
    return History(QueueReading(fake.connection, "default"), sample_seconds=5.0)


def finish(broker, name: str) -> None:
    broker.submit(make_request(id=name))
    broker.commit([make_item(claim_next(broker).claim, 0, 3, final=True)])


def test_a_sample_counts_what_waits_runs_and_has_ended_since(history, fake):
    history.read()
    finish(fake.broker, "a")
    fake.broker.submit_many([make_request(id=name) for name in "bcd"])
    claim_next(fake.broker)
    history.read()
    last = history.samples[-1]
    assert (last.num_waiting, last.num_running) == (2, 1)
    assert (dict(last.ended), last.ended_tokens) == ({State.COMPLETED: 1}, 3)
    history.read()
    assert history.samples[-1].ended == {}


def test_ends_from_before_the_start_are_in_the_periods_when_they_ended(history, fake):
    finish(fake.broker, "a")
    now_ms = fake.broker.now_ms()
    ((_, fields),) = fake.connection.xrange(fake.broker.keys.ends)
    fake.connection.delete(fake.broker.keys.ends)
    for seconds_ago in (31, 30.5, 2):
        at_ms = now_ms - int(1000 * seconds_ago)
        fake.connection.xadd(fake.broker.keys.ends, fields, id=f"{at_ms}-*")
    history.read()
    ended = [sum(sample.ended.values()) for sample in history.samples]
    assert ended == [2, 0, 0, 0, 0, 0, 1]
    assert [sample.num_waiting for sample in history.samples] == [None] * 6 + [0]


def test_the_ends_of_the_last_hour_are_counted_and_forgotten(history, fake):
    for name in "abc":
        fake.broker.submit(make_request(id=name))
        error = None if name == "a" else ErrorInfo("device_failed", "gone")
        end = stage.completed(name, error=error)
        fake.broker.commit([stage.item(claim_next(fake.broker).claim, 0, ["x"], end=end)])
    assert history.last_hour is None
    history.read()
    assert history.last_hour == LastHour(1, 2)
    moved = fake.connection.xrevrange(fake.broker.keys.ends, count=1)
    fake.connection.delete(fake.broker.keys.ends)
    now_ms = fake.broker.now_ms()
    for minutes_ago in (62, 58):
        at_ms = now_ms - 60_000 * minutes_ago
        fake.connection.xadd(fake.broker.keys.ends, moved[0][1], id=f"{at_ms}-0")
    later = History(QueueReading(fake.connection, "default"), sample_seconds=5.0)
    later.read()
    assert later.last_hour == LastHour(0, 1)
    later.read()
    assert later.last_hour == LastHour(0, 1)


def test_an_hour_of_which_not_all_was_read_says_since_when(history, fake, monkeypatch):
    monkeypatch.setattr("service.console.reading.history.MAX_ENDS", 2)
    for name in "abc":
        finish(fake.broker, name)
    ids = [entry_id for entry_id, _ in fake.connection.xrange(fake.broker.keys.ends)]
    history.read()
    assert history.last_hour == LastHour(2, 0, since_ms=int(ids[1].partition(b"-")[0]))


def test_tokens_per_second_are_those_between_two_beats_of_each_worker(history, fake):
    broker = fake.broker
    now_ms = broker.now_ms()

    def beat(seconds_ago: float, generated: float, *, name: str = "w") -> None:
        """Counted from the beginning of the test, however long its steps take."""
        broker.beat_worker(name, "ready", {"generated": generated, "kv_usage": 0.5})
        line = fake.connection.hget(broker.keys.workers, name)
        _, rest = line.split(b" ", 1)
        then = now_ms - int(1000 * seconds_ago)
        fake.connection.hset(broker.keys.workers, name, b"%d %b" % (then, rest))

    beat(10, 100)
    beat(10, 50, name="x")
    history.read()
    assert history.samples[-1].tokens_per_second is None
    beat(0, 300)
    beat(0, 150, name="x")
    history.read()
    sample = history.samples[-1]
    assert sample.tokens_per_second == pytest.approx(30, rel=0.05)
    assert sample.kv_usage == 0.5
    # A new process under the same name begins at nothing; a worker that is silent makes nothing.
    beat(0, 10)
    beat(45, 999, name="x")
    history.read()
    assert history.samples[-1].tokens_per_second is None


def test_what_no_worker_tells_is_unknown_and_not_zero(history, fake):
    fake.broker.beat_worker("old", "ready", {"claims": 1.0})
    history.read()
    sample = history.samples[-1]
    assert (sample.tokens_per_second, sample.kv_usage) == (None, None)
    history.read()
    plots = {plot.title: plot for plot in plots_of(history.samples, sample_seconds=5.0)}
    assert plots["KV cache in use"].lines == ()
    assert plots["KV cache in use"].summary == "No data yet."


def test_a_history_has_a_bound(history, fake, monkeypatch):
    monkeypatch.setattr("service.console.reading.history.NUM_SAMPLES", 3)
    for _ in range(5):
        history.read()
    assert len(history.samples) == 3


def test_ends_of_another_program_are_left_out(history, fake):
    history.read()
    fake.connection.xadd(fake.broker.keys.ends, {"state": "odd", "tokens": "1"})
    fake.connection.xadd(fake.broker.keys.ends, {"x": stage.HOSTILE})
    history.read()
    assert history.samples[-1].ended == {}


def samples(*waiting: int | None) -> list[Sample]:
    return [Sample(1_000_000 + 5000 * n, num_waiting=value) for n, value in enumerate(waiting)]


def test_a_line_goes_through_its_values_from_left_to_right():
    (plot, *_) = plots_of(samples(0, 5, 10), sample_seconds=5.0)
    (line,) = plot.lines
    points = [tuple(map(float, xy)) for xy in re.findall(r"([\d.]+) ([\d.]+)", line.path)]
    middle = (LEFT + WIDTH - RIGHT) / 2
    assert [x for x, _ in points] == [LEFT, pytest.approx(middle), WIDTH - RIGHT]
    assert points[0][1] > points[1][1] > points[2][1] >= 0 and points[0][1] < HEIGHT
    assert points[0][1] - points[1][1] == pytest.approx(points[1][1] - points[2][1], abs=0.2)
    assert line.last == "10" and "waiting: now 10, from 0 to 10" in plot.summary


def test_a_line_is_broken_where_nothing_is_known_and_after_a_long_pause():
    (plot, *_) = plots_of(samples(1, None, 2, 3), sample_seconds=5.0)
    assert plot.lines[0].path.count("M") == 2
    late = [*samples(1, 2), Sample(1_100_000, num_waiting=3)]
    (plot, *_) = plots_of(late, sample_seconds=5.0)
    assert plot.lines[0].path.count("M") == 2


@pytest.mark.parametrize("few", [[], samples(1), [*samples(1), *samples(2)]])
def test_too_few_samples_are_no_plot(few):
    assert all(plot.lines == () for plot in plots_of(few, sample_seconds=5.0))


@pytest.mark.parametrize("most", [0, 1, 3, 999, 10_000, 12_345_678])
def test_the_ticks_of_a_plot_are_few_and_reach_its_largest_value(most):
    (plot, *_) = plots_of(samples(0, most), sample_seconds=5.0)
    assert 2 <= len(plot.rows) <= 6
    assert all(0 <= row.at <= HEIGHT for row in plot.rows)
    top = min(row.at for row in plot.rows)
    highest = min(float(y) for y in re.findall(r" ([\d.]+)", plot.lines[0].path))
    assert top <= highest + 0.1
