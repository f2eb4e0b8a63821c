"""``everstep nodes`` and ``everstep node``: list nodes, and send orders to them."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from everstep.cli import history, tables
from everstep.cli.client import ControllerClient, path
from everstep.cli.context import Json, Reason, connected_client, print_change, print_error, send_order, show
from everstep.errors import AuthenticationError, EverstepError, Unavailable
from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.v1 import operator as op
from everstep.wire.v1 import operator_history

app = typer.Typer(
    help="One node: show, drain, hold, release, readmit, evict, repair, forget, maintenance.", no_args_is_help=True
)

Node = Annotated[str, typer.Argument(metavar="NODE")]
Nodes = Annotated[list[str], typer.Argument(metavar="NODE...", help="One or more.")]


def nodes(
    context: typer.Context,
    state: Annotated[str, typer.Option(help="Only in this state, such as quarantined; several with commas.")] = "",
    rack: Annotated[str, typer.Option(help="Only in this rack.")] = "",
    switch: Annotated[str, typer.Option(help="Only at this switch.")] = "",
    job: Annotated[str, typer.Option(help="Only in this job's roster.")] = "",
    gpu_model: Annotated[str, typer.Option(help="Only with GPUs of whose name this is a part.")] = "",
    driver: Annotated[str, typer.Option(help="Only with this version of the driver.")] = "",
    gpu: Annotated[str, typer.Option(help="Only the one with this GPU: its UUID or serial number.")] = "",
    label: Annotated[str, typer.Option(metavar="NAME[=VALUE]", help="Only with this label.")] = "",
    as_json: Json = False,
) -> None:
    """Nodes and how they stand."""
    with connected_client(context) as client:
        where = {"state": state, "rack": rack, "switch": switch, "job": job}
        found = fetch_nodes(client, **where, gpu_model=gpu_model, driver=driver, gpu=gpu, label=label)
        show(op.NodeList(nodes=found, total=len(found)), as_json, tables.nodes(found, SYSTEM_CLOCK.wall()))


def fetch_nodes(client: ControllerClient, **wanted: str) -> tuple[op.NodeSummary, ...]:
    """Return all matching nodes."""
    return tuple(
        node
        for page in history.fetch_pages(client, "/v1/nodes", op.NodeList, sys.maxsize, **wanted)
        for node in page.nodes
    )


@app.command("show")
def node_show(context: typer.Context, node: Node, as_json: Json = False) -> None:
    """One node: state, findings, GPUs, verdicts."""
    with connected_client(context) as client:
        detail = client.get(path("nodes", node), op.NodeDetail)
        show(detail, as_json, tables.node(detail, SYSTEM_CLOCK.wall()))


def _order_each(context: typer.Context, nodes: list[str], kind: str, reason: str) -> None:
    """Send the same order to each node in turn; a refusal does not stop the others."""
    refused = 0
    with connected_client(context) as client:
        for place in [path("nodes", node, kind) for node in dict.fromkeys(nodes)]:
            try:
                changed = client.post(place, op.ReasonOnlyRequest(reason=reason), op.ChangeResult)
            except (AuthenticationError, Unavailable):
                raise  # the other orders would fail too
            except EverstepError as error:
                print_error("refused: ", error)
                refused += 1
            else:
                print_change(changed.sentence, changed.trace)
    if refused:
        raise typer.Exit(1)


@app.command()
def drain(context: typer.Context, nodes: Nodes, reason: Reason) -> None:
    """Leave running jobs at a step boundary, then stay out."""
    _order_each(context, nodes, "drain", reason)


@app.command()
def hold(context: typer.Context, nodes: Nodes, reason: Reason) -> None:
    """Keep the node out of new rosters; what runs there goes on. One that is out gets no cure and stays out."""
    _order_each(context, nodes, "hold", reason)


@app.command()
def release(context: typer.Context, nodes: Nodes, reason: Reason) -> None:
    """End a hold or a drain, and nothing else: the node is tried, or treated further."""
    _order_each(context, nodes, "release", reason)


@app.command()
def readmit(context: typer.Context, nodes: Nodes, reason: Reason) -> None:
    """Let the node come back, by way of a probe and probation."""
    _order_each(context, nodes, "readmit", reason)


@app.command()
def evict(context: typer.Context, nodes: Nodes, reason: Reason) -> None:
    """Take the node out of every job at once, whatever the budget says."""
    _order_each(context, nodes, "evict", reason)


@app.command()
def maintenance(
    context: typer.Context,
    reason: Reason,
    hours: Annotated[float, typer.Option(min=0.01, max=366 * 24, help="How long.")],
    node: Annotated[str, typer.Argument(metavar="NODE")] = "",
    rack: Annotated[str, typer.Option(help="All nodes of this rack instead.")] = "",
    starts_in_hours: Annotated[
        float, typer.Option(min=0.0, max=366 * 24, help="When it begins: so many hours from now.")
    ] = 0.0,
) -> None:
    """Leave jobs at a boundary for so long, and come back by probation; nothing that happens meanwhile counts."""
    begins = SYSTEM_CLOCK.wall() + starts_in_hours * 3600
    window = operator_history.MaintenanceRequest(
        starts_at=begins if starts_in_hours else None,
        until=begins + hours * 3600,
        reason=reason,
        node=node or None,
        rack=rack or None,
    )
    send_order(context, window, "maintenance")


@app.command("cancel-maintenance")
def cancel_maintenance(
    context: typer.Context,
    reason: Reason,
    node: Annotated[str, typer.Argument(metavar="NODE")] = "",
    rack: Annotated[str, typer.Option(help="What is planned for this rack instead.")] = "",
) -> None:
    """Maintenance that is planned does not begin; a window that has begun ends by readmit."""
    plan = operator_history.CancelMaintenance(reason=reason, node=node or None, rack=rack or None)
    send_order(context, plan, "maintenance", "cancel")


@app.command()
def repair(context: typer.Context, nodes: Nodes, reason: Reason) -> None:
    """Take the node out until a person readmits it."""
    _order_each(context, nodes, "repair", reason)


@app.command()
def forget(context: typer.Context, nodes: Nodes, reason: Reason) -> None:
    """Drop a node that is gone for good, with all that is known of it."""
    _order_each(context, nodes, "forget", reason)
