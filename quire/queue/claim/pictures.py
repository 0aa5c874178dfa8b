"""HOLD: a worker reads the pictures of its requests, and keeps them while these run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.keys import Keys
from quire.queue.request.arguments import in_parts
from quire.queue.shard import Shard
from quire.queue.submit.pictures import reading
from quire.transport.procedure import Procedure
from quire.transport.script_calls import Ask, ScriptCall, raise_if_error


class HoldingPictures(Shard):
    """How a worker gets the pictures of a request."""

    def hold_pictures(self, digests: Sequence[str]) -> Mapping[str, bytes]:
        """The stored pictures, by digest; the result has none that has expired.

        From now on they live as long as the request may wait if it is queued again.
        """
        return self.run(_holding(self.keys, digests))

    def keep_pictures(self, digests: Sequence[str]) -> None:
        """Lets stored pictures of running requests live on, as `hold_pictures` does."""
        for part in in_parts(digests):
            self._scripts.run("hold", ScriptCall([*map(self.keys.picture, part)], ()))


def _holding(keys: Keys, digests: Sequence[str]) -> Procedure[Mapping[str, bytes]]:
    each = list(dict.fromkeys(digests))
    if not each:
        return {}
    (reply,) = yield Ask("hold", [ScriptCall([*map(keys.picture, each)], ())])
    found = zip(each, raise_if_error(reply), strict=True)
    return (yield from reading(keys, [digest for digest, is_stored in found if is_stored]))
