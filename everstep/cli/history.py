"""``everstep findings``, ``verdicts``, ``checkpoints``, ``remediations``, ``probes``, ``budget`` and ``evidence``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.text import Text

from everstep.cli.context import Json, connected_client, console, show
from everstep.cli.tables import age, ago, size, table
from everstep.client import Client
from everstep.errors import ConfigurationError
from everstep.system_clock import SYSTEM_CLOCK

Node = Annotated[str, typer.Option(help="Show only entries of this node.")]
LimitOption = Annotated[int, typer.Option("--limit", min=1, help="Maximum number of entries: the newest.")]


def findings(
    context: typer.Context,
    node: Node = "",
    kind: Annotated[str, typer.Option(help="Show only findings of this kind, such as gpu.xid.")] = "",
    active: Annotated[bool, typer.Option(help="Show only findings that have not cleared.")] = False,
    limit: LimitOption = 100,
    as_json: Json = False,
) -> None:
    """List findings on nodes, newest first."""
    with connected_client(context) as client:
        listed = client.findings(node=node, kind=kind, active=active or None)
        seen, now = listed.collect(limit), SYSTEM_CLOCK.wall()
        view = table("node", "severity", "finding", "seen", "cleared")
        for finding in seen.findings:
            found = finding.finding
            view.add_row(
                finding.node, found.severity, found.message, ago(finding.raised_at, now), ago(finding.cleared_at, now)
            )
        show(seen, as_json, view)


def verdicts(
    context: typer.Context,
    node: Node = "",
    decision: Annotated[str, typer.Option(help="Show only these decisions: evict, defer_eviction, readmit, ...")] = "",
    limit: LimitOption = 100,
    as_json: Json = False,
) -> None:
    """List verdicts on nodes, newest first."""
    with connected_client(context) as client:
        given = client.verdicts(node=node, decision=decision).collect(limit)
        now, view = SYSTEM_CLOCK.wall(), table("verdict", "decision", "when", "why")
        for verdict in given.verdicts:
            view.add_row(verdict.id, verdict.decision, ago(verdict.at, now), verdict.sentence)
        show(given, as_json, view)


def checkpoints(
    context: typer.Context,
    job: Annotated[str, typer.Argument(metavar="[JOB]", help="Show the versions that this job can restore now.")] = "",
    of: Annotated[str, typer.Option("--job", help="Show only the history of this job.")] = "",
    limit: LimitOption = 20,
    as_json: Json = False,
) -> None:
    """List committed versions, newest first; with JOB, the versions that it can restore now."""
    with connected_client(context) as client:
        if job:
            _show_job_checkpoints(client, job, as_json)
        else:
            _show_committed(client, of, limit, as_json)


def _show_job_checkpoints(client: Client, job: str, as_json: bool) -> None:
    told, now = client.job_checkpoints(job), SYSTEM_CLOCK.wall()
    view = table("version", "where", "since", "size", "restorable", "why, or where", right=("size",))
    for version in told.versions:
        where = version.storage_tier if version.state == "complete" else f"to {version.storage_tier}"
        bytes_held = size(version.bytes) if version.bytes else "-"
        can = Text("yes", style="green") if version.restorable else Text("no", style="yellow")
        checks = "verified" if version.verified else "", "audited" if version.audited else ""
        why = ", ".join(filter(None, (version.sentence, *checks, version.url)))
        view.add_row(str(version.version), where, ago(version.since, now), bytes_held, can, why)
    if not as_json:
        console.print(told.sentence)
        if told.last_error:
            console.print(f"last error: {told.last_error}")
    show(told, as_json, view)


def _show_committed(client: Client, job: str, limit: int, as_json: bool) -> None:
    kept = client.checkpoints(job=job).collect(limit)
    now, columns = SYSTEM_CLOCK.wall(), ("job", "version", "committed", "verified", "audited", "size")
    view = table(*columns, right=("size",))
    for checkpoint in kept.checkpoints:
        times = (ago(at, now) for at in (checkpoint.committed_at, checkpoint.verified_at, checkpoint.audited_at))
        view.add_row(checkpoint.job, str(checkpoint.version), *times, size(checkpoint.bytes))
    show(kept, as_json, view)


def remediations(
    context: typer.Context,
    node: Node = "",
    state: Annotated[str, typer.Option(help="Show only requested, started, confirmed, failed or superseded.")] = "",
    limit: LimitOption = 50,
    as_json: Json = False,
) -> None:
    """List actions requested from Slurm, Kubernetes or the webhook, and their outcomes."""
    with connected_client(context) as client:
        asked = client.remediations(node=node, remediation_state=state).collect(limit)
        now, view = SYSTEM_CLOCK.wall(), table("node", "action", "state", "asked", "why")
        for remediation in asked.remediations:
            why = f"{remediation.sentence} ({remediation.detail})" if remediation.detail else remediation.sentence
            view.add_row(
                remediation.node,
                remediation.kind.replace("_", " "),
                remediation.state,
                ago(remediation.requested_at, now),
                why,
            )
        show(asked, as_json, view)


def probes(context: typer.Context, node: Node = "", limit: LimitOption = 50, as_json: Json = False) -> None:
    """List probes since this controller became leader, newest first."""
    with connected_client(context) as client:
        known = client.probes(node=node).collect(limit)
        now, view = SYSTEM_CLOCK.wall(), table("probe", "nodes", "begun", "outcome")
        for probe in known.probes:
            outcome = {None: "running", True: "passed", False: "failed"}[probe.ok]
            view.add_row(probe.probe, ", ".join(probe.nodes), ago(probe.started_at, now), outcome)
        show(known, as_json, view)


def budget(context: typer.Context, as_json: Json = False) -> None:
    """Show the eviction budget, and nodes whose eviction is deferred."""
    with connected_client(context) as client:
        now, left = SYSTEM_CLOCK.wall(), client.budget()
        numbers = ("left", "limit", "used", "nodes")
        view = table("of", *numbers, "frees in", right=numbers)
        for scope in left.scopes:
            frees = age(scope.next_free_at - now) if scope.next_free_at > now else "-"
            if left.breaker:
                frees = "after everstep reset-breaker"
            counts = (scope.remaining, scope.limit, scope.used, scope.nodes)
            view.add_row(" ".join(filter(None, (scope.kind, scope.name))), *map(str, counts), frees)
        show(left, as_json, view)
        if not as_json:
            if left.breaker:
                console.print(Text(left.breaker, style="bold red"))
            for held in left.deferred:
                console.print(f"{held.node}: eviction deferred by {held.deferred_by}: {held.finding}")


def evidence(
    context: typer.Context,
    node: Annotated[str, typer.Argument(metavar="NODE")],
    output: Annotated[Path | None, typer.Option(help="Write to this file instead of the terminal.")] = None,
) -> None:
    """Collect the evidence against a node in one JSON document, for its vendor."""
    with connected_client(context) as client:
        bundle = client.evidence(node)
        text = msgspec.json.format(msgspec.json.encode(bundle), indent=2) + b"\n"
        if output is None:
            sys.stdout.buffer.write(text)
            return
        try:
            with os.fdopen(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(text)
        except OSError as error:
            raise ConfigurationError(f"cannot write {output}: {error.strerror}") from error
        console.print(f"{output}: {len(bundle.findings)} findings, {len(bundle.verdicts)} verdicts of {node}")


def loss_forecast(
    context: typer.Context, job: Annotated[str, typer.Argument(metavar="JOB")], as_json: Json = False
) -> None:
    """Show what the job could restore after the loss of each node, rack or switch."""
    with connected_client(context) as client:
        told = client.restorability(job)
        view = table("loss", "checkpoint", "nodes left", "what follows", right=("nodes left",))
        for forecast in told.loss_forecasts:
            name = forecast.name or "+".join(forecast.nodes)
            whole = Text("restorable", style="green") if forecast.restorable else Text("lost", style="bold red")
            view.add_row(f"{forecast.kind} {name}", whole, str(forecast.remaining_nodes), forecast.sentence)
        if not as_json:
            console.print(told.sentence)
        show(told, as_json, view)
