"""RESTORE puts back what Redis has lost of the queue around its open requests."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from quire.keys import Keys
from quire.queue.repair.damage import Mending
from quire.queue.request.arguments import call_on
from quire.transport.procedure import command
from quire.transport.script_calls import ScriptCall

#: About how many open requests one turn of `restore` examines: four calls of RESTORE, and about
#: 20 ms of the server.
OPEN_PER_TURN = 1000

#: The shortest time between two turns of `restore`, of all workers together: 0.5 % of the server.
TURN_MS = 4000

#: The pause between two passes over all open requests.
REST_MS = 30_000

#: How many open requests are looked at at once after a change of the policy: half a second.
MAX_RANKED = 20_000


class Lost(StrEnum):
    """What Redis had lost of the queue around an open request.

    ENTRY: its entry in a rank set. DELAY, LEASE, WAIT: its time in the set of that name.
    RECORD: the request itself, so that only its place in the counts was left.
    """

    ENTRY = "entry"
    DELAY = "delay"
    LEASE = "lease"
    WAIT = "wait"
    RECORD = "record"


@dataclass(frozen=True, slots=True)
class Restored:
    """An open request that was given back what Redis had lost of it; see Lost."""

    request_id: str
    lost: Lost


class Restoring(Mending):
    """Puts back what was lost, and ranks anew what waits."""

    def restore(self, *, is_at_once: bool = False) -> list[Restored]:
        """Compares some open requests with the sets of the queue, and repairs losses.

        Keys can be deleted or evicted. Then no worker would find the request any more, so its entry
        is put back. After a change of the policy this also ranks waiting requests anew. Any worker
        may call this at any time. One turn examines the next OPEN_PER_TURN open requests. All
        workers share one cursor and one pace: a turn every TURN_MS at most, and a pause of REST_MS
        after a whole pass. `is_at_once` ignores the pace, for a worker that has just found a loss.

        """
        survey = survey_call(
            self.keys,
            count=OPEN_PER_TURN,
            pause_ms=TURN_MS,
            rest_ms=REST_MS,
            is_at_once=is_at_once,
        )
        # An id is UTF-8 text. Any other field of the hash is not a request.
        names = [row.decode(errors="ignore") for row in self._scripts.run("survey", survey)]
        replies = self._run_on([name for name in names if name], "restore", call_on)
        # A damaged request was ended instead, and its reply is a state.
        return [
            Restored(request_id, Lost(lost)) for request_id, lost in replies if lost in set(Lost)
        ]

    def rank_anew(self) -> list[Restored]:
        """Ranks the requests that wait by a policy that was just announced: the first MAX_RANKED.

        The others are ranked by later turns of `restore`. Returns what that has restored, too.
        """
        number = self._read(command("hlen", self.keys.open))
        # A turn goes through OPEN_PER_TURN slots of a hash table, of which half may be empty.
        turns = range(2 * min(int(number), MAX_RANKED) // OPEN_PER_TURN + 1)
        return [restored for _ in turns for restored in self.restore(is_at_once=True)]


def survey_call(
    keys: Keys, *, count: int, pause_ms: int, rest_ms: int, is_at_once: bool = False
) -> ScriptCall:
    """For survey.lua."""
    arguments = (count, pause_ms, rest_ms, int(is_at_once))
    return ScriptCall((keys.open, keys.counts, keys.survey), arguments)
