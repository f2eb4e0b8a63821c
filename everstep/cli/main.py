"""The command ``everstep``: queries and orders of an operator.

Exit status: 0 for success, 1 if the controller refused, 2 if the settings are wrong or no controller answers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Annotated, Literal

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from everstep.cli import chaos, doctor, events, files, history, logs, nodes, policy, runs, tables, tokens, vault
from everstep.cli.context import (
    PROGRAM,
    ConnectionOptions,
    Json,
    Reason,
    connected_client,
    console,
    reporting_errors,
    send_order,
    show,
)
from everstep.cli.login.commands import log_in, log_out
from everstep.client import Client, calls
from everstep.command_line import Flags, Version, make_app, takes_settings
from everstep.errors import Unavailable
from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.v1 import operator as op

MAX_LISTED_NODES = 20
"""Nodes that ``status`` names; `everstep nodes` lists the others."""

app = make_app("Inspect and control an Everstep fleet.")
job_app = make_app("Show, stop or resize a job; print its receipt.")
verdict_app = make_app("Explain the verdicts on nodes.")
app.add_typer(nodes.app, name="node")
app.add_typer(job_app, name="job")
app.add_typer(verdict_app, name="verdict")
app.add_typer(tokens.app, name="token")
app.add_typer(policy.app, name="policy")
app.add_typer(vault.app, name="vault")
app.add_typer(runs.app, name="runs")
_commands: list[Callable[..., None]] = [history.findings, history.verdicts, history.checkpoints, history.remediations]
_commands += [history.probes, history.budget, history.evidence, events.events, events.orders, nodes.nodes, nodes.drift]
_commands += [files.files, chaos.chaos, doctor.doctor, logs.logs]
for _command in _commands:
    app.command()(_command)
app.command("login")(log_in)
app.command("logout")(log_out)
job_app.command()(history.loss_forecast)
app.command("open")(runs.open_page)
job_app.command("receipt")(runs.job_receipt)

JobName = Annotated[str, typer.Argument(metavar="JOB")]


@app.callback()
@takes_settings(PROGRAM)
def everstep(context: typer.Context, flags: Flags, _version: Version = False) -> None:
    with reporting_errors():
        context.obj = ConnectionOptions(**PROGRAM.read(flags, os.environ))


@app.command()
def status(context: typer.Context, as_json: Json = False) -> None:
    """Show a summary of the fleet, what needs a person, and the other nodes that are out of service."""
    with connected_client(context) as client:
        fleet = client.status()
        named = () if as_json else _unfit(client, fleet)
        view = tables.status(fleet)
        show(fleet, as_json, Group(view, tables.attention(fleet, named)) if named else view)


def _unfit(client: Client, fleet: op.FleetStatus) -> tuple[op.NodeSummary, ...]:
    """Return the first of the unhealthy nodes; those that need a person come first."""
    found: list[op.NodeSummary] = []
    for state in tables.BY_URGENCY:
        wanted = min(fleet.nodes.get(state, 0), MAX_LISTED_NODES - len(found))
        if wanted > 0:
            found += client.nodes(state=str(state)).collect(wanted).nodes
    return tuple(found)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def replay(context: typer.Context) -> None:
    """Decide a recorded incident again: the same as `everstep-controller replay`."""
    command = [sys.executable, "-m", "everstep_controller.main", "replay", *context.args]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


@app.command()
def top(
    context: typer.Context,
    interval_s: Annotated[float, typer.Option(min=0.1, help="Refresh interval in seconds.")] = 1.0,
) -> None:
    """Show the fleet and refresh it until interrupted. Unhealthy nodes come first."""
    with (
        connected_client(context) as client,
        Live(console=console, screen=console.is_terminal, auto_refresh=False) as live,
    ):
        view = _fleet_view(client)
        try:
            while True:
                live.update(view, refresh=True)
                time.sleep(interval_s)
                try:
                    view = _fleet_view(client)
                except Unavailable as error:  # the controller or the network may recover
                    view = Text(f"{error}; retrying", style="yellow")
        except KeyboardInterrupt:
            return


def _fleet_view(client: Client) -> RenderableType:
    fleet = client.status()
    return tables.top(fleet, client.nodes().collect().nodes, SYSTEM_CLOCK.wall())


@app.command()
def jobs(
    context: typer.Context,
    state: Annotated[str, typer.Option(help="Show only jobs in this state, such as paused.")] = "",
    as_json: Json = False,
) -> None:
    """List all jobs and their progress."""
    with connected_client(context) as client:
        found = client.jobs(job_state=state).collect()
        show(found, as_json, tables.jobs(found.jobs))


@job_app.command("show")
def job_show(context: typer.Context, job: JobName, as_json: Json = False) -> None:
    """Show the ranks, versions and recoveries of a job."""
    with connected_client(context) as client:
        detail = client.job(job)
        show(detail, as_json, tables.job(detail, SYSTEM_CLOCK.wall()))


@job_app.command()
def stop(context: typer.Context, job: JobName, reason: Reason) -> None:
    """Stop a job."""
    send_order(context, calls.stop_job, job, reason=reason)


@job_app.command()
def resize(
    context: typer.Context,
    job: JobName,
    size: Annotated[int, typer.Argument(min=1, help="Maximum number of nodes.")],
    reason: Reason,
) -> None:
    """Limit the number of a job's nodes, from its next step boundary on."""
    send_order(context, calls.resize_job, job, size, reason=reason)


@app.command("reset-breaker")
def reset_breaker(context: typer.Context, reason: Reason) -> None:
    """Allow automatic evictions again. Earlier verdicts have no consequences."""
    send_order(context, calls.reset_breaker, reason=reason)


@verdict_app.command("explain")
def verdict_explain(
    context: typer.Context, verdict: Annotated[str, typer.Argument(metavar="ID")], as_json: Json = False
) -> None:
    """Explain a verdict: its reason, its action and its evidence."""
    with connected_client(context) as client:
        found = client.verdict(verdict)
        show(found, as_json, tables.verdict(found, SYSTEM_CLOCK.wall()))


@app.command()
def probe(
    context: typer.Context,
    between: Annotated[list[str], typer.Argument(metavar="NODE...")],
    backend: Annotated[Literal["gloo", "nccl"], typer.Option(help="gloo tests hosts, nccl tests GPUs.")] = "gloo",
    reason: Reason = "manual probe",
    timeout_s: Annotated[float, typer.Option(help="Seconds to wait for the result.")] = 90.0,
    as_json: Json = False,
) -> None:
    """Run an all-reduce between nodes, and show latency and bus bandwidth by message size."""
    with connected_client(context) as client:
        found = client.start_probe(between, backend=backend, reason=reason)
        deadline = SYSTEM_CLOCK.monotonic() + timeout_s
        while found.ok is None and SYSTEM_CLOCK.monotonic() < deadline:
            time.sleep(0.2)
            found = client.probe(found.probe)
        show(found, as_json, tables.probe(found))
        if not found.ok:
            raise typer.Exit(1)


def main() -> None:
    """Run the command and end the process."""
    app(prog_name="everstep")


if __name__ == "__main__":
    main()
