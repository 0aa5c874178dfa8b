"""Pages of a list, and other parameters of a query, as OpenAI's API has them. Pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidRequest

#: More digits than any number in a query has.
MAX_DIGITS = 9


@dataclass(frozen=True, slots=True)
class PageQuery:
    """Which part of a list is asked for; `after` is the id of the last one that the caller has."""

    limit: int
    after: str | None
    is_ascending: bool


def page_of(query: Mapping[str, str], *, longest: int, default: int) -> PageQuery:
    """Reads `limit`, `after` and `order`; the newest comes first by default. InvalidRequest."""
    limit = number_in(query, "limit", default)
    if not 1 <= limit <= longest:
        raise InvalidRequest("limit", f"must be 1 to {longest}")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order", "must be asc or desc")
    return PageQuery(limit, query.get("after") or None, order == "asc")


def part_of(items: Sequence[Mapping[str, Any]], page: PageQuery) -> Sequence[Mapping[str, Any]]:
    """The items of a page, and one more if there are more; the oldest item is first in `items`.

    InvalidRequest if no item is that of `after`.
    """
    ordered = items if page.is_ascending else items[::-1]
    first = 0
    if page.after is not None:
        ids = [item["id"] for item in ordered]
        if page.after not in ids:
            raise InvalidRequest("after", "must be the id of an item of this list")
        first = ids.index(page.after) + 1
    return ordered[first : first + page.limit + 1]


def page_body(bodies: Sequence[Mapping[str, Any]], page: PageQuery) -> dict[str, Any]:
    """A list in OpenAI's form. `bodies` may have one more than asked for, if there are more."""
    shown = bodies[: page.limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(bodies) > page.limit,
    }


def number_in(query: Mapping[str, str], name: str, default: int) -> int:
    """The number of a query's parameter. InvalidRequest if it is none."""
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise InvalidRequest(name, "must be a number")
    return int(text)


def switch_in(query: Mapping[str, str], name: str) -> bool:
    """Whether a query's parameter is `true`. InvalidRequest if it is neither that nor `false`."""
    text = query.get(name, "false")
    if text not in ("true", "false"):
        raise InvalidRequest(name, "must be true or false")
    return text == "true"
