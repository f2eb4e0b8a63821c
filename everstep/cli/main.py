"""``everstep``: what an operator asks and orders.

Exit codes: 0 done; 1 the controller refused (its sentence is shown); 2 the controller or the token is not there.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Annotated, Any, Literal

import msgspec
import typer
from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from everstep import __version__
from everstep.cli import past, policy, tables, tokens, vault
from everstep.cli.client import Client
from everstep.cli.context import Access, Json, Reason, console, controller, print_changed, show
from everstep.errors import Unavailable
from everstep.system_clock import SYSTEM_CLOCK
from everstep.vocabulary import Verdict
from everstep.wire.v1 import history
from everstep.wire.v1 import operator as op

DEFAULT_CONTROLLER = "http://127.0.0.1:7700"
EVENTS_AT_ONCE = 1000

app = typer.Typer(help="See and steer a fleet that Everstep keeps training.", no_args_is_help=True)
node_app = typer.Typer(help="One node: show, drain, hold, release, readmit, evict, repair.", no_args_is_help=True)
job_app = typer.Typer(help="One job: show, stop, resize.", no_args_is_help=True)
verdict_app = typer.Typer(help="Why a node was judged as it was.", no_args_is_help=True)
app.add_typer(node_app, name="node")
app.add_typer(job_app, name="job")
app.add_typer(verdict_app, name="verdict")
app.add_typer(tokens.app, name="token")
app.add_typer(policy.app, name="policy")
app.add_typer(vault.app, name="vault")
past.register(app)
job_app.command()(past.exposures)

NodeName = Annotated[str, typer.Argument(metavar="NODE")]
JobName = Annotated[str, typer.Argument(metavar="JOB")]


@app.callback()
def connect(
    context: typer.Context,
    address: Annotated[
        str, typer.Option("--controller", envvar="EVERSTEP_CONTROLLER", help="Where controllers are, commas between.")
    ] = DEFAULT_CONTROLLER,
    token_file: Annotated[str, typer.Option(envvar="EVERSTEP_TOKEN_FILE", help="A file with your token.")] = "",
    ca_file: Annotated[
        str,
        typer.Option(envvar="EVERSTEP_CA_FILE", help="PEM file of the authority that signed the controller."),
    ] = "",
    certificate: Annotated[
        str, typer.Option(envvar="EVERSTEP_CERTIFICATE", help="PEM file of your certificate, in place of a token.")
    ] = "",
    key: Annotated[str, typer.Option(envvar="EVERSTEP_KEY", help="PEM file of the certificate's key.")] = "",
) -> None:
    context.obj = Access(address, token_file, ca_file, certificate, key)


@app.command()
def status(context: typer.Context, as_json: Json = False) -> None:
    """The fleet on one screen."""
    with controller(context) as client:
        fleet = client.get("/v1/status", op.FleetStatus)
        show(fleet, as_json, tables.status(fleet))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def replay(context: typer.Context) -> None:
    """A recorded incident once more, as it was decided and as it would be today: replay LOG, --help for more."""
    command = [sys.executable, "-m", "controller.main", "replay", *context.args]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


@app.command()
def top(
    context: typer.Context,
    interval_s: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")] = 1.0,
) -> None:
    """The fleet as it stands, drawn again and again until interrupted; nodes that are not healthy come first."""
    with controller(context) as client, Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        view = _look(client)
        try:
            while True:
                live.update(view, refresh=True)
                time.sleep(interval_s)
                try:
                    view = _look(client)
                except Unavailable as error:  # it restarts, or the network does
                    view = Text(f"{error}; trying again", style="yellow")
        except KeyboardInterrupt:
            return


def _look(client: Client) -> RenderableType:
    fleet = client.get("/v1/status", op.FleetStatus)
    return tables.top(fleet, _all_nodes(client), SYSTEM_CLOCK.wall())


@app.command()
def nodes(
    context: typer.Context,
    state: Annotated[str, typer.Option(help="Only in this state, such as quarantined.")] = "",
    rack: Annotated[str, typer.Option(help="Only in this rack.")] = "",
    job: Annotated[str, typer.Option(help="Only in this job's roster.")] = "",
    model: Annotated[str, typer.Option(help="Only with GPUs of whose name this is a part.")] = "",
    label: Annotated[str, typer.Option(metavar="NAME[=VALUE]", help="Only with this label.")] = "",
    as_json: Json = False,
) -> None:
    """Nodes and how they stand."""
    with controller(context) as client:
        wanted = {"state": state, "rack": rack, "job": job, "model": model, "label": label}
        found = _all_nodes(client, **wanted)
        show(op.NodeList(nodes=found, total=len(found)), as_json, tables.nodes(found, SYSTEM_CLOCK.wall()))


def _all_nodes(client: Client, **wanted: str) -> tuple[op.NodeSummary, ...]:
    return tuple(
        node for page in past.pages(client, "/v1/nodes", op.NodeList, sys.maxsize, **wanted) for node in page.nodes
    )


@node_app.command("show")
def nodeshow(context: typer.Context, node: NodeName, as_json: Json = False) -> None:
    """One node: state, findings, GPUs, verdicts."""
    with controller(context) as client:
        detail = client.get(f"/v1/nodes/{node}", op.NodeDetail)
        show(detail, as_json, tables.node(detail, SYSTEM_CLOCK.wall()))


def _order(context: typer.Context, path: str, body: Any) -> None:
    with controller(context) as client:
        changed = client.post(path, body, op.Changed)
        print_changed(changed.sentence, changed.trace)


@node_app.command()
def drain(context: typer.Context, node: NodeName, reason: Reason) -> None:
    """Leave running jobs at a step boundary, then stay out."""
    _order(context, f"/v1/nodes/{node}/drain", op.Because(reason=reason))


@node_app.command()
def hold(context: typer.Context, node: NodeName, reason: Reason) -> None:
    """Keep the node out of new rosters; what runs there goes on. One that is out gets no cure and stays out."""
    _order(context, f"/v1/nodes/{node}/hold", op.Because(reason=reason))


@node_app.command()
def release(context: typer.Context, node: NodeName, reason: Reason) -> None:
    """End a hold or a drain, and nothing else: the node is tried, or treated further."""
    _order(context, f"/v1/nodes/{node}/release", op.Because(reason=reason))


@node_app.command()
def readmit(context: typer.Context, node: NodeName, reason: Reason) -> None:
    """Let the node come back, by way of a probe and probation."""
    _order(context, f"/v1/nodes/{node}/readmit", op.Because(reason=reason))


@node_app.command()
def evict(context: typer.Context, node: NodeName, reason: Reason) -> None:
    """Take the node out of every job at once, whatever the budget says."""
    _order(context, f"/v1/nodes/{node}/evict", op.Because(reason=reason))


@node_app.command()
def maintenance(
    context: typer.Context,
    reason: Reason,
    hours: Annotated[float, typer.Option(min=0.01, help="How long.")],
    node: Annotated[str, typer.Argument(metavar="NODE")] = "",
    rack: Annotated[str, typer.Option(help="All nodes of this rack instead.")] = "",
    in_hours: Annotated[float, typer.Option(min=0.0, help="When it begins: so many hours from now.")] = 0.0,
) -> None:
    """Leave jobs at a boundary for so long, and come back by probation; nothing that happens meanwhile counts."""
    begins = SYSTEM_CLOCK.wall() + in_hours * 3600
    window = history.Maintenance(
        starts_at=begins if in_hours else None,
        until=begins + hours * 3600,
        reason=reason,
        node=node or None,
        rack=rack or None,
    )
    _order(context, "/v1/maintenance", window)


@node_app.command("cancel-maintenance")
def cancel_maintenance(
    context: typer.Context,
    reason: Reason,
    node: Annotated[str, typer.Argument(metavar="NODE")] = "",
    rack: Annotated[str, typer.Option(help="What is planned for this rack instead.")] = "",
) -> None:
    """Maintenance that is planned does not begin; a window that has begun ends by readmit."""
    plan = history.CancelMaintenance(reason=reason, node=node or None, rack=rack or None)
    _order(context, "/v1/maintenance/cancel", plan)


@node_app.command()
def repair(context: typer.Context, node: NodeName, reason: Reason) -> None:
    """Take the node out until a person readmits it."""
    _order(context, f"/v1/nodes/{node}/repair", op.Because(reason=reason))


@node_app.command()
def forget(context: typer.Context, node: NodeName, reason: Reason) -> None:
    """Drop a node that is gone for good, with all that is known of it."""
    _order(context, f"/v1/nodes/{node}/forget", op.Because(reason=reason))


@app.command()
def jobs(context: typer.Context, as_json: Json = False) -> None:
    """All jobs and how far they are."""
    with controller(context) as client:
        found = tuple(job for page in past.pages(client, "/v1/jobs", op.JobList, sys.maxsize) for job in page.jobs)
        show(op.JobList(jobs=found, total=len(found)), as_json, tables.jobs(found))


@job_app.command("show")
def jobshow(context: typer.Context, job: JobName, as_json: Json = False) -> None:
    """One job: ranks, versions, recoveries."""
    with controller(context) as client:
        detail = client.get(f"/v1/jobs/{job}", op.JobDetail)
        show(detail, as_json, tables.job(detail, SYSTEM_CLOCK.wall()))


@job_app.command()
def stop(context: typer.Context, job: JobName, reason: Reason) -> None:
    """End the job."""
    _order(context, f"/v1/jobs/{job}/stop", op.Because(reason=reason))


@job_app.command()
def resize(context: typer.Context, job: JobName, size: Annotated[int, typer.Argument(min=1)], reason: Reason) -> None:
    """Bound the job's nodes, from its next boundary on."""
    _order(context, f"/v1/jobs/{job}/resize", op.Resize(size=size, reason=reason))


