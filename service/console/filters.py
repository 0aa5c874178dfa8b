"""The filter of a list: from the address of a page, as its form, and as a part of links."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import urlencode

from quire.errors import InvalidRequest
from quire.queue.submit.routing import check_group_name
from quire.records import Activity, State
from quire.wire.protocol import is_tenant_name
from service.console.reading.filters import WITHIN, Filter

#: The fields of the filter of each list. The model of a request is known from its claim on.
_TIMES = ("within", "since", "until")
FIELDS: Mapping[str, Sequence[str]] = {
    "running": ("status", "tenant", "group", "model", *_TIMES),
    "waiting": ("tenant", "group", *_TIMES),
    "scheduled": ("tenant", "group", *_TIMES),
    "ended": ("status", "tenant", "group", "model", "error", *_TIMES),
    "dead": ("tenant", "group", "error", *_TIMES),
}

STATUSES: Mapping[str, Sequence[str]] = {
    "running": tuple(map(str, Activity)),
    "ended": tuple(str(state) for state in State if state.is_terminal),
}

#: The longest text of a field.
MAX_LENGTH = 128

#: What the times of each list are, for the form.
_MOMENTS = {
    "running": "claimed", "waiting": "submitted", "scheduled": "submitted",
    "ended": "ended", "dead": "written",
}  # fmt: skip

_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}(:[0-9]{2})?Z?")


@dataclass(frozen=True, slots=True)
class FormField:
    """A field of the form. With `options`, pairs of value and text, it is a choice."""

    name: str
    label: str
    value: str
    kind: str = "text"
    options: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, slots=True)
class FilterForm:
    """A filter on a page. `words` says it; empty for none. `query` is its part of an address."""

    fields: Sequence[FormField]
    words: str
    query: str


def filter_of(query: Mapping[str, str], *, of: str) -> Filter:
    """The filter of a list in a query string. InvalidRequest names the field that is wrong."""
    names = dict.fromkeys(name for one in FIELDS.values() for name in one)
    given = {name: value.strip() for name in names if (value := query.get(name, "")).strip()}
    for name, value in given.items():
        if name not in FIELDS.get(of, ()):
            raise InvalidRequest(name, f"the list of {of} requests has no such filter")
        if len(value) > MAX_LENGTH or not value.isprintable():
            raise InvalidRequest(name, f"must be printable, with at most {MAX_LENGTH} characters")
    _check_choice("status", given, STATUSES.get(of, ()))
    _check_choice("within", given, tuple(WITHIN))
    if "tenant" in given and not is_tenant_name(given["tenant"]):
        raise InvalidRequest("tenant", "is not the name of a tenant")
    if "group" in given:
        check_group_name(given["group"])
    since, until = (_time_in(name, given.pop(name, "")) for name in ("since", "until"))
    return Filter(**given, since_ms=since, until_ms=until)


def form_of(wanted: Filter, *, of: str) -> FilterForm:
    """The form of a list, with the filter in it."""
    values = _values_of(wanted, of=of)
    moment = _MOMENTS[of]
    labels = {
        "status": "Ended as" if of == "ended" else "Activity",
        "tenant": "Tenant", "group": "Group", "model": "Model has", "error": "Error has",
        "within": f"{moment} within".capitalize(), "since": "From, UTC", "until": "To, UTC",
    }  # fmt: skip
    options = {"status": STATUSES.get(of, ()), "within": tuple(WITHIN)}
    fields = [
        FormField(
            name,
            labels[name],
            values.get(name, ""),
            kind="datetime-local" if name in ("since", "until") else "text",
            options=[("", "any"), *((one, one) for one in options[name])]
            if name in options
            else (),
        )
        for name in FIELDS[of]
    ]
    told = {"status": "", "tenant": "tenant ", "group": "group ", "model": "model has ",
            "error": "error has ", "within": f"{moment} within ", "since": f"{moment} from ",
            "until": f"{moment} to "}  # fmt: skip
    words = ", ".join(
        f"{told[name]}{value}{' UTC' if name in ('since', 'until') else ''}"
        for name, value in values.items()
    )
    return FilterForm(fields, words, query_of(wanted, of=of))


def query_of(wanted: Filter, *, of: str) -> str:
    """The filter as the end of an address, with what the list can have; empty for none."""
    values = _values_of(wanted, of=of)
    return f"&{urlencode(values)}" if values else ""


def _values_of(wanted: Filter, *, of: str) -> dict[str, str]:
    """The fields that are not empty, as texts, in the order of the form."""
    texts = {
        "since": _text_of(wanted.since_ms),
        "until": _text_of(wanted.until_ms),
    }
    found = {name: texts.get(name) or str(getattr(wanted, name, "")) for name in FIELDS[of]}
    if found.get("status") not in STATUSES.get(of, ()):
        found.pop("status", None)
    return {name: value for name, value in found.items() if value}


def _check_choice(name: str, given: Mapping[str, str], choices: Sequence[str]) -> None:
    if name in given and given[name] not in choices:
        raise InvalidRequest(name, f"must be one of {', '.join(choices)}")


def _time_in(name: str, text: str) -> int | None:
    """Unix ms of a time in UTC; None for an empty text."""
    if not text:
        return None
    message = "must be a time in UTC such as 2026-01-31T18:30"
    if not _TIME.fullmatch(text):
        raise InvalidRequest(name, message)
    try:
        at = datetime.fromisoformat(text.removesuffix("Z")).replace(tzinfo=UTC)
    except ValueError:
        raise InvalidRequest(name, message) from None
    # Not before 1970: the ids of streams have no sign.
    return max(0, int(at.timestamp() * 1000))


def _text_of(at_ms: int | None) -> str:
    if at_ms is None:
        return ""
    text = datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return text.removesuffix(":00")
