"""Converts descriptions of panels to the JSON that Grafana reads. Knows no metric."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["timeseries", "stat", "heatmap", "state-timeline", "table"]

#: Every panel and target uses the data source variable, so the dashboard works in any Grafana.
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
#: Grafana's grid has 24 columns.
GRID_COLUMNS = 24
#: Heights of a panel and of a row's title, in grid cells.
PANEL_HEIGHT = 8
ROW_HEIGHT = 1


@dataclass(frozen=True, slots=True)
class Target:
    """One query of a panel; `legend` may use {{label}}."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel. `mappings` has (number, text, colour) for a state timeline."""

    title: str
    description: str
    unit: str
    targets: Sequence[Target]
    kind: Kind = "timeseries"
    width: int = 8
    height: int = PANEL_HEIGHT
    is_stacked: bool = False
    maximum: float | None = None
    #: (lower bound, colour); the first one has no bound.
    thresholds: Sequence[tuple[float | None, str]] = ((None, "green"),)
    mappings: Sequence[tuple[int, str, str]] = field(default_factory=tuple)


@dataclass(frozen=True, slots=True)
class Row:
    """A titled group of panels, laid out from left to right in this order."""

    title: str
    panels: Sequence[Panel]


def lay_out(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The dashboard's `panels`: rows and their panels, with positions and ids."""
    result: list[dict[str, Any]] = []
    y = 0
    for row in rows:
        position = {"h": ROW_HEIGHT, "w": GRID_COLUMNS, "x": 0, "y": y}
        title = {"type": "row", "title": row.title, "collapsed": False, "panels": []}
        result.append({"id": len(result) + 1, "gridPos": position, **title})
        y += ROW_HEIGHT
        x = line_height = 0
        for panel in row.panels:
            if x + panel.width > GRID_COLUMNS:
                x, y, line_height = 0, y + line_height, 0
            position = {"h": panel.height, "w": panel.width, "x": x, "y": y}
            result.append({"id": len(result) + 1, "gridPos": position, **render(panel)})
            x, line_height = x + panel.width, max(line_height, panel.height)
        y += line_height
    return result


def render(panel: Panel) -> dict[str, Any]:
    """The JSON of one panel without its id and position."""
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "color": {"mode": "palette-classic" if panel.kind == "timeseries" else "thresholds"},
        "thresholds": {
            "mode": "absolute",
            "steps": [{"color": color, "value": value} for value, color in panel.thresholds],
        },
        "mappings": _mappings(panel),
    }
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 30 if panel.is_stacked else 5,
            "showPoints": "never",
            "stacking": {"group": "A", "mode": "normal" if panel.is_stacked else "none"},
        }
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _options(panel),
        "targets": [_target(panel, index) for index in range(len(panel.targets))],
    }


def _target(panel: Panel, index: int) -> dict[str, Any]:
    target = panel.targets[index]
    formats = {"heatmap": "heatmap", "table": "table"}
    is_instant = panel.kind in ("stat", "table")
    return {
        "refId": chr(ord("A") + index),
        "datasource": DATASOURCE,
        "editorMode": "code",
        "expr": target.expr,
        "legendFormat": target.legend or "__auto",
        "format": formats.get(panel.kind, "time_series"),
        "instant": is_instant,
        "range": not is_instant,
    }


def _mappings(panel: Panel) -> list[dict[str, Any]]:
    if not panel.mappings:
        return []
    options = {
        str(value): {"index": value, "text": text, "color": color}
        for value, text, color in panel.mappings
    }
    return [{"type": "value", "options": options}]


def _options(panel: Panel) -> dict[str, Any]:
    match panel.kind:
        case "timeseries":
            return {
                "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
                "tooltip": {"mode": "multi", "sort": "desc"},
            }
        case "stat":
            return {
                "colorMode": "value",
                "graphMode": "none",
                "textMode": "auto",
                "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            }
        case "heatmap":
            return {
                "calculate": False,
                "cellGap": 1,
                "color": {"mode": "scheme", "scheme": "Blues", "steps": 32},
                "filterValues": {"le": 1e-9},
                "legend": {"show": True},
                "tooltip": {"mode": "single", "yHistogram": False},
                "yAxis": {"axisPlacement": "left", "unit": panel.unit},
            }
        case "state-timeline":
            return {
                "alignValue": "left",
                "mergeValues": True,
                "rowHeight": 0.8,
                "showValue": "auto",
                "legend": {"displayMode": "list", "placement": "bottom", "showLegend": False},
                "tooltip": {"mode": "single"},
            }
        case "table":
            return {"cellHeight": "sm", "showHeader": True}
