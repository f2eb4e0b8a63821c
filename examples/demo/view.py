"""The live picture on the terminal: nodes, the job, and what was done, found, decided and restored."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from everstep.vocabulary import NodeState
from everstep.wire.v1.operator import JobSummary, NodeSummary

STATE_COLOURS = {
    NodeState.HEALTHY: "green",
    NodeState.SUSPECT: "yellow",
    NodeState.LOST: "red",
    NodeState.QUARANTINED: "magenta",
    NodeState.PROBATION: "cyan",
    NodeState.HELD: "blue",
    NodeState.REPAIR: "red",
}
KIND_COLOURS = {"done": "bold red", "found": "yellow", "decided": "cyan", "restored": "green"}
TIMELINE_LINES = 18


@dataclass
class View:
    """What is on the screen now; ``render`` draws it."""

    steps: int
    started_at: float
    title: str = "starting"
    nodes: tuple[NodeSummary, ...] = ()
    roster: frozenset[str] = frozenset()
    job: JobSummary | None = None
    step: int = 0
    lines: deque[tuple[float, str, str]] = field(default_factory=lambda: deque(maxlen=TIMELINE_LINES))

    def say(self, at: float, kind: str, sentence: str) -> None:
        """Adds a line to the timeline."""
        self.lines.append((at - self.started_at, kind, sentence))

    def render(self, now: float) -> RenderableType:
        """The whole picture at wall time ``now``."""
        return Group(self._head(now), self._nodes(), self._timeline())

    def _head(self, now: float) -> RenderableType:
        job = self.job
        generation = "-" if job is None else str(job.generation)
        world = "-" if job is None else str(job.world_size)
        loss = "-" if job is None or job.loss is None else f"{job.loss:.4f}"
        committed = "-" if job is None else str(job.committed or "-")
        grid = Table.grid(padding=(0, 2))
        grid.add_row(
            Text(self.title, style="bold"),
            f"generation [b]{generation}[/]",
            f"world [b]{world}[/]",
            f"step [b]{self.step}[/] of {self.steps}",
            f"loss [b]{loss}[/]",
            f"committed [b]{committed}[/]",
            f"{now - self.started_at:5.1f} s",
        )
        return Panel(Group(grid, ProgressBar(total=self.steps, completed=self.step)), title="Everstep")

    def _nodes(self) -> RenderableType:
        table = Table(expand=True, box=None, padding=(0, 1))
        for column in ("node", "state", "plays", "since", "why"):
            table.add_column(column, overflow="ellipsis", no_wrap=True)
        for node in self.nodes:
            plays = "rank" if node.node in self.roster else "spare" if node.state is NodeState.HEALTHY else ""
            colour = STATE_COLOURS[node.state]
            since = f"{max(0.0, node.since - self.started_at):.1f} s"
            table.add_row(node.node, f"[{colour}]{node.state}[/]", plays, since, Text(node.reason))
        return Panel(table, title="nodes")

    def _timeline(self) -> RenderableType:
        table = Table(expand=True, box=None, show_header=False, padding=(0, 1))
        table.add_column(justify="right", no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold", ratio=1)
        for at, kind, sentence in self.lines:
            table.add_row(f"{at:.3f} s", Text(kind, style=KIND_COLOURS.get(kind, "")), Text(sentence))
        return Panel(table, title="what happened")
