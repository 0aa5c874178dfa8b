"""Which requests of a list a reader wants to see. Knows no Redis and no HTTP."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from quire.keys import GROUP_SEPARATOR

#: Times before now, in seconds, as an address names them.
WITHIN: Mapping[str, int] = {"15m": 900, "1h": 3600, "6h": 21_600, "24h": 86_400}

#: The most requests that a filtered list examines for one page.
NUM_SEARCHED = 1000


@dataclass(frozen=True, slots=True)
class Filter:
    """What a request must have to be listed; an empty field asks for nothing.

    `status`: its activity or how it ended. `tenant` and `group` are whole names. `model` and
    `error` are parts, in any case, of the name of the model, and of the code or the message of the
    error. `within` is a name of WITHIN. Times are unix ms, both included.
    """

    status: str = ""
    tenant: str = ""
    group: str = ""
    model: str = ""
    error: str = ""
    within: str = ""
    since_ms: int | None = None
    until_ms: int | None = None

    @property
    def is_empty(self) -> bool:
        return self == EVERYTHING

    @property
    def has_span(self) -> bool:
        """Whether it asks for a time."""
        return bool(self.within) or self.since_ms is not None or self.until_ms is not None

    def at(self, now_ms: int) -> "Filter":
        """The same with a time in the place of `within`."""
        if not self.within:
            return self
        since_ms = now_ms - 1000 * WITHIN[self.within]
        return replace(self, within="", since_ms=max(since_ms, self.since_ms or since_ms))

    def has_tenant(self, tenant: str) -> bool:
        """Whether it is the wanted tenant."""
        return self.tenant in ("", tenant)

    def has_group(self, request_id: str) -> bool:
        """Whether it is the id of a request of the wanted group."""
        return not self.group or request_id.startswith(f"{self.group}{GROUP_SEPARATOR}")

    def has_time(self, at_ms: int | None) -> bool:
        """Whether a time is in between; one that is not known is not. Not before `at`."""
        if not self.has_span:
            return True
        return at_ms is not None and (
            (self.since_ms is None or at_ms >= self.since_ms)
            and (self.until_ms is None or at_ms <= self.until_ms)
        )

    def has_model(self, model: str | None) -> bool:
        """Whether the name of a model has the wanted part."""
        return self.model.casefold() in (model or "").casefold()

    def has_error(self, *texts: str) -> bool:
        """Whether one of the texts of an error has the wanted part."""
        part = self.error.casefold()
        return not part or any(part in text.casefold() for text in texts)


#: The filter that lets everything through.
EVERYTHING = Filter()
