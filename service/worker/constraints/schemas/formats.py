"""What the formats of JSON Schema ask of a text, as other keywords. Knows no library.

The library has some of these formats, but takes 29 February in every year, the year 0, the second
60 in every minute, and host names of any length.
"""

from collections.abc import Mapping
from typing import Any, Final

_LETTER = "[a-zA-Z0-9]"
_LETTER_OR_HYPHEN = "[a-zA-Z0-9-]"
_HEX = "[0-9a-fA-F]"

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
#: The last two digits of a year are a multiple of 4, or the first two are and the last are 00.
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])"
    "|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
    f"|{_LEAP_YEAR}-02-29)"
)
#: Without leap seconds: most programs cannot read them.
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?"
    "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)


def _parts(*units: str) -> str:
    """Numbers with these units in this order, from any unit on, and none left out between two."""
    rest = ""
    starts = []
    for unit in reversed(units):
        rest = f"[0-9]+{unit}" + (f"(?:{rest})?" if rest else "")
        starts.append(rest)
    return f"(?:{'|'.join(starts)})"


_DURATION = f"P(?:{_parts(*'YMD')}(?:T{_parts(*'HMS')})?|T{_parts(*'HMS')}|[0-9]+W)"

#: Without hyphens as the third and fourth character: what such a label encodes may be invalid.
_LABEL = (
    f"{_LETTER}(?:{_LETTER_OR_HYPHEN}?{_LETTER}|{_LETTER_OR_HYPHEN}{{2}}{_LETTER}"
    f"|{_LETTER_OR_HYPHEN}(?:{_LETTER}{_LETTER_OR_HYPHEN}|-{_LETTER})"
    f"{_LETTER_OR_HYPHEN}{{0,58}}{_LETTER})?"
)
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"

#: Addresses of any length. With a pattern beside them, counted ones are too complex to compile.
_LONG_ADDRESS = (
    rf"{_ATOM}(?:\.{_ATOM})*@{_LETTER}(?:{_LETTER_OR_HYPHEN}*{_LETTER})?"
    rf"(?:\.{_LETTER}(?:{_LETTER_OR_HYPHEN}*{_LETTER})?)*"
)

_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_GROUP = f"{_HEX}{{1,4}}"


def _ipv6() -> str:
    """All groups, or two colons with at most seven groups around them; an IPv4 address is two."""
    forms = [f"(?:{_GROUP}:){{7}}{_GROUP}", f"(?:{_GROUP}:){{6}}{_IPV4}", "::"]
    for after in range(8):
        most = 7 - after
        before = f"(?:{_GROUP}(?::{_GROUP}){{0,{most - 1}}})?" if most else ""
        ends = [f"(?:{_GROUP}:){{{after - 1}}}{_GROUP}"] if after else [""]
        if after >= 2:
            ends.append(f"(?:{_GROUP}:){{{after - 2}}}{_IPV4}")
        forms += [f"{before}::{end}" for end in ends]
    return f"(?:{'|'.join(forms)})"


_IPV6 = _ipv6()
_SUB_DELIMITERS = "!$&'()*+,;="
#: The characters that an IRI may have, and a URI may not.
_OTHER_SCRIPTS = r"\x{A0}-\x{D7FF}\x{F900}-\x{FDCF}\x{FDF0}-\x{FFEF}\x{10000}-\x{1FFFD}"


def _identifier(others: str, *, may_be_relative: bool) -> str:
    """A URI by RFC 3986, or a reference to one; `others` are more characters that it may have."""

    def any_of(more: str) -> str:
        return rf"(?:[a-zA-Z0-9._~{others}{_SUB_DELIMITERS}{more}-]|%{_HEX}{{2}})"

    segment, segment_without_colon = any_of(":@"), any_of("@")
    literal = rf"\[(?:{_IPV6}|[vV]{_HEX}+\.[a-zA-Z0-9._~{_SUB_DELIMITERS}:-]+)\]"
    authority = f"//(?:{any_of(':')}*@)?(?:{literal}|{any_of('')}*)(?::[0-9]*)?(?:/{segment}*)*"
    absolute = f"/(?:{segment}+(?:/{segment}*)*)?"
    rootless = f"{segment}+(?:/{segment}*)*"
    end = rf"(?:\?{any_of(':@/?')}*)?(?:#{any_of(':@/?')}*)?"
    whole = f"[a-zA-Z][a-zA-Z0-9+.-]*:(?:{authority}|{absolute}|{rootless})?"
    if not may_be_relative:
        return whole + end
    # A first segment with a colon would be read as a scheme.
    relative = f"(?:{authority}|{absolute}|{segment_without_colon}+(?:/{segment}*)*)?"
    return f"(?:{whole}|{relative}){end}"


_VARIABLE = rf"(?:[a-zA-Z0-9_]|%{_HEX}{{2}})(?:\.?(?:[a-zA-Z0-9_]|%{_HEX}{{2}}))*"
_SPECIFIED = rf"{_VARIABLE}(?:\*|:[1-9][0-9]{{0,3}})?"
_TEMPLATE = (
    rf"(?:[!#$&()*+,./0-9:;=?@A-Z\[\]_a-z~{_OTHER_SCRIPTS}-]|%{_HEX}{{2}}"
    rf"|\{{[+#./;?&]?{_SPECIFIED}(?:,{_SPECIFIED})*\}})*"
)
_POINTER = "(?:/(?:[^/~]|~[01])*)*"

_PATTERNS = {
    "date-time": f"{_DATE}[tT]{_TIME}",
    "date": _DATE,
    "time": _TIME,
    "duration": _DURATION,
    "email": rf"{_ATOM}(?:\.{_ATOM})*@(?:{_HOSTNAME}|\[{_IPV4}\])",
    "hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": f"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
    "uri": _identifier("", may_be_relative=False),
    "uri-reference": _identifier("", may_be_relative=True),
    "iri": _identifier(_OTHER_SCRIPTS, may_be_relative=False),
    "iri-reference": _identifier(_OTHER_SCRIPTS, may_be_relative=True),
    "uri-template": _TEMPLATE,
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
}
#: The most characters. Of an email address, the part before `@` may have 64 of them.
_LONGEST: Final = {"hostname": 253, "email": 254}
#: Formats that take all texts of another one, and more, which cannot come.
_WIDER = {"idn-hostname": "hostname", "idn-email": "email"}


def keywords_of(name: str, *, has_pattern: bool = False) -> Mapping[str, Any] | None:
    """The keywords that a text of this format keeps to; None if no keywords describe the format.

    `has_pattern`: there is a `pattern` beside it. By the rules of JSON Schema, a format that it
    does not define restricts nothing.
    """
    if name == "regex":
        return None
    name = _WIDER.get(name, name)
    if name not in _PATTERNS:
        return {}
    if name == "email" and has_pattern:
        return {"pattern": f"^{_LONG_ADDRESS}$"}
    found: dict[str, Any] = {"pattern": f"^(?:{_PATTERNS[name]})$"}
    if name in _LONGEST:
        found["maxLength"] = _LONGEST[name]
    if name == "email":
        found["allOf"] = [{"pattern": "^[^@]{1,64}@"}]
    return found
