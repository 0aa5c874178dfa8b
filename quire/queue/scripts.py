"""The Lua transitions: each is a file in the room of its call, behind the parts that it shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources

#: The shared parts that are put in front of a transition, in this order.
PARTS = (
    "request/common",
    "request/record",
    "rank/ranking",
    "rank/fairness",
    "rank/turns",
    "ends/ends",
    "request/request",
    "request/running",
)
_COMMON = PARTS[:1]
#: Without what is about running requests: users with access to fewer keys call these.
_OF_PRODUCERS = PARTS[:7]

#: Each transition with its shared parts.
_PARTS_OF: Mapping[str, Sequence[str]] = {
    "submit/submit": _OF_PRODUCERS,
    "submit/cancel": _OF_PRODUCERS,
    "submit/discard": _COMMON,
    "claim/claim": (*PARTS, "claim/affinity"),
    "claim/balance": PARTS,
    "claim/hold": _COMMON,
    "publish/extend": _COMMON,
    "publish/commit": PARTS,
    "lease/heartbeat": PARTS,
    "lease/release": PARTS,
    "lease/fail": PARTS,
    "lease/reap": PARTS,
    "lease/promote": PARTS,
    "lease/expire": _OF_PRODUCERS,
    "rank/announce": _COMMON,
    "repair/condemn": PARTS,
    "repair/dead_letter": PARTS,
    "repair/requeue": PARTS,
    "repair/restore": PARTS,
    "repair/survey": _COMMON,
    "workers/beat_worker": _COMMON,
}
_FILE_OF = {file.partition("/")[2]: file for file in _PARTS_OF}

#: The transitions of a request and its queue, by name.
TRANSITIONS = tuple(sorted(_FILE_OF))

#: The scripts of files and batches, as their names begin, and their shared part.
BATCHES = "batches/"
_OF_BATCHES = (f"{BATCHES}shared",)


@cache
def load_source(name: str) -> str:
    """The full text of the transition `name`: its shared parts, then its own file."""
    file = name if name.startswith(BATCHES) else _FILE_OF[name]
    return "\n".join(map(load_file, (*_PARTS_OF.get(file, _OF_BATCHES), file)))


def load_file(file: str) -> str:
    """One file, named by its room and its name without `.lua`."""
    return (resources.files("quire.queue") / f"{file}.lua").read_text()
