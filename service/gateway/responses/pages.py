"""Pages of a list, as OpenAI's API has them. Pure functions."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import InvalidRequest

#: The items of one page unless `limit` says another number, and the most.
PAGE_ITEMS, MAX_PAGE_ITEMS = 20, 100

#: More digits than any number in a query has.
MAX_DIGITS = 9


def page_of(items: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """The page that `limit`, `order` and `after` ask for. InvalidRequest.

    The newest item comes first unless `order` is `asc`. `after` is the id of the last item that the
    caller has.
    """
    limit = number_in(query, "limit", PAGE_ITEMS)
    if not 1 <= limit <= MAX_PAGE_ITEMS:
        raise InvalidRequest("limit", f"must be 1 to {MAX_PAGE_ITEMS}")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order", "must be asc or desc")
    ordered = list(items) if order == "asc" else list(reversed(items))
    first = 0
    if "after" in query:
        ids = [item["id"] for item in ordered]
        if query["after"] not in ids:
            raise InvalidRequest("after", "must be the id of an item of this list")
        first = ids.index(query["after"]) + 1
    page = ordered[first : first + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": first + limit < len(ordered),
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
