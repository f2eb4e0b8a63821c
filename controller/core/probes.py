"""All-reduce probes between nodes: asked for, reported, timed out."""

from __future__ import annotations

import msgspec

from controller.core.state import Probe
from controller.core.turn import Turn
from everstep.wire.v1.directives import RunProbe
from everstep.wire.v1.training import ProbeFinished


def start_probe(turn: Turn, nodes: tuple[str, ...], *, candidate: str | None, backend: str = "gloo") -> str:
    """Sends the probe to all of ``nodes``; the first hosts its store. Returns the probe's id."""
    state = turn.state
    state.fleet.probes += 1
    turn.fleet_changed()
    name = f"probe-{state.fleet.probes}"
    due = turn.now + turn.policy.probe_timeout_s
    state.probes[name] = Probe(nodes=nodes, candidate=candidate, due=due, trace=turn.trace)
    host = state.nodes[nodes[0]].vault.rpartition(":")[0]
    body = RunProbe(
        probe=name,
        nodes=nodes,
        store=f"{host}:0",
        backend=backend,
        timeout_s=turn.policy.probe_timeout_s / 2,
        trace=turn.trace,
    )
    if candidate is not None:
        body = msgspec.structs.replace(body, sizes=turn.policy.probe_sizes)
    for node in nodes:
        turn.send(node, body)
    turn.audit("probe.started", f"{name}: all-reduce between {', '.join(nodes)}", node=candidate)
    turn.wake(due, "probe", name)
    return name


def take_result(turn: Turn, node: str, report: ProbeFinished) -> tuple[Probe, str] | None:
    """Counts one side's result. Once the outcome is known: the probe, and why it failed (empty: it passed)."""
    probe = turn.state.probes.get(report.probe)
    if probe is None or node not in probe.nodes:
        turn.ignore("probe_finished.unknown")
        return None
    rows = {f"{size}": f"{latency:.6f} s, {rate / 1e9:.3f} GB/s" for size, latency, rate in report.rows}
    outcome = "passed" if report.ok else f"failed: {report.detail}"
    sentence = f"{report.probe}: {node} {outcome}"
    turn.audit("probe.result", sentence, node=node, trace=probe.trace, data=rows)
    if report.ok:
        probe.passed.add(node)
        if len(probe.passed) < len(probe.nodes):
            return None
    del turn.state.probes[report.probe]
    return probe, "" if report.ok else f"{sentence} ({' with '.join(probe.nodes)})"


def overdue(turn: Turn, name: str) -> tuple[Probe, str] | None:
    """At a probe's deadline: the probe, and who did not answer; None when it has ended."""
    probe = turn.state.probes.get(name)
    if probe is None or turn.now < probe.due:
        return None
    del turn.state.probes[name]
    mute = ", ".join(node for node in probe.nodes if node not in probe.passed)
    sentence = f"{name}: no result from {mute} within {turn.policy.probe_timeout_s:g} s"
    turn.audit("probe.overdue", sentence, node=probe.candidate, trace=probe.trace)
    return probe, sentence
