"""The queue of those that wait: its order, what is counted of it, and how it forgets the dead."""

from engine.request import Priority, Request, RequestState
from engine.scheduling.waiting_queue import MAX_DEAD_ENTRIES, WaitingQueue
from tests.engine.builders import make_request


def ranked(name: str, rank: float = 0.0, *, preempted: bool = False, **others) -> Request:
    request = make_request(name, **others)
    request.rank = (rank, 0)
    if preempted:
        request.transition(RequestState.RUNNING)
        request.transition(RequestState.PREEMPTED)
    return request


def make_queue(*requests: Request) -> WaitingQueue:
    queue = WaitingQueue()
    for request in requests:
        queue.push(request)
    return queue


def end(queue: WaitingQueue, request: Request) -> None:
    request.transition(RequestState.FINISHED)
    queue.mark_dead(request)


def test_the_best_rank_comes_next_and_stays_until_it_is_popped():
    queue = make_queue(ranked("c", 3.0), ranked("a", 1.0), ranked("b", 2.0))
    assert queue.peek().request_id == "a"
    assert [queue.pop().request_id for _ in range(3)] == ["a", "b", "c"]
    assert queue.peek() is None


def test_of_the_better_classes_alone_the_best_rank_comes_next():
    queue = make_queue(
        ranked("low", 1.0, priority=Priority.LOW),
        ranked("normal", 2.0),
        ranked("high", 3.0, priority=Priority.HIGH),
        ended := ranked("critical", 0.0, priority=Priority.CRITICAL),
    )
    end(queue, ended)
    names = [queue.peek(above=level) for level in Priority]
    assert [name and name.request_id for name in names] == ["normal", "high", None, None]
    assert queue.pop(above=Priority.LOW).request_id == "normal"
    assert queue.pop().request_id == "low"


def test_one_that_ended_while_it_waited_is_passed_over_and_not_counted():
    queue = make_queue(ended := ranked("a", 1.0), ranked("b", 2.0))
    end(queue, ended)
    assert len(queue) == 1
    assert queue.pop().request_id == "b"
    assert len(queue) == 0


def test_those_that_ran_before_are_counted_until_they_are_popped_or_end():
    popped, ended = ranked("a", 1.0, preempted=True), ranked("b", 2.0, preempted=True)
    queue = make_queue(popped, ended, ranked("new", 3.0))
    assert (len(queue), queue.num_preempted) == (3, 2)
    assert queue.pop() is popped
    assert queue.num_preempted == 1
    end(queue, ended)
    assert (len(queue), queue.num_preempted) == (1, 0)


def test_the_dead_are_swept_out_before_they_are_many():
    queue = make_queue(ranked("best", -1.0))
    dead = [ranked(f"r{index}", index) for index in range(MAX_DEAD_ENTRIES + 1)]
    for request in dead:
        queue.push(request)
    for request in dead:
        end(queue, request)
    assert len(queue) == queue._num_entries == 1
