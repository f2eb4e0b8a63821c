"""``everstep``: queries and orders of an operator.

Exit codes: 0 done; 1 the controller refused (its message is shown); 2 the controller or the token is not there.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Annotated, Literal

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from everstep import __version__
from everstep.cli import events, history, nodes, policy, tables, tokens, vault
from everstep.cli.client import ControllerClient, path
from everstep.cli.context import (
    DEFAULT_CONTROLLER,
    ConnectionOptions,
    Json,
    Reason,
    connected_client,
    console,
    send_order,
    show,
)
from everstep.errors import Unavailable
from everstep.system_clock import SYSTEM_CLOCK
from everstep.vocabulary import Verdict
from everstep.wire.v1 import operator as op

MAX_LISTED_NODES = 20
"""Nodes that ``status`` names; `everstep nodes` lists the others."""

app = typer.Typer(help="See and steer a fleet that Everstep keeps training.", no_args_is_help=True)
job_app = typer.Typer(help="One job: show, stop, resize.", no_args_is_help=True)
verdict_app = typer.Typer(help="Why a node was judged as it was.", no_args_is_help=True)
app.add_typer(nodes.app, name="node")
app.add_typer(job_app, name="job")
app.add_typer(verdict_app, name="verdict")
app.add_typer(tokens.app, name="token")
app.add_typer(policy.app, name="policy")
app.add_typer(vault.app, name="vault")
history.register(app)
events.register(app)
app.command()(nodes.nodes)
job_app.command()(history.loss_forecast)

JobName = Annotated[str, typer.Argument(metavar="JOB")]


def _print_version(requested: bool) -> None:
    if requested:
        console.print(__version__, highlight=False)
        raise typer.Exit


@app.callback()
def connect(
    context: typer.Context,
    address: Annotated[
        str,
        typer.Option(
            "--controller",
            envvar="EVERSTEP_CONTROLLER",
            help="Where controllers are, commas between. Not given: that of a run of everstep-launch on this machine, "
            f"else {DEFAULT_CONTROLLER}.",
        ),
    ] = "",
    token_file: Annotated[str, typer.Option(envvar="EVERSTEP_TOKEN_FILE", help="A file with your token.")] = "",
    ca_file: Annotated[
        str,
        typer.Option(envvar="EVERSTEP_CA_FILE", help="PEM file of the authority that signed the controller."),
    ] = "",
    certificate: Annotated[
        str, typer.Option(envvar="EVERSTEP_CERTIFICATE", help="PEM file of your certificate, in place of a token.")
    ] = "",
    key: Annotated[str, typer.Option(envvar="EVERSTEP_KEY", help="PEM file of the certificate's key.")] = "",
    run: Annotated[
        str, typer.Option("--run", metavar="NAME", help="A run of everstep-launch on this machine, by its job's name.")
    ] = "",
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the release and exit.")
    ] = False,
) -> None:
    context.obj = ConnectionOptions(address, token_file, ca_file, certificate, key, run)


@app.command()
def status(context: typer.Context, as_json: Json = False) -> None:
    """The fleet on one screen, with the nodes that need attention."""
    with connected_client(context) as client:
        fleet = client.get("/v1/status", op.FleetStatus)
        named = () if as_json else _unfit(client, fleet)
        view = tables.status(fleet)
        show(fleet, as_json, Group(view, tables.attention(fleet, named)) if named else view)


def _unfit(client: ControllerClient, fleet: op.FleetStatus) -> tuple[op.NodeSummary, ...]:
    """Return the first of the unhealthy nodes; those that need a person come first."""
    found: list[op.NodeSummary] = []
    for state in tables.BY_URGENCY:
        wanted = min(fleet.nodes.get(state, 0), MAX_LISTED_NODES - len(found))
        if wanted > 0:
            page = client.get("/v1/nodes", op.NodeList, state=str(state), limit=wanted)
            found += page.nodes
    return tuple(found)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def replay(context: typer.Context) -> None:
    """A recorded incident once more, as it was decided and as it would be today: replay LOG, --help for more."""
    command = [sys.executable, "-m", "everstep_controller.main", "replay", *context.args]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


@app.command()
def top(
    context: typer.Context,
    interval_s: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")] = 1.0,
) -> None:
    """The fleet as it stands, drawn again and again until interrupted; nodes that are not healthy come first."""
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
                    view = Text(f"{error}; trying again", style="yellow")
        except KeyboardInterrupt:
            return


def _fleet_view(client: ControllerClient) -> RenderableType:
    fleet = client.get("/v1/status", op.FleetStatus)
    return tables.top(fleet, nodes.fetch_nodes(client), SYSTEM_CLOCK.wall())


@app.command()
def jobs(
    context: typer.Context,
    state: Annotated[str, typer.Option(help="Only in this state, such as paused.")] = "",
    as_json: Json = False,
) -> None:
    """All jobs and how far they are."""
    with connected_client(context) as client:
        pages = history.fetch_pages(client, "/v1/jobs", op.JobList, sys.maxsize, job_state=state)
        found = tuple(job for page in pages for job in page.jobs)
        show(op.JobList(jobs=found, total=len(found)), as_json, tables.jobs(found))


@job_app.command("show")
def job_show(context: typer.Context, job: JobName, as_json: Json = False) -> None:
    """One job: ranks, versions, recoveries."""
    with connected_client(context) as client:
        detail = client.get(path("jobs", job), op.JobDetail)
        show(detail, as_json, tables.job(detail, SYSTEM_CLOCK.wall()))


@job_app.command()
def stop(context: typer.Context, job: JobName, reason: Reason) -> None:
    """End the job."""
    send_order(context, op.ReasonOnlyRequest(reason=reason), "jobs", job, "stop")


@job_app.command()
def resize(context: typer.Context, job: JobName, size: Annotated[int, typer.Argument(min=1)], reason: Reason) -> None:
    """Bound the job's nodes, from its next boundary on."""
    send_order(context, op.Resize(size=size, reason=reason), "jobs", job, "resize")


