"""Writes ``grafana/everstep.json``: ``python -m dashboards.build``. A test checks that the file is current.

A dashboard is a table of panels; Grafana's JSON repeats forty lines for each. Here each is one row.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGET = Path(__file__).with_name("grafana") / "everstep.json"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
GRID = 24
C = "everstep_controller_"
A = "everstep_agent_"
G = "everstep_gpu_"


@dataclass(frozen=True)
class Panel:
    """One panel: its queries as (PromQL, legend), its unit by Grafana's name, and how wide and high it is."""

    title: str
    about: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"
    unit: str = "short"
    width: int = 8
    height: int = 7
    bad_above: float | None = None
    stacked: bool = False


def _job(metric: str) -> str:
    return f'{C}{metric}{{job=~"$job"}}'


FLEET = (
    Panel("Fit nodes", "Nodes that may compute.", ((f'sum({C}nodes{{state="healthy"}})', "healthy"),), "stat", width=4),
    Panel(
        "Unfit nodes",
        "Quarantined, lost, held, on probation, in repair, suspect.",
        (("everstep:nodes:unfit", "unfit"),),
        "stat",
        width=4,
        bad_above=1,
    ),
    Panel(
        "Critical findings",
        "Raised and not cleared.",
        ((f'{C}node_findings{{severity="critical"}}', "critical"),),
        "stat",
        width=4,
        bad_above=1,
    ),
    Panel(
        "Eviction breaker",
        "1: automatic eviction is stopped, and says why in `everstep status`.",
        ((f"{C}eviction_breaker_open", "open"),),
        "stat",
        width=4,
        bad_above=1,
    ),
    Panel("Evictions left", "What the budget allows now.", ((f"{C}eviction_budget_left", "left"),), "stat", width=4),
    Panel("Agents connected", "Long polls held.", ((f"{C}connected_agents", "connected"),), "stat", width=4),
    Panel("Nodes by state", "Where each node stands.", ((f"{C}nodes", "{{state}}"),), stacked=True),
    Panel(
        "Verdicts", "Judgements per hour.", ((f"sum by (decision) (increase({C}verdicts_total[1h]))", "{{decision}}"),)
    ),
    Panel("Findings", "Raised and not cleared, by severity.", ((f"{C}node_findings", "{{severity}}"),)),
)

JOB = (
    Panel("Step", "Newest step that all ranks finished.", ((_job("job_step"), "{{job}}"),), "stat", width=4),
    Panel("Generation", "Rises by one at each regroup.", ((_job("job_generation"), "{{job}}"),), "stat", width=4),
    Panel("World size", "Ranks that take part.", ((_job("job_world_size"), "{{job}}"),), "stat", width=4),
    Panel("Spares", "Nodes that wait.", ((_job("job_spares"), "{{job}}"),), "stat", width=4),
    Panel("Loss", "As the lowest rank reports it.", ((_job("job_loss"), "{{job}}"),), "stat", width=4),
    Panel(
        "Time at risk",
        "Computed and not committed yet: what the loss of a node with its memory, or corruption, could cost at most.",
        (('everstep:job:uncommitted_seconds{job=~"$job"}', "{{job}}"),),
        "stat",
        unit="s",
        width=4,
        bad_above=60,
    ),
    Panel("Loss curve", "Newest loss.", ((_job("job_loss"), "{{job}}"),)),
    Panel("Steps per second", "Over a minute.", (('everstep:job:steps_per_second{job=~"$job"}', "{{job}}"),)),
    Panel("Step time", "The slowest rank's.", ((_job("job_step_seconds"), "{{job}}"),), unit="s"),
    Panel(
        "Step, committed, verified",
        "A crash restores the newest whole version, mostly the last step, and never one before the committed one; "
        "corruption the newest known to be clean.",
        (
            (_job("job_step"), "step {{job}}"),
            (_job("job_committed_step"), "committed {{job}}"),
            (_job("job_verified_step"), "verified {{job}}"),
        ),
    ),
    Panel(
        "Recoveries",
        "Generations per hour, by reason.",
        ((f'sum by (reason) (increase({C}recoveries_total{{job=~"$job"}}[1h]))', "{{reason}}"),),
    ),
    Panel(
        "Recovery time",
        "Decision to the last rank's first step.",
        (
            (f"histogram_quantile(0.5, sum by (le) (rate({C}recovery_seconds_bucket[1h])))", "median"),
            ("everstep:recovery_seconds:p99", "99 %"),
        ),
        unit="s",
    ),
)

GPUS = (
    Panel("Temperature", "By node and GPU.", ((f"{G}temperature_celsius", "{{node}} {{gpu}}"),), unit="celsius"),
    Panel("Power", "Drawn now.", ((f"{G}power_watts", "{{node}} {{gpu}}"),), unit="watt"),
    Panel(
        "Utilization",
        "Share of time a kernel ran.",
        ((f"{G}utilization_ratio", "{{node}} {{gpu}}"),),
        unit="percentunit",
    ),
    Panel("XIDs", "Per hour.", ((f"sum by (node, xid) (increase({G}xids_total[1h]))", "{{node}} XID {{xid}}"),)),
    Panel(
        "Uncorrectable ECC errors",
        "Per hour.",
        ((f"sum by (node, gpu) (increase({G}ecc_uncorrectable_total[1h]))", "{{node}} {{gpu}}"),),
    ),
    Panel("Memory used", "Of each GPU.", ((f"{G}memory_used_bytes", "{{node}} {{gpu}}"),), unit="bytes"),
)

SELF = (
    Panel(
        "Controller, per event",
        "The decision core and the transaction, 99 %.",
        (
            (f"histogram_quantile(0.99, sum by (le) (rate({C}handle_seconds_bucket[5m])))", "decide"),
            (f"histogram_quantile(0.99, sum by (le) (rate({C}commit_seconds_bucket[5m])))", "commit"),
        ),
        unit="s",
    ),
    Panel("Loop lag", "Worst lateness in the last second.", ((f"{C}loop_lag_seconds", "lag"),), unit="s"),
    Panel(
        "Requests refused",
        "Per minute, by route and reason.",
        ((f"sum by (route, code) (rate({C}requests_refused_total[5m])) * 60", "{{route}} {{code}}"),),
    ),
    Panel(
        "Agent memory",
        "Supervisor and sensors.",
        ((f"{A}resident_memory_bytes", "{{node}} {{process}}"),),
        unit="bytes",
    ),
    Panel("Reports waiting", "In the agents' spools.", ((f"{A}spool_reports", "{{node}}"),)),
    Panel("Heartbeats", "Per second, at the controller.", ((f"rate({C}heartbeats_total[1m])", "heartbeats"),)),
)

ROWS = (("Fleet", FLEET), ("Job", JOB), ("GPUs", GPUS), ("Everstep itself", SELF))


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
    height = 4 if panel.kind == "stat" else panel.height
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
            "name": "job",
            "type": "query",
            "label": "Job",
            "datasource": DATASOURCE,
            "query": {"query": f"label_values({C}job_info, job)", "refId": "job"},
            "definition": f"label_values({C}job_info, job)",
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
        "expr": f'changes({C}job_generation{{job=~"$job"}}[1m]) > 0',
        "titleFormat": "{{job}} regrouped",
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


def queries() -> list[str]:
    """Every panel's PromQL, with the variables filled as Grafana's 'All' would."""
    found = [expr for _, row in ROWS for panel in row for expr, _ in panel.queries]
    return [expr.replace("$job", ".*") for expr in found]


if __name__ == "__main__":
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(json.dumps(dashboard(), indent=2) + "\n")