@app.command("reset-breaker")
def reset_breaker(context: typer.Context, reason: Reason) -> None:
    """Allow automatic evictions again; verdicts of before are not acted on."""
    _order(context, "/v1/breaker/reset", op.Because(reason=reason))


@app.command()
def events(
    context: typer.Context,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as events come.")] = False,
    trace: Annotated[str, typer.Option(help="Only what followed from this stimulus, as a story with times.")] = "",
    node: Annotated[str, typer.Option(help="Only about this node.")] = "",
    job: Annotated[str, typer.Option(help="Only about this job.")] = "",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=EVENTS_AT_ONCE, help="How many.")] = 50,
    as_json: Json = False,
) -> None:
    """What happened and what was decided, newest last."""
    with controller(context) as client:
        limit = EVENTS_AT_ONCE if trace else limit
        found = client.get(
            "/v1/events", op.EventList, limit=limit, trace=trace, node=node, job=job, newest="" if trace else "true"
        )
        if trace and not as_json and not follow:
            console.print(tables.story(found.events) if found.events else f"nothing is known of trace {trace}")
            return
        for event in found.events:
            _print_event(event, as_json)
        if follow:
            _follow(client, found.next_after, as_json, trace=trace, node=node, job=job)


def _print_event(event: op.Event, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(msgspec.json.encode(event).decode() + "\n")
        sys.stdout.flush()
    else:
        console.print(tables.event_line(event), soft_wrap=True)


def _follow(client: Client, after: int, as_json: bool, **wanted: str) -> None:
    """Prints what comes, across restarts of the controller, until interrupted."""
    wanted = {name: value for name, value in wanted.items() if value}
    try:
        while True:
            try:
                for name, data in client.stream(f"/v1/events/stream?after={after}"):
                    if name == "gap":
                        gap = msgspec.json.decode(data, type=op.EventGap)
                        after = gap.through
                        sys.stderr.write(gap.sentence + "\n")
                        continue
                    event = msgspec.json.decode(data, type=op.Event)
                    after = event.id
                    if all(getattr(event, name) == value for name, value in wanted.items()):
                        _print_event(event, as_json)
            except Unavailable:
                pass  # it restarts; the next stream begins after the last event seen
            time.sleep(0.5)
    except KeyboardInterrupt:
        return


@verdict_app.command("explain")
def verdict_explain(
    context: typer.Context, verdict: Annotated[str, typer.Argument(metavar="ID")], as_json: Json = False
) -> None:
    """A verdict's sentence and the evidence it rests on."""
    with controller(context) as client:
        found = client.get(f"/v1/verdicts/{verdict}", Verdict)
        show(found, as_json, tables.verdict(found, SYSTEM_CLOCK.wall()))


@app.command()
def probe(
    context: typer.Context,
    nodes: Annotated[list[str], typer.Argument(metavar="NODE...")],
    backend: Annotated[Literal["gloo", "nccl"], typer.Option(help="nccl goes between GPUs.")] = "gloo",
    reason: Reason = "asked for by hand",
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait for the result.")] = 90.0,
    as_json: Json = False,
) -> None:
    """Let nodes run an all-reduce among them: latency and bus bandwidth by size."""
    with controller(context) as client:
        body = op.StartProbe(nodes=tuple(nodes), backend=backend, reason=reason)
        found = client.post("/v1/probes", body, op.ProbeStatus)
        deadline = SYSTEM_CLOCK.monotonic() + timeout_s
        while found.ok is None and SYSTEM_CLOCK.monotonic() < deadline:
            time.sleep(0.2)
            found = client.get(f"/v1/probes/{found.probe}", op.ProbeStatus)
        show(found, as_json, tables.probe(found))
        if not found.ok:
            raise typer.Exit(1)


@app.command()
def version() -> None:
    """The release of this command."""
    console.print(__version__, highlight=False)


if __name__ == "__main__":
    app()
