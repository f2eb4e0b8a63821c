"""Render the controller's answers for a terminal."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from everstep.ids import Version
from everstep.vocabulary import Decision, Finding, JobState, NodeState, Severity, Verdict
from everstep.wire.v1 import operator as op

# Numbers and states in words.

STYLES: dict[str, str] = {
    NodeState.HEALTHY: "green",
    NodeState.SUSPECT: "yellow",
    NodeState.LOST: "bold red",
    NodeState.QUARANTINED: "red",
    NodeState.PROBATION: "cyan",
    NodeState.HELD: "magenta",
    NodeState.REPAIR: "red",
    "outbreak": "bold red",
    "faulty": "bold red",
    JobState.FORMING: "cyan",
    JobState.RUNNING: "green",
    JobState.PAUSED: "yellow",
    JobState.FINISHED: "blue",
    JobState.FAILED: "bold red",
    Severity.INFO: "dim",
    Severity.WARNING: "yellow",
    Severity.CRITICAL: "bold red",
    Decision.EVICT: "bold red",
    Decision.DEFER_EVICTION: "yellow",
    Decision.RESTART: "yellow",
    Decision.READMIT: "green",
}


def styled_state(value: str) -> Text:
    return Text(str(value), style=STYLES.get(value, ""))


def age(seconds: float) -> str:
    """Format an age in its two largest units: ``8 s``, ``3 min``, ``2 h 10 min``, ``5 d 3 h``."""
    total = max(0, int(seconds))
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min"
    if total < 86400:
        return f"{total // 3600} h {total % 3600 // 60} min"
    return f"{total // 86400} d {total % 86400 // 3600} h"


def ago(at: float | None, now: float) -> str:
    return "-" if at is None else f"{age(now - at)} ago"


def duration(seconds: float) -> str:
    """Format a span: ``830 us``, ``12.3 ms``, ``1.24 s``."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def size(count: float) -> str:
    """Format bytes in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def table(*columns: str, right: Iterable[str] = ()) -> Table:
    """Return an empty table in the common style, with the columns ``right`` aligned to the right."""
    made = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


class ResponsiveTable:
    """A table with one row per item. ``columns`` is by the terminal width they need, the widest first."""

    def __init__(
        self,
        rows: Iterable[Mapping[str, RenderableType]],
        *,
        columns: Mapping[int, Sequence[str]],
        right: Sequence[str] = (),
    ) -> None:
        self._rows, self._columns, self._right = list(rows), columns, right

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = next(named for width, named in self._columns.items() if options.max_width >= width)
        made = table(*columns, right=self._right)
        for row in self._rows:
            made.add_row(*(row[column] for column in columns))
        yield made


def _version(version: Version | None) -> str:
    return "-" if version is None else f"step {version.step} (g{version.generation})"


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}"


def _pairs(*rows: tuple[str, RenderableType]) -> Table:
    made = Table.grid(padding=(0, 2))
    made.add_column(style="dim")
    made.add_column(overflow="fold")
    for name, value in rows:
        made.add_row(name, value)
    return made


def status(fleet: op.FleetStatus) -> RenderableType:
    counts = Text(", ").join(
        Text.assemble(str(count), " ", styled_state(name)) for name, count in sorted(fleet.nodes.items())
    )
    budget: RenderableType = f"{fleet.budget_left} evictions left"
    if fleet.breaker:
        since = age(fleet.now - fleet.breaker_at)
        budget = Text(f"automatic evictions stopped {since} ago: {fleet.breaker}", style="bold red")
    away = Text(f"unavailable, running jobs can only regroup: {fleet.database_outage}", style="bold red")
    head = _pairs(
        ("controller", f"{fleet.version}, up {age(fleet.now - fleet.started_at)}, epoch {fleet.epoch}"),
        ("nodes", counts if fleet.nodes else "none registered yet"),
        ("connected", str(fleet.connected_nodes)),
        ("budget", budget),
        *((("database", away),) if fleet.database_outage else ()),
        *(("outbreak", _outbreak(outbreak, fleet.now)) for outbreak in fleet.outbreaks),
    )
    running = jobs(fleet.jobs) if fleet.jobs else Text("no running jobs", style="dim")
    stalls = (Text.assemble((job.job, "bold"), ": ", _stall(job, fleet.now)) for job in fleet.jobs if job.stall)
    return Group(head, *needs(fleet), running, *stalls)


def _stall(one: op.JobSummary, now: float) -> Text:
    since = now if one.stall_since is None else one.stall_since
    return Text(f"for {age(now - since)}: {one.stall}", style="yellow")


def needs(fleet: op.FleetStatus) -> list[RenderableType]:
    """Render what needs a person."""
    if not fleet.need_count:
        return [Text("nothing needs a person", style="green")]
    count = fleet.need_count
    shown: list[RenderableType] = [Text(f"{count} {'thing needs' if count == 1 else 'things need'} a person", "bold")]
    for need in fleet.needs:
        style = "bold red" if need.severity == Severity.CRITICAL else "yellow"
        kind = f" {need.kind.replace('_', ' ')}, for {age(fleet.now - need.since)}"
        command = f"\n{need.command}" if need.command else ""
        shown += [
            Text.assemble((need.subject, style), (kind, "dim")),
            Padding(Text.assemble(need.reason, (f"\n{need.advice}", "dim"), (command, "bold")), (0, 0, 0, 2)),
        ]
    left = count - len(fleet.needs)
    return [*shown, Text(f"and {left} more", style="dim")] if left > 0 else shown


def _outbreak(one: op.Outbreak, now: float) -> Text:
    return Text.assemble((f"since {age(now - one.since)}: {one.sentence}", "bold red"), f"\n{one.advice}")


def _state_text(one: op.NodeSummary) -> Text:
    """Return the node's state; a node that serves despite an outbreak or a fault is not shown as healthy."""
    despite = " (outbreak)" if one.outbreaks else " (faulty)" if one.is_faulty else ""
    return Text.assemble(styled_state(one.state), (despite, "bold red"))


