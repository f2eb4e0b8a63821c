"""Describe panels, and write the PromQL that all dashboards share.

A fleet has thousands of GPUs, so no panel draws a line for each. ``highest`` and ``lowest`` choose ten series once, at
the end of the time range (``@ end()``): without that, each point in time would choose its own ten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

C = "everstep_controller_"
A = "everstep_agent_"
G = "everstep_gpu_"
V = "everstep_vault_"
P = "everstep_port_"

Step = tuple[float | None, str]
"""A threshold: the value from which the color holds (None: from the lowest value on)."""
Query = tuple[str, str]
"""PromQL and legend."""
Kind = Literal["stat", "timeseries", "bargauge", "table"]

INFORMATIVE: tuple[Step, ...] = ((None, "blue"),)
"""Of a panel whose values are neither good nor bad by themselves."""


def above(warning: float, critical: float) -> tuple[Step, ...]:
    """Return thresholds of a value that should be small."""
    return ((None, "green"), (warning, "orange"), (critical, "red"))


def below(critical: float, warning: float) -> tuple[Step, ...]:
    """Return thresholds of a value that should be large."""
    return ((None, "red"), (critical, "orange"), (warning, "green"))


def never(limit: float = 1) -> tuple[Step, ...]:
    """Return thresholds of a value that should stay below ``limit``."""
    return ((None, "green"), (limit, "red"))


ONE: tuple[Step, ...] = ((None, "red"), (1, "green"), (2, "red"))
"""Thresholds of a value that should be exactly 1."""


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        about: What the values mean, and what to do about bad ones.
        queries: At least one.
        unit: Grafana's name of the unit.
        thresholds: Where the color changes; drawn as lines in a time series.
        no_value: Shown where a query has no result, when that is good news.
        columns: Of a table: the labels to show, in order, with their headings.
        value: Of a table: the heading of the value.
        names_series: Of a stat: show the legend instead of the value.
    """

    title: str
    about: str
    queries: tuple[Query, ...]
    kind: Kind = "timeseries"
    unit: str = "short"
    thresholds: tuple[Step, ...] = INFORMATIVE
    stacked: bool = False
    no_value: str = ""
    columns: tuple[tuple[str, str], ...] = ()
    value: str = ""
    names_series: bool = False

    @property
    def width(self) -> int:
        """Columns of Grafana's grid, which has 24."""
        return {"stat": 4, "timeseries": 8, "bargauge": 8, "table": 24}[self.kind]

    @property
    def height(self) -> int:
        """Rows of Grafana's grid."""
        return {"stat": 4, "timeseries": 8, "bargauge": 8, "table": 9}[self.kind]


@dataclass(frozen=True)
class Variable:
    """A choice at the top of a dashboard. ``All`` stands for every value, also for one that is missing."""

    name: str
    label: str
    query: str


@dataclass(frozen=True)
class Dashboard:
    """One dashboard. ``name`` is its file and its uid."""

    name: str
    title: str
    about: str
    variables: tuple[Variable, ...]
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for _, row in self.rows for panel in row)


RUN = Variable("run", "Run", f"label_values({C}job_state, run)")
RACK = Variable("rack", "Rack", f"label_values({A}domain_info, rack)")
NODE = Variable("node", "Node", f'label_values({A}domain_info{{rack=~"$rack"}}, node)')

CHOSEN = 10
"""Series that a panel shows of many."""
IN_RACK = f'{A}domain_info{{rack=~"$rack"}}'


def top(expression: str) -> str:
    """Return the series with the highest values at each moment."""
    return f"topk({CHOSEN}, {expression})"


def bottom(expression: str) -> str:
    """Return the series with the lowest values at each moment."""
    return f"bottomk({CHOSEN}, {expression})"


def of_run(metric: str) -> str:
    """Return a selector of the controller's series of the chosen runs."""
    return f'{C}{metric}{{run=~"$run"}}'


def of_nodes(metric: str, labels: str = "") -> str:
    """Return a selector of an agent's series on the chosen nodes, whatever their racks."""
    return f'{metric}{{node=~"$node"{"," if labels else ""}{labels}}}'


def in_racks(expression: str) -> str:
    """Return ``expression``, of series with a node, without the nodes of other racks."""
    return f"({expression}) and on (node) {IN_RACK}"


def here(metric: str, labels: str = "") -> str:
    """Return an agent's series on the chosen nodes of the chosen racks."""
    return in_racks(of_nodes(metric, labels))


def highest(metric: str, by: str = "node, gpu", labels: str = "") -> str:
    """Return the series with the highest maximum over the time range."""
    return _chosen("topk", "max_over_time", of_nodes(metric, labels), by)


def lowest(metric: str, by: str = "node, gpu", labels: str = "") -> str:
    """Return the series with the lowest minimum over the time range."""
    return _chosen("bottomk", "min_over_time", of_nodes(metric, labels), by)


def _chosen(choose: str, over_time: str, series: str, by: str) -> str:
    summit = f"{over_time}({series}[$__range] @ end()) and on (node) {IN_RACK} @ end()"
    return f"{series} and on ({by}) {choose}({CHOSEN}, {summit})"


def busiest(counter: str, by: str = "node, gpu", window: str = "1h") -> str:
    """Return the increase of a counter over ``window``, for the series that grew most over the time range."""
    series = of_nodes(counter)
    grown = f"increase({series}[$__range] @ end()) and on (node) {IN_RACK} @ end()"
    return f"increase({series}[{window}]) and on ({by}) topk({CHOSEN}, {grown})"
