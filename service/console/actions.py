"""What operators may do: each action takes a form, changes the queue, and says what it has done.

Each can be repeated. None takes an address to go to from its form.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from quire.errors import InvalidRequest, UnknownRequest
from quire.queue.control.control import Control
from quire.queue.control.controlling import MAX_REASON_LENGTH, MOST_PROMPT_BYTES
from quire.queue.control.limits import QueueLimits
from quire.queue.rank.fairness import Fairness
from quire.queue.roles import Operator
from quire.queue.submit.routing import check_group_name
from quire.wire.arguments import MAX_AHEAD_SECONDS
from quire.wire.protocol import is_tenant_name
from quire.wire.sizes import MAX_TOKENS_PER_REQUEST
from service.console.reading.groups import open_members
from service.console.reading.letters import letter_with
from service.console.reading.queue import RETRY_SECONDS, QueueReading
from service.shared.batches import ledger
from service.shared.batches.ledger import Ledger
from service.shared.batches.records import BATCH_ID

#: The most requests of a group that one form cancels: more would take longer than a person waits.
MAX_CANCELLED = 2000

#: The largest number of a limit.
MAX_LIMIT = 10**12

_LETTER = re.compile(r"([0-9]{1,4}):([0-9]{1,20}-[0-9]{1,20})")


class Fields:
    """The fields of a form. InvalidRequest for a field that is missing or has no valid value."""

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self._pairs = pairs

    @property
    def first(self) -> Mapping[str, str]:
        """The first value of each field."""
        return dict(reversed(self._pairs))

    def text(self, name: str) -> str:
        """The value of a field; empty without it."""
        return self.first.get(name, "").strip()

    def all(self, name: str) -> list[str]:
        """All values of a field, each once."""
        return list(dict.fromkeys(value for key, value in self._pairs if key == name))

    def number(self, name: str, *, least: int = 0, most: int = MAX_LIMIT) -> int | None:
        """A whole number; None for an empty field."""
        text = self.text(name)
        if not text:
            return None
        if not re.fullmatch(r"[0-9]{1,15}", text) or not least <= int(text) <= most:
            raise InvalidRequest(name, f"must be a whole number from {least:,} to {most:,}")
        return int(text)

    def seconds(self, name: str) -> float | None:
        """A number of seconds; None for an empty field and for 0."""
        text = self.text(name)
        if not text:
            return None
        is_number = re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,3})?", text)
        if not is_number or float(text) > MAX_AHEAD_SECONDS:
            raise InvalidRequest(name, f"must be a number of seconds up to {MAX_AHEAD_SECONDS:,}")
        return float(text) or None


class Done(NamedTuple):
    """What an action has done, and the page of the queue that shows it."""

    notice: str
    path: str


Action = Callable[[QueueReading, Fields], Done]


def pause(queue: QueueReading, fields: Fields) -> Done:
    """No request of the queue is claimed from now on."""
    reason = fields.text("reason")[:MAX_REASON_LENGTH]
    for broker in queue.operators:
        broker.pause(reason)
    return Done("The queue is paused. Running requests continue.", "")


def resume(queue: QueueReading, _: Fields) -> Done:
    """Ends a pause."""
    for broker in queue.operators:
        broker.resume()
    return Done("The queue is open again.", "")


def drain(queue: QueueReading, fields: Fields) -> Done:
    """Asks a worker to end."""
    name = fields.text("worker")
    brokers = [b for b in queue.operators if name in {info.name for info in b.workers()}]
    if not brokers:
        raise InvalidRequest("worker", "no worker of this name is registered")
    for broker in brokers:
        broker.drain(name)
    return Done(f"{name} was asked to drain. It reads this within its lease.", "/workers")


def cancel(queue: QueueReading, fields: Fields) -> Done:
    """Cancels a request. UnknownRequest."""
    request_id = fields.text("request")
    state = queue.operator_of(request_id).cancel(request_id)
    says = "Its worker ends it at its next commit." if state == "running" else f"It is {state}."
    return Done(f"The cancel was accepted. {says}", f"/requests/{request_id}")


def cancel_group(queue: QueueReading, fields: Fields) -> Done:
    """Cancels the requests of a group that have not ended: the first MAX_CANCELLED of them."""
    name = check_group_name(fields.text("group"))
    num_cancelled = num_running = 0
    for shard, members in list(open_members(queue, name, most=MAX_CANCELLED)):
        states = queue.operators[shard].cancel_many(members).values()
        num_cancelled += len(states)
        num_running += sum(state == "running" for state in states)
    notice = f"The cancel of {num_cancelled:,} requests was accepted."
    if num_running:
        notice += f" {num_running:,} of them run: their workers end them at their next commit."
    num_open = sum(broker.num_open_members(name) for broker in queue.operators) - num_running
    if num_open > 0:
        notice += f" {num_open:,} more are open: cancel the group again."
    return Done(notice, f"/groups/{name}")


def requeue(queue: QueueReading, fields: Fields) -> Done:
    """Queues the requests of dead letters again, with their tokens if `keep` is set."""
    states = []
    keeps_tokens = fields.text("keep") == "1"
    for broker, entry_id in _letters(queue, fields):
        try:
            letter = letter_with(broker, entry_id)
            states.append(str(broker.requeue(letter, keep_tokens=keeps_tokens)))
        except UnknownRequest:
            # Somebody else was faster, or its request is gone.
            states.append("gone")
    return Done(_counted("Queued again", states, good="queued"), "/dead")


def purge(queue: QueueReading, fields: Fields) -> Done:
    """Deletes dead letters. Their requests stay ended."""
    letters = _letters(queue, fields)
    for broker, entry_id in letters:
        broker.purge([entry_id])
    return Done(f"Deleted letters: {len(letters)}.", "/dead")


def set_limits(queue: QueueReading, fields: Fields) -> Done:
    """Replaces the limits of the queue that are not of one tenant."""
    timeout, target = fields.seconds("request_timeout"), fields.seconds("target_latency")
    fairness, ends = fields.text("fairness"), fields.number("ends", most=10_000_000)
    prompts = fields.number("prompts", most=MOST_PROMPT_BYTES)
    if fairness not in ("none", "tokens"):
        raise InvalidRequest("fairness", "must be `none` or `tokens`")
    for broker in queue.operators:
        before = broker.control()
        limits = replace(
            before.limits,
            requests=fields.number("requests") or None,
            tokens=fields.number("tokens") or None,
            per_tenant=fields.number("per_tenant") or None,
            rate=fields.number("rate") or None,
        )
        defaults = replace(
            before.defaults,
            request_timeout_seconds=timeout,
            target_latency_seconds=target,
            max_tokens=fields.number("max_tokens", most=MAX_TOKENS_PER_REQUEST) or None,
        )
        shares = replace(before.fairness, by_tokens=fairness == "tokens")
        _change(broker, before, limits=limits, fairness=shares)
        if defaults != before.defaults:
            broker.set_defaults(defaults)
        if ends is not None and ends != before.ends_kept:
            broker.keep_ends(ends)
        if prompts is not None and prompts != before.prompts_kept:
            broker.keep_prompts(prompts)
    return Done("The limits are set. They apply to every submit from now on.", "/limits")


def set_tenant(queue: QueueReading, fields: Fields) -> Done:
    """Replaces the limits and the weight of one tenant; an empty field removes its own value."""
    tenant = fields.text("tenant")
    if not is_tenant_name(tenant):
        raise InvalidRequest("tenant", "is not the name of a tenant")
    limit, rate = fields.number("limit"), fields.number("tenant_rate")
    weight = fields.number("weight", least=1, most=1000)
    for broker in queue.operators:
        before = broker.control()
        limits = replace(
            before.limits,
            tenants=_with(before.limits.tenants, tenant, limit),
            rates=_with(before.limits.rates, tenant, rate),
        )
        weights = _with(before.fairness.weights, tenant, weight)
        _change(broker, before, limits=limits, fairness=replace(before.fairness, weights=weights))
    return Done(f"The limits of {tenant} are set.", "/limits")


def cancel_batch(queue: QueueReading, fields: Fields) -> Done:
    """Asks for the end of a batch."""
    batch_id = fields.text("batch")
    if not BATCH_ID.fullmatch(batch_id):
        raise InvalidRequest("batch", "is not the id of a batch")
    books = Ledger(queue.connection, queue.name, retry_seconds=RETRY_SECONDS)
    status = books.run(ledger.cancel_batch(books.keys, batch_id))
    if not status:
        raise UnknownRequest(batch_id, "no such batch")
    return Done(f"The batch is {status}.", "/batches")


#: The actions by the last part of their address.
ACTIONS: Mapping[str, Action] = {
    "pause": pause,
    "resume": resume,
    "drain": drain,
    "cancel": cancel,
    "requeue": requeue,
    "purge": purge,
    "limits": set_limits,
    "tenant": set_tenant,
    "cancel-batch": cancel_batch,
    "cancel-group": cancel_group,
}


def _letters(queue: QueueReading, fields: Fields) -> list[tuple[Operator, str]]:
    """The chosen letters: the broker of each, and the id of its entry. InvalidRequest for none."""
    chosen = []
    for value in fields.all("letter"):
        found = _LETTER.fullmatch(value)
        if found is None or int(found[1]) >= len(queue.operators):
            raise InvalidRequest("letter", "is not a dead letter of this queue")
        chosen.append((queue.operators[int(found[1])], found[2]))
    if not chosen:
        raise InvalidRequest("letter", "choose one letter or more")
    return chosen


def _counted(what: str, states: Sequence[str], *, good: str) -> str:
    others = [state for state in states if state != good]
    text = f"{what}: {len(states) - len(others)} of {len(states)}."
    return text + (f" The others are {', '.join(sorted(set(others)))}." if others else "")


def _with(before: Mapping[str, int], tenant: str, value: int | None) -> dict[str, int]:
    kept = {name: number for name, number in before.items() if name != tenant}
    return kept if value is None else {**kept, tenant: value}


def _change(broker: Operator, before: Control, *, limits: QueueLimits, fairness: Fairness) -> None:
    if limits != before.limits:
        broker.set_limits(limits)
    if fairness != before.fairness:
        broker.set_fairness(fairness)