BY_URGENCY = tuple(map(NodeState, ("repair", "quarantined", "lost", "suspect", "held", "probation")))
"""States in which a node does not compute, or may soon not; those that need a person come first."""


def attention(fleet: op.FleetStatus, found: Sequence[op.NodeSummary]) -> RenderableType:
    """Render the unhealthy nodes that ``needs`` does not name; ``found`` may hold only the first of all."""
    listed = {need.node for need in fleet.needs}
    made = table("out of service", "state", "for", "why")
    for node in found:
        if node.node not in listed:
            row = _node_row(node, fleet.now)
            made.add_row(row["node"], row["state"], row["for"], row["why"] or "-")
    left = sum(fleet.nodes.get(state, 0) for state in BY_URGENCY) - len(found)
    if not made.row_count and left <= 0:
        return ""
    return Group(made, Text(f"and {left} more: everstep nodes", style="dim")) if left > 0 else made


def nodes(found: Iterable[op.NodeSummary], now: float) -> RenderableType:
    return ResponsiveTable(
        (_node_row(node, now) for node in found),
        columns={
            160: ["node", "state", "for", "job", "gpus", "findings", "seen", "rack", "switch", "driver", "why"],
            120: ["node", "state", "for", "job", "gpus", "findings", "seen", "rack", "why"],
            0: ["node", "state", "for", "job", "why"],
        },
        right=("gpus", "findings"),
    )


def drift(found: Iterable[op.Drift]) -> RenderableType:
    """Render values in which nodes differ from like nodes."""
    made = table("node", "value", "is", "others", "like nodes", "kind")
    for one in found:
        node = Text.assemble((one.node, "bold"), " (offline)" if one.is_offline else "")
        share = f"differs from {one.usual_nodes} of {one.compared_nodes}"
        made.add_row(node, one.value.replace("_", " "), one.actual, one.usual, share, one.kind)
    return made if made.row_count else Text("no node differs from the majority of like nodes", style="green")


def top(fleet: op.FleetStatus, found: Iterable[op.NodeSummary], now: float) -> RenderableType:
    """Render the fleet and its jobs, and below as many nodes as fit, unhealthy ones first."""
    ordered = sorted(
        found, key=lambda one: (one.state is NodeState.HEALTHY and not one.outbreaks and not one.is_faulty, one.node)
    )
    return Group(status(fleet), nodes(ordered, now))