@app.command("reset-breaker")
def reset_breaker(context: typer.Context, reason: Reason) -> None:
    """Allow automatic evictions again; verdicts of before are not acted on."""
    send_order(context, op.ReasonOnlyRequest(reason=reason), "breaker", "reset")


@verdict_app.command("explain")
def verdict_explain(
    context: typer.Context, verdict: Annotated[str, typer.Argument(metavar="ID")], as_json: Json = False
) -> None:
    """A verdict's sentence and the evidence it rests on."""
    with connected_client(context) as client:
        found = client.get(path("verdicts", verdict), Verdict)
        show(found, as_json, tables.verdict(found, SYSTEM_CLOCK.wall()))


@app.command()
def probe(
    context: typer.Context,
    between: Annotated[list[str], typer.Argument(metavar="NODE...")],
    backend: Annotated[Literal["gloo", "nccl"], typer.Option(help="nccl goes between GPUs.")] = "gloo",
    reason: Reason = "asked for by hand",
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait for the result.")] = 90.0,
    as_json: Json = False,
) -> None:
    """Let nodes run an all-reduce among them: latency and bus bandwidth by size."""
    with connected_client(context) as client:
        body = op.StartProbe(nodes=tuple(between), backend=backend, reason=reason)
        found = client.post("/v1/probes", body, op.ProbeStatus)
        deadline = SYSTEM_CLOCK.monotonic() + timeout_s
        while found.ok is None and SYSTEM_CLOCK.monotonic() < deadline:
            time.sleep(0.2)
            found = client.get(path("probes", found.probe), op.ProbeStatus)
        show(found, as_json, tables.probe(found))
        if not found.ok:
            raise typer.Exit(1)


@app.command()
def version() -> None:
    """The release of this command."""
    console.print(__version__, highlight=False)


if __name__ == "__main__":
    app()
