"""``everstep nodes`` and ``everstep node``: list nodes, and send orders to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from everstep.cli import local_node, tables
from everstep.cli.context import Json, Reason, connected_client, print_change, print_error, send_order, show
from everstep.client import Call, calls
from everstep.command_line import make_app
from everstep.errors import AuthenticationError, EverstepError, Unavailable
from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.v1 import operator as op

app = make_app("Show a node, or change its state.")

Node = Annotated[str, typer.Argument(metavar="NODE")]
Nodes = Annotated[list[str], typer.Argument(metavar="NODE...", help="One or more nodes.")]


def nodes(
    context: typer.Context,
    state: Annotated[str, typer.Option(help="Show only nodes in these states, such as lost,repair.")] = "",
    rack: Annotated[str, typer.Option(help="Show only nodes in this rack.")] = "",
    switch: Annotated[str, typer.Option(help="Show only nodes at this switch.")] = "",
    job: Annotated[str, typer.Option(help="Show only nodes of this job.")] = "",
    gpu_model: Annotated[str, typer.Option(help="Show only nodes with GPUs whose name contains this text.")] = "",
    driver: Annotated[str, typer.Option(help="Show only nodes with this driver version.")] = "",
    gpu: Annotated[str, typer.Option(help="Show only the node with this GPU (UUID or serial number).")] = "",
    label: Annotated[str, typer.Option(metavar="NAME[=VALUE]", help="Show only nodes with this label.")] = "",
    as_json: Json = False,
) -> None:
    """List nodes and their states."""
    with connected_client(context) as client:
        wanted = {"state": state, "rack": rack, "switch": switch, "job": job}
        wanted |= {"gpu_model": gpu_model, "driver": driver, "gpu": gpu, "label": label}
        found = client.nodes(**wanted).collect()
        show(found, as_json, tables.nodes(found.nodes, SYSTEM_CLOCK.wall()))


def drift(context: typer.Context, as_json: Json = False) -> None:
    """List nodes that differ from the majority of like nodes, such as in their driver. It may be an upgrade."""
    with connected_client(context) as client:
        found = client.drift().collect()
        show(found, as_json, tables.drift(found.drifts))


@app.command("show")
def node_show(context: typer.Context, node: Node, as_json: Json = False) -> None:
    """Show the state, findings, GPUs and verdicts of a node."""
    with connected_client(context) as client:
        detail = client.node(node)
        gpus = None if as_json else client.node_gpus(node)
        show(detail, as_json, tables.node(detail, SYSTEM_CLOCK.wall(), gpus))


def _order(make: Callable[..., Call[op.ChangeResult]]) -> Callable[..., None]:
    """Return the command that sends this order to each node in turn; a refusal does not stop the others."""

    def order(context: typer.Context, nodes: Nodes, reason: Reason) -> None:
        refused = 0
        with connected_client(context) as client:
            for order in [make(node, reason=reason) for node in dict.fromkeys(nodes)]:
                try:
                    changed = client.send(order)
                except (AuthenticationError, Unavailable):
                    raise  # the other orders would fail too
                except EverstepError as error:
                    print_error("refused: ", error)
                    refused += 1
                else:
                    print_change(changed.sentence, changed.trace)
        if refused:
            raise typer.Exit(1)

    return order


for _make, _help in {
    calls.drain: "Remove nodes from their jobs at a step boundary, and hold them out of service.",
    calls.hold: "Keep nodes out of new generations. Running ranks continue; nodes out of service get no remediation.",
    calls.release: "End a hold or a drain. The node returns through a probe, or its remediation continues.",
    calls.readmit: "Return nodes to service, through a probe and probation.",
    calls.evict: "Remove nodes from all jobs at once, regardless of the eviction budget.",
    calls.repair: "Take nodes out of service until a person readmits them.",
    calls.forget: "Delete nodes that no longer exist, with their records.",
}.items():
    app.command(_make.__name__, help=_help)(_order(_make))


@app.command()
def maintenance(
    context: typer.Context,
    reason: Reason,
    hours: Annotated[float, typer.Option(min=0.01, max=366 * 24, help="Length of the window in hours.")],
    node: Annotated[str, typer.Argument(metavar="NODE")] = "",
    rack: Annotated[str, typer.Option(help="Apply to all nodes of this rack instead.")] = "",
    starts_in_hours: Annotated[float, typer.Option(min=0.0, max=366 * 24, help="Hours until the window begins.")] = 0.0,
) -> None:
    """Take nodes out of service for some hours. Findings in that time do not count; they return by probation."""
    begins = SYSTEM_CLOCK.wall() + starts_in_hours * 3600
    send_order(
        context,
        calls.plan_maintenance,
        starts_at=begins if starts_in_hours else None,
        until=begins + hours * 3600,
        reason=reason,
        node=node or None,
        rack=rack or None,
    )


@app.command("cancel-maintenance")
def cancel_maintenance(
    context: typer.Context,
    reason: Reason,
    node: Annotated[str, typer.Argument(metavar="NODE")] = "",
    rack: Annotated[str, typer.Option(help="Cancel the window of this rack instead.")] = "",
) -> None:
    """Cancel planned maintenance. To end maintenance that has begun, use readmit."""
    send_order(context, calls.cancel_maintenance, reason=reason, node=node or None, rack=rack or None)


app.command()(local_node.local)
app.command()(local_node.bundle)
app.command()(local_node.join)
app.command("pause-nvml")(local_node.pause_nvml)