def _node_row(one: op.NodeSummary, now: float) -> dict[str, RenderableType]:
    seen = ago(one.last_seen_at, now)
    return {
        "node": Text(one.node, style="bold"),
        "state": _state_text(one),
        "for": age(now - one.since),
        "job": one.job or "-",
        "gpus": str(one.gpus),
        "findings": Text(str(one.findings), style="yellow" if one.findings else "dim"),
        "seen": seen if one.connected else Text(seen, style="yellow"),
        "rack": one.domain.rack or "-",
        "switch": one.domain.switch or "-",
        "driver": one.driver_version or "-",
        "why": one.reason if one.hold_reason in ("", one.reason) else f"{one.reason}; {one.hold_reason}",
    }


def node(detail: op.NodeDetail, now: float, gpus: op.NodeGpus | None = None) -> RenderableType:
    one = detail.summary
    head = _pairs(
        ("node", Text(one.node, style="bold")),
        ("state", Text.assemble(_state_text(one), f" for {age(now - one.since)}")),
        ("why", one.reason or "-"),
        ("job", one.job or "-"),
        ("connected", "yes" if one.connected else Text("no", style="yellow")),
        ("agent", f"{detail.agent_version or '?'}, incarnation {detail.incarnation}"),
        ("registered", ago(detail.registered_at or None, now)),
        ("driver", detail.driver_version or "-"),
        ("vault", detail.vault or "-"),
        ("domain", " ".join(filter(None, (one.domain.rack, one.domain.switch, one.domain.power))) or "-"),
        ("labels", " ".join(f"{name}={value}" for name, value in one.labels.items()) or "-"),
        ("evictions", str(detail.evictions)),
        ("offences", f"{detail.offence_score:.2f}"),
        ("maintenance", _maintenance(detail, now)),
        ("hold", detail.hold_reason or "-"),
        ("cordoned by", detail.external_cordon_by or "-"),
        *((("eviction deferred by", detail.eviction_deferred_by),) if detail.eviction_deferred_by else ()),
        *((("drift", "\n".join(drift.sentence for drift in detail.drifts)),) if detail.drifts else ()),
    )
    parts: list[RenderableType] = [head]
    if detail.findings:
        parts.append(findings(detail.findings, now))
    if detail.gpus:
        made = table("gpu", "name", "memory", "bus", "uuid", "serial", right=("gpu", "memory"))
        for gpu in detail.gpus:
            made.add_row(str(gpu.index), gpu.name, size(gpu.memory_bytes), gpu.pci_bus_id, gpu.uuid, gpu.serial or "-")
        parts.append(made)
    if gpus is not None and gpus.received_at is not None:
        parts.append(_gauges(gpus, gpus.received_at, now))
    if detail.verdicts:
        made = table("verdict", "decision", "ago", "why")
        for verdict in detail.verdicts:
            made.add_row(verdict.id, styled_state(verdict.decision), age(now - verdict.at), verdict.sentence)
        parts.append(made)
    return Group(*parts)


def _gauges(found: op.NodeGpus, received_at: float, now: float) -> RenderableType:
    """Render the newest gauges of a node's GPUs."""
    right = ("gpu", "temperature", "power", "use", "memory used", "clock", "ECC")
    made = table("gpu", *right[1:], "throttled by", right=right)
    for gpu in found.gpus:
        values = (
            _measured(gpu.temperature_c, "{:.0f} C"),
            _measured(gpu.power_w, "{:.0f} W", gpu.power_limit_w, " of {:.0f}"),
            "-" if gpu.utilization is None else f"{gpu.utilization:.0%}",
            "-" if gpu.memory_used_bytes is None else size(gpu.memory_used_bytes),
            _measured(gpu.sm_clock_mhz, "{:.0f} MHz"),
            _measured(gpu.ecc_uncorrected, "{:.0f} uncorrected", gpu.ecc_corrected, ", {:.0f} corrected"),
            ", ".join(gpu.throttled_by).replace("_", " ") or "-",
        )
        made.add_row(str(gpu.index), *(("lost", *values[1:]) if gpu.is_lost else values))
    made.caption = f"gauges received {ago(received_at, now)}"
    made.caption_justify = "left"
    return made


def _measured(value: float | None, form: str, other: float | None = None, other_form: str = "") -> str:
    """Format a value, and another one behind it if there is one; ``-`` if the first is not known."""
    if value is None:
        return "-"
    return form.format(value) + ("" if other is None else other_form.format(other))


