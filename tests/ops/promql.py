"""Reads PromQL as tests need it: which metrics, which labels, which ranges."""

import re
from collections.abc import Collection

import promql_parser
from promql_parser import MatchOp, VectorSelector

#: What Grafana replaces by an interval that always covers enough scrapes.
RATE_INTERVAL = "$__rate_interval"
#: The suffixes a histogram is queried by.
HISTOGRAM_SUFFIXES = ("_bucket", "_sum", "_count")


def substitute(expr: str, *, interval: str = "10s") -> str:
    """`expr` as Grafana would send it with every variable set to "All"."""
    return re.sub(r"\$\w+", ".*", expr.replace(RATE_INTERVAL, interval))


def parse(expr: str) -> promql_parser.Expr:
    """The syntax tree; ValueError for what is not PromQL."""
    return promql_parser.parse(substitute(expr))


def nodes(expr: str) -> list[promql_parser.Expr]:
    """Every node of the tree, parents before their children."""
    found: list[promql_parser.Expr] = []
    promql_parser.walk(parse(expr), found.append)
    return found


def selectors(expr: str) -> list[VectorSelector]:
    """Every series selector, those inside ranges included."""
    return [node for node in nodes(expr) if isinstance(node, VectorSelector)]


def matchers(selector: VectorSelector) -> list[tuple[str, str, str]]:
    """(label, operator, value) of the selector's braces."""
    return [(item.name, _sign(item.op), item.value) for item in selector.matchers.matchers]


def family_name(series: str, families: Collection[str]) -> str:
    """The registered name behind a series' name: `x_bucket` is of the family `x`."""
    if series in families:
        return series
    for suffix in HISTOGRAM_SUFFIXES:
        if series.endswith(suffix) and series.removesuffix(suffix) in families:
            return series.removesuffix(suffix)
    return series


def _sign(operator: MatchOp) -> str:
    if operator == MatchOp.Equal:
        return "="
    if operator == MatchOp.NotEqual:
        return "!="
    return "=~" if operator == MatchOp.Re else "!~"
