"""Write ``grafana/*.json``: ``python -m dashboards.build``. A test checks that the files are current.

Grafana's own builders make the JSON, so that a field that Grafana does not know is a type error here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import bargauge, common, stat, table, timeseries
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as options
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from dashboards.controller import CONTROLLER
from dashboards.gpu_network import GPU_NETWORK
from dashboards.job import JOB
from dashboards.on_call import ON_CALL
from dashboards.panels import C, Dashboard, Kind, Panel, Query, Variable

FOLDER = Path(__file__).with_name("grafana")
DASHBOARDS = (ON_CALL, JOB, GPU_NETWORK, CONTROLLER)
TAG = "everstep"
GRID = 24
SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
AnyPanel = stat.Panel | timeseries.Panel | bargauge.Panel | table.Panel


def uid(name: str) -> str:
    """Return the uid of a dashboard."""
    return f"{TAG}-{name}"


def build(described: Dashboard) -> dict[str, Any]:
    """Return a dashboard as Grafana imports it."""
    made = (
        builders.Dashboard(described.title)
        .uid(uid(described.name))
        .description(described.about)
        .tags([TAG])
        .timezone("browser")
        .refresh("10s")
        .time("now-1h", "now")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(_links())
        .annotation(_regroups())
        .with_variable(builders.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for variable in described.variables:
        made = made.with_variable(_variable(variable))
    number, y = 0, 0
    for title, row in described.rows:
        number += 1
        place = models.GridPos(h=1, w=GRID, x=0, y=y)
        made = made.with_row(builders.Row(title).id(number).grid_pos(place))
        x, y, height = 0, y + 1, 0
        for panel in row:
            if x + panel.width > GRID:
                x, y, height = 0, y + height, 0
            number += 1
            place = models.GridPos(h=panel.height, w=panel.width, x=x, y=y)
            made = made.with_panel(_panel(panel).id(number).grid_pos(place))
            x, height = x + panel.width, max(height, panel.height)
        y += height
    document: dict[str, Any] = json.loads(json.dumps(made.build(), cls=JSONEncoder))
    return document


def text(described: Dashboard) -> str:
    """Return the content of a dashboard's file."""
    return json.dumps(build(described), indent=2) + "\n"


def _panel(panel: Panel) -> AnyPanel:
    makers: dict[Kind, Callable[[Panel], AnyPanel]] = {
        "stat": _stat,
        "timeseries": _time_series,
        "bargauge": _bars,
        "table": _table,
    }
    made = makers[panel.kind](panel)
    made = made.title(panel.title).description(panel.about).datasource(SOURCE).unit(panel.unit)
    steps = [models.Threshold(value=value, color=color) for value, color in panel.thresholds]
    made = made.thresholds(builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
    if panel.no_value:
        made = made.no_value(panel.no_value)
    for place, query in enumerate(panel.queries):
        made = made.with_target(_target(panel, place, query))
    return made


def _target(panel: Panel, place: int, query: Query) -> Dataquery:
    expression, legend = query
    made = Dataquery().ref_id(chr(ord("A") + place)).datasource(SOURCE).expr(expression).legend_format(legend)
    if panel.kind == "timeseries":
        return made.range()
    made = made.instant()
    return made.format(PromQueryFormat.TABLE) if panel.kind == "table" else made


def _newest() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"])


def _stat(panel: Panel) -> stat.Panel:
    shown = options.BigValueTextMode.NAME if panel.names_series else options.BigValueTextMode.AUTO
    return (
        stat.Panel()
        .graph_mode(options.BigValueGraphMode.NONE)
        .color_mode(options.BigValueColorMode.VALUE)
        .text_mode(shown)
        .reduce_options(_newest())
    )


def _time_series(panel: Panel) -> timeseries.Panel:
    mode = options.StackingMode.NORMAL if panel.stacked else options.StackingMode.NONE
    made = (
        timeseries.Panel()
        .line_width(1)
        .fill_opacity(60 if panel.stacked else 8)
        .stacking(common.StackingConfig().mode(mode).group("A"))
        .legend(
            common.VizLegendOptions()
            .display_mode(options.LegendDisplayMode.LIST)
            .placement(options.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs([])
        )
        .tooltip(common.VizTooltipOptions().mode(options.TooltipDisplayMode.MULTI).sort(options.SortOrder.DESCENDING))
    )
    if len(panel.thresholds) == 1:
        return made
    return made.thresholds_style(common.GraphThresholdsStyleConfig().mode(options.GraphThresholdsStyleMode.DASHED))


def _bars(_panel: Panel) -> bargauge.Panel:
    return (
        bargauge.Panel()
        .display_mode(options.BarGaugeDisplayMode.BASIC)
        .orientation(options.VizOrientation.HORIZONTAL)
        .reduce_options(_newest())
    )


def _table(panel: Panel) -> table.Panel:
    """Return a table of the labels in ``panel.columns`` and the value, and of nothing else."""
    names = [label for label, _ in panel.columns]
    organized = {
        "indexByName": {name: place for place, name in enumerate([*names, "Value"])},
        "renameByName": {**dict(panel.columns), "Value": panel.value},
    }
    wanted = {"include": {"names": [*names, "Value"]}}
    made = (
        table.Panel()
        .with_transformation(models.DataTransformerConfig(id_val="filterFieldsByName", options=wanted))
        .with_transformation(models.DataTransformerConfig(id_val="organize", options=organized))
        .show_header(True)
    )
    url = f"/d/{uid(GPU_NETWORK.name)}?var-node=${{__value.text}}&${{__url_time_range}}"
    link = models.DynamicConfigValue("links", [{"title": "GPUs and links of this node", "url": url}])
    return made.override_by_name("Node", [link])


def _variable(variable: Variable) -> builders.QueryVariable:
    everything = models.VariableOption(selected=True, text="All", value="$__all")
    return (
        builders.QueryVariable(variable.name)
        .label(variable.label)
        .datasource(SOURCE)
        .query({"query": variable.query, "refId": variable.name})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(everything)
    )


def _links() -> builders.DashboardLink:
    """Return a link to each other dashboard of Everstep, with the same time range and variables."""
    return (
        builders.DashboardLink("Everstep")
        .type(models.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .icon("dashboard")
        .tooltip("Other dashboards of Everstep")
        .url("")
        .as_dropdown(False)
        .target_blank(False)
        .include_vars(True)
        .keep_time(True)
    )


def _regroups() -> builders.AnnotationQuery:
    return (
        builders.AnnotationQuery()
        .name("Regroups")
        .datasource(SOURCE)
        .enable(True)
        .icon_color("red")
        .expr(f"changes({C}job_generation[1m]) > 0")
    )


def filled_in(expression: str, **values: str) -> str:
    """Return PromQL with Grafana's variables filled in; those that are not in ``values`` stand for everything.

    Args:
        expression: a panel's query.
        values: by variable, what Grafana would put there, such as ``run="llama"`` or ``__range="15m"``.
    """
    known = {"run": ".*", "rack": ".*", "node": ".*", "__range": "1h", "__rate_interval": "1m"} | values
    return re.sub(r"\$(\w+)", lambda found: known[found[1]], expression)


def queries(**values: str) -> list[str]:
    """Return every panel's PromQL of all dashboards, with its variables filled in as by ``filled_in``."""
    return [
        filled_in(expression, **values)
        for dashboard in DASHBOARDS
        for panel in dashboard.panels
        for expression, _ in panel.queries
    ]


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for dashboard in DASHBOARDS:
        (FOLDER / f"{dashboard.name}.json").write_text(text(dashboard))
