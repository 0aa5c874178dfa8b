"""A session is named in every place where a request is made, and what waits for it is shown."""

from quire import Client
from quire.queue.repair.losses import inspect_losses
from quire.queue.repair.restore import Lost
from quire.queue.view.inspection import inspect_shards
from quire.testing import FakeQuire
from tests.quire.batch_folder import Folder, ask
from tests.quire.builders import claim_next, make_item, make_request


def waiting(broker):
    return [candidate.request_id for candidate in broker.peek(count=100)]


def test_a_client_submits_turns_and_tells_what_one_waits_for(broker):
    client = Client(broker)
    handles = [client.submit([1], session_id="s", request_id=name) for name in "abc"]
    assert waiting(broker) == ["a"]
    assert [handle.status().waits_for for handle in handles] == [None, "a", "a"]
    claimed = claim_next(broker)
    assert handles[1].status().waits_for == "a"
    broker.commit([make_item(claimed.claim, 0, 1, final=True)])
    assert [handle.status().waits_for for handle in handles] == [None, None, "b"]
    assert handles[2].status().session_id == "s"


def test_a_turn_of_many_requests_is_one_of_them(broker):
    Client(broker).submit_many(
        [{"prompt": [1], "session_id": "s", "request_id": "a"}, {"prompt": [1], "request_id": "b"}]
    )
    Client(broker).submit([1], session_id="s", request_id="c")
    assert waiting(broker) == ["a", "b"]


def test_an_inspected_queue_has_lost_no_parked_turn(broker, connection):
    for name in "abc":
        broker.submit(make_request(id=name, session_id="s"))
    (state,) = inspect_shards(connection, [broker.keys])
    assert (state.num_queued, state.num_turns, state.num_lost) == (3, 3, 0)
    assert inspect_losses(connection, broker.keys).lost == {}
    connection.zrem(broker.keys.rank(1), "a")
    assert inspect_losses(connection, broker.keys).lost == {"a": Lost.ENTRY}
    broker.restore(is_at_once=True)
    assert inspect_losses(connection, broker.keys).lost == {}


def test_a_batch_runs_the_lines_of_a_session_in_their_order(tmp_path):
    folder = Folder(tmp_path)
    begun = []

    def answer(request):
        begun.append(request.body["prompt"])
        return request.body["prompt"].upper()

    names = "abcdefgh"
    folder.write(*(ask(name, name) | {"session_id": "s"} for name in names), ask("z", "z"))
    with FakeQuire(answer=answer) as fake:
        folder.run(fake.client())
    assert [name for name in begun if name in names] == list(names)
    assert folder.texts["z"] == "Z"
