"""Writes ``grafana/everstep.json``: ``python -m dashboards.build``. A test checks that the file is current.

A dashboard is a table of panels (``dashboards.panels``); Grafana's JSON repeats forty lines for each.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dashboards.panels import ROWS, C, Panel

TARGET = Path(__file__).with_name("grafana") / "everstep.json"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
GRID = 24


def _field_config(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.bad_above is not None:
        steps.append({"color": "red", "value": panel.bad_above})
    defaults: dict[str, Any] = {"unit": panel.unit, "thresholds": {"mode": "absolute", "steps": steps}}
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        defaults["custom"] = {"lineWidth": 1, "fillOpacity": 60 if panel.stacked else 8, "stacking": stacking}
    return {"defaults": defaults, "overrides": []}


def _panel(panel: Panel, identity: int, x: int, y: int) -> dict[str, Any]:
    height = 4 if panel.kind == "stat" else 7
    targets = [
        {"refId": chr(ord("A") + i), "datasource": DATASOURCE, "expr": expr, "legendFormat": legend}
        for i, (expr, legend) in enumerate(panel.queries)
    ]
    options: dict[str, Any] = (
        {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value"}
        if panel.kind == "stat"
        else {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    )
    return {
        "id": identity,
        "title": panel.title,
        "description": panel.about,
        "type": panel.kind,
        "datasource": DATASOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": height},
        "targets": targets,
        "fieldConfig": _field_config(panel),
        "options": options,
    }


def _panels() -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "panels": []}
            | {"gridPos": {"x": 0, "y": y, "w": GRID, "h": 1}}
        )
        x, y, height = 0, y + 1, 0
        for panel in row:
            if x + panel.width > GRID:
                x, y, height = 0, y + height, 0
            drawn = _panel(panel, len(panels) + 1, x, y)
            panels.append(drawn)
            x, height = x + panel.width, max(height, drawn["gridPos"]["h"])
        y += height
    return panels


def _variables() -> list[dict[str, Any]]:
    return [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
        {
            "name": "run",
            "type": "query",
            "label": "Run",
            "datasource": DATASOURCE,
            "query": {"query": f"label_values({C}job_state, run)", "refId": "run"},
            "definition": f"label_values({C}job_state, run)",
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "current": {"text": "All", "value": "$__all"},
        },
    ]


def _recoveries_annotation() -> dict[str, Any]:
    return {
        "name": "Regroups",
        "enable": True,
        "iconColor": "red",
        "datasource": DATASOURCE,
        "expr": f'changes({C}job_generation{{run=~"$run"}}[1m]) > 0',
        "titleFormat": "{{run}} regrouped",
    }


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    return {
        "uid": "everstep",
        "title": "Everstep",
        "tags": ["everstep"],
        "timezone": "browser",
        "schemaVersion": 41,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _variables()},
        "annotations": {"list": [_recoveries_annotation()]},
        "panels": _panels(),
    }


def queries(run: str = ".*") -> list[str]:
    """Return every panel's PromQL with its variables filled in.

    Args:
        run: what Grafana puts for ``$run``: a run's name, or the regular expression that its "All" stands for.
    """
    found = [expr for _, row in ROWS for panel in row for expr, _ in panel.queries]
    return [expr.replace("$run", run) for expr in found]


if __name__ == "__main__":
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(json.dumps(dashboard(), indent=2) + "\n")