def _maintenance(detail: op.NodeDetail, now: float) -> str:
    """Describe the node's present maintenance window and the planned ones."""
    until = detail.maintenance_until
    lines = [f"for another {age(until - now)}"] if until > now else []
    lines += [
        f"planned in {age(window.starts_at - now)} for {age(window.until - window.starts_at)}: {window.sentence}"
        for window in detail.planned_maintenance
    ]
    return "\n".join(lines) or "-"


def findings(found: Iterable[Finding], now: float) -> RenderableType:
    """Render findings, with the sources of their thresholds."""
    made = table("finding", "severity", "since", "message", "action", "rule")
    for finding in found:
        made.add_row(
            f"{finding.kind} {finding.subject}" + (f" XID {finding.xid}" if finding.xid is not None else ""),
            styled_state(finding.severity),
            ago(finding.since or None, now),
            finding.message,
            str(finding.action),
            f"{finding.rule} ({finding.source})" if finding.source else finding.rule or "-",
        )
    return made


def jobs(found: Iterable[op.JobSummary]) -> RenderableType:
    wide = ["job", "state", "gen", "ranks", "nodes", "spares", "step", "step time", "loss", "committed", "verified"]
    narrow = ["job", "state", "gen", "ranks", "spares", "step", "loss", "commit"]
    numbers = ["gen", "ranks", "nodes", "spares", "step", "step time", "loss", "commit"]
    return ResponsiveTable((_job_row(job) for job in found), columns={128: wide, 0: narrow}, right=numbers)


def _job_row(one: op.JobSummary) -> dict[str, RenderableType]:
    return {
        "job": Text(one.job, style="bold"),
        "state": styled_state("stopped" if one.is_stopped else one.state),
        "gen": str(one.generation),
        "ranks": str(one.world_size),
        "nodes": str(one.nodes),
        "spares": str(one.spares),
        "step": str(one.step),
        "step time": duration(one.step_s) if one.step_s else "-",
        "loss": _loss(one.loss),
        "committed": _version(one.committed),
        "commit": "-" if one.committed is None else str(one.committed.step),
        "verified": _version(one.verified),
    }


def job(detail: op.JobDetail, now: float) -> RenderableType:
    parts: list[RenderableType] = [jobs([detail.summary])]
    if detail.summary.reason:
        parts.append(Text(detail.summary.reason, style="dim"))
    if detail.summary.stall:
        parts.append(_stall(detail.summary, now))
    if detail.roster:
        made = table("rank", "node", "local", "step", "step time", "loss", right=("rank", "local", "step", "loss"))
        ranks = {rank.rank: rank for rank in detail.ranks}
        for member in detail.roster:
            one = ranks.get(member.rank)
            took = duration(one.step_s) if one and one.step_s else "-"
            progress = (str(one.step), took, _loss(one.loss)) if one else ("-", "-", "-")
            made.add_row(str(member.rank), member.node, str(member.local_rank), *progress)
        parts.append(made)
    if detail.spares:
        parts.append(Text(f"spares: {', '.join(detail.spares)}"))
    if detail.ineligible_nodes:
        parts.append(_pairs(*((f"{node} waits", why) for node, why in detail.ineligible_nodes.items())))
    if (snapshots := _snapshots(detail.ranks)) is not None:
        parts.append(_pairs(("snapshots", snapshots)))
    parts.append(_audits(detail.audits))
    if detail.recoveries:
        parts.append(recoveries(detail.recoveries, now))
    return Group(*parts)


def _snapshots(ranks: Iterable[op.RankStatus]) -> str | None:
    """Describe how often the ranks store their state; None before they report."""
    found = [one.snapshot_every for one in ranks]
    if not found:
        return None
    if 0 in found:
        return "only versions to be committed"
    every = max(found)
    if every == 1:
        return "each step"
    repeated = "1 finished step" if every == 2 else f"{every - 1} finished steps"
    return f"every {every} steps (snapshot_budget or snapshot_every), so losing a node may repeat up to {repeated}"


