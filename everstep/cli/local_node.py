"""``everstep node local``, ``bundle`` and ``join``: ask the agent of this machine, without a controller.

Exit status of ``node local``: 0 for a healthy node, 1 for findings of warning or above, 2 if the node's health is
unknown, because no agent answers or its sensors give no values, and 3 for a node that the policy takes out of service.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from everstep.cli.context import Json, console, reporting_errors, show
from everstep.cli.tables import table
from everstep.errors import DECODE_ERRORS, EverstepError, Unavailable
from everstep.host.agent_places import default_run_dir, local_node_name
from everstep.vocabulary import Severity
from everstep.wire.v1 import node_status
from everstep.wire.v1.local import DEFAULT_AGENT_SOCKET
from everstep.wire.v1.node_status import (
    NODE_SOCKET,
    FleetJoined,
    LocalRequest,
    LogBundleMade,
    NodeHealth,
    NodeStatus,
    NvmlPauseSet,
)

T = TypeVar("T")

ANSWER_TIMEOUT_S = 5.0
BUNDLE_TIMEOUT_S = 360.0
"""Seconds to wait for a bundle with the driver's report, which the agent stops after five minutes."""
JOIN_TIMEOUT_S = 60.0
"""Seconds to wait for an enrolment and the start of a vault."""
NVML_PAUSE_TIMEOUT_S = 15.0
MAX_ANSWER_BYTES = 16 << 20

EXIT_STATUS = {NodeHealth.HEALTHY: 0, NodeHealth.DEGRADED: 1, NodeHealth.UNKNOWN: 2, NodeHealth.UNFIT: 3}
_STYLES = {Severity.INFO: "", Severity.WARNING: "yellow", Severity.CRITICAL: "bold red"}

RunDir = Annotated[
    Path | None,
    typer.Option(
        help="The agent's --run-dir. Default: where an agent runs, of /run/everstep and the agent's own defaults."
    ),
]


def find_run_dir(given: Path | None) -> Path:
    """Return the run directory of the agent of this machine. Raises Unavailable if there is none."""
    if given is not None:
        return given
    places = [Path(DEFAULT_AGENT_SOCKET).parent, default_run_dir(local_node_name(), os.environ)]
    for place in places:
        try:
            if (place / NODE_SOCKET).exists():
                return place
        except PermissionError as error:
            raise Unavailable(f"{place} is closed to this user: ask as the agent's user or as root") from error
    looked = " or ".join(map(str, places))
    raise Unavailable(f"no agent runs in {looked}: start everstep-agent, or give its --run-dir")


def ask_agent(run_dir: Path, request: LocalRequest, answer: type[T], timeout_s: float) -> T:
    """Return the agent's answer. Raises Unavailable if none answers in time, EverstepError if it refuses."""
    path = run_dir / NODE_SOCKET
    try:
        with socket.socket(socket.AF_UNIX) as connected:
            connected.settimeout(timeout_s)
            connected.connect(str(path))
            connected.sendall(msgspec.json.encode(request) + b"\n")
            data = bytearray()
            while len(data) < MAX_ANSWER_BYTES and (more := connected.recv(1 << 16)):
                data += more
        received = msgspec.json.decode(data, type=node_status.LocalAnswer)
    except OSError as error:
        raise Unavailable(f"no agent answers at {path}: {error.strerror or error}") from error
    except DECODE_ERRORS as error:
        raise Unavailable(f"the agent at {path} answers in another version's form: {error}") from error
    if isinstance(received, answer):
        return received
    raise EverstepError(received.message if isinstance(received, node_status.LocalRefusal) else "no such answer")


def local(run_dir: RunDir = None, as_json: Json = False) -> None:
    """Show the health, findings, GPUs and ports of this machine, as its own agent knows them.

    The exit status is 0 for a healthy node, 1 for warnings, 2 if the health is unknown or no agent answers, and 3 if
    the policy takes the node out of service.
    """
    with reporting_errors():
        status = ask_agent(find_run_dir(run_dir), node_status.DescribeNode(), NodeStatus, ANSWER_TIMEOUT_S)
    show(status, as_json, Group(*_views(status)))
    raise typer.Exit(EXIT_STATUS[status.health])