def _audits(audits: op.JobAudits) -> RenderableType:
    """Render what audits check, and what they do not cover."""
    only = " (report only)" if audits.preset != "off" and audits.mode == "report" else ""
    lines = [("audits", f"{audits.preset}{only}")]
    lines += [(f"audit {kind} is off", why) for kind, why in audits.off.items()]
    lines += [("digests are not compared", audits.voting_off_reason)] if audits.voting_off_reason else []
    lines += [("not compared", why) for why in audits.not_compared]
    lines += [("reported", sentence) for sentence in audits.reports]
    lines += [("withdrawn", sentence) for sentence in audits.withdrawn]
    return _pairs(*lines)


def recoveries(found: Iterable[op.GenerationRecovery], now: float) -> RenderableType:
    """Render the cost of each generation."""
    made = table("gen", "reason", "ago", "took", "from", "phases (slowest rank)", "trace", right=("gen", "took"))
    for recovery in found:
        took: RenderableType = Text(f"{recovery.resumed_ranks}/{recovery.world_size} resumed", style="yellow")
        if recovery.duration_s is not None:
            took = duration(recovery.duration_s)
        phases = ", ".join(f"{name} {duration(seconds)}" for name, seconds in recovery.phases_s.items())
        restored = _version(recovery.restored) if recovery.restored else "scratch" if recovery.resumed_ranks else "-"
        made.add_row(
            str(recovery.generation),
            str(recovery.reason),
            age(now - recovery.decided_at),
            took,
            restored,
            phases or "-",
            recovery.trace,
        )
    return made


def event_line(event: op.Event) -> Text:
    at = datetime.datetime.fromtimestamp(event.at).astimezone().strftime("%m-%d %H:%M:%S.%f")[:-3]
    about = " ".join(filter(None, (event.node, event.job, f"g{event.generation}" if event.generation else "")))
    return Text.assemble(
        (f"{event.id:>6} ", "dim"),
        (at, "dim"),
        " ",
        (f"{event.kind:<22}", _kind_style(event.kind)),
        (f" {about:<16} " if about else " ", "bold"),
        " ".join(event.sentence.split()),
        (f"  {event.trace}", "dim"),
    )


def _kind_style(kind: str) -> str:
    for mark, style in (("evict", "bold red"), ("lost", "red"), ("verdict", "magenta"), ("generation", "cyan")):
        if mark in kind:
            return style
    return "green" if "resumed" in kind or "readmit" in kind else ""


def trace_table(events: Sequence[op.Event]) -> RenderableType:
    """Render all consequences of one trace, with times from its first event on."""
    made = table("after", "kind", "node", "job", "what", right=("after",))
    for event in events:
        said = ", ".join(f"{name} {value}" for name, value in event.detail.items() if value)
        made.add_row(
            f"+{(event.at - events[0].at) * 1e3:.1f} ms",
            Text(event.kind, style=_kind_style(event.kind)),
            event.node or "-",
            f"{event.job} g{event.generation}" if event.job and event.generation else event.job or "-",
            Text.assemble(event.sentence, (f"\n{said}" if said else "", "dim")),
        )
    return made


def verdict(one: Verdict, now: float) -> RenderableType:
    head = _pairs(
        ("verdict", Text(one.id, style="bold")),
        ("node", one.node),
        ("decision", styled_state(one.decision)),
        ("reason", one.sentence),
        ("action", str(one.action)),
        ("given", ago(one.at, now)),
        ("trace", one.trace),
    )
    if not one.evidence:
        return head
    facts = [
        _pairs(*((name.replace("_", " "), value) for name, value in found.evidence.items()))
        for found in one.evidence
        if found.evidence
    ]
    return Group(head, findings(one.evidence, now), *facts)


def probe(one: op.ProbeStatus) -> RenderableType:
    word = {True: Text("ok", style="green"), False: Text("failed", style="bold red"), None: Text("running")}[one.ok]
    head = _pairs(("probe", one.probe), ("nodes", ", ".join(one.nodes)), ("result", word))
    parts: list[RenderableType] = [head]
    if one.rows:
        made = table("size", "latency", "bus bandwidth", right=("size", "latency", "bus bandwidth"))
        for row in one.rows:
            made.add_row(size(row.bytes), duration(row.latency_s), f"{size(row.bandwidth_bytes_per_s)}/s")
        parts.append(made)
    parts += [Text(f"{node}: {said}", style="dim") for node, said in one.answers.items()]
    return Group(*parts)