def bundle(run_dir: RunDir = None) -> None:
    """Keep the logs of this machine in an archive: kernel log, sensors' values and findings. Prints its path."""
    with reporting_errors():
        made = ask_agent(find_run_dir(run_dir), node_status.MakeLogBundle(), LogBundleMade, BUNDLE_TIMEOUT_S)
    console.print(made.path)


def pause_nvml(
    run_dir: RunDir = None,
    seconds: Annotated[
        float, typer.Option(min=1, max=3600, help="Seconds after which the agent opens NVML again by itself.")
    ] = 600.0,
    end: Annotated[bool, typer.Option("--end", help="Let the agent open NVML again now.")] = False,
) -> None:
    """Have the agent of this machine close NVML, for a reset of a GPU or a new driver. Returns once it is closed."""
    with reporting_errors():
        request = node_status.SetNvmlPause(seconds=0.0 if end else seconds)
        ask_agent(find_run_dir(run_dir), request, NvmlPauseSet, NVML_PAUSE_TIMEOUT_S)
    console.print("the agent watches GPUs again" if end else f"NVML is closed for {seconds:g} s at most")


def join(
    controllers: Annotated[list[str], typer.Argument(metavar="URL...", help="Base URLs of the controllers.")],
    run_dir: RunDir = None,
    token_file: Annotated[Path | None, typer.Option(help="File with this node's agent token.")] = None,
    join_token_file: Annotated[Path | None, typer.Option(help="File with a join token, to enrol with.")] = None,
    ca_file: Annotated[Path | None, typer.Option(help="Authority of the controllers' certificate, PEM.")] = None,
    client_certificate: Annotated[Path | None, typer.Option(help="This node's certificate, PEM.")] = None,
    client_key: Annotated[Path | None, typer.Option(help="The certificate's private key, PEM.")] = None,
) -> None:
    """Connect the standalone agent of this machine to controllers, without a restart."""
    files = {
        "token_file": token_file,
        "join_token_file": join_token_file,
        "ca_file": ca_file,
        "client_certificate": client_certificate,
        "client_key": client_key,
    }
    paths = {name: str(path.absolute()) for name, path in files.items() if path is not None}
    with reporting_errors():
        request = node_status.JoinFleet(controllers=tuple(controllers), **paths)
        joined = ask_agent(find_run_dir(run_dir), request, FleetJoined, JOIN_TIMEOUT_S)
    console.print(joined.sentence)


def _views(status: NodeStatus) -> Iterable[RenderableType]:
    """Yield the parts of the view for people."""
    fleet = ", ".join(status.controllers) or "none, it runs standalone"
    yield Text.assemble(f"{status.node}: ", (str(status.health), "bold"), f" (controller: {fleet})")
    if status.health is NodeHealth.UNKNOWN:
        yield Text("the sensors give no values yet: ask again in some seconds, or look at the agent's log")
    if status.findings:
        yield _findings(status)
    if status.gpus:
        yield _gpus(status)
    if status.ports:
        yield _ports(status)
    if status.newest_bundle:
        yield Text(f"newest bundle of logs: {status.newest_bundle}")


def _findings(status: NodeStatus) -> Table:
    view = table("finding", "severity", "action", "mode", "what")
    for found in sorted(status.findings, key=lambda finding: -finding.severity.gravity):
        severity = Text(str(found.severity), style=_STYLES[found.severity])
        view.add_row(found.key, severity, str(found.action), str(found.mode), found.message)
    return view


def _gpus(status: NodeStatus) -> Table:
    view = table("gpu", "address", "model", "temperature", "power", "used", "memory", "error")
    for gpu in status.gpus:
        used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
        memory = "" if used is None or total is None else f"{used / 2**30:.1f} of {total / 2**30:.1f} GiB"
        view.add_row(
            str(gpu.index),
            gpu.pci_bus_id,
            gpu.name,
            "" if gpu.temperature_c is None else f"{gpu.temperature_c:.0f} C",
            "" if gpu.power_w is None else f"{gpu.power_w:.0f} W",
            "" if gpu.utilization is None else f"{gpu.utilization:.0%}",
            memory,
            gpu.error,
        )
    return view


def _ports(status: NodeStatus) -> Table:
    view = table("port", "kind", "role", "state", "rate")
    for port in status.ports:
        rate = "" if port.rate_gbps is None else f"{port.rate_gbps:g} Gb/s"
        view.add_row(port.name, port.kind, port.role, "up" if port.is_up else "down", rate)
    return view
